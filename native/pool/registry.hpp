// What this process has attached, and the small change of working with files. For the pool's own sources.
#pragma once

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "pool/segment.hpp"

namespace umbp {

struct Descriptor {
  int fd;
  explicit Descriptor(int value) : fd(value) {}
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int give() { return std::exchange(fd, -1); }
};

// Every attachment of this process. Held throughout attach and detach: a descriptor closed beside a living
// attachment of the same file would drop its byte lock.
struct Registry {
  std::mutex mutex;
  std::condition_variable detached;
  std::map<FileId, std::weak_ptr<Segment>> segments;

  static Registry& get() {
    static Registry* registry =
        new Registry;  // outlives static destruction: attachments may be closed at exit
    return *registry;
  }
  std::shared_ptr<Segment> adopt(int fd, const Header& header, FileId id, std::string name,
                                 std::string path = {});
  // This process's attachment of a file, if there is one; waits for a last user that is just leaving. Let go
  // of it outside the mutex.
  std::shared_ptr<Segment> find(FileId id, std::unique_lock<std::mutex>& guard) {
    for (;;) {
      auto found = segments.find(id);
      if (found == segments.end()) return nullptr;
      if (auto living = found->second.lock()) return living;
      detached.wait(guard);
    }
  }
  static void detach(Segment* segment, FileId id);
  // Whether the file that was opened is the one that was looked at before. If it is another, and one that
  // this process has attached, it stays open: closing it would drop the attachment's byte lock.
  bool is_still(Descriptor& opened, FileId expected) const;
};

inline FileId id_of(const struct stat& info) {
  return {u64(info.st_dev), u64(info.st_ino)};
}

inline std::string reason() {
  return std::strerror(errno);
}

inline struct stat stat_of(int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0) throw SegmentError("the pool's file can't be examined: " + reason());
  return info;
}

inline bool Registry::is_still(Descriptor& opened, FileId expected) const {
  const FileId found = id_of(stat_of(opened.fd));
  if (found != expected && segments.count(found)) opened.give();
  return found == expected;
}

}  // namespace umbp
