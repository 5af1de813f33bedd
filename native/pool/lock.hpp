// The segment's lock: one futex word {process slot, waiters, attach generation}. A dead owner's word is taken
// over, a living owner, even a stopped one, is never robbed. Not a pthread robust mutex: that one's owner
// test reads pids and goes wrong across pid namespaces.
#pragma once

#include "pool/format.hpp"

namespace umbp {

class Segment;

constexpr u32 kLockWaiters = 0x80;
inline u32 lock_word(u32 slot, u32 generation) {
  return (generation & 0xffffffu) << 8 | (slot + 1);
}

// How long a verb may still wait for the lock, all its batches together. Its own work doesn't count.
struct Patience {
  u64 left_ns;
};

// False if a living process kept the lock for all of the patience.
bool lock_segment(Segment& segment, Patience& patience);
void unlock_segment(Segment& segment);
// Whether a lock word names a process that is no more.
bool owner_is_dead(Segment& segment, u32 word);

}  // namespace umbp
