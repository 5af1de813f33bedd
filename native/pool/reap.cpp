#include "pool/reap.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "pool/liveness.hpp"
#include "pool/resize.hpp"

namespace umbp {

static constexpr u64 kJoinPatienceNs = 2000000000ull;
static constexpr u64 kLeavePatienceNs = 100000000ull;
static constexpr u64 kRowBatch = 65536;   // row entries looked at in one hold of the lock
static constexpr u64 kChangeBatch = 256;  // objects changed in one hold of the lock
static constexpr u64 kSweepBatch = 4096;  // records looked at in one hold of the lock
static constexpr u64 kReapIntervalNs = 250000000ull;
static constexpr u32 kPassingHolds = 16;  // of the lock, by one who only comes by

bool is_dead(Segment& s, u32 process) {
  return process != s.process_slot() && s.process(process).in_use.load() != 0 &&
         !other_holds_byte_lock(s.fd(), process);
}

// One batch of returning what `process` held. True when its row is empty.
static bool return_batch(Objects& objects, u32 process) {
  Segment& s = objects.s;
  const u64 slots = s.geometry().max_slots;
  u64 cursor = s.process(process).returned_slots;
  if (cursor > slots) cursor = 0;  // damage
  const u64 end = std::min(cursor + kRowBatch, slots);
  u64 changed = 0;
  for (; cursor < end && changed < kChangeBatch; cursor++) {
    u32 slot = u32(cursor);
    u16 count = s.pin(process, slot).load(std::memory_order_relaxed);
    if (count == 0) continue;
    changed++;
    u64 word = objects.word(slot);
    bool live = s.slab_slot_bytes(s.slab_of(slot)) != 0 && word_state(word) != SlotState::free;
    if (!live)
      s.pin(process, slot).store(0, std::memory_order_relaxed);
    else if (word_state(word) == SlotState::reserved)
      objects.abandon(slot);
    else
      objects.unpin(slot, process, count);
    crash_point();
  }
  s.process(process).returned_slots = cursor;
  return cursor >= slots;
}

static void vacate(Process& entry) {
  entry.size_holds.store(0);
  entry.returned_slots = 0;
  ordered();
  entry.in_use.store(kPlaceFree);
}

// Returns everything that the attachment `generation` of `process` held, in batches; false if the lock
// couldn't be had, or if `holds` of it didn't suffice.
static bool return_all(Segment& s, u32 process, u32 generation, Patience& patience, u32& holds) {
  for (; holds; holds--) {
    Locked lock(s, patience);
    if (!lock) return false;
    Process& entry = s.process(process);
    if (entry.generation.load() != generation || entry.in_use.load() == kPlaceFree)
      return true;  // another has done it
    const bool is_own = process == s.process_slot() && s.is_joined();
    if (!is_own) entry.in_use.store(kPlaceReaped);
    if (!return_batch(*lock, process)) continue;
    vacate(entry);
    s.header().reaped.fetch_add(!is_own, std::memory_order_relaxed);
    return true;
  }
  return false;
}

u32 claim_generation(Segment& s, u32 slot) {
  Process& entry = s.process(slot);
  u32 generation = (entry.generation.load() + 1) & 0xffffffu;
  if (generation == 0) generation = 1;
  entry.generation.store(generation);
  return generation;
}

void join_process_table(Segment& s) {
  const u32 me = s.process_slot();
  auto refuse = [&s] {
    throw SegmentError(s.name() + " can't be attached now: a stopped process holds its lock");
  };
  if (!s.back_range(s.geometry().pins_at + me * s.geometry().pin_row_bytes, s.geometry().pin_row_bytes))
    throw CapacityError(s.name() + " can't be attached: no memory for this process's " +
                        std::to_string(s.geometry().pin_row_bytes) + " bytes of pin counts");
  Process& entry = s.process(me);
  Patience patience{kJoinPatienceNs};
  u32 holds = ~0u;
  if (!return_all(s, me, s.process_generation(), patience, holds)) refuse();  // what a predecessor left
  {
    Locked lock(s, patience);
    if (!lock) refuse();
    entry.pid.store(u32(getpid()));
    entry.uid = geteuid();
    entry.attached_ns = monotonic_ns();
    entry.size_holds.store(0);
    entry.returned_slots = 0;
    entry.in_use.store(kPlaceTaken);
    s.mark_joined();
  }
  reap_dead(s, patience);
}

void leave_process_table(Segment& s) {
  try {
    Patience patience{kLeavePatienceNs};
    u32 holds = ~0u;
    return_all(s, s.process_slot(), s.process_generation(), patience, holds);
  } catch (const SegmentError&) {
    // A damaged pool is left as it is; whoever attaches next finds our entry in use without its byte lock.
  }
}

// Returns what all dead processes held; how many they were. False in `is_done` where it isn't all.
static u32 return_of_all(Segment& s, Patience& patience, u32& holds, bool& is_done) {
  u32 reaped = 0;
  is_done = false;
  for (u32 process = 0; process < kProcessLimit; process++) {
    // Read first: should the slot be taken anew between the two, what we return is still the dead one's.
    u32 generation = s.process(process).generation.load();
    if (!is_dead(s, process)) continue;
    if (!return_all(s, process, generation, patience, holds)) return reaped;
    reaped++;
  }
  is_done = true;
  return reaped;
}

u32 reap_dead(Segment& s, Patience& patience) {
  u32 holds = ~0u;
  bool is_done = false;
  const u32 reaped = return_of_all(s, patience, holds, is_done);
  if (!is_done) return reaped;
  for (u32 ns = 0; ns < kNamespaceLimit; ns++) {
    Namespace& entry = s.ns(ns);
    u32 epoch = entry.epoch.load(std::memory_order_relaxed);
    if (epoch == 0) break;
    if (entry.swept_epoch != epoch && !sweep_namespace(s, ns, patience)) break;
  }
  finish_dead_resize(s, patience);
  return reaped;
}

void reap_in_passing(Segment& s) {
  std::atomic<u64>& next = s.header().next_reap_ns;
  const u64 now = coarse_monotonic_ns();
  u64 due = next.load(std::memory_order_relaxed);
  // A time further ahead was set by another clock (a time namespace of its own), or is damage.
  if (now < due && due - now <= kReapIntervalNs) return;
  if (!next.compare_exchange_strong(due, now + kReapIntervalNs)) return;  // somebody else does it
  Patience patience{0};
  u32 holds = kPassingHolds;
  bool is_done = false;
  return_of_all(s, patience, holds, is_done);
  if (is_done)
    finish_dead_resize(s, patience);
  else if (holds == 0)
    next.store(0);
}

bool sweep_namespace(Segment& s, u32 ns, Patience& patience) {
  u64 slab = 0, position = 0;
  u32 target = 0;  // the epoch that this walk has swept for from its first slab on
  for (;;) {
    Locked lock(s, patience);
    if (!lock) return false;
    Namespace& entry = s.ns(ns);
    const u32 epoch = entry.epoch.load(std::memory_order_relaxed);
    if (slab == 0 && position == 0) target = epoch;
    u64 looked = 0, changed = 0;
    while (slab < s.geometry().slab_count && looked < kSweepBatch && changed < kChangeBatch) {
      looked++;
      if (position >= lock->space.slots_in(u32(slab))) {
        slab++;
        position = 0;
        continue;
      }
      const u32 slot = lock->space.first_slot(u32(slab)) + u32(position++);
      const SlotRecord& r = s.record(slot);
      const SlotState state = lock->state(slot);
      const bool is_stored = state == SlotState::published || state == SlotState::reserved;
      if (!is_stored || r.ns != ns || r.epoch == epoch) continue;
      lock->drop(slot);
      changed++;
    }
    if (slab < s.geometry().slab_count) continue;
    if (epoch == target) {
      entry.swept_epoch = epoch;
      return true;
    }
    slab = position = 0;  // cleared once more while we walked: what was stored in between may lie behind us
  }
}

std::optional<u64> count_lingering(Segment& s, u32 ns, Patience& patience) {
  u64 found = 0;
  for (u64 slab = 0, position = 0; slab < s.geometry().slab_count;) {
    Locked lock(s, patience);
    if (!lock) return std::nullopt;
    for (u64 looked = 0; slab < s.geometry().slab_count && looked < kSweepBatch; looked++) {
      if (s.slab(u32(slab)).pinned == 0 || position >= lock->space.slots_in(u32(slab))) {
        slab++;
        position = 0;
        continue;
      }
      const u32 slot = lock->space.first_slot(u32(slab)) + u32(position++);
      const SlotRecord& r = s.record(slot);
      if (r.ns != ns || r.pins == 0) continue;
      const SlotState state = lock->state(slot);
      if (state == SlotState::doomed || (state == SlotState::published && !lock->is_current(r))) found++;
    }
  }
  return found;
}

namespace {

// Which processes may hold anything: attached and alive. The dead lose their rows here.
std::vector<u32> living_processes(Segment& s) {
  std::vector<u32> living;
  for (u32 process = 0; process < kProcessLimit; process++) {
    Process& entry = s.process(process);
    if (entry.in_use.load() == 0) continue;
    if (!is_dead(s, process)) {
      living.push_back(process);
      continue;
    }
    std::memset(static_cast<void*>(s.base() + s.geometry().pins_at + process * s.geometry().pin_row_bytes), 0,
                s.geometry().pin_row_bytes);
    ordered();
    vacate(entry);
    s.header().reaped.fetch_add(1, std::memory_order_relaxed);
  }
  return living;
}

// Makes one record say something that can be true, by the truth alone: its state, its owner's life, its pins.
void settle_record(Objects& objects, u32 slot, u64 slot_bytes, const std::vector<u32>& living) {
  Segment& s = objects.s;
  SlotRecord& r = s.record(slot);
  u64 word = objects.word(slot);
  SlotState state = word_state(word);
  const u64 length = size_length(r.size);
  bool sound = r.ns < kNamespaceLimit && length > 0 && length <= slot_bytes - kSlotOverheadBytes;
  u32 pins = 0, owners_pins = 0;
  for (u32 process : living) {
    u32 count = s.pin(process, slot).load(std::memory_order_relaxed);
    pins += count;
    if (process == word_owner(word)) owners_pins = count;
  }
  if (!sound || state > SlotState::doomed) state = SlotState::free;
  if (state == SlotState::reserved && owners_pins == 0) state = SlotState::free;
  if (state == SlotState::published && !objects.is_current(r)) state = SlotState::doomed;
  if (state == SlotState::doomed && pins == 0) state = SlotState::free;
  if (state == SlotState::free) {
    pins = 0;
    for (u32 process : living) s.pin(process, slot).store(0, std::memory_order_relaxed);
  }
  u32 owner = state == SlotState::reserved ? word_owner(word) : 0;
  r.word.store(make_word(word_generation(word), state, owner), std::memory_order_release);
  r.pins = pins;
  r.children = 0;
  r.lru_prev = r.lru_next = r.own_prev = r.own_next = kNil;
  r.first_child = r.next_sibling = r.prev_sibling = kNil;
}

// Makes a settled object known again: its parent's link, its key, its namespace's and its slab's counts.
void place_object(Objects& objects, u32 slot, std::vector<u32>& evictable) {
  Segment& s = objects.s;
  SlotRecord& r = s.record(slot);
  const u64 word = objects.word(slot), slot_bytes = s.slab_slot_bytes(s.slab_of(slot));
  SlotState state = word_state(word);
  bool is_visible = state != SlotState::doomed && objects.is_current(r);
  if (is_visible &&
      objects.index.find(r.digest) >= 0) {  // damage, not a crash: the key keeps its first object
    is_visible = false;
    state = r.pins ? SlotState::doomed : SlotState::free;
    r.word.store(make_word(word_generation(word), state, 0), std::memory_order_release);
    if (state == SlotState::free) {
      objects.space.give(slot);
      return;
    }
  }
  s.ns(r.ns).used_bytes += slot_bytes;
  if (r.pins) s.slab(s.slab_of(slot)).pinned++;
  u32 parent = is_visible ? objects.tree.parent_of(r) : kNil;
  if (parent != kNil) {
    const SlotRecord& p = s.record(parent);
    const bool fits = parent != slot && objects.state(parent) != SlotState::doomed && objects.is_current(p) &&
                      s.slab_slot_bytes(s.slab_of(parent)) == slot_bytes;
    if (!fits) parent = kNil;
  }
  if (parent != kNil)
    objects.tree.link(parent, slot);
  else
    r.parent = 0;
  if (!is_visible) return;
  objects.index.insert(r.digest, make_ref(slot, word_generation(word), state == SlotState::published),
                       u64(r.ns) << 32 | r.epoch);
  if (state != SlotState::published) return;
  s.header().objects++;
  s.ns(r.ns).objects++;
  if (r.pins == 0) evictable.push_back(slot);
}

}  // namespace

void rebuild(Objects& objects) {
  Segment& s = objects.s;
  Header& h = s.header();
  const bool is_first = h.rebuilds.fetch_add(1, std::memory_order_relaxed) == 0;
  const std::vector<u32> living = living_processes(s);
  objects.index.clear();
  objects.space.reset();
  for (u32 ns = 0; ns < kNamespaceLimit; ns++) {
    s.ns(ns).used_bytes = s.ns(ns).objects = 0;
    s.ns(ns).young = s.ns(ns).old = kNil;
    s.ns(ns).swept_epoch = s.ns(ns).epoch.load(std::memory_order_relaxed);
  }
  const u32 slabs = u32(s.geometry().slab_count);
  for (u32 slab = slabs; slab-- > 0;) {
    const u64 slot_bytes = s.slab_slot_bytes(slab);
    if (!s.has_memory(slab)) {
      objects.space.adopt_absent(slab);
      continue;
    }
    h.present_slabs++;
    if (slot_bytes == 0) {
      objects.space.free_slab(slab);
      continue;
    }
    const u32 first = objects.space.first_slot(slab), end = first + objects.space.slots_in(slab);
    for (u32 slot = first; slot < end; slot++) settle_record(objects, slot, slot_bytes, living);
    objects.space.adopt_slab(slab);
    crash_point();
  }
  std::vector<u32> evictable;
  for (u32 slab = 0; slab < slabs; slab++) {
    const u32 first = objects.space.first_slot(slab), end = first + objects.space.slots_in(slab);
    for (u32 slot = first; slot < end; slot++) {
      if (objects.state(slot) == SlotState::free) continue;
      h.clock = std::max(h.clock, s.record(slot).stamp);
      place_object(objects, slot, evictable);
    }
    crash_point();
  }
  std::sort(evictable.begin(), evictable.end(),
            [&s](u32 a, u32 b) { return s.record(a).stamp < s.record(b).stamp; });
  objects.policy.rebuild(evictable);
  for (u32 slot : evictable) objects.own.enter(slot);
  objects.index.settle();
  // A removal that was cut short may be missing from the ring: every reader is told that it has lost some.
  if (!is_first) h.ring_head.fetch_add(kRingEntries + 1, std::memory_order_release);
}

}  // namespace umbp
