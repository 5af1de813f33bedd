// One choice of victims, leaf first: what has cached children gives way to its oldest leaf descendant, so
// prefixes stay whole. Its marks in the records carry the plan's number, so nothing has to be cleaned up.
#pragma once

#include <vector>

#include "pool/tree.hpp"

namespace umbp {

class EvictionPlan {
 public:
  // Victims are of size class `klass`; objects marked by the reserve call `call` are spared.
  EvictionPlan(Segment& segment, u32 klass, u32 call, u64 goal, std::vector<u32>& victims);

  // Done, or has looked at as many records as one hold of the lock may.
  bool is_over() const { return victims_.size() >= goal_ || budget_ == 0; }
  // Considers the next in somebody's order; the next younger, which may be looked at afterwards.
  u32 consider(u32 slot);
  bool may_go(u32 slot) const;

 private:
  u32 children_left(const SlotRecord& r) const {
    return r.children - (r.plan_children_tag == number_ ? r.plan_children : 0);
  }
  u32 take(u32 slot);
  void take_below(u32 top);
  void collect_leaves(u32 top);
  void push_leaf(u32 slot);

  Segment& s_;
  Tree tree_;
  const u32 klass_, call_, number_;
  const u64 goal_;
  u64 budget_;
  std::vector<u32>& victims_;
  std::vector<u32> stack_;
  std::vector<std::pair<u64, u32>> leaves_;  // heap, oldest first
};

}  // namespace umbp
