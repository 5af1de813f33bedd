// Who is attached, and putting things right after those who died.
#pragma once

#include "pool/objects.hpp"

namespace umbp {

// The caller holds the byte lock of its slot. A new generation first: it makes what its predecessor held a
// dead owner's; then what the predecessor left is returned, then the entry is ours.
u32 claim_generation(Segment& segment, u32 slot);
void join_process_table(Segment& segment);
void leave_process_table(Segment& segment);

// Returns the pins and reservations of every dead process and finishes interrupted clears and resizes. Number
// of processes reaped; stops early where the lock can't be had.
u32 reap_dead(Segment& segment, Patience& patience);
// What every verb does first: the same but for clears, a few times a second for all processes together. A
// bounded part of it where the dead held much; the next verb goes on. Doesn't wait for the lock.
void reap_in_passing(Segment& segment);
bool is_dead(Segment& segment, u32 process);

// Drops what a clear() of the namespace has outdated; false if the lock couldn't be had.
bool sweep_namespace(Segment& segment, u32 ns, Patience& patience);

// How many of the namespace's objects are invisible and still pinned; none if the lock couldn't be had.
std::optional<u64> count_lingering(Segment& segment, u32 ns, Patience& patience);

// Builds everything derived from the truth; called with the lock held and the dirty mark set.
void rebuild(Objects& objects);

}  // namespace umbp
