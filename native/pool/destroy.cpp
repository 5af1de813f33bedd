#include <fcntl.h>
#include <sys/file.h>

#include "pool/registry.hpp"

namespace umbp {

// Unlinked first, told second: who dies in between leaves no file, and the attached find that out too.
void Segment::destroy(const std::string& path, std::optional<FileId> expected) {
  auto refuse = [&path](const std::string& why) -> void {
    throw SegmentError(path + " can't be destroyed: " + why);
  };
  Registry& registry = Registry::get();
  std::shared_ptr<Segment> attached;  // let go after the registry's mutex, which a detach takes
  std::unique_lock<std::mutex> guard(registry.mutex);
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) refuse(reason());
  if (!S_ISREG(info.st_mode)) refuse("it isn't a file");
  attached = registry.find(id_of(info), guard);
  Descriptor own(attached ? -1 : open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW));
  const int fd = attached ? attached->fd() : own.fd;
  if (fd < 0) refuse(reason() + " (it belongs to user " + std::to_string(info.st_uid) + ")");
  if (!attached && !registry.is_still(own, id_of(info))) refuse("it was replaced while it was being opened");
  if (expected && id_of(info) != *expected) refuse("another file has taken its place");
  u64 magic = 0;
  if (pread(fd, &magic, sizeof magic, 0) != ssize_t(sizeof magic) || magic != kMagic)
    refuse("it isn't a UMBP pool; if nobody needs it, rm " + path);
  // Two who destroy the same pool take turns, lest the second unlink a new pool of that name. A stopped one
  // isn't waited for for long.
  for (int tries = 0; flock(fd, LOCK_EX | LOCK_NB) != 0 && tries < 1000; tries++) usleep(1000);
  struct stat now;
  crash_point();
  if (lstat(path.c_str(), &now) == 0 && id_of(now) == id_of(info) && unlink(path.c_str()) != 0) {
    const std::string why = reason();
    flock(fd, LOCK_UN);
    refuse(why + "; only its owner (user " + std::to_string(info.st_uid) + ") or root can");
  }
  crash_point();
  const u32 state = u32(SegmentState::destroyed);
  const bool is_told =
      pwrite(fd, &state, sizeof state, i64(offsetof(Header, state))) == ssize_t(sizeof state);
  crash_point();
  flock(fd, LOCK_UN);
  if (!is_told) throw SegmentError(path + " is gone, but its users can't be told: " + reason());
}

}  // namespace umbp
