// The verbs of the node pool. All take batches, none throws for a full, busy or stopped neighbour: each key
// gets its outcome. The lock is held for at most kBatch keys at a time and never while bytes move.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pool/hazard.hpp"
#include "pool/index.hpp"
#include "pool/inspect.hpp"
#include "pool/lock.hpp"
#include "pool/resize.hpp"
#include "pool/segment.hpp"

namespace umbp {

enum class Outcome : u8 {
  reserved = 0,
  exists = 1,     // published already
  busy = 2,       // being written by somebody
  full = 3,       // no room, and nothing more that may be evicted
  too_large = 4,  // no slab could ever hold it
  not_now = 5,    // the lock was held too long by a living process
  published = 6,
  stale = 7,    // reserved before its namespace was cleared: freed instead of published
  invalid = 8,  // not a ticket that this process holds in that state
  hit = 9,
  miss = 10,
  released = 11,
  deferred = 12,  // will be done by this process's next call that gets the lock
  removed = 13,
  abandoned = 14,
  touched = 15,
};

struct Stats {
  u64 capacity_bytes, max_bytes, used_bytes, objects, slabs, free_slabs, slots, processes, namespaces,
      evicted, evicted_bytes, evicted_tokens, orphaned, reserved, published, abandoned, not_now, takeovers,
      rebuilds, reaped, full, slab_moves, cleared, acquired_hits, acquired_misses, removed_total, noted,
      pinned, pinned_here, deferred_here;
};

class Pool {
 public:
  static constexpr std::size_t kBatch = 256;

  explicit Pool(std::shared_ptr<Segment> segment, u64 lock_patience_ns)
      : segment_(std::move(segment)), patience_ns_(lock_patience_ns) {}

  // The attachment, kept alive by the caller for the length of a verb; throws once closed.
  std::shared_ptr<Segment> segment() const;
  void close();
  bool is_closed() const;

  // Without the lock.
  void lookup(std::span<const Digest> keys, bool* hits) const;
  void states(std::span<const Digest> keys, KeyState* states) const;
  // How many of prefix + hex(hash) are published before the first that isn't.
  std::size_t match(const std::vector<std::string_view>& hashes, std::string_view prefix) const;
  std::optional<u64> removed_since(u64 cursor,
                                   std::vector<Digest>& removed) const;  // the new cursor; none: lost
  u64 removed_head() const;
  std::vector<NamespaceReport> namespaces() const;
  bool is_destroyed() const;
  // Destroyed, or its path leads elsewhere by now; asks the file system once in `interval_ns` at most.
  bool is_replaced(u64 interval_ns) const;
  std::vector<std::pair<u64, u64>> arena_ranges() const;
  void payload(std::span<const u64> tickets, u64* addresses, u64* lengths) const;
  Stats stats() const;

  // Under it.
  // The number of a namespace, made if new. Names are only ever added: a number means one name for good.
  u32 open_namespace(std::string_view name);
  // The most that its slots may take; 0: nothing may be stored, ~0: no bound. What is above it is evicted, as
  // far as nobody holds it. False if the lock couldn't be had.
  bool set_quota(u32 ns, u64 bytes);
  // `tokens` is what each of the objects counts for once it is evicted.
  void reserve(u32 ns, std::span<const Digest> keys, std::span<const u64> object_bytes,
               std::span<const std::optional<Digest>> parents, u64 tokens, u64* tickets, Outcome* outcomes);
  void publish(std::span<const u64> tickets, Outcome* outcomes);
  void abandon(std::span<const u64> tickets, Outcome* outcomes);
  void acquire(std::span<const Digest> keys, u64* tickets, Outcome* outcomes);
  void release(std::span<const u64> tickets, Outcome* outcomes);
  void touch(std::span<const Digest> keys, Outcome* outcomes);
  // A request with its full chain, root first: that it begins, or how it ended. Under leaf-first LRU a touch.
  void note(std::span<const Digest> chain, bool is_end, Answer answer, Outcome* outcomes);
  void remove(std::span<const Digest> keys, Outcome* outcomes);
  bool clear(u32 ns);
  bool clear_all();
  // How many objects of the namespace were removed, or cleared away, and are still pinned.
  std::optional<u64> lingering(u32 ns);
  u32 reap();  // now, and all of it; every verb from here up does so now and then
  void resize(const ResizeParameters& parameters);
  void hold_size();
  void release_size();
  void destroy();
  void audit();

 private:
  Patience give_back_patience(Segment& segment) const;
  // For whoever is about to change something: takes back what the dead held, now and then.
  std::shared_ptr<Segment> segment_to_change() const;

  mutable std::mutex mutex_;
  std::shared_ptr<Segment> segment_;
  const u64 patience_ns_;
};

// Proves every invariant of the segment or throws InvariantError with its name; the lock is held.
class Objects;
void audit_segment(Objects& objects);

}  // namespace umbp
