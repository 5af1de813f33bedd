// A pool that is in use grows and shrinks by whole slabs. One process resizes at a time: it alone moves slabs
// between "free" and "absent", and its memory is taken and given back outside the lock. Every step leaves the
// slab table true; a resize that is cut short leaves a pool of some size between.
#pragma once

#include <functional>

#include "pool/lock.hpp"
#include "pool/segment.hpp"

namespace umbp {

struct ResizeParameters {
  u64 capacity_bytes;  // rounded down to whole slabs
  // Called before each portion of memory is taken, with the bytes that are still to be taken; throws to
  // refuse.
  std::function<void(u64)> may_take;
  // Called now and then with the capacity reached; throws to stop there.
  std::function<void(u64)> reached;
  MemoryPolicy memory = {};
};

// Throws ConfigError for a size that can't be, SegmentError where what is in use or held forbids it,
// CapacityError where there is no memory; the message says what size the pool has then.
void resize(Segment& segment, const ResizeParameters& parameters);

// As long as it is held by a living process the pool can't be resized: for one that has registered the memory
// with a device. Throws SegmentError where the pool is being resized just now.
void hold_size(Segment& segment);
void release_size(Segment& segment);

// What a resizer that died has left: slabs between absent and present become absent.
void finish_dead_resize(Segment& segment, const Patience& patience);

}  // namespace umbp
