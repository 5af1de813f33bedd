// The transitions of one stored object, each of them a step that a crash can't split: a slot record's state
// word changes last (or first, when the object goes), everything else is derived or counted again. Under the
// lock.
#pragma once

#include "pool/index.hpp"
#include "pool/lock.hpp"
#include "pool/own_order.hpp"
#include "pool/policy.hpp"
#include "pool/space.hpp"
#include "pool/tree.hpp"

namespace umbp {

class Objects {
 public:
  explicit Objects(Segment& segment);
  Objects(const Objects&) = delete;
  Objects& operator=(const Objects&) = delete;

  Segment& s;
  Index index;
  Space space;
  Tree tree;
  OwnOrder own;

 private:
  LeafFirstLru lru_;
  HazardLru hazard_lru_;

 public:
  Policy& policy;
  Hazard* const hazard;  // null under another policy

  u64 word(u32 slot) const { return s.record(slot).word.load(std::memory_order_relaxed); }
  SlotState state(u32 slot) const { return word_state(word(slot)); }
  u64 ticket(u32 slot) const { return make_ticket(slot, word_generation(word(slot))); }
  bool is_current(const SlotRecord& r) const {
    return s.ns(r.ns).epoch.load(std::memory_order_relaxed) == r.epoch && r.epoch != 0;
  }
  // The slot that the key's index entry names; kNil if it has none.
  u32 slot_of(const Digest& digest) const {
    const i64 at = index.find(digest);
    if (at < 0) return kNil;
    require_of(ref_slot(index.ref(at)), digest);
    return ref_slot(index.ref(at));
  }
  void require_of(u32 slot, const Digest& digest) const {
    require_sound(s.record(slot).digest == digest, "an index entry names another key's slot");
  }
  // Whether the ticket names what its slot holds now.
  bool names(u64 ticket, SlotState wanted) const {
    if (ticket_slot(ticket) >= s.geometry().max_slots ||
        s.slab_slot_bytes(s.slab_of(ticket_slot(ticket))) == 0)
      return false;
    u64 w = word(ticket_slot(ticket));
    return word_generation(w) == ticket_generation(ticket) && word_state(w) == wanted;
  }

  // Fills a slot fresh from Space::take and makes it this process's reservation.
  void reserve(u32 slot, const Digest& digest, u32 ns, u64 length, u64 tokens, u32 parent);
  void publish(u32 slot);
  void abandon(u32 slot);  // a reservation, anybody's
  void pin(u32 slot);      // for this process
  void unpin(u32 slot, u32 process, u16 count);
  void enter_orders(u32 slot);  // evictable from now on, as the youngest
  void leave_orders(u32 slot);
  void touch(u32 slot);  // used: the youngest again, if it may be evicted
  // Makes an object invisible and frees it, at once or with its last pin. A reservation stays its owner's.
  void drop(u32 slot);
  void evict(u32 slot);  // drop, and count it as what others needed the room of

 private:
  void set_word(SlotRecord& r, u64 word);
  void unindex(u32 slot);
  void free(u32 slot);
  void remember_removed(const Digest& digest);
};

// Holds the lock, or not: test it. Whoever dies while holding it, or leaves by an exception, leaves the dirty
// mark, and the next holder rebuilds what is derived before it looks at anything.
class Locked {
 public:
  Locked(Segment& segment, Patience& patience);
  ~Locked();
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  explicit operator bool() const { return held_; }
  Objects* operator->() { return &objects_; }
  Objects& operator*() { return objects_; }

 private:
  Segment& segment_;
  Objects objects_;
  int exceptions_;
  bool held_ = false;
  u64 since_ns_ = 0;  // where holds are measured
};

}  // namespace umbp
