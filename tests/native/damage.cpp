// A pool whose tables are damaged under a process that works on it: every verb must end in bounded time with
// an answer or one of our errors, no payload may lie outside the arena, and nobody may write where it has no
// slot.
//
// damage [rounds] [first seed]; a round is reproduced by its seed.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "copy/engine.hpp"
#include "copy/seal.hpp"
#include "pool/hazard.hpp"
#include "pool/pool.hpp"

using namespace umbp;

namespace {

constexpr u64 kObjectBytes = 3000, kSlots = 64, kMostSlots = 96, kKeys = 100, kRun = 16;
constexpr u64 kRows = 400;
constexpr u64 kSizes[] = {3000, 3000, 7000, 20000};
constexpr unsigned kSecondsForARound = 20;
u64 seed = 0, sealed = 0, copied = 0;
const char* verb = "";

void say_where(const char* what) {
  std::fprintf(stderr, "damage: %s in %s, seed %llu\n", what, verb, static_cast<unsigned long long>(seed));
}
void on_signal(int signal) {
  say_where(signal == SIGALRM ? "no end" : "a crash");
  _exit(1);
}
[[noreturn]] void fail(const char* what) {
  say_where(what);
  std::abort();
}

struct Round {
  std::mt19937_64 random{seed};
  Pool pool;
  std::shared_ptr<Segment> segment;
  std::vector<Digest> keys;
  std::vector<std::string> texts;  // the keys'
  std::vector<u64> pins, reserved;
  std::vector<u64> seals;  // offsets in the arena where one may have been written
  u32 ns;

  static std::shared_ptr<Segment> make() {
    CreateParameters parameters;
    parameters.capacity_bytes = kSlots * 4096;
    parameters.max_bytes = kMostSlots * 4096;
    parameters.slab_bytes = 8 * 4096;
    parameters.min_object_bytes = kObjectBytes;
    parameters.eviction_policy = seed % 2 ? EvictionPolicy::hazard : EvictionPolicy::lru;
    return Segment::create_memfd(parameters);
  }
  Round() : pool(make(), 1000000), segment(pool.segment()), ns(pool.open_namespace("a")) {
    for (u64 i = 0; i < kKeys; i++) texts.push_back("k" + std::to_string(i));
    for (const std::string& text : texts) keys.push_back(digest_of(text, segment->hash_seed()));
  }
  u64 below(u64 limit) { return random() % limit; }

  void damage() { damage(random); }
  // What is between the tables is damaged as well; the arena isn't: it holds payloads, which are anybody's
  // bytes.
  void damage(std::mt19937_64& random) {
    auto below = [&random](u64 limit) { return random() % limit; };
    const Geometry& g = segment->geometry();
    std::byte* base = segment->base();
    const u64 tables[][2] = {{offsetof(Header, state), sizeof(Header)},
                             {offsetof(Header, state), sizeof(Header)},
                             {g.processes_at, g.namespaces_at},
                             {g.namespaces_at, g.namespaces_at + 4 * sizeof(Namespace)},
                             {g.classes_at, g.classes_at + 4 * sizeof(Class)},
                             {g.slabs_at, g.slabs_at + g.slab_count * sizeof(Slab)},
                             {g.ring_at, g.index_at},
                             {g.hazard_at, std::min(g.hazard_at + sizeof(HazardState), g.index_at)},
                             {g.hazard_at, g.index_at},
                             {g.index_at, g.records_at},
                             {g.records_at, g.records_at + g.max_slots * sizeof(SlotRecord)},
                             {g.records_at, g.records_at + g.max_slots * sizeof(SlotRecord)},
                             {g.pins_at, g.pins_at + 2 * g.pin_row_bytes}};
    const auto& [from, to] = tables[below(std::size(tables))];
    if (from >= to) return;  // a table of the other policy
    const u64 at = from + below(to - from), words = (to - from) / 4, word = from + 4 * below(words);
    const u64 limits[] = {kSlots, g.slab_count, 4, kProcessLimit};
    u32 plausible = u32(below(limits[below(4)]));
    if (below(6) == 0) plausible = kNil;
    switch (below(6)) {
      case 0:
        base[at] ^= std::byte(1 << below(8));
        break;
      case 1:
        for (u64 i = at; i < std::min(to, at + 1 + below(64)); i++) base[i] = std::byte(random());
        break;
      case 2:  // a link that leads elsewhere: lists that meet, or never end
      case 3:
        std::memcpy(base + word, &plausible, 4);
        break;
      case 4:
        std::memset(base + at, below(2) ? 0xff : 0, std::min(to - at, 1 + below(128)));
        break;
      case 5:  // one record over another
        if (const u64 size = 128; to - from >= 2 * size)
          std::memcpy(base + from + size * below((to - from) / size),
                      base + from + size * below((to - from) / size), size);
        break;
    }
  }

  void check_payloads(const std::vector<u64>& tickets) {
    std::vector<u64> addresses(tickets.size()), lengths(tickets.size());
    pool.payload(tickets, addresses.data(), lengths.data());
    const Geometry& g = segment->geometry();
    const u64 begin = reinterpret_cast<u64>(segment->base()) + g.arena_at, end = begin + g.max_bytes;
    for (std::size_t i = 0; i < tickets.size(); i++) {
      if (addresses[i] == 0) continue;
      if (addresses[i] < begin || lengths[i] > g.slab_bytes || addresses[i] + lengths[i] > end)
        fail("a payload outside the arena");
    }
  }

  // Both verbs answer for tickets of whatever kind, under their own keys or others'.
  void seal(std::vector<u64> tickets) {
    tickets.resize(std::min<std::size_t>(tickets.size(), 512));
    if (below(8) == 0) tickets.push_back(random());
    std::vector<std::string_view> names;
    for (u64 ticket : tickets) {
      std::string_view name = texts[below(kKeys)];
      if (const u32 slot = ticket_slot(ticket); slot < segment->geometry().max_slots && below(8)) {
        const auto known = std::find(keys.begin(), keys.end(), segment->record(slot).digest);
        if (known != keys.end()) name = texts[std::size_t(known - keys.begin())];
      }
      names.push_back(name);
    }
    verb = "sealed_ranges";
    std::vector<u64> addresses(tickets.size()), lengths(tickets.size());
    sealed_ranges(pool, tickets, addresses.data(), lengths.data());
    const Geometry& g = segment->geometry();
    const u64 begin = reinterpret_cast<u64>(segment->base()) + g.arena_at, end = begin + g.max_bytes;
    for (std::size_t i = 0; i < tickets.size(); i++) {
      if (addresses[i] == 0) continue;
      if (addresses[i] < begin || lengths[i] <= kSealBytes || addresses[i] + lengths[i] > end ||
          (addresses[i] - begin) % g.slab_bytes + lengths[i] + kTrailerBytes > g.slab_bytes)
        fail("a range outside its slab");
      seals.push_back(addresses[i] + lengths[i] - kSealBytes - begin);
    }
    std::vector<SealStatus> statuses(tickets.size());
    verb = "seal";
    seal_objects(pool, tickets, names, below(2), statuses.data());
    for (SealStatus status : statuses) sealed += status == SealStatus::ok;
    verb = "check_seal";
    check_seals(pool, tickets, names, below(2), statuses.data());
    verb = "adopt_seal";
    adopt_seals(pool, tickets, names, statuses.data());
  }

  // A slab's slots become others while objects are copied into them and out of them, and summed: for each
  // object there is an answer. What is copied is zero, and so the arena stays as it is.
  void copy(std::vector<u64> tickets, bool is_store) {
    tickets.resize(std::min<std::size_t>(tickets.size(), kRun));
    if (tickets.empty()) tickets.push_back(random());
    // So many rows that both threads of the engine have some.
    for (std::size_t i = 0; tickets.size() < kRows; i++) tickets.push_back(tickets[i]);
    const u32 slot = ticket_slot(tickets[below(tickets.size())]) % segment->geometry().max_slots;
    u64 bytes = size_length(segment->record(slot).size);
    if (std::find(std::begin(kSizes), std::end(kSizes), bytes) == std::end(kSizes)) bytes = kSizes[0];
    static std::vector<std::byte> zeros(kRows * kSizes[std::size(kSizes) - 1]), loaded(zeros.size());
    static CopyEngine engine(2, {});
    const u64 base = reinterpret_cast<u64>((is_store ? zeros : loaded).data()), half = bytes / 2;
    const u64 first = below(2) ? 0 : half;  // in order or not
    const Runs runs(
        {{base + first, base + half - first}, {i64(bytes), i64(bytes)}, {half, half}, {first, half - first}},
        kRows, half * 2);
    std::vector<i64> blocks(tickets.size());
    for (std::size_t i = 0; i < blocks.size(); i++) blocks[i] = i64(i);
    std::vector<CopyStatus> statuses(tickets.size());
    std::atomic<bool> has_begun{false}, is_over{false};
    std::thread other([&, random = std::mt19937_64(random())]() mutable {
      Slab& slab = segment->slab(segment->slab_of(slot));
      while (!is_over) {
        const u64 bytes = slab.slot_bytes.exchange(random() % 2 ? 0 : kPageBytes << random() % 4);
        has_begun = true;
        slab.slot_bytes.store(bytes);
      }
    });
    while (!has_begun) std::this_thread::yield();
    try {
      for (int i = 0; i < 2; i++) {
        verb = is_store ? "store" : "load";
        if (is_store)
          engine.store(runs, blocks, pool, tickets, true, statuses.data());
        else
          engine.load(runs, blocks, pool, tickets, below(2), statuses.data());
        for (CopyStatus status : statuses) copied += status == CopyStatus::ok;
      }
    } catch (...) {
      is_over = true;
      other.join();
      throw;
    }
    is_over = true;
    other.join();
  }

  void run_verb() {
    const u64 from = below(kKeys - kRun), count = 1 + below(kRun);
    const std::span<const Digest> run{keys.data() + from, count};
    Outcome outcomes[kRun + 512];
    u64 tickets[kRun];
    switch (below(21)) {
      case 0:
      case 1: {
        verb = "reserve";
        std::vector<u64> sizes(count, kSizes[from % std::size(kSizes)]);
        std::vector<std::optional<Digest>> parents(count);
        for (std::size_t i = 1; i < count; i++) parents[i] = run[i - 1];
        pool.reserve(ns, run, sizes, parents, 16, tickets, outcomes);
        for (std::size_t i = 0; i < count; i++)
          if (outcomes[i] == Outcome::reserved) reserved.push_back(tickets[i]);
        verb = "payload";
        return check_payloads(reserved);
      }
      case 2:
      case 3:
        verb = "publish";
        reserved.resize(std::min<std::size_t>(reserved.size(), 512));
        pool.publish(reserved, outcomes);
        return reserved.clear();
      case 4:
        verb = "abandon";
        reserved.resize(std::min<std::size_t>(reserved.size(), 512));
        pool.abandon(reserved, outcomes);
        return reserved.clear();
      case 5:
      case 6:
        verb = "acquire";
        pool.acquire(run, tickets, outcomes);
        for (std::size_t i = 0; i < count; i++)
          if (outcomes[i] == Outcome::hit) pins.push_back(tickets[i]);
        verb = "payload";
        return check_payloads(pins);
      case 7:
        verb = "release";
        pins.resize(std::min<std::size_t>(pins.size(), 512));
        pool.release(pins, outcomes);
        return pins.clear();
      case 8:
        verb = "note";
        if (below(2)) return pool.note(run, below(2), Answer(below(7)), outcomes);
        verb = "touch";
        return pool.touch(run, outcomes);
      case 9:
        verb = "remove";
        return pool.remove(run, outcomes);
      case 10:
        verb = "lookup";
        bool found[kKeys];
        pool.lookup(keys, found);
        KeyState states[kKeys];
        return pool.states(keys, states);
      case 11: {
        verb = "removed_since";
        std::vector<Digest> removed;
        pool.removed_since(pool.removed_head() - below(100), removed);
        verb = "stats";
        pool.stats();
        return;
      }
      case 12:
        verb = "clear";
        if (below(4) == 0) pool.clear(ns);
        verb = "lingering";
        pool.lingering(ns);
        verb = "reap";
        pool.reap();
        return;
      case 13:
        verb = "set_quota";
        pool.set_quota(ns, below(2) ? ~0ull : below(kSlots * 4096));
        verb = "namespaces";
        pool.namespaces();
        return;
      case 14:
        verb = "resize";  // a smaller pool waits two seconds for whoever has pins in what is to go
        if (below(40) == 0) return pool.resize({(kSlots + below(kSlots / 2)) * 4096, {}, {}, {}});
        return pool.resize({kMostSlots * 4096, {}, {}, {}});
      case 15:
        verb = "clear_all";
        if (below(4) == 0) pool.clear_all();
        return;
      case 16:
      case 17:
        return seal(below(2) ? pins : reserved);
      case 18:
        return copy(reserved, true);
      case 19:
        return copy(pins, false);
      default:
        verb = "audit";
        return pool.audit();
    }
  }

  // Nobody writes payloads here: only trailers, which lie at the ends of pages, and seals are not zero.
  bool is_arena_untouched() {
    const Geometry& g = segment->geometry();
    static const std::byte zeros[kPageBytes] = {};
    for (u64 at : seals) std::memset(segment->base() + g.arena_at + at, 0, kSealBytes);
    for (u64 page = 0; page < g.max_bytes; page += kPageBytes)
      if (std::memcmp(segment->base() + g.arena_at + page, zeros, kPageBytes - kTrailerBytes) != 0)
        return false;
    return true;
  }

  void run(u64& errors, u64& answers) {
    for (int i = 0; i < 60; i++) {
      if (i >= 20 && i % 4 == 0) damage();
      try {
        run_verb();
        answers++;
      } catch (const SegmentError&) {
        errors++;
      } catch (const InvariantError&) {
        errors++;
      } catch (const ConfigError&) {
        errors++;
      } catch (const std::exception& error) {
        fail(error.what());
      }
    }
    if (!is_arena_untouched()) fail("a write where nobody has a slot");
  }
};

}  // namespace

int main(int count, char** arguments) {
  const u64 rounds = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 2000;
  const u64 first = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : std::random_device{}();
  std::printf("rounds %llu from seed %llu\n", static_cast<unsigned long long>(rounds),
              static_cast<unsigned long long>(first));
  std::fflush(stdout);
  for (int number : {SIGALRM, SIGABRT, SIGSEGV, SIGBUS}) signal(number, on_signal);
  u64 errors = 0, answers = 0;
  for (seed = first; seed < first + rounds; seed++) {
    alarm(kSecondsForARound);
    verb = "making the pool";
    Round round;
    round.run(errors, answers);
    verb = "leaving";
  }
  std::printf("%llu verbs answered, %llu refused\n", static_cast<unsigned long long>(answers),
              static_cast<unsigned long long>(errors));
  return answers == 0 || errors == 0 || sealed == 0 || copied == 0;
}
