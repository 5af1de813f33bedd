#include "pool/own_order.hpp"

#include <utility>

namespace umbp {

// Records looked at for one choice; bounds the time under the lock.
static constexpr u64 kLookBudget = 16384;

void OwnOrder::enter(u32 slot) {
  SlotRecord& r = s_.record(slot);
  Namespace& ns = s_.ns(r.ns);
  r.own_prev = kNil;
  r.own_next = ns.young;
  if (ns.young != kNil)
    s_.record(ns.young).own_prev = slot;
  else
    ns.old = slot;
  ns.young = slot;
}

void OwnOrder::leave(u32 slot) {
  SlotRecord& r = s_.record(slot);
  Namespace& ns = s_.ns(r.ns);
  if (r.own_prev != kNil)
    s_.record(r.own_prev).own_next = r.own_next;
  else
    ns.young = r.own_next;
  if (r.own_next != kNil)
    s_.record(r.own_next).own_prev = r.own_prev;
  else
    ns.old = r.own_prev;
  r.own_prev = r.own_next = kNil;
}

// One choice. What it takes carries its plan's number (it may go, and so may its parent), and the call's
// mark, by which the eviction policy spares what has been chosen already.
struct OwnOrder::Choice {
  Segment& s;
  const u32 ns, klass, call;
  const u64 wanted_bytes;
  std::vector<u32>& victims;
  const u32 number = ++s.header().plan_id;
  u64 found_bytes = 0, budget = kLookBudget;
  std::vector<std::pair<u32, u32>> path{};  // a record and its next child to look at, from the top down

  bool is_done() const { return found_bytes >= wanted_bytes || budget == 0; }
  // Whoever asks for a class wants slots, which a closed slab doesn't hand out.
  bool may_go(u32 slot) const {
    const SlotRecord& r = s.record(slot);
    const Slab& slab = s.slab(s.slab_of(slot));
    return word_state(r.word.load(std::memory_order_relaxed)) == SlotState::published && r.pins == 0 &&
           r.call != call && r.ns == ns && (klass == kNil || (slab.klass == klass && !slab.closed));
  }
  void take(u32 slot) {
    s.record(slot).call = call;
    s.slab(s.slab_of(slot)).call = call;
    s.record(slot).plan = number;
    victims.push_back(slot);
    found_bytes += s.slab_slot_bytes(s.slab_of(slot));
  }
  // An object below which something stays, stays too.
  bool is_bare(u32 slot) {
    const SlotRecord& r = s.record(slot);
    u32 child = r.first_child;
    for (u32 i = 0; i < r.children && child != kNil; i++, child = s.record(child).next_sibling) {
      if (budget == 0 || s.record(child).plan != number) return false;
      budget--;
    }
    return true;
  }
  // As far as wanted, what hangs below `top`, and then top itself.
  void take_from(u32 top) {
    path.assign(1, {top, s.record(top).first_child});
    while (!path.empty() && !is_done()) {
      auto& [slot, child] = path.back();
      if (child == kNil) {
        if (is_bare(slot)) take(slot);
        path.pop_back();
        continue;
      }
      const u32 next = child;
      child = s.record(next).next_sibling;
      budget--;
      if (may_go(next)) path.emplace_back(next, s.record(next).first_child);
    }
  }
};

u64 OwnOrder::choose(u32 ns, u32 klass, u64 wanted_bytes, u32 call, std::vector<u32>& victims) {
  Choice choice{s_, ns, klass, call, wanted_bytes, victims};
  for (u32 slot = s_.ns(ns).old; slot != kNil && !choice.is_done(); slot = s_.record(slot).own_prev) {
    choice.budget--;
    if (choice.may_go(slot)) choice.take_from(slot);
  }
  return choice.found_bytes;
}

}  // namespace umbp
