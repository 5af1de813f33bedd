#include "pool/space.hpp"

namespace umbp {

u32 Space::class_of(u64 slot_bytes, u32 call) {
  Header& h = s_.header();
  u32 vacant = kNil;
  for (u32 i = 0; i < h.class_count && i < kClassLimit; i++) {
    Class& c = s_.klass(i);
    if (c.slot_bytes == slot_bytes) {
      c.call = call;
      return i;
    }
    if (c.slabs == 0 && c.call != call && vacant == kNil) vacant = i;
  }
  if (vacant == kNil) {
    if (h.class_count >= kClassLimit) return kNil;
    vacant = h.class_count++;
  }
  Class& c = s_.klass(vacant);
  c = Class{};
  c.slot_bytes = slot_bytes;
  c.call = call;
  c.partial_head = kNil;
  c.order = {kNil, kNil, 0};
  return vacant;
}

u32 Space::slots_in(u32 slab_index) const {
  u64 bytes = s_.slab_slot_bytes(slab_index);
  return bytes ? u32(s_.geometry().slots_in_slab(bytes)) : 0;
}

u64 Space::available(u32 klass) const {
  const Class& c = s_.klass(klass);
  return c.free_slots + s_.header().free_slabs * s_.geometry().slots_in_slab(c.slot_bytes);
}

void Space::push_partial(u32 slab_index) {
  Slab& slab = s_.slab(slab_index);
  Class& c = s_.klass(slab.klass);
  slab.prev = kNil;
  slab.next = c.partial_head;
  if (c.partial_head != kNil) s_.slab(c.partial_head).prev = slab_index;
  c.partial_head = slab_index;
}

void Space::drop_partial(u32 slab_index) {
  Slab& slab = s_.slab(slab_index);
  if (slab.prev != kNil)
    s_.slab(slab.prev).next = slab.next;
  else
    s_.klass(slab.klass).partial_head = slab.next;
  if (slab.next != kNil) s_.slab(slab.next).prev = slab.prev;
  slab.prev = slab.next = kNil;
}

bool Space::join(u32 slab_index, u32 klass) {
  Slab& slab = s_.slab(slab_index);
  Class& c = s_.klass(klass);
  require_sound(s_.slab_slot_bytes(slab_index) == 0, "a slab in use is listed as free");
  u32 slots = u32(s_.geometry().slots_in_slab(c.slot_bytes));
  if (slab.backed < slots) {
    u64 from = s_.geometry().records_at + u64(first_slot(slab_index)) * sizeof(SlotRecord);
    if (!s_.back_range(from, slots * sizeof(SlotRecord))) return false;
    slab.backed = slots;
  }
  s_.header().free_slab_head = slab.next;
  s_.header().free_slabs--;
  slab.klass = klass;
  slab.used = slab.fresh = 0;
  slab.pinned = 0;
  slab.touched = 0;
  slab.free_head = kNil;
  ordered();
  slab.slot_bytes.store(c.slot_bytes,
                        std::memory_order_release);  // all its slots are free: nothing else to vouch for
  crash_point();
  c.slabs++;
  c.free_slots += slots;
  push_partial(slab_index);
  return true;
}

u32 Space::take(u32 klass) {
  Class& c = s_.klass(klass);
  if (c.partial_head == kNil) {
    u32 slab_index = s_.header().free_slab_head;
    if (slab_index == kNil || !join(slab_index, klass)) return kNil;
  }
  u32 slab_index = c.partial_head;
  Slab& slab = s_.slab(slab_index);
  u32 slots = slots_in(slab_index), slot;
  require_sound(slab.klass == klass && slab.used < slots, "a slab in a class's list is full or another's");
  if (slab.free_head != kNil) {
    slot = slab.free_head;
    slab.free_head = s_.record(slot).next_free;
  } else {
    require_sound(slab.fresh < slots, "a slab has fewer slots than its class counts");
    slot = first_slot(slab_index) + slab.fresh++;
  }
  require_sound(s_.slab_of(slot) == slab_index && slot - first_slot(slab_index) < slots &&
                    word_state(s_.record(slot).word.load(std::memory_order_relaxed)) == SlotState::free,
                "a slab lists a slot as free that isn't");
  slab.used++;
  c.free_slots--;
  s_.header().used_bytes += c.slot_bytes;
  if (slab.used == slots) drop_partial(slab_index);
  return slot;
}

void Space::give(u32 slot) {
  u32 slab_index = s_.slab_of(slot);
  Slab& slab = s_.slab(slab_index);
  Class& c = s_.klass(slab.klass);
  if (slab.used == slots_in(slab_index) && !slab.closed) push_partial(slab_index);
  s_.record(slot).next_free = slab.free_head;
  slab.free_head = slot;
  slab.used--;
  if (!slab.closed) c.free_slots++;
  s_.header().used_bytes -= c.slot_bytes;
  if (slab.used) return;
  if (!slab.closed) {
    drop_partial(slab_index);
    c.free_slots -= slots_in(slab_index);
  }
  c.slabs--;
  crash_point();
  free_slab(slab_index);
}

void Space::free_slab(u32 slab_index) {
  Slab& slab = s_.slab(slab_index);
  slab.slot_bytes.store(0, std::memory_order_release);
  crash_point();
  slab.klass = kNil;
  slab.used = slab.fresh = slab.closed = 0;
  slab.pinned = 0;
  slab.free_head = slab.prev = kNil;
  slab.next = s_.header().free_slab_head;
  s_.header().free_slab_head = slab_index;
  s_.header().free_slabs++;
}

void Space::close_slab(u32 slab_index) {
  Slab& slab = s_.slab(slab_index);
  const u32 slots = slots_in(slab_index);
  if (slab.used < slots) drop_partial(slab_index);
  s_.klass(slab.klass).free_slots -= slots - slab.used;
  slab.closed = 1;
}

void Space::reopen_slab(u32 slab_index) {
  Slab& slab = s_.slab(slab_index);
  const u32 slots = slots_in(slab_index);
  slab.closed = 0;
  s_.klass(slab.klass).free_slots += slots - slab.used;
  if (slab.used < slots) push_partial(slab_index);
}

u32 Space::take_out() {
  Header& h = s_.header();
  const u32 slab_index = h.free_slab_head;
  if (slab_index == kNil) return kNil;
  Slab& slab = s_.slab(slab_index);
  slab.slot_bytes.store(kSlabMoving, std::memory_order_release);
  crash_point();
  h.free_slab_head = slab.next;
  h.free_slabs--;
  h.present_slabs--;
  slab.next = kNil;
  return slab_index;
}

void Space::leave_out(u32 slab_index) {
  s_.slab(slab_index).slot_bytes.store(kSlabAbsent, std::memory_order_release);
  crash_point();
}

void Space::bring_in(u32 slab_index) {
  s_.header().present_slabs++;
  free_slab(slab_index);
}

void Space::adopt_absent(u32 slab_index) {
  Slab& slab = s_.slab(slab_index);
  slab.klass = slab.free_head = slab.prev = slab.next = kNil;
  slab.used = slab.pinned = slab.fresh = slab.closed = 0;
  slab.touched = 0;
}

void Space::reset() {
  Header& h = s_.header();
  h.class_count = 0;
  h.free_slab_head = kNil;
  h.free_slabs = h.present_slabs = h.used_bytes = h.objects = 0;
}

void Space::adopt_slab(u32 slab_index) {
  Slab& slab = s_.slab(slab_index);
  u32 klass = class_of(s_.slab_slot_bytes(slab_index), 0);
  if (klass == kNil) throw SegmentError("the pool is damaged: it has more slot sizes than it can have");
  Class& c = s_.klass(klass);
  u32 slots = slots_in(slab_index);
  slab.klass = klass;
  slab.used = slab.closed = 0;
  slab.pinned = 0;
  slab.fresh = slots;
  slab.free_head = slab.prev = slab.next = kNil;
  slab.touched = 0;
  u32 first = first_slot(slab_index);
  for (u32 slot = first + slots; slot-- > first;) {
    SlotRecord& r = s_.record(slot);
    if (word_state(r.word.load(std::memory_order_relaxed)) == SlotState::free) {
      r.next_free = slab.free_head;
      slab.free_head = slot;
    } else {
      slab.used++;
    }
  }
  if (slab.used == 0) {
    free_slab(slab_index);
    return;
  }
  c.slabs++;
  c.free_slots += slots - slab.used;
  s_.header().used_bytes += slab.used * c.slot_bytes;
  if (slab.used < slots) push_partial(slab_index);
}

}  // namespace umbp
