// How a pool's memory is taken from the kernel: on which memory node, in pages of which size, and mapped
// where.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "pool/base.hpp"

namespace umbp {

constexpr u64 kHugePageBytes = 2ull << 20;

struct MemoryPolicy {
  bool use_huge_pages = false;  // as far as the kernel has them; small pages for the rest
  int node = -1;                // preferred memory node; -1: the kernel's choice
  u64 huge_patience_ns = 0;     // huge pages are no longer asked for once they have taken so long
};

// What came of a policy.
struct MemoryFacts {
  u64 asked_bytes = 0;  // whole huge pages' worth, of what was taken
  u64 huge_bytes = 0;   // and how much of it huge pages back
  u64 taken_ns = 0;
  std::string huge_reason, node_reason;  // empty, or why the kernel refused
};

// Maps a whole file shared, at an address where huge pages fit; throws std::system_error.
std::byte* map_shared(int fd, u64 bytes);

// Takes memory for ranges of a file, portion by portion. The file's own mapping of this object is where huge
// pages and the node's policy are asked for; it goes with the object, what was taken stays with the file.
class MemoryTaker {
 public:
  MemoryTaker(int fd, u64 file_bytes, const MemoryPolicy& policy);
  ~MemoryTaker();
  MemoryTaker(const MemoryTaker&) = delete;
  MemoryTaker& operator=(const MemoryTaker&) = delete;

  // All pages of the range have memory afterwards, of whatever size; throws std::system_error where there is
  // none left. `before_portion` hears how many bytes are still to be taken, and may throw.
  void take(u64 from, u64 bytes, const std::function<void(u64)>& before_portion);
  const MemoryFacts& facts() const { return facts_; }

 private:
  void take_small(u64 from, u64 bytes);
  void take_huge(u64 first, u64 end);

  const int fd_;
  const u64 file_bytes_;
  const MemoryPolicy policy_;
  std::byte* base_;
  bool is_huge_;
  u64 huge_ns_ = 0;
  MemoryFacts facts_;
};

// The memory node of each of these addresses' pages, which are touched; -1 where the kernel doesn't say.
std::vector<int> nodes_of(const std::vector<u64>& addresses);

// Maps a range's pages in this process; 0, or the kernel's errno (EINVAL before Linux 5.14).
int populate(u64 address, u64 bytes);

}  // namespace umbp
