#include "pool/reserve.hpp"

#include <algorithm>
#include <cstring>

namespace umbp {

// Bounds on one hold of the lock: slabs looked at for cold ones, objects evicted with them; and on how many
// holds one call may spend on emptying slabs.
static constexpr u64 kSlabsLooked = 4096, kEvictedWithSlabs = 512;
static constexpr u32 kSlabRounds = 128;

bool Reservation::plan(Objects& objects, std::size_t from, std::size_t count) {
  while (call_ == 0) call_ = ++s_.header().call_id;
  // A plan that wasn't carried out has marked some of the namespace's own objects.
  for (u32 victim : victims_)
    if (s_.record(victim).call == call_) s_.record(victim).call = 0;
  victims_.clear();
  slabs_.clear();
  objects_in_slabs_ = 0;
  is_unfinished_ = false;
  classify(objects, from, count);
  u64 free_slabs = s_.header().free_slabs;
  bool all = true;
  if (!is_cut_) {
    all = stay_in_quota(objects, from, count);
    for (const Need& need : needs_) all &= choose_for(objects, need, free_slabs);
    if (!is_unfinished_) drain_other_classes(objects);
  }
  return all;
}

// What each key is. The objects that this call names are marked: they are not evicted for it.
void Reservation::classify(Objects& objects, std::size_t from, std::size_t count) {
  needs_.clear();
  busy_owners_ = 0;
  std::fill(std::begin(seen_), std::end(seen_), u16(0));
  for (std::size_t i = from; i < from + count; i++) objects.index.prefetch_home(c_.keys[i]);
  for (std::size_t i = from; i < from + count; i++) {
    spare_parent(objects, i);
    c_.tickets[i] = 0;
    u32 slot = objects.slot_of(c_.keys[i]);
    if (slot != kNil && !objects.is_current(s_.record(slot))) {
      objects.drop(slot);  // outdated by a clear() that hasn't swept it yet
      slot = kNil;
    }
    if (slot != kNil) {
      spare(slot);
      u64 word = objects.word(slot);
      bool is_published = word_state(word) == SlotState::published;
      c_.outcomes[i] = is_published ? Outcome::exists : Outcome::busy;
      if (!is_published && word_owner(word) != s_.process_slot())
        busy_owners_ |= 1ull << word_owner(word) % 64;
    } else if (c_.object_bytes[i] == 0 || c_.object_bytes[i] > largest_object()) {
      c_.outcomes[i] = Outcome::too_large;
    } else if (is_repeated(from, i)) {
      c_.outcomes[i] = Outcome::busy;
    } else {
      c_.outcomes[i] = Outcome::full;  // until it gets its slot
      count_need(objects, slot_bytes(i));
    }
  }
}

u64 Reservation::largest_object() const {
  return std::min(s_.geometry().slab_bytes - kSlotOverheadBytes, kMaxObjectBytes);
}

u64 Reservation::slot_bytes(std::size_t i) const {
  return slot_bytes_for(std::max(c_.object_bytes[i], s_.geometry().min_object_bytes));
}

void Reservation::spare_parent(Objects& objects, std::size_t i) {
  if (c_.parents.empty() || !c_.parents[i] || (i > 0 && *c_.parents[i] == c_.keys[i - 1])) return;
  const u32 slot = objects.slot_of(*c_.parents[i]);
  if (slot != kNil) spare(slot);
}

bool Reservation::is_repeated(std::size_t from, std::size_t i) {
  const Digest& key = c_.keys[i];
  u64 at = key.high % std::size(seen_);
  for (; seen_[at]; at = (at + 1) % std::size(seen_))
    if (c_.keys[from + seen_[at] - 1] == key) return true;
  seen_[at] = u16(i - from + 1);
  return false;
}

void Reservation::count_need(Objects& objects, u64 slot_bytes) {
  for (Need& need : needs_)
    if (need.slot_bytes == slot_bytes) {
      need.count++;
      return;
    }
  u32 klass = objects.space.class_of(slot_bytes, call_);
  if (klass != kNil) needs_.push_back({klass, slot_bytes, 1});
}

bool Reservation::stay_in_quota(Objects& objects, std::size_t from, std::size_t count) {
  quota_end_ = from + count;
  const Namespace& ns = s_.ns(c_.ns);
  if (ns.quota_bytes > kMaxBytes) return true;
  i64 wanted = 0;
  for (const Need& need : needs_) wanted += i64(need.count * need.slot_bytes);
  i64 room = i64(ns.quota_bytes) - i64(ns.used_bytes);
  // Those of the sizes that are asked for first: their slots are what we need.
  for (Need& need : needs_) {
    if (room >= wanted) return true;
    const u64 most = std::min(u64(wanted - room), need.count * need.slot_bytes);
    const u64 found = objects.own.choose(c_.ns, need.klass, most, call_, victims_);
    need.own = found / need.slot_bytes;
    room += i64(found);
  }
  if (room < wanted) room += i64(objects.own.choose(c_.ns, kNil, u64(wanted - room), call_, victims_));
  if (room >= wanted) return true;
  for (Need& need : needs_) need.count = 0;
  for (std::size_t i = from; i < from + count; i++) {
    if (c_.outcomes[i] != Outcome::full) continue;
    room -= i64(slot_bytes(i));
    if (room < 0) {
      quota_end_ = i;
      return false;
    }
    count_need(objects, slot_bytes(i));
  }
  return false;
}

bool Reservation::choose_for(Objects& objects, const Need& need, u64& free_slabs) {
  const u64 per_slab = s_.geometry().slots_in_slab(need.slot_bytes),
            free_slots = s_.klass(need.klass).free_slots + need.own;
  u64 missing = need.count - std::min(need.count, free_slots);
  const u64 fresh = std::min(free_slabs, (missing + per_slab - 1) / per_slab);
  free_slabs -= fresh;
  missing -= std::min(missing, fresh * per_slab);
  const u64 over =
      std::min<u64>((excess_bytes() + need.slot_bytes - 1) / need.slot_bytes, Pool::kBatch + need.count);
  const u64 wanted = std::max(missing, over);
  if (wanted == 0) return true;

  const bool has_rivals = s_.header().class_count > 1;
  u64 gained = 0;
  // A slab colder than our own oldest goes first.
  if (has_rivals && missing) gained = take_slabs(need, missing, objects.policy.oldest_stamp(need.klass));
  const std::size_t before = victims_.size();
  if (gained < wanted) objects.policy.choose(need.klass, wanted - gained, call_, victims_);
  gained += victims_.size() - before;
  if (has_rivals && gained < missing) gained += take_slabs(need, missing - gained, ~0ull);  // starving
  return gained >= missing;
}

u64 Reservation::take_slabs(const Need& need, u64 wanted, u64 older_than) {
  if (is_unfinished_ || rounds_ >= kSlabRounds) return 0;
  const u32 count = u32(s_.geometry().slab_count), looked = std::min(count, u32(kSlabsLooked));
  const u32 own_slabs = s_.klass(need.klass).slabs;
  // Where another class of the same call has chosen victims, their slots are promised to it; who would starve
  // takes them all the same.
  std::vector<u32> promised;
  if (older_than != ~0ull)
    for (u32 victim : victims_) promised.push_back(s_.slab_of(victim));
  std::sort(promised.begin(), promised.end());
  std::vector<std::pair<u64, u32>> cold;
  u32 at = s_.header().slab_hand % count;
  for (u32 i = 0; i < looked; i++, at = at + 1 == count ? 0 : at + 1) {
    const Slab& slab = s_.slab(at);
    if (s_.slab_slot_bytes(at) == 0 || slab.klass == need.klass || slab.closed || slab.pinned) continue;
    if (slab.touched >= older_than || slab.call == call_) continue;
    if (s_.klass(slab.klass).slabs <= own_slabs) continue;  // it is no richer than we are
    if (std::binary_search(promised.begin(), promised.end(), at)) continue;
    if (std::find(slabs_.begin(), slabs_.end(), at) == slabs_.end()) cold.emplace_back(slab.touched, at);
  }
  s_.header().slab_hand = at;
  std::sort(cold.begin(), cold.end());
  u64 gained = 0;
  for (auto [touched, slab] : cold) {
    if (gained >= wanted) break;
    const u64 used = s_.slab(slab).used;
    if (!slabs_.empty() && objects_in_slabs_ + used > kEvictedWithSlabs) {
      is_unfinished_ = true;  // the rest of them in the next hold
      break;
    }
    slabs_.push_back(slab);
    objects_in_slabs_ += used;
    gained += s_.geometry().slots_in_slab(need.slot_bytes);
    is_unfinished_ |= used > kEvictedWithSlabs;
  }
  return gained;
}

u64 Reservation::excess_bytes() {
  if (s_.high_ppm() >= 1000000) return 0;
  const unsigned __int128 capacity = s_.capacity_bytes();
  const u64 high = u64(capacity * s_.high_ppm() / 1000000), low = u64(capacity * s_.low_ppm() / 1000000);
  u64 after = s_.header().used_bytes;
  for (const Need& need : needs_) after += need.count * need.slot_bytes;
  u64 going = 0;
  for (u32 victim : victims_) going += s_.slab_slot_bytes(s_.slab_of(victim));
  for (u32 slab : slabs_) going += s_.slab(slab).used * s_.slab_slot_bytes(slab);
  after -= std::min(after, going);
  if (after > high) s_.header().draining = 1;
  if (after <= low) s_.header().draining = 0;
  return s_.header().draining && after > low ? after - low : 0;
}

// What the wanted classes could not give up: from the others, the one with the oldest first.
void Reservation::drain_other_classes(Objects& objects) {
  if (excess_bytes() == 0 || s_.header().class_count <= needs_.size()) return;
  std::vector<std::pair<u64, u32>> others;
  for (u32 klass = 0; klass < s_.header().class_count; klass++) {
    const bool is_needed =
        std::any_of(needs_.begin(), needs_.end(), [klass](const Need& need) { return need.klass == klass; });
    const u64 oldest = is_needed ? ~0ull : objects.policy.oldest_stamp(klass);
    if (oldest != ~0ull) others.emplace_back(oldest, klass);
  }
  std::sort(others.begin(), others.end());
  for (auto [oldest, klass] : others) {
    const u64 excess = excess_bytes(), slot_bytes = s_.klass(klass).slot_bytes;
    if (excess == 0 || victims_.size() >= 2 * Pool::kBatch) return;
    objects.policy.choose(klass, std::min<u64>((excess + slot_bytes - 1) / slot_bytes, Pool::kBatch), call_,
                          victims_);
  }
}

bool Reservation::evict(Objects& objects, u32 slot) {
  if (objects.state(slot) != SlotState::published || s_.record(slot).pins)
    return false;  // gone with its slab
  objects.evict(slot);
  return true;
}

bool Reservation::carry_out(Objects& objects, std::size_t from, std::size_t count) {
  u64 left = kEvictedWithSlabs;
  for (u32 slab : slabs_) {
    u32 first = objects.space.first_slot(slab), slots = objects.space.slots_in(slab);
    for (u32 slot = first; slot < first + slots && left; slot++) left -= evict(objects, slot);
    if (s_.slab_slot_bytes(slab) == 0) s_.header().slab_moves.fetch_add(1, std::memory_order_relaxed);
  }
  if (is_unfinished_) {
    rounds_++;
    return false;
  }
  for (u32 victim : victims_) {
    objects.index.prefetch_home(s_.record(victim).digest);
    objects.policy.prefetch_known(s_.record(victim).digest);
  }
  for (u32 victim : victims_) evict(objects, victim);
  victims_.clear();
  for (std::size_t i = from; i < from + count; i++)
    if (c_.outcomes[i] == Outcome::full) objects.policy.prefetch_known(c_.keys[i]);
  u64 reserved = 0;
  for (std::size_t i = from; i < from + count; i++) {
    if (c_.outcomes[i] != Outcome::full || is_cut_) continue;
    u32 klass = objects.space.class_of(slot_bytes(i), call_);
    u32 slot = klass == kNil || i >= quota_end_ ? kNil : objects.space.take(klass);
    if (slot == kNil) {
      is_cut_ = true;
      s_.header().full.fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    objects.reserve(slot, c_.keys[i], c_.ns, c_.object_bytes[i], c_.tokens, parent_slot(objects, i, klass));
    spare(slot);
    c_.tickets[i] = objects.ticket(slot);
    c_.outcomes[i] = Outcome::reserved;
    reserved++;
  }
  s_.header().reserved_total.fetch_add(reserved, std::memory_order_relaxed);
  return true;
}

// A parent in another class isn't linked: evicting its children would make no room for it.
u32 Reservation::parent_slot(Objects& objects, std::size_t i, u32 klass) {
  if (c_.parents.empty() || !c_.parents[i]) return kNil;
  const u32 slot = objects.slot_of(*c_.parents[i]);
  if (slot == kNil) return kNil;
  return s_.slab(s_.slab_of(slot)).klass == klass && objects.is_current(s_.record(slot)) ? slot : kNil;
}

void Reservation::write_trailer(std::size_t i) {
  const Place place = s_.place(ticket_slot(c_.tickets[i]));
  require_sound(c_.object_bytes[i] <= place.payload_limit(), "a reservation doesn't fit its slot");
  place.trailer() = Trailer{
      s_.ns(c_.ns).digest, c_.keys[i], c_.object_bytes[i], make_mark(ticket_generation(c_.tickets[i]), 0), 0,
      kTrailerMagic};
  std::memset(place.payload + c_.object_bytes[i], 0, kSealBytes);  // no former object's seal is taken for its
}

}  // namespace umbp
