// Child links between slot records: which stored blocks continue which. Derived from the records' parent
// fields.
#pragma once

#include "pool/segment.hpp"

namespace umbp {

class Tree {
 public:
  explicit Tree(Segment& segment) : s_(segment) {}

  // The parent's slot while it still is the object that the child named; else kNil.
  u32 parent_of(const SlotRecord& r) const {
    if (r.parent == 0) return kNil;
    u32 slot = ticket_slot(r.parent);
    u64 word = s_.record(slot).word.load(std::memory_order_relaxed);
    bool same = word_generation(word) == ticket_generation(r.parent) && word_state(word) != SlotState::free;
    return same ? slot : kNil;
  }

  void link(u32 parent, u32 child) {
    SlotRecord &p = s_.record(parent), &c = s_.record(child);
    c.prev_sibling = kNil;
    c.next_sibling = p.first_child;
    if (p.first_child != kNil) s_.record(p.first_child).prev_sibling = child;
    p.first_child = child;
    p.children++;
  }

  // Takes an object out: from its parent, and its children become roots.
  void unlink(u32 slot) {
    SlotRecord& r = s_.record(slot);
    if (u32 parent = parent_of(r); parent != kNil) {
      SlotRecord& p = s_.record(parent);
      if (r.prev_sibling != kNil)
        s_.record(r.prev_sibling).next_sibling = r.next_sibling;
      else
        p.first_child = r.next_sibling;
      if (r.next_sibling != kNil) s_.record(r.next_sibling).prev_sibling = r.prev_sibling;
      p.children--;
    }
    r.parent = 0;
    r.prev_sibling = r.next_sibling = kNil;
    for (u32 left = r.children; left && r.first_child != kNil; left--) {
      SlotRecord& c = s_.record(r.first_child);
      r.first_child = c.next_sibling;
      c.parent = 0;
      c.prev_sibling = c.next_sibling = kNil;
      s_.header().removed_orphans.fetch_add(1, std::memory_order_relaxed);
    }
    r.children = 0;
    r.first_child = kNil;
  }

 private:
  Segment& s_;
};

}  // namespace umbp
