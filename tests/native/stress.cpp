// Threads of one process on one pool, each doing every verb at random: what a data race detector is to watch.
// The payloads carry their key, and every thread checks what it reads; some of them are copied by one engine
// for all, with checksums.
//
// stress [seconds] [threads] [seed]; odd seeds take the hazard policy. The exit code says whether anything
// was wrong.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "copy/engine.hpp"
#include "copy/seal.hpp"
#include "pool/pool.hpp"

using namespace umbp;

namespace {

constexpr u64 kObjectBytes = 3000, kSlotBytes = 4096, kSlots = 96, kKeys = 160, kRun = 12;
std::atomic<bool> stop{false};
std::atomic<u64> steps{0}, reads{0}, hits{0}, not_now{0}, summed{0}, unsummed{0};

[[noreturn]] void fail(const char* what, u64 detail) {
  std::fprintf(stderr, "stress: %s (%llu)\n", what, static_cast<unsigned long long>(detail));
  std::abort();
}

// A thread's blocks in engine memory, whose objects are two runs, in order or not.
struct Blocks {
  std::vector<u64> words = std::vector<u64>(kRun * kObjectBytes / 8);
  Runs runs;

  explicit Blocks(bool in_order) : runs(columns(in_order), kRun, kObjectBytes) {}
  u64* word(std::size_t block) { return words.data() + block * (kObjectBytes / 8); }
  Runs::Columns columns(bool in_order) const {
    const u64 base = reinterpret_cast<u64>(words.data()), first = 1000, second = kObjectBytes - first;
    const i64 stride = kObjectBytes;
    if (in_order) return {{base, base + first}, {stride, stride}, {first, second}, {0, first}};
    return {{base + first, base}, {stride, stride}, {second, first}, {first, 0}};
  }
};

struct Work {
  Pool& pool;
  CopyEngine& engine;
  Blocks blocks;
  std::mt19937_64 random;
  std::vector<std::string> texts;  // the keys'
  std::vector<Digest> keys;
  u32 spaces[2];
  u64 cursor;

  Work(Pool& pool_, CopyEngine& engine_, u64 seed)
      : pool(pool_), engine(engine_), blocks(seed % 3 > 0), random(seed) {
    for (u64 i = 0; i < kKeys; i++) texts.push_back("k" + std::to_string(i));
    for (const std::string& text : texts) keys.push_back(digest_of(text, pool.segment()->hash_seed()));
    spaces[0] = pool.open_namespace("one");
    spaces[1] = pool.open_namespace("two");
    cursor = pool.removed_head();
  }
  u64 below(u64 limit) { return random() % limit; }
  std::span<const Digest> some(u64 from) { return {keys.data() + from, 1 + below(kRun)}; }

  void store(u64 from) {
    auto run = some(from);
    std::vector<u64> sizes(run.size(), kObjectBytes), tickets(run.size());
    std::vector<Outcome> outcomes(run.size());
    std::vector<std::optional<Digest>> parents(run.size());
    for (std::size_t i = 1; i < run.size(); i++) parents[i] = run[i - 1];
    pool.reserve(spaces[from % 2], run, sizes, parents, 16, tickets.data(), outcomes.data());
    std::vector<u64> mine, addresses(run.size()), lengths(run.size());
    std::vector<i64> from_blocks;
    std::vector<std::string_view> names;
    const bool by_engine = below(2);
    pool.payload(tickets, addresses.data(), lengths.data());
    for (std::size_t i = 0; i < run.size(); i++) {
      if (outcomes[i] == Outcome::not_now) not_now++;
      if (outcomes[i] != Outcome::reserved) continue;
      if (lengths[i] != kObjectBytes) fail("a reservation has another length", lengths[i]);
      mine.push_back(tickets[i]);
      from_blocks.push_back(i64(i));
      names.push_back(texts[from + i]);
      u64* words = by_engine ? blocks.word(i) : reinterpret_cast<u64*>(addresses[i]);
      for (u64 w = 0; w < kObjectBytes / 8; w++) words[w] = run[i].low ^ w;
    }
    if (by_engine) {
      std::vector<CopyStatus> statuses(mine.size());
      engine.store(blocks.runs, from_blocks, pool, mine, true, statuses.data());
      for (CopyStatus status : statuses)
        if (status != CopyStatus::ok) fail("a store went wrong", u64(status));
    }
    if (below(2)) arrive(mine, names);
    if (below(8) == 0)
      pool.abandon(mine, outcomes.data());
    else
      for (int tries = 0; tries < 1000; tries++) {
        pool.publish(mine, outcomes.data());
        std::vector<u64> left;
        for (std::size_t i = 0; i < mine.size(); i++)
          if (outcomes[i] == Outcome::not_now) left.push_back(mine[i]);
        mine.swap(left);
        if (mine.empty()) break;
      }
  }
  // As if they had come from elsewhere: whoever loads them first compares them, several at once perhaps.
  void arrive(const std::vector<u64>& mine, const std::vector<std::string_view>& names) {
    std::vector<SealStatus> statuses(mine.size());
    seal_objects(pool, mine, names, true, statuses.data());
    adopt_seals(pool, mine, names, statuses.data());
    for (SealStatus status : statuses)
      if (status != SealStatus::ok) fail("an arrival is refused", u64(status));
  }
  void read(u64 from) {
    auto run = some(from);
    std::vector<u64> tickets(run.size()), addresses(run.size()), lengths(run.size());
    std::vector<Outcome> outcomes(run.size());
    pool.acquire(run, tickets.data(), outcomes.data());
    pool.payload(tickets, addresses.data(), lengths.data());
    std::vector<u64> pins;
    std::vector<std::string_view> names;
    for (std::size_t i = 0; i < run.size(); i++) {
      if (outcomes[i] != Outcome::hit) continue;
      pins.push_back(tickets[i]);
      names.push_back(texts[from + i]);
      const u64* words = reinterpret_cast<const u64*>(addresses[i]);
      for (u64 w = 0; w < lengths[i] / 8; w++)
        if (words[w] != (run[i].low ^ w)) fail("wrong bytes", w);
      reads++;
    }
    // Others may be sealing the same objects.
    std::vector<SealStatus> statuses(pins.size());
    for (auto verb : {seal_objects, check_seals}) {
      verb(pool, pins, names, true, statuses.data());
      for (SealStatus status : statuses)
        if (status != SealStatus::ok) fail("a seal isn't sound", u64(status));
    }
    load(pins, addresses_of(pins));
    pool.release(pins, outcomes.data());
  }
  std::vector<const u64*> addresses_of(const std::vector<u64>& pins) const {
    std::vector<u64> addresses(pins.size()), lengths(pins.size());
    pool.payload(pins, addresses.data(), lengths.data());
    std::vector<const u64*> found;
    for (u64 address : addresses) found.push_back(reinterpret_cast<const u64*>(address));
    return found;
  }
  // Who asks for checksums gets those objects that were stored with one.
  void load(const std::vector<u64>& pins, const std::vector<const u64*>& objects) {
    std::vector<i64> into(pins.size());
    std::iota(into.begin(), into.end(), 0);
    std::vector<CopyStatus> statuses(pins.size());
    const bool checksum = below(2);
    engine.load(blocks.runs, into, pool, pins, checksum, statuses.data());
    for (std::size_t i = 0; i < pins.size(); i++) {
      const bool is_good = statuses[i] == CopyStatus::ok;
      if (!is_good && !(checksum && statuses[i] == CopyStatus::bad_checksum))
        fail("a load went wrong", u64(statuses[i]));
      if (is_good && std::memcmp(blocks.word(i), objects[i], kObjectBytes) != 0) fail("wrong bytes", i);
      (checksum && is_good ? summed : unsummed)++;
    }
  }
  void look() {
    bool found[kKeys];
    pool.lookup(keys, found);
    for (bool hit : found) hits += hit;
    KeyState states[kKeys];
    pool.states(keys, states);
    std::vector<Digest> removed;
    cursor = pool.removed_since(cursor, removed).value_or(pool.removed_head());
  }
  void change_size() {
    try {
      pool.resize({(kSlots / 2 + below(kSlots)) * kSlotBytes, {}, {}, {}});
    } catch (const SegmentError&) {  // another resizes it, or what is in use doesn't fit
    }
  }
  void step() {
    Outcome outcomes[kRun];
    const u64 from = below(kKeys - kRun);
    switch (below(12)) {
      case 0:
      case 1:
      case 2:
        return store(from);
      case 3:
      case 4:
        return read(from);
      case 5:
        if (below(2)) return pool.note(some(from), below(2), Answer::medium, outcomes);
        return pool.touch(some(from), outcomes);
      case 6:
        return pool.remove(some(from), outcomes);
      case 7:
        if (below(50) == 0) pool.clear(spaces[from % 2]);
        if (below(50) == 0) pool.set_quota(spaces[0], below(2) ? ~0ull : kSlots / 3 * kSlotBytes);
        if (below(50) == 0) change_size();
        pool.namespaces();
        pool.reap();
        return;
      case 8:
        if (pool.stats().used_bytes > 2 * kSlots * kSlotBytes) fail("more is used than there is", 0);
        if (below(20) == 0) pool.audit();
        return;
      default:
        return look();
    }
  }
};

}  // namespace

int main(int count, char** arguments) {
  auto argument = [&](int i, u64 otherwise) {
    return i < count ? std::strtoull(arguments[i], nullptr, 10) : otherwise;
  };
  const u64 seconds = argument(1, 10), threads = argument(2, 6), seed = argument(3, std::random_device{}());
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  CreateParameters parameters;
  parameters.capacity_bytes = kSlots * kSlotBytes;
  parameters.max_bytes = 2 * kSlots * kSlotBytes;
  parameters.slab_bytes = 8 * kSlotBytes;
  parameters.min_object_bytes = kObjectBytes;
  parameters.eviction_policy = seed % 2 ? EvictionPolicy::hazard : EvictionPolicy::lru;
  Pool pool(Segment::create_memfd(parameters), 100000000ull);
  CopyEngine engine(2, {});
  std::vector<std::thread> crowd;
  for (u64 i = 0; i < threads; i++)
    crowd.emplace_back([&, i] {
      try {
        Work work(pool, engine, seed + i);
        while (!stop.load(std::memory_order_relaxed)) {
          work.step();
          steps++;
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "stress: %s\n", error.what());
        std::abort();
      }
    });
  std::this_thread::sleep_for(std::chrono::seconds(seconds));
  stop = true;
  for (std::thread& thread : crowd) thread.join();
  pool.audit();
  if (pool.stats().pinned) fail("slots are still pinned", pool.stats().pinned);
  std::printf(
      "%llu steps, %llu objects read and right, %llu of them by their checksums, %llu hits looked up, %llu "
      "times not now\n",
      static_cast<unsigned long long>(steps), static_cast<unsigned long long>(reads),
      static_cast<unsigned long long>(summed), static_cast<unsigned long long>(hits),
      static_cast<unsigned long long>(not_now));
  return reads == 0 || summed == 0 || unsummed == 0;
}
