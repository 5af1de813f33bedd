#include "pool/plan.hpp"

#include <algorithm>

namespace umbp {

// Records looked at by one plan; bounds the time under the lock when pins block much of the old end.
static constexpr u64 kLookBudget = 8192;

EvictionPlan::EvictionPlan(Segment& segment, u32 klass, u32 call, u64 goal, std::vector<u32>& victims)
    : s_(segment),
      tree_(segment),
      klass_(klass),
      call_(call),
      number_(++segment.header().plan_id),
      goal_(goal),
      budget_(kLookBudget),
      victims_(victims) {}

// A closed slab's slots serve nobody: what is in them goes by whoever closed it.
bool EvictionPlan::may_go(u32 slot) const {
  const SlotRecord& r = s_.record(slot);
  const Slab& slab = s_.slab(s_.slab_of(slot));
  return word_state(r.word.load(std::memory_order_relaxed)) == SlotState::published && r.pins == 0 &&
         r.call != call_ && r.plan != number_ && slab.klass == klass_ && !slab.closed;
}

u32 EvictionPlan::consider(u32 slot) {
  budget_--;
  const SlotRecord& r = s_.record(slot);
  const u32 younger = r.lru_prev;
  if (younger != kNil) prefetch(&s_.record(younger));
  if (may_go(slot)) {
    if (children_left(r) == 0)
      take(slot);
    else if (r.plan_seen != number_)
      take_below(slot);
  }
  return younger;
}

// Returns the parent if the choice has made it a leaf.
u32 EvictionPlan::take(u32 slot) {
  SlotRecord& r = s_.record(slot);
  r.plan = number_;
  victims_.push_back(slot);
  const u32 parent = tree_.parent_of(r);
  if (parent == kNil) return kNil;
  SlotRecord& p = s_.record(parent);
  if (p.plan_children_tag != number_) {
    p.plan_children_tag = number_;
    p.plan_children = 0;
  }
  p.plan_children++;
  return children_left(p) == 0 ? parent : kNil;
}

void EvictionPlan::push_leaf(u32 slot) {
  leaves_.emplace_back(s_.record(slot).stamp, slot);
  std::push_heap(leaves_.begin(), leaves_.end(), std::greater<>());
}

// All leaves below `top` that may go. A node is looked through once in a plan.
void EvictionPlan::collect_leaves(u32 top) {
  leaves_.clear();
  stack_.assign(1, top);
  while (!stack_.empty() && budget_) {
    const u32 slot = stack_.back();
    stack_.pop_back();
    SlotRecord& r = s_.record(slot);
    if (r.plan_seen == number_) continue;
    r.plan_seen = number_;
    budget_--;
    if (children_left(r) == 0) {
      if (may_go(slot)) push_leaf(slot);
      continue;
    }
    u32 child = r.first_child;
    for (u32 i = 0; i < r.children && child != kNil && stack_.size() < kLookBudget;
         i++, child = s_.record(child).next_sibling)
      stack_.push_back(child);
  }
}

// `top` would go, but has cached children: its oldest leaf descendant goes, again and again, until top itself
// has gone.
void EvictionPlan::take_below(u32 top) {
  collect_leaves(top);
  while (victims_.size() < goal_ && !leaves_.empty()) {
    std::pop_heap(leaves_.begin(), leaves_.end(), std::greater<>());
    const u32 slot = leaves_.back().second;
    leaves_.pop_back();
    const u32 bared = take(slot);
    if (slot == top) return;
    if (bared != kNil && may_go(bared)) push_leaf(bared);
  }
}

}  // namespace umbp
