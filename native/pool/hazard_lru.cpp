#include "pool/order.hpp"
#include "pool/plan.hpp"
#include "pool/policy.hpp"

namespace umbp {

namespace {

// The oldest of one group that has not been considered yet.
struct Candidate {
  u32 slot;
  float index;
  u64 stamp;

  bool goes_before(const Candidate& other) const {
    return index < other.index || (index == other.index && stamp < other.stamp);
  }
};

Candidate candidate(Segment& s, const Hazard& hazard, u32 slot) {
  const SlotRecord& r = s.record(slot);
  return {slot, hazard.index(r.history), r.stamp};
}

}  // namespace

void HazardLru::enter(u32 slot) {
  hazard.rest(s_.record(slot).history);
  stamp(s_, slot);
  enter_order(s_, order_of(slot), slot);
}

void HazardLru::leave(u32 slot) {
  leave_order(s_, order_of(slot), slot);
}

u64 HazardLru::oldest_stamp(u32 klass) {
  Candidate first{kNil, 0, ~0ull};
  for (u32 group = 0; group < kGroups; group++) {
    const u32 old = hazard.order(klass, group).old;
    if (old == kNil) continue;
    const Candidate next = candidate(s_, hazard, old);
    if (first.slot == kNil || next.goes_before(first)) first = next;
  }
  return first.stamp;
}

void HazardLru::rebuild(const std::vector<u32>& oldest_first) {
  hazard.rebuild();
  for (u32 slot : oldest_first) {
    s_.slab(s_.slab_of(slot)).touched = s_.record(slot).stamp;
    enter_order(s_, order_of(slot), slot);
  }
}

void HazardLru::choose(u32 klass, u64 wanted, u32 call, std::vector<u32>& victims) {
  EvictionPlan plan(s_, klass, call, victims.size() + wanted, victims);
  Candidate heads[kGroups];
  u32 count = 0;
  for (u32 group = 0; group < kGroups; group++)
    if (const u32 old = hazard.order(klass, group).old; old != kNil) heads[count++].slot = old;
  for (u32 i = 0; i < count; i++) prefetch(&s_.record(heads[i].slot).history);
  for (u32 i = 0; i < count; i++) heads[i] = candidate(s_, hazard, heads[i].slot);
  while (count && !plan.is_over()) {
    u32 first = 0;
    for (u32 i = 1; i < count; i++)
      if (heads[i].goes_before(heads[first])) first = i;
    const u32 younger = plan.consider(heads[first].slot);
    heads[first] = younger == kNil ? heads[--count] : candidate(s_, hazard, younger);
  }
}

}  // namespace umbp
