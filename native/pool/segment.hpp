// One process's attachment to one segment: descriptor, mapping, its own checked copy of the geometry, its
// byte lock and its slot in the process table. There is at most one for each file in a process (closing any
// descriptor of a file drops the process's byte locks on it), handed out by a registry and shared.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "pool/format.hpp"
#include "pool/memory.hpp"

namespace umbp {

struct CreateParameters {
  u64 capacity_bytes = 0, max_bytes = 0;  // a pool that can't grow has no more than its capacity
  u64 slab_bytes = 0, min_object_bytes = 0;
  u32 high_ppm = 1000000, low_ppm = 950000;
  EvictionPolicy eviction_policy = EvictionPolicy::lru;
  std::optional<u64> hash_seed;  // random where none is given
  u32 group_gid = kNoGroup;      // of a file pool: whose members may attach
  // Called before each portion of the arena is taken, with the bytes that are still to be taken; throws to
  // refuse. Others may be taking memory at the same time: what was free at the start need not be free any
  // more.
  std::function<void(u64)> may_take;
  MemoryPolicy memory = {};
};

using FileId = std::pair<u64, u64>;  // device, inode

// Where a slot lies, by one look at its slab's slot size: whoever writes there needs no second one, which
// might say something else.
struct Place {
  std::byte* payload;
  u64 slot_bytes;

  u64 payload_limit() const { return slot_bytes - kSlotOverheadBytes; }
  Trailer& trailer() const { return *reinterpret_cast<Trailer*>(payload + slot_bytes - kTrailerBytes); }
};

class Segment {
 public:
  static std::shared_ptr<Segment> create_memfd(const CreateParameters& parameters);
  static std::shared_ptr<Segment> create_file(const std::string& path, const CreateParameters& parameters);
  static std::shared_ptr<Segment> attach(const std::string& path);
  // Unlinks the pool's file and tells everybody who is attached; attaches nothing itself, so it works on a
  // pool that is damaged or whose lock is held. What lies at the path must be the pool `expected`, if given.
  static void destroy(const std::string& path, std::optional<FileId> expected = {});

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int fd() const { return fd_; }
  const Geometry& geometry() const { return geometry_; }
  u64 hash_seed() const { return hash_seed_; }
  u32 high_ppm() const { return high_ppm_; }
  u32 low_ppm() const { return low_ppm_; }
  EvictionPolicy eviction_policy() const { return EvictionPolicy(geometry_.eviction_policy); }
  // The policy's time, in ticks since boot.
  u32 tick() const;
  // For simulations: from now on, in this process, time is what was set last, in seconds from a zero that
  // lies ahead of the clock and is a multiple of every bin's width, so that each run is like the other.
  void set_time(double seconds);

  // The longest hold of the lock by this process since the last call, in processor time: what others wait for
  // is that, and whatever the kernel adds. Measured from the first call on.
  u64 take_longest_hold_ns() {
    measures_holds_.store(true, std::memory_order_relaxed);
    return longest_hold_ns_.exchange(0, std::memory_order_relaxed);
  }
  bool measures_holds() const { return measures_holds_.load(std::memory_order_relaxed); }
  void report_hold(u64 ns) {
    u64 longest = longest_hold_ns_.load(std::memory_order_relaxed);
    while (ns > longest && !longest_hold_ns_.compare_exchange_weak(longest, ns, std::memory_order_relaxed)) {
    }
  }
  u32 process_slot() const { return process_slot_; }
  u32 process_generation() const { return process_generation_; }
  const std::string& name() const { return name_; }
  const MemoryFacts& memory() const { return memory_; }  // of what this process took for it
  // Where a file pool was found; empty for a memfd.
  const std::string& path() const { return path_; }
  FileId id() const { return id_; }
  bool is_destroyed() const {
    return header().state.load(std::memory_order_relaxed) == u32(SegmentState::destroyed);
  }
  // Whether the path no longer leads to this pool. Asks the file system at most once in `interval_ns`.
  bool is_replaced(u64 interval_ns) const;
  std::byte* base() const { return base_; }

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Process& process(u32 i) const { return at<Process>(geometry_.processes_at, bounded(i, kProcessLimit)); }
  Namespace& ns(u32 i) const { return at<Namespace>(geometry_.namespaces_at, bounded(i, kNamespaceLimit)); }
  Class& klass(u32 i) const { return at<Class>(geometry_.classes_at, bounded(i, kClassLimit)); }
  Slab& slab(u32 i) const { return at<Slab>(geometry_.slabs_at, bounded(i, geometry_.slab_count)); }
  RingEntry& ring(u64 i) const { return at<RingEntry>(geometry_.ring_at, i % kRingEntries); }
  IndexEntry& entry(u64 i) const { return at<IndexEntry>(geometry_.index_at, i); }
  SlotRecord& record(u32 slot) const {
    return at<SlotRecord>(geometry_.records_at, bounded(slot, geometry_.max_slots));
  }
  // Pins that process `process` holds on `slot`; truth.
  std::atomic<u16>& pin(u32 process, u32 slot) const {
    return *reinterpret_cast<std::atomic<u16>*>(base_ + geometry_.pins_at +
                                                bounded(process, kProcessLimit) * geometry_.pin_row_bytes +
                                                2 * bounded(slot, geometry_.max_slots));
  }
  std::atomic<u16>& my_pin(u32 slot) const { return pin(process_slot_, slot); }
  u64 pinned_slots() const;  // on how many this process has pins or reservations
  u32 slab_of(u32 slot) const { return u32(slot / geometry_.slots_per_slab); }
  // The slot size of a slab as found in the segment, checked; 0 if it belongs to no class.
  u64 slab_slot_bytes(u32 slab_index) const;
  bool has_memory(u32 slab_index) const {
    u64 bytes = slab(slab_index).slot_bytes.load(std::memory_order_relaxed);
    return bytes != kSlabAbsent && bytes != kSlabMoving;
  }
  u64 capacity_bytes() const { return header().present_slabs * geometry_.slab_bytes; }
  // Where a slot's payload begins; throws SegmentError where slot and slab don't agree.
  std::byte* payload(u32 slot) const { return place(slot).payload; }
  Trailer& trailer(u32 slot) const { return place(slot).trailer(); }
  // Throws SegmentError likewise.
  Place place(u32 slot) const;

  // The process table names us from here on; should it cease to, somebody has taken us for dead.
  void mark_joined() { is_joined_ = true; }
  bool is_joined() const { return is_joined_; }
  bool is_expelled() const {
    const Process& entry = process(process_slot_);
    return is_joined_ && (entry.in_use.load(std::memory_order_relaxed) != kPlaceTaken ||
                          entry.generation.load(std::memory_order_relaxed) != process_generation_);
  }

  // Throws in a child of the attaching process.
  void refuse_after_fork() const;

  // What a verb could not do in time (lock held by another): done by the next one that gets the lock.
  std::mutex deferred_mutex;
  std::vector<u64> deferred_releases, deferred_abandons;

  bool back_range(u64 offset, u64 bytes) const;  // reserves memory for a sparse range; false if there is none
  bool unback_range(u64 offset, u64 bytes) const;  // gives it back

 private:
  friend struct Registry;
  Segment() = default;
  ~Segment() = default;

  template <class T>
  T& at(u64 offset, u64 i) const {
    return *reinterpret_cast<T*>(base_ + offset + i * sizeof(T));
  }
  static u64 bounded(u64 i, u64 limit) {
    if (__builtin_expect(i >= limit, 0)) damaged();
    return i;
  }
  [[noreturn]] static void damaged();

  int fd_ = -1;
  std::byte* base_ = nullptr;
  Geometry geometry_;
  u64 hash_seed_ = 0;
  u32 high_ppm_ = 0, low_ppm_ = 0;
  u32 process_slot_ = kProcessLimit, process_generation_ = 0;
  u64 fork_epoch_ = 0;
  bool is_joined_ = false;
  std::atomic<u32> set_tick_{0};  // 0: the clock's
  std::atomic<bool> measures_holds_{false};
  std::atomic<u64> longest_hold_ns_{0};
  std::string name_, path_;
  FileId id_{0, 0};
  mutable std::atomic<u64> looked_at_ns_{0};
  mutable std::atomic<bool> was_replaced_{false};
  MemoryFacts memory_;
};

// For what no crash leaves behind: the caller's changes are undone by the next holder's rebuild.
inline void require_sound(bool holds, const char* fault) {
  if (__builtin_expect(!holds, 0)) throw SegmentError(std::string("the pool is damaged: ") + fault);
}

// How often this process has been forked into being; an object made before a fork must not be used after it.
u64 fork_epoch();

}  // namespace umbp
