#include "pool/memory.hpp"

#include <errno.h>
#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace umbp {

static constexpr u64 kPortionBytes = 256ull << 20;
// After so many huge pages in a row that the kernel doesn't give, it isn't asked again.
static constexpr u32 kRefusals = 8;

static u64 round_down(u64 value, u64 unit) {
  return value / unit * unit;
}

[[noreturn]] static void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::byte* map_shared(int fd, u64 bytes) {
  // A place with room to spare, of which the aligned part is used: not every kernel aligns mappings by
  // itself.
  void* room =
      mmap(nullptr, bytes + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) fail("no address space");
  const u64 start = reinterpret_cast<u64>(room), end = start + bytes + kHugePageBytes;
  const u64 aligned = round_down(start + kHugePageBytes - 1, kHugePageBytes);
  void* base =
      mmap(reinterpret_cast<void*>(aligned), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (base == MAP_FAILED) {
    const int reason = errno;
    munmap(room, bytes + kHugePageBytes);
    errno = reason;
    fail("mmap");
  }
  const u64 page = u64(sysconf(_SC_PAGESIZE));
  const u64 used_end = round_down(aligned + bytes + page - 1, page);
  if (aligned > start) munmap(room, aligned - start);
  if (end > used_end) munmap(reinterpret_cast<void*>(used_end), end - used_end);
  return static_cast<std::byte*>(base);
}

// The file keeps the policy, so it also holds for what other processes come to touch first. Preferred rather
// than binding: a full node must cost speed, not the engine.
static int prefer_node(void* base, u64 bytes, int node) {
  constexpr u64 kBits = 8 * sizeof(unsigned long);
  unsigned long mask[1024 / kBits + 1] = {};
  mask[u64(node) / kBits] = 1ul << (u64(node) % kBits);
  return syscall(SYS_mbind, base, bytes, MPOL_PREFERRED, mask, 8 * sizeof mask, 0) == 0 ? 0 : errno;
}

MemoryTaker::MemoryTaker(int fd, u64 file_bytes, const MemoryPolicy& policy)
    : fd_(fd),
      file_bytes_(file_bytes),
      policy_(policy),
      base_(map_shared(fd, file_bytes)),
      is_huge_(policy.use_huge_pages) {
  if (policy.node >= 0 && policy.node < 1024)
    if (int reason = prefer_node(base_, file_bytes, policy.node); reason != 0)
      facts_.node_reason = std::strerror(reason);
  // Where shared memory has huge pages by advice alone, this is the advice.
  if (is_huge_) madvise(base_, file_bytes, MADV_HUGEPAGE);
}

MemoryTaker::~MemoryTaker() {
  munmap(base_, file_bytes_);
}

void MemoryTaker::take(u64 from, u64 bytes, const std::function<void(u64)>& before_portion) {
  for (u64 taken = 0; taken < bytes;) {
    const u64 first = from + taken;
    // Portions end where huge pages do.
    const u64 end = std::min(from + bytes, round_down(first + kPortionBytes, kHugePageBytes));
    if (before_portion) before_portion(bytes - taken);
    const u64 start_ns = monotonic_ns();
    const u64 huge_first = round_down(first + kHugePageBytes - 1, kHugePageBytes);
    const u64 huge_end = round_down(end, kHugePageBytes);
    if (huge_end > huge_first) {
      facts_.asked_bytes += huge_end - huge_first;
      if (is_huge_) take_huge(huge_first, huge_end);
    }
    take_small(first, end - first);
    facts_.taken_ns += monotonic_ns() - start_ns;
    taken = end - from;
  }
}

// What has memory already, keeps it. On older kernels a signal undoes a call that it interrupts: shorter ones
// get on under however many.
void MemoryTaker::take_small(u64 from, u64 bytes) {
  const u64 end = from + bytes;
  for (u64 step = bytes; from < end;) {
    if (fallocate(fd_, 0, i64(from), i64(std::min(step, end - from))) == 0)
      from += std::min(step, end - from);
    else if (errno == EINTR)
      step = std::max(step / 2, kHugePageBytes);
    else
      fail("fallocate");
  }
}

// A huge page of which one small page is there can be collapsed: the rest is cleared in one go and nothing is
// copied, so this is cheaper than taking small pages. One call for the whole range, since each begins with a
// round through all processors; page by page only to find out how far a refusal goes.
void MemoryTaker::take_huge(u64 first, u64 end) {
  const u64 start_ns = monotonic_ns();
  for (u64 at = first; at < end; at += kHugePageBytes) take_small(at, 1);
  if (madvise(base_ + first, end - first, MADV_COLLAPSE) == 0) {
    facts_.huge_bytes += end - first;
  } else {
    u32 refusals = 0;
    for (u64 at = first; at < end && refusals < kRefusals; at += kHugePageBytes) {
      if (madvise(base_ + at, kHugePageBytes, MADV_COLLAPSE) == 0) {
        facts_.huge_bytes += kHugePageBytes;
        refusals = 0;
      } else {
        facts_.huge_reason = errno == EINVAL ? "they are off for this kind of memory" : std::strerror(errno);
        refusals++;
      }
    }
    is_huge_ = refusals < kRefusals;
  }
  huge_ns_ += monotonic_ns() - start_ns;
  if (is_huge_ && huge_ns_ > policy_.huge_patience_ns) {
    is_huge_ = false;
    facts_.huge_reason = "the kernel took too long to free them";
  }
}

std::vector<int> nodes_of(const std::vector<u64>& addresses) {
  std::vector<void*> pages;
  pages.reserve(addresses.size());
  for (u64 address : addresses) {
    (void)*reinterpret_cast<const volatile char*>(address);
    pages.push_back(reinterpret_cast<void*>(address));
  }
  std::vector<int> nodes(addresses.size(), -1);
  if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0)
    std::fill(nodes.begin(), nodes.end(), -1);
  for (int& node : nodes) node = std::max(node, -1);
  return nodes;
}

int populate(u64 address, u64 bytes) {
  while (madvise(reinterpret_cast<void*>(address), bytes, MADV_POPULATE_WRITE) != 0)
    if (errno != EINTR) return errno;
  return 0;
}

}  // namespace umbp
