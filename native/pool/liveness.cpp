#include "pool/liveness.hpp"

#include <errno.h>
#include <fcntl.h>

#include <cstring>

#include "pool/format.hpp"

namespace umbp {

static struct flock byte_of(u32 slot) {
  struct flock range;
  std::memset(&range, 0, sizeof range);
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = kLockBase + i64(slot);
  range.l_len = 1;
  return range;
}

bool take_byte_lock(int fd, u32 slot) {
  struct flock range = byte_of(slot);
  while (fcntl(fd, F_SETLK, &range) != 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EACCES) return false;
    throw SegmentError(std::string("byte locks don't work on this file system: ") + std::strerror(errno));
  }
  return true;
}

bool other_holds_byte_lock(int fd, u32 slot) {
  struct flock range = byte_of(slot);
  while (fcntl(fd, F_GETLK, &range) != 0)
    if (errno != EINTR) return true;  // can't tell: never rob
  return range.l_type != F_UNLCK;
}

}  // namespace umbp
