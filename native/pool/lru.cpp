#include "pool/order.hpp"
#include "pool/plan.hpp"
#include "pool/policy.hpp"

namespace umbp {

void LeafFirstLru::enter(u32 slot) {
  stamp(s_, slot);
  enter_order(s_, order_of(slot), slot);
}

void LeafFirstLru::leave(u32 slot) {
  leave_order(s_, order_of(slot), slot);
}

u64 LeafFirstLru::oldest_stamp(u32 klass) {
  const u32 old = s_.klass(klass).order.old;
  return old == kNil ? ~0ull : s_.record(old).stamp;
}

void LeafFirstLru::rebuild(const std::vector<u32>& oldest_first) {
  for (u32 slot : oldest_first) {
    s_.slab(s_.slab_of(slot)).touched = s_.record(slot).stamp;
    enter_order(s_, order_of(slot), slot);
  }
}

void LeafFirstLru::choose(u32 klass, u64 wanted, u32 call, std::vector<u32>& victims) {
  EvictionPlan plan(s_, klass, call, victims.size() + wanted, victims);
  for (u32 slot = s_.klass(klass).order.old; slot != kNil && !plan.is_over();) slot = plan.consider(slot);
}

}  // namespace umbp
