#include "pool/objects.hpp"

#include <exception>

#include "pool/reap.hpp"

namespace umbp {

Objects::Objects(Segment& segment)
    : s(segment),
      index(segment),
      space(segment),
      tree(segment),
      own(segment),
      lru_(segment),
      hazard_lru_(segment),
      policy(segment.eviction_policy() == EvictionPolicy::hazard ? static_cast<Policy&>(hazard_lru_) : lru_),
      hazard(segment.eviction_policy() == EvictionPolicy::hazard ? &hazard_lru_.hazard : nullptr) {}

void Objects::set_word(SlotRecord& r, u64 word) {
  crash_point();
  r.word.store(word, std::memory_order_release);
  crash_point();
}

void Objects::unindex(u32 slot) {
  i64 at = index.find(s.record(slot).digest);
  if (at >= 0 && ref_slot(index.ref(at)) == slot) index.erase(at);
}

void Objects::remember_removed(const Digest& digest) {
  std::atomic<u64>& head = s.header().ring_head;
  u64 count = head.load(std::memory_order_relaxed);
  RingEntry& entry = s.ring(count);
  entry.low.store(digest.low, std::memory_order_relaxed);
  entry.high.store(digest.high, std::memory_order_relaxed);
  head.store(count + 1, std::memory_order_release);
}

void Objects::reserve(u32 slot, const Digest& digest, u32 ns, u64 length, u64 tokens, u32 parent) {
  SlotRecord& r = s.record(slot);
  u32 slab_index = s.slab_of(slot);
  r.digest = digest;
  r.ns = ns;
  r.epoch = s.ns(ns).epoch.load(std::memory_order_relaxed);
  r.size = make_size(length, tokens);
  r.stamp = ++s.header().clock;
  r.parent = parent == kNil ? 0 : ticket(parent);
  r.pins = 1;
  r.children = 0;
  r.lru_prev = r.lru_next = r.own_prev = r.own_next = kNil;
  r.first_child = r.next_sibling = r.prev_sibling = kNil;
  crash_point();
  s.my_pin(slot).store(1, std::memory_order_relaxed);
  policy.arrive(slot);
  u32 generation = next_generation(word_generation(word(slot)));
  set_word(r, make_word(generation, SlotState::reserved, s.process_slot()));
  s.slab(slab_index).pinned++;
  s.ns(ns).used_bytes += s.slab_slot_bytes(slab_index);
  if (parent != kNil) tree.link(parent, slot);
  index.insert(digest, make_ref(slot, generation, false), u64(ns) << 32 | r.epoch);
}

void Objects::publish(u32 slot) {
  SlotRecord& r = s.record(slot);
  set_word(r, make_word(word_generation(word(slot)), SlotState::published, 0));
  s.my_pin(slot).store(0, std::memory_order_relaxed);
  r.pins = 0;
  s.slab(s.slab_of(slot)).pinned--;
  s.header().objects++;
  s.ns(r.ns).objects++;
  enter_orders(slot);
  i64 at = index.find(r.digest);
  require_sound(at >= 0 && ref_slot(index.ref(at)) == slot, "a reservation has no index entry");
  index.set_published(at);
}

void Objects::abandon(u32 slot) {
  SlotRecord& r = s.record(slot);
  u32 owner = word_owner(word(slot));
  unindex(slot);
  tree.unlink(slot);
  policy.depart(slot);
  r.pins = 0;
  s.slab(s.slab_of(slot)).pinned--;
  free(slot);
  if (owner < kProcessLimit) s.pin(owner, slot).store(0, std::memory_order_relaxed);
}

void Objects::free(u32 slot) {
  SlotRecord& r = s.record(slot);
  u32 ns = r.ns;
  u64 bytes = s.slab_slot_bytes(s.slab_of(slot));
  set_word(r, make_word(word_generation(word(slot)), SlotState::free, 0));
  s.ns(ns).used_bytes -= bytes;
  space.give(slot);
}

void Objects::pin(u32 slot) {
  SlotRecord& r = s.record(slot);
  if (r.pins == 0) {
    leave_orders(slot);
    s.slab(s.slab_of(slot)).pinned++;
  }
  crash_point();
  std::atomic<u16>& mine = s.my_pin(slot);
  mine.store(u16(mine.load(std::memory_order_relaxed) + 1), std::memory_order_relaxed);
  crash_point();
  r.pins++;
}

void Objects::unpin(u32 slot, u32 process, u16 count) {
  SlotRecord& r = s.record(slot);
  std::atomic<u16>& theirs = s.pin(process, slot);
  theirs.store(u16(theirs.load(std::memory_order_relaxed) - count), std::memory_order_relaxed);
  crash_point();
  require_sound(r.pins >= count, "an object has fewer pins than its processes");
  r.pins -= count;
  if (r.pins) return;
  s.slab(s.slab_of(slot)).pinned--;
  if (state(slot) == SlotState::doomed)
    free(slot);
  else
    enter_orders(slot);
}

void Objects::drop(u32 slot) {
  SlotRecord& r = s.record(slot);
  unindex(slot);
  tree.unlink(slot);
  if (state(slot) != SlotState::published) return;  // a reservation: its owner finds it outdated
  Digest digest = r.digest;
  s.header().objects--;
  s.ns(r.ns).objects--;
  if (r.pins == 0) leave_orders(slot);
  policy.depart(slot);
  if (r.pins == 0) {
    free(slot);
  } else {
    set_word(r, make_word(word_generation(word(slot)), SlotState::doomed, 0));
  }
  remember_removed(digest);
}

void Objects::evict(u32 slot) {
  const u64 slot_bytes = s.slab_slot_bytes(s.slab_of(slot)), tokens = size_tokens(s.record(slot).size);
  drop(slot);
  s.header().evicted.fetch_add(1, std::memory_order_relaxed);
  s.header().evicted_bytes.fetch_add(slot_bytes, std::memory_order_relaxed);
  s.header().evicted_tokens.fetch_add(tokens, std::memory_order_relaxed);
}

void Objects::touch(u32 slot) {
  if (s.record(slot).pins) return;
  leave_orders(slot);
  enter_orders(slot);
}

void Objects::enter_orders(u32 slot) {
  policy.enter(slot);
  own.enter(slot);
}

void Objects::leave_orders(u32 slot) {
  policy.leave(slot);
  own.leave(slot);
}

static void do_deferred(Objects& objects) {
  Segment& s = objects.s;
  std::lock_guard<std::mutex> guard(s.deferred_mutex);
  for (u64 ticket : s.deferred_releases) {
    u32 slot = ticket_slot(ticket);
    bool held = objects.names(ticket, SlotState::published) || objects.names(ticket, SlotState::doomed);
    if (held && s.my_pin(slot).load() > 0) objects.unpin(slot, s.process_slot(), 1);
  }
  s.deferred_releases.clear();
  for (u64 ticket : s.deferred_abandons) {
    u32 slot = ticket_slot(ticket);
    if (objects.names(ticket, SlotState::reserved) && word_owner(objects.word(slot)) == s.process_slot())
      objects.abandon(slot);
  }
  s.deferred_abandons.clear();
}

Locked::Locked(Segment& segment, Patience& patience)
    : segment_(segment), objects_(segment), exceptions_(std::uncaught_exceptions()) {
  held_ = lock_segment(segment, patience);
  if (!held_) {
    segment.header().not_now.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (segment.measures_holds()) since_ns_ = processor_ns();
  try {
    if (segment.is_expelled())
      throw SegmentError(
          "this process was taken for dead and has lost its place in the pool: something in it closed a "
          "descriptor "
          "of the pool's file, which drops its byte lock; attach again in a new process");
    std::atomic<u32>& dirty = segment.header().dirty;
    bool repair = dirty.load(std::memory_order_relaxed) != 0;
    dirty.store(1, std::memory_order_relaxed);
    crash_point();
    if (repair) rebuild(objects_);
    if (objects_.hazard) objects_.hazard->advance(segment.tick());
    do_deferred(objects_);
  } catch (...) {
    unlock_segment(segment);
    throw;
  }
}

Locked::~Locked() {
  if (!held_) return;
  crash_point();
  if (std::uncaught_exceptions() == exceptions_) segment_.header().dirty.store(0, std::memory_order_relaxed);
  crash_point();
  unlock_segment(segment_);
  if (since_ns_) segment_.report_hold(processor_ns() - since_ns_);
}

}  // namespace umbp
