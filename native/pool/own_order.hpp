// Each namespace's evictable objects by last use, for one that must make room among its own: at its quota, or
// when the quota is lowered. Kept beside the eviction policy's orders, whatever the policy. Under the lock.
#pragma once

#include <vector>

#include "pool/segment.hpp"

namespace umbp {

class OwnOrder {
 public:
  explicit OwnOrder(Segment& segment) : s_(segment) {}

  void enter(u32 slot);  // as the youngest
  void leave(u32 slot);
  // Appends victims of the namespace, oldest first and children before their parents, until their slots make
  // up `wanted_bytes`; of one class, or of any with kNil. Marks them with `call`; those marked are spared.
  // The bytes that it found.
  u64 choose(u32 ns, u32 klass, u64 wanted_bytes, u32 call, std::vector<u32>& victims);

 private:
  struct Choice;
  Segment& s_;
};

}  // namespace umbp
