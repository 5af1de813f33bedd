#include "pool/pool.hpp"

#include <algorithm>
#include <cstring>

#include "pool/note.hpp"
#include "pool/objects.hpp"
#include "pool/reap.hpp"
#include "pool/reserve.hpp"

namespace umbp {

// Giving back must succeed in the end: it waits longer than other verbs, and what even then can't be done is
// remembered. While something is remembered already nobody waits that long again.
static constexpr u64 kGiveBackPatienceNs = 50000000ull;
static constexpr u64 kReapPatienceNs = 100000000ull;
static constexpr u64 kAuditPatienceNs = 1000000000ull;

std::shared_ptr<Segment> Pool::segment() const {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!segment_) throw SegmentError("this pool has been closed");
  segment_->refuse_after_fork();
  return segment_;
}

std::shared_ptr<Segment> Pool::segment_to_change() const {
  auto s = segment();
  if (!s->is_destroyed()) reap_in_passing(*s);
  return s;
}

void Pool::close() {
  std::shared_ptr<Segment> last;  // the detach, if it is one, happens outside our mutex
  std::lock_guard<std::mutex> guard(mutex_);
  last.swap(segment_);
}

bool Pool::is_closed() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return !segment_;
}

Patience Pool::give_back_patience(Segment& segment) const {
  std::lock_guard<std::mutex> guard(segment.deferred_mutex);
  const bool behind = !segment.deferred_releases.empty() || !segment.deferred_abandons.empty();
  return {behind ? patience_ns_ : std::max(patience_ns_, kGiveBackPatienceNs)};
}

void Pool::lookup(std::span<const Digest> keys, bool* hits) const {
  auto s = segment();
  if (s->is_destroyed())
    std::fill(hits, hits + keys.size(), false);
  else
    Index(*s).lookup(keys.data(), keys.size(), hits);
}

void Pool::states(std::span<const Digest> keys, KeyState* states) const {
  auto s = segment();
  if (s->is_destroyed())
    std::fill(states, states + keys.size(), KeyState::absent);
  else
    Index(*s).states(keys.data(), keys.size(), states);
}

std::size_t Pool::match(const std::vector<std::string_view>& hashes, std::string_view prefix) const {
  constexpr std::size_t kMostAhead = 512;
  auto s = segment();
  if (s->is_destroyed()) return 0;
  Index index(*s);
  RawHasher hasher(prefix, s->hash_seed());
  Digest digests[kMostAhead];
  bool hits[kMostAhead];
  std::size_t done = 0;
  // Short steps first: many prompts match little, and what is hashed beyond the first miss is wasted.
  for (std::size_t step = 32; done < hashes.size(); step = std::min(2 * step, kMostAhead)) {
    const std::size_t n = std::min(step, hashes.size() - done);
    for (std::size_t i = 0; i < n; i++) {
      digests[i] = hasher(hashes[done + i]);
      index.prefetch_home(digests[i]);
    }
    index.lookup(digests, n, hits);
    const std::size_t leading = std::size_t(std::find(hits, hits + n, false) - hits);
    done += leading;
    if (leading < n) break;
  }
  return done;
}

u64 Pool::removed_head() const {
  return segment()->header().ring_head.load(std::memory_order_acquire);
}

std::optional<u64> Pool::removed_since(u64 cursor, std::vector<Digest>& removed) const {
  auto s = segment();
  u64 head = s->header().ring_head.load(std::memory_order_acquire);
  if (cursor > head || head - cursor >= kRingEntries) return std::nullopt;
  removed.reserve(head - cursor);
  for (u64 i = cursor; i < head; i++) {
    RingEntry& entry = s->ring(i);
    removed.push_back(
        {entry.low.load(std::memory_order_relaxed), entry.high.load(std::memory_order_relaxed)});
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  u64 now = s->header().ring_head.load(std::memory_order_acquire);
  if (now - cursor >= kRingEntries) return std::nullopt;  // overtaken while reading
  return head;
}

void Pool::payload(std::span<const u64> tickets, u64* addresses, u64* lengths) const {
  auto s = segment();
  Objects objects(*s);
  for (std::size_t i = 0; i < tickets.size(); i++) {
    u32 slot = ticket_slot(tickets[i]);
    addresses[i] = lengths[i] = 0;
    bool held = objects.names(tickets[i], SlotState::reserved) ||
                objects.names(tickets[i], SlotState::published) ||
                objects.names(tickets[i], SlotState::doomed);
    if (!held || s->my_pin(slot).load() == 0) continue;
    const Place place = s->place(slot);
    addresses[i] = reinterpret_cast<u64>(place.payload);
    lengths[i] = std::min(size_length(s->record(slot).size), place.payload_limit());
  }
}

Stats Pool::stats() const {
  auto s = segment();
  const Header& h = s->header();
  Stats stats{};
  stats.capacity_bytes = s->capacity_bytes();
  stats.max_bytes = s->geometry().max_bytes;
  stats.used_bytes = h.used_bytes;
  stats.objects = h.objects;
  stats.slabs = h.present_slabs;
  stats.free_slabs = h.free_slabs;
  stats.slots = s->geometry().max_slots;
  for (u32 i = 0; i < kProcessLimit; i++) stats.processes += s->process(i).in_use.load() != 0;
  while (stats.namespaces < kNamespaceLimit && s->ns(u32(stats.namespaces)).epoch.load() != 0)
    stats.namespaces++;
  stats.evicted = h.evicted;
  stats.evicted_bytes = h.evicted_bytes;
  stats.evicted_tokens = h.evicted_tokens;
  stats.orphaned = h.removed_orphans;
  stats.reserved = h.reserved_total;
  stats.published = h.published_total;
  stats.abandoned = h.abandoned_total;
  stats.not_now = h.not_now;
  stats.takeovers = h.takeovers;
  stats.rebuilds = h.rebuilds;
  stats.reaped = h.reaped;
  stats.full = h.full;
  stats.slab_moves = h.slab_moves;
  stats.cleared = h.cleared;
  stats.acquired_hits = h.acquired_hits;
  stats.acquired_misses = h.acquired_misses;
  stats.removed_total = h.ring_head;
  if (s->eviction_policy() == EvictionPolicy::hazard) stats.noted = Objects(*s).hazard->requests();
  stats.pinned_here = s->pinned_slots();
  for (u64 slab = 0; slab < s->geometry().slab_count; slab++)
    if (s->slab_slot_bytes(u32(slab)) != 0) stats.pinned += s->slab(u32(slab)).pinned;
  std::lock_guard<std::mutex> guard(s->deferred_mutex);
  stats.deferred_here = s->deferred_releases.size() + s->deferred_abandons.size();
  return stats;
}

void Pool::resize(const ResizeParameters& parameters) {
  auto s = segment();
  umbp::resize(*s, parameters);
}

void Pool::hold_size() {
  auto s = segment();
  umbp::hold_size(*s);
}

void Pool::release_size() {
  auto s = segment();
  umbp::release_size(*s);
}

void Pool::destroy() {
  auto s = segment();
  if (s->path().empty())
    throw SegmentError("a pool without a file can't be destroyed: it goes with its processes");
  if (!s->is_destroyed()) Segment::destroy(s->path(), s->id());
}

bool Pool::is_destroyed() const {
  return segment()->is_destroyed();
}

bool Pool::is_replaced(u64 interval_ns) const {
  auto s = segment();
  return s->is_destroyed() || s->is_replaced(interval_ns);
}

// Contiguous stretches of the arena that have memory, as offset and length.
std::vector<std::pair<u64, u64>> Pool::arena_ranges() const {
  auto s = segment();
  const u64 slab_bytes = s->geometry().slab_bytes;
  std::vector<std::pair<u64, u64>> ranges;
  for (u64 i = 0; i < s->geometry().slab_count; i++) {
    if (!s->has_memory(u32(i))) continue;
    if (!ranges.empty() && ranges.back().first + ranges.back().second == i * slab_bytes)
      ranges.back().second += slab_bytes;
    else
      ranges.emplace_back(i * slab_bytes, slab_bytes);
  }
  return ranges;
}

namespace {

constexpr std::size_t kBatch = Pool::kBatch;

template <class Call>
void in_batches(std::size_t count, Call&& call) {
  for (std::size_t from = 0; from < count; from += kBatch) call(from, std::min(kBatch, count - from));
}
// The last batch first: within a chain, ancestors come to lie on the younger side of their descendants.
template <class Call>
void in_batches_backwards(std::size_t count, Call&& call) {
  for (std::size_t to = count; to > 0;) {
    std::size_t from = (to - 1) / kBatch * kBatch;
    call(from, to - from);
    to = from;
  }
}

// Finds each key's slot (kNil: none) in two passes over the cache, so that the misses of a batch overlap.
void find_slots(Objects& objects, std::span<const Digest> keys, u32* slots) {
  for (const Digest& key : keys) objects.index.prefetch_home(key);
  for (std::size_t i = 0; i < keys.size(); i++) {
    i64 at = objects.index.find(keys[i]);
    slots[i] = at < 0 ? kNil : ref_slot(objects.index.ref(at));
    if (slots[i] == kNil) continue;
    SlotRecord& r = objects.s.record(slots[i]);
    prefetch(&r);
    prefetch(&r.lru_prev);
  }
}

void prefetch_tickets(Objects& objects, std::span<const u64> tickets) {
  for (u64 ticket : tickets) {
    if (ticket_slot(ticket) >= objects.s.geometry().max_slots) continue;
    SlotRecord& r = objects.s.record(ticket_slot(ticket));
    prefetch(&r);
    prefetch(&r.lru_prev);
  }
}

bool is_my_reservation(const Objects& objects, u64 ticket) {
  return objects.names(ticket, SlotState::reserved) &&
         word_owner(objects.word(ticket_slot(ticket))) == objects.s.process_slot();
}

// Slots whose order links will be rewritten: fetches the neighbours' records.
void prefetch_neighbours(Objects& objects, const u32* slots, std::size_t count) {
  const u64 limit = objects.s.geometry().max_slots;
  for (std::size_t i = 0; i < count; i++) {
    if (slots[i] == kNil) continue;
    const SlotRecord& r = objects.s.record(slots[i]);
    if (r.lru_prev < limit) prefetch(&objects.s.record(r.lru_prev).lru_prev);
    if (r.lru_next < limit) prefetch(&objects.s.record(r.lru_next).lru_prev);
  }
}

}  // namespace

void Pool::reserve(u32 ns, std::span<const Digest> keys, std::span<const u64> object_bytes,
                   std::span<const std::optional<Digest>> parents, u64 tokens, u64* tickets,
                   Outcome* outcomes) {
  if (tokens > kMaxObjectTokens)
    throw ConfigError("an object can't count for " + std::to_string(tokens) + " tokens");
  auto s = segment_to_change();
  if (ns >= kNamespaceLimit || s->ns(ns).epoch.load() == 0)
    throw ConfigError("no such namespace in this pool");
  if (s->is_destroyed()) {
    std::fill(tickets, tickets + keys.size(), 0);
    std::fill(outcomes, outcomes + keys.size(), Outcome::full);
    return;
  }
  Reservation call(*s, {ns, keys, object_bytes, tokens, parents, tickets, outcomes});
  Patience patience{patience_ns_};
  bool has_reaped = false;
  u64 others_busy = 0;  // processes that are writing what we wanted to write
  for (std::size_t from = 0; from < keys.size();) {
    const std::size_t count = std::min(kBatch, keys.size() - from);
    bool is_short, is_done = false;
    {
      Locked lock(*s, patience);
      if (!lock) {
        std::fill(outcomes + from, outcomes + keys.size(), Outcome::not_now);
        std::fill(tickets + from, tickets + keys.size(), 0);
        break;
      }
      is_short = !call.plan(*lock, from, count);
      if (!is_short || has_reaped) is_done = call.carry_out(*lock, from, count);
      others_busy |= call.busy_owners();
    }
    if (is_short && !has_reaped) {
      has_reaped = true;  // the dead may hold what is missing: once more after them
      reap_dead(*s, patience);
      continue;
    }
    if (is_done) from += count;
  }
  for (std::size_t i = 0; i < keys.size(); i++)
    if (outcomes[i] == Outcome::reserved) call.write_trailer(i);
  for (u32 process = 0; process < kProcessLimit; process++)
    if ((others_busy >> process & 1) && is_dead(*s, process)) reap_dead(*s, patience);
}

void Pool::publish(std::span<const u64> tickets, Outcome* outcomes) {
  auto s = segment_to_change();
  std::fill(outcomes, outcomes + tickets.size(), Outcome::not_now);
  Patience patience = give_back_patience(*s);
  in_batches_backwards(tickets.size(), [&](std::size_t from, std::size_t count) {
    Locked lock(*s, patience);
    if (!lock) return;
    prefetch_tickets(*lock, tickets.subspan(from, count));
    for (std::size_t i = from + count; i-- > from;) {
      u32 slot = ticket_slot(tickets[i]);
      if (!is_my_reservation(*lock, tickets[i])) {
        outcomes[i] = Outcome::invalid;
      } else if (!lock->is_current(s->record(slot)) || s->is_destroyed()) {
        lock->abandon(slot);
        outcomes[i] = Outcome::stale;
      } else {
        lock->publish(slot);
        s->header().published_total.fetch_add(1, std::memory_order_relaxed);
        outcomes[i] = Outcome::published;
      }
    }
  });
}

void Pool::abandon(std::span<const u64> tickets, Outcome* outcomes) {
  auto s = segment_to_change();
  Patience patience = give_back_patience(*s);
  in_batches(tickets.size(), [&](std::size_t from, std::size_t count) {
    Locked lock(*s, patience);
    if (!lock) {
      std::lock_guard<std::mutex> guard(s->deferred_mutex);
      s->deferred_abandons.insert(s->deferred_abandons.end(), tickets.begin() + from,
                                  tickets.begin() + from + count);
      std::fill_n(outcomes + from, count, Outcome::deferred);
      return;
    }
    prefetch_tickets(*lock, tickets.subspan(from, count));
    for (std::size_t i = from; i < from + count; i++) {
      outcomes[i] = Outcome::invalid;
      if (!is_my_reservation(*lock, tickets[i])) continue;
      lock->abandon(ticket_slot(tickets[i]));
      s->header().abandoned_total.fetch_add(1, std::memory_order_relaxed);
      outcomes[i] = Outcome::abandoned;
    }
  });
}

void Pool::acquire(std::span<const Digest> keys, u64* tickets, Outcome* outcomes) {
  auto s = segment_to_change();
  std::fill(tickets, tickets + keys.size(), 0);
  std::fill(outcomes, outcomes + keys.size(), s->is_destroyed() ? Outcome::miss : Outcome::not_now);
  if (s->is_destroyed()) return;
  Patience patience{patience_ns_};
  u64 hits = 0, misses = 0;
  in_batches(keys.size(), [&](std::size_t from, std::size_t count) {
    Locked lock(*s, patience);
    if (!lock) return;
    u32 slots[kBatch];
    find_slots(*lock, keys.subspan(from, count), slots);
    prefetch_neighbours(*lock, slots, count);
    for (std::size_t i = 0; i < count; i++) {
      Outcome& outcome = outcomes[from + i];
      outcome = Outcome::miss;
      if (slots[i] == kNil) continue;
      lock->require_of(slots[i], keys[from + i]);
      if (lock->state(slots[i]) != SlotState::published) continue;
      if (!lock->is_current(s->record(slots[i]))) continue;
      if (s->my_pin(slots[i]).load(std::memory_order_relaxed) == 0xffff) {
        outcome = Outcome::not_now;  // as many pins as one process can count
        continue;
      }
      lock->pin(slots[i]);
      tickets[from + i] = lock->ticket(slots[i]);
      outcome = Outcome::hit;
    }
  });
  for (std::size_t i = 0; i < keys.size(); i++) {
    hits += outcomes[i] == Outcome::hit;
    misses += outcomes[i] == Outcome::miss;
  }
  s->header().acquired_hits.fetch_add(hits, std::memory_order_relaxed);
  s->header().acquired_misses.fetch_add(misses, std::memory_order_relaxed);
}

void Pool::release(std::span<const u64> tickets, Outcome* outcomes) {
  auto s = segment_to_change();
  Patience patience = give_back_patience(*s);
  in_batches_backwards(tickets.size(), [&](std::size_t from, std::size_t count) {
    Locked lock(*s, patience);
    if (!lock) {
      std::lock_guard<std::mutex> guard(s->deferred_mutex);
      s->deferred_releases.insert(s->deferred_releases.end(), tickets.begin() + from,
                                  tickets.begin() + from + count);
      std::fill_n(outcomes + from, count, Outcome::deferred);
      return;
    }
    prefetch_tickets(*lock, tickets.subspan(from, count));
    for (std::size_t i = from + count; i-- > from;) {
      u32 slot = ticket_slot(tickets[i]);
      bool held =
          (lock->names(tickets[i], SlotState::published) || lock->names(tickets[i], SlotState::doomed)) &&
          s->my_pin(slot).load(std::memory_order_relaxed) > 0;
      if (held) lock->unpin(slot, s->process_slot(), 1);
      outcomes[i] = held ? Outcome::released : Outcome::invalid;
    }
  });
}

void Pool::touch(std::span<const Digest> keys, Outcome* outcomes) {
  auto s = segment_to_change();
  std::fill(outcomes, outcomes + keys.size(), s->is_destroyed() ? Outcome::miss : Outcome::not_now);
  if (s->is_destroyed()) return;
  Patience patience{patience_ns_};
  in_batches_backwards(keys.size(), [&](std::size_t from, std::size_t count) {
    Locked lock(*s, patience);
    if (!lock) return;
    u32 slots[kBatch];
    find_slots(*lock, keys.subspan(from, count), slots);
    prefetch_neighbours(*lock, slots, count);
    for (std::size_t i = count; i-- > 0;) {
      if (slots[i] != kNil) lock->require_of(slots[i], keys[from + i]);
      bool present = slots[i] != kNil && lock->state(slots[i]) == SlotState::published;
      outcomes[from + i] = present ? Outcome::touched : Outcome::miss;
      if (present) lock->touch(slots[i]);
    }
  });
}

void Pool::note(std::span<const Digest> chain, bool is_end, Answer answer, Outcome* outcomes) {
  auto s = segment_to_change();
  if (s->eviction_policy() != EvictionPolicy::hazard) return touch(chain, outcomes);
  std::fill(outcomes, outcomes + chain.size(), Outcome::not_now);
  Patience patience{patience_ns_};
  RequestNote note(chain, is_end, answer);
  bool is_found = false;
  in_batches_backwards(chain.size(), [&](std::size_t from, std::size_t count) {
    if (is_found) return;
    if (Locked lock(*s, patience); lock) is_found = note.find_turn(*lock, from, count);
  });
  in_batches_backwards(chain.size(), [&](std::size_t from, std::size_t count) {
    if (Locked lock(*s, patience); lock) note.apply(*lock, from, count, outcomes);
  });
  if (is_end || chain.empty()) return;
  if (Locked lock(*s, patience); lock && lock->hazard->count_request()) lock->hazard->learn();
}

void Pool::remove(std::span<const Digest> keys, Outcome* outcomes) {
  auto s = segment_to_change();
  std::fill(outcomes, outcomes + keys.size(), s->is_destroyed() ? Outcome::miss : Outcome::not_now);
  if (s->is_destroyed()) return;
  Patience patience{patience_ns_};
  in_batches(keys.size(), [&](std::size_t from, std::size_t count) {
    Locked lock(*s, patience);
    if (!lock) return;
    for (std::size_t i = from; i < from + count; i++) {
      u32 slot = lock->slot_of(keys[i]);
      outcomes[i] = Outcome::miss;
      if (slot == kNil || !lock->is_current(s->record(slot))) continue;
      outcomes[i] = Outcome::busy;
      if (lock->state(slot) != SlotState::published) continue;
      lock->drop(slot);
      outcomes[i] = Outcome::removed;
    }
  });
}

u32 Pool::reap() {
  auto s = segment();
  Patience patience{kReapPatienceNs};
  return reap_dead(*s, patience);
}

void Pool::audit() {
  auto s = segment();
  Patience patience{kAuditPatienceNs};
  Locked lock(*s, patience);
  if (!lock) throw SegmentError("the pool can't be audited now: a stopped process holds its lock");
  audit_segment(*lock);
}

}  // namespace umbp
