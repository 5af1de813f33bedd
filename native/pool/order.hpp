// A doubly linked order of slots, young to old, through their records.
#pragma once

#include "pool/segment.hpp"

namespace umbp {

inline void enter_order(Segment& s, Order& order, u32 slot) {
  SlotRecord& r = s.record(slot);
  r.lru_prev = kNil;
  r.lru_next = order.young;
  if (order.young != kNil)
    s.record(order.young).lru_prev = slot;
  else
    order.old = slot;
  order.young = slot;
  order.count++;
}

inline void leave_order(Segment& s, Order& order, u32 slot) {
  SlotRecord& r = s.record(slot);
  if (r.lru_prev != kNil)
    s.record(r.lru_prev).lru_next = r.lru_next;
  else
    order.young = r.lru_next;
  if (r.lru_next != kNil)
    s.record(r.lru_next).lru_prev = r.lru_prev;
  else
    order.old = r.lru_prev;
  r.lru_prev = r.lru_next = kNil;
  order.count--;
}

// Marks a use: the youngest stamp of its slab and of the pool.
inline void stamp(Segment& s, u32 slot) {
  SlotRecord& r = s.record(slot);
  r.stamp = ++s.header().clock;
  s.slab(s.slab_of(slot)).touched = r.stamp;
}

}  // namespace umbp
