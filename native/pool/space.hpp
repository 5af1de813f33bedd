// Slabs and slots: which bytes of the arena belong to whom. Under the lock.
#pragma once

#include "pool/segment.hpp"

namespace umbp {

class Space {
 public:
  explicit Space(Segment& segment) : s_(segment) {}

  // The class of a slot size, made if need be and kept through `call` even while it has no slabs; kNil if
  // there are too many.
  u32 class_of(u64 slot_bytes, u32 call);
  // A free slot of the class, taking a free slab if its own are full; kNil if there is none.
  u32 take(u32 klass);
  // Gives a slot back; a slab that becomes empty leaves its class.
  void give(u32 slot);
  // Slots that take() can hand out for this class if nobody else takes slabs.
  u64 available(u32 klass) const;

  // Rebuild: forgets classes and lists, then takes in each slab with its free slots counted.
  void reset();
  void adopt_slab(u32 slab_index);
  void free_slab(u32 slab_index);
  u32 first_slot(u32 slab_index) const { return u32(slab_index * s_.geometry().slots_per_slab); }
  u32 slots_in(u32 slab_index) const;

  // Resizing. A closed slab hands out nothing more; emptied, it is free like any other.
  void close_slab(u32 slab_index);
  void reopen_slab(u32 slab_index);
  // Takes any free slab out of use, for its memory to be given back; kNil if none is free.
  u32 take_out();
  // Marks a slab that is being moved absent, or free with memory.
  void leave_out(u32 slab_index);
  void bring_in(u32 slab_index);
  // Rebuild: a slab without memory.
  void adopt_absent(u32 slab_index);

 private:
  bool join(u32 slab_index, u32 klass);
  void push_partial(u32 slab_index);
  void drop_partial(u32 slab_index);

  Segment& s_;
};

}  // namespace umbp
