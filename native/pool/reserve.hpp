// One reserve call, batch after batch under the lock: what each key is, which objects must go for the new
// ones, and only then the changes. The keys that get room are a head of the call; the first that finds none
// ends it.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "pool/objects.hpp"
#include "pool/pool.hpp"

namespace umbp {

class Reservation {
 public:
  struct Columns {
    u32 ns;
    std::span<const Digest> keys;
    std::span<const u64> object_bytes;
    u64 tokens;                                      // of each object
    std::span<const std::optional<Digest>> parents;  // empty, or one for each key
    u64* tickets;
    Outcome* outcomes;
  };

  Reservation(Segment& segment, const Columns& columns) : s_(segment), c_(columns) {}

  // Classifies a batch and chooses its victims; false if even those don't make room for all of it.
  bool plan(Objects& objects, std::size_t from, std::size_t count);
  // False if there was more to evict than one hold of the lock may: nothing of the batch is reserved yet,
  // plan it again.
  bool carry_out(Objects& objects, std::size_t from, std::size_t count);
  // After the lock: the reserved slots are ours to write. No seal is left in them.
  void write_trailer(std::size_t i);
  // One bit for each other process that is writing a key of the last batch.
  u64 busy_owners() const { return busy_owners_; }

 private:
  struct Need {
    u32 klass;
    u64 slot_bytes, count;
    u64 own = 0;  // of its slots, those that the namespace's own objects give up
  };

  void classify(Objects& objects, std::size_t from, std::size_t count);
  void spare(u32 slot) { s_.record(slot).call = s_.slab(s_.slab_of(slot)).call = call_; }
  void spare_parent(Objects& objects, std::size_t i);
  bool is_repeated(std::size_t from, std::size_t i);
  void count_need(Objects& objects, u64 slot_bytes);
  u64 largest_object() const;
  u64 slot_bytes(std::size_t i) const;
  // At its quota a namespace makes room among its own objects; what is beyond it even then isn't asked for.
  // False if that is so for some of the batch.
  bool stay_in_quota(Objects& objects, std::size_t from, std::size_t count);
  bool choose_for(Objects& objects, const Need& need, u64& free_slabs);
  // Slabs of richer classes whose objects are all older than `older_than`, the coldest first, until they have
  // `wanted` slots of this class or as many objects as one hold may evict. The slots.
  u64 take_slabs(const Need& need, u64 wanted, u64 older_than);
  // How far the pool will be above the low watermark while it is on its way there from the high one, after
  // what has been chosen so far; 0 if it isn't, which ends the way.
  u64 excess_bytes();
  void drain_other_classes(Objects& objects);
  bool evict(Objects& objects, u32 slot);  // false if it is gone already
  u32 parent_slot(Objects& objects, std::size_t i, u32 klass);

  Segment& s_;
  const Columns c_;
  u32 call_ = 0;
  bool is_cut_ = false;
  std::size_t quota_end_ = 0;  // from this key on there is no room in the quota
  u64 busy_owners_ = 0;
  std::vector<Need> needs_;
  std::vector<u32> victims_, slabs_;
  u64 objects_in_slabs_ = 0;
  bool is_unfinished_ = false;  // more of a slab's objects must go than one hold may evict
  u32 rounds_ = 0;              // holds that such slabs have taken in this call
  u16 seen_[2 * Pool::kBatch];
};

}  // namespace umbp
