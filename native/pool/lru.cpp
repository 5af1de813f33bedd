#include <algorithm>

#include "pool/policy.hpp"
#include "pool/tree.hpp"

namespace umbp {

// Records looked at by one plan; bounds the time under the lock when pins block much of the old end.
static constexpr u64 kLookBudget = 32768;

void LeafFirstLru::enter(u32 slot) {
  SlotRecord& r = s_.record(slot);
  Slab& slab = s_.slab(s_.slab_of(slot));
  Class& c = s_.klass(slab.klass);
  r.stamp = ++s_.header().clock;
  slab.touched = r.stamp;
  r.lru_prev = kNil;
  r.lru_next = c.lru_young;
  if (c.lru_young != kNil)
    s_.record(c.lru_young).lru_prev = slot;
  else
    c.lru_old = slot;
  c.lru_young = slot;
  c.lru_count++;
}

void LeafFirstLru::leave(u32 slot) {
  SlotRecord& r = s_.record(slot);
  Class& c = s_.klass(s_.slab(s_.slab_of(slot)).klass);
  if (r.lru_prev != kNil)
    s_.record(r.lru_prev).lru_next = r.lru_next;
  else
    c.lru_young = r.lru_next;
  if (r.lru_next != kNil)
    s_.record(r.lru_next).lru_prev = r.lru_prev;
  else
    c.lru_old = r.lru_prev;
  r.lru_prev = r.lru_next = kNil;
  c.lru_count--;
}

void LeafFirstLru::touch(u32 slot) {
  leave(slot);
  enter(slot);
}

u64 LeafFirstLru::oldest_stamp(u32 klass) {
  u32 old = s_.klass(klass).lru_old;
  return old == kNil ? ~0ull : s_.record(old).stamp;
}

void LeafFirstLru::rebuild(const std::vector<u32>& oldest_first) {
  for (u32 slot : oldest_first) {
    u64 stamp = s_.record(slot).stamp;
    enter(slot);
    s_.record(slot).stamp = stamp;
    s_.slab(s_.slab_of(slot)).touched = stamp;
  }
}

// One choice of victims. Its marks in the records carry the plan's number, so nothing has to be cleaned up.
struct LeafFirstLru::Plan {
  Segment& s;
  Tree tree;
  const u32 klass, call, number;
  u64 budget = kLookBudget;
  std::vector<u32> stack;
  std::vector<std::pair<u64, u32>> leaves;  // heap, oldest first

  Plan(Segment& segment, u32 klass_, u32 call_)
      : s(segment), tree(segment), klass(klass_), call(call_), number(++segment.header().plan_id) {}

  u32 children_left(const SlotRecord& r) const {
    return r.children - (r.plan_children_tag == number ? r.plan_children : 0);
  }
  bool may_go(u32 slot) const {
    const SlotRecord& r = s.record(slot);
    return word_state(r.word.load(std::memory_order_relaxed)) == SlotState::published && r.pins == 0 &&
           r.call != call && r.plan != number && s.slab(s.slab_of(slot)).klass == klass;
  }
  // Returns the parent if the choice has made it a leaf.
  u32 take(u32 slot, std::vector<u32>& victims) {
    SlotRecord& r = s.record(slot);
    r.plan = number;
    victims.push_back(slot);
    u32 parent = tree.parent_of(r);
    if (parent == kNil) return kNil;
    SlotRecord& p = s.record(parent);
    if (p.plan_children_tag != number) {
      p.plan_children_tag = number;
      p.plan_children = 0;
    }
    p.plan_children++;
    return children_left(p) == 0 ? parent : kNil;
  }
  void push_leaf(u32 slot) {
    leaves.emplace_back(s.record(slot).stamp, slot);
    std::push_heap(leaves.begin(), leaves.end(), std::greater<>());
  }
  // All leaves below `top` that may go. A node is looked through once in a plan.
  void collect_leaves(u32 top) {
    leaves.clear();
    stack.assign(1, top);
    while (!stack.empty() && budget) {
      u32 slot = stack.back();
      stack.pop_back();
      SlotRecord& r = s.record(slot);
      if (r.plan_seen == number) continue;
      r.plan_seen = number;
      budget--;
      if (children_left(r) == 0) {
        if (may_go(slot)) push_leaf(slot);
        continue;
      }
      u32 child = r.first_child;
      for (u32 i = 0; i < r.children && child != kNil && stack.size() < kLookBudget;
           i++, child = s.record(child).next_sibling)
        stack.push_back(child);
    }
  }
  // `top` is the oldest, but has cached children: its oldest leaf descendant goes, again and again, until top
  // itself has gone.
  void take_below(u32 top, u64 wanted, std::vector<u32>& victims) {
    collect_leaves(top);
    while (victims.size() < wanted && !leaves.empty()) {
      std::pop_heap(leaves.begin(), leaves.end(), std::greater<>());
      u32 slot = leaves.back().second;
      leaves.pop_back();
      u32 bared = take(slot, victims);
      if (slot == top) return;
      if (bared != kNil && may_go(bared)) push_leaf(bared);
    }
  }
};

void LeafFirstLru::choose(u32 klass, u64 wanted, u32 call, std::vector<u32>& victims) {
  Plan plan(s_, klass, call);
  const u64 goal = victims.size() + wanted;
  u32 slot = s_.klass(klass).lru_old;
  while (slot != kNil && victims.size() < goal && plan.budget) {
    plan.budget--;
    SlotRecord& r = s_.record(slot);
    u32 younger = r.lru_prev;
    if (younger != kNil) prefetch(&s_.record(younger));
    if (plan.may_go(slot)) {
      if (plan.children_left(r) == 0)
        plan.take(slot, victims);
      else if (r.plan_seen != plan.number)
        plan.take_below(slot, goal, victims);
    }
    slot = younger;
  }
}

}  // namespace umbp
