#include "pool/hazard.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace umbp {

// The pseudo-counts say how much a group must have seen before it counts for more than those like it: reuses
// for how fast its blocks come back on the whole, blocks for how that changes with age.
static constexpr float kFactorPrior = 400, kShapePrior = 16000;
static constexpr u64 kLearnEvery = 64, kDecayEvery = 1000;
static constexpr double kDecay = 0.9;
static constexpr u64 kFewestGhosts = 65536, kMostGhosts = 1ull << 20;

u64 ghosts_for(u64 max_slots) {
  return round_up(std::clamp(max_slots, kFewestGhosts, kMostGhosts), kGhostWays);
}

static u64 orders_at() {
  return round_up(sizeof(HazardState), 64);
}
static u64 ghosts_at() {
  return round_up(orders_at() + sizeof(Order) * kClassLimit * kGroups, 64);
}
u64 hazard_bytes(u64 ghosts) {
  return ghosts_at() + ghosts * sizeof(Ghost);
}

u32 age_of(u32 ticks) {
  if (ticks < kTicksPerSecond) return 0;
  const u32 log = u32(std::bit_width(ticks)) - 1;
  const bool is_upper_half = u64(ticks) * ticks >> (2 * log + 1) != 0;
  return std::min(1 + 2 * (log - u32(std::bit_width(kTicksPerSecond)) + 1) + is_upper_half, kAges - 1);
}

// Where a bucket begins, in seconds.
static float edge_s(u32 age) {
  return age == 0 ? 0 : std::exp2(float(age - 1) / 2);
}

Answer answer_of(u64 output_tokens, bool is_tool_call, bool is_end_of_turn) {
  if (is_tool_call) return Answer::tool_call;
  if (is_end_of_turn) return Answer::end_of_turn;
  if (output_tokens < 8) return Answer::tiny;
  if (output_tokens < 64) return Answer::brief;
  return output_tokens < 400 ? Answer::medium : Answer::full;
}

static u32 bucket_of(u32 value, std::initializer_list<u32> most) {
  u32 bucket = 0;
  for (u32 bound : most) bucket += value > bound;
  return bucket;
}

u8 Hazard::group_of(const History& history, u32 turn, Answer answer) {
  if (history.branches >= kBranching) return u8(kBranchGroups + bucket_of(history.branches, {4, 8, 16, 64}));
  if (turn <= 1 && history.uses > 1) return u8(kUseGroups + bucket_of(history.uses, {2, 4, 16}));
  return u8(bucket_of(turn, {1, 2, 4, 8, 16, 32}) * kAnswers + u32(answer));
}

// Groups that are like each other: turns, whatever the answer; any other group alone.
static u32 family_of(u32 group) {
  return group < kBranchGroups ? group / kAnswers : group - kBranchGroups + kTurns;
}

Hazard::Hazard(Segment& segment)
    : s_(segment),
      h_(*reinterpret_cast<HazardState*>(segment.base() + segment.geometry().hazard_at)),
      orders_(reinterpret_cast<Order*>(segment.base() + segment.geometry().hazard_at + orders_at())),
      ghosts_(reinterpret_cast<Ghost*>(segment.base() + segment.geometry().hazard_at + ghosts_at())),
      ghost_count_(segment.geometry().ghosts) {}

// The lowest level whose window has the birth in it; in the last one the oldest bin is open towards the past.
Hazard::Place Hazard::place_of(u32 born) const {
  const u32 age = h_.now - born;
  u32 level = u32(std::max(0, int(std::bit_width(age)) - int(std::bit_width(kBins)) + 1));
  if (level < kLevels && (h_.now >> level) - (born >> level) >= kBins) level++;
  if (level < kLevels) return {level, (born >> level) % kBins};
  level = kLevels - 1;
  return {level, ((h_.now >> level) - kBins + 1) % kBins};
}

void Hazard::advance(u32 tick) {
  const u32 before = h_.now;
  if (tick <= before) return;
  h_.now = tick;
  // The highest level first: bins that leave a level go to a higher one, whose own have left by then.
  for (u32 level = kLevels; level-- > 0;) {
    const u32 head = before >> level;
    if (head == tick >> level) continue;
    for (u32 back = std::min(head, kBins - 1) + 1; back-- > 0;) {
      const u32 number = head - back;
      if ((tick >> level) - number < kBins) continue;
      u32* from = h_.alive[level][number % kBins];
      const Place to = place_of(number << level);
      if (to.level == level && to.bin == number % kBins) continue;  // the open bin of the last level
      u32* into = h_.alive[to.level][to.bin];
      for (u32 group = 0; group < kGroups; group++) {
        into[group] += from[group];
        from[group] = 0;
      }
    }
    crash_point();
  }
}

void Hazard::move(History& history, u8 group, u32 born) {
  alive(history)--;
  history.group = group;
  history.born = born;
  alive(history)++;
}

History* Hazard::ghost(const Digest& digest) {
  Ghost* way = ghosts_ + first_way(digest);
  for (u64 i = 0; i < kGhostWays; i++, way++)
    if (way->in_use && way->digest == digest) return &way->history;
  return nullptr;
}

// A ghost gives way: what is known of it is that it reached this age unused.
void Hazard::forget(Ghost& ghost) {
  h_.lost[ghost.history.group % kGroups][age_of(h_.now - ghost.history.born)]++;
  alive(ghost.history)--;
  ghost.in_use = 0;
}

History& Hazard::remember(const Digest& digest, const History& history) {
  Ghost* way = ghosts_ + first_way(digest);
  Ghost* taken = way;
  for (u64 i = 0; i < kGhostWays; i++, way++) {
    if (!way->in_use) {
      taken = way;
      break;
    }
    if (way->history.born < taken->history.born) taken = way;
  }
  if (taken->in_use) forget(*taken);
  taken->digest = digest;
  taken->history = history;
  alive(history)++;
  crash_point();
  taken->in_use = 1;
  return taken->history;
}

void Hazard::arrive(u32 slot) {
  SlotRecord& r = s_.record(slot);
  Ghost* way = ghosts_ + first_way(r.digest);
  for (u64 i = 0; i < kGhostWays; i++, way++)
    if (way->in_use && way->digest == r.digest) {
      r.history = way->history;
      way->in_use = 0;
      return;
    }
  r.history = fresh();
  alive(r.history)++;
}

void Hazard::depart(u32 slot) {
  const SlotRecord& r = s_.record(slot);
  alive(r.history)--;
  if (!ghost(r.digest)) remember(r.digest, r.history);
}

void Hazard::use(History& history) {
  if (history.uses > 0) h_.used[history.group % kGroups][age_of(h_.now - history.born)]++;
  history.uses = u8(std::min(history.uses + 1, 255));
}

void Hazard::branch(History& history, const Digest& child, bool is_new) {
  const u16 mark = std::max<u16>(1, u16(child.low >> 13));
  for (u16& known : history.known) {
    if (known == mark) return;
    if (known != 0) continue;
    known = mark;
    history.branches++;
    return;
  }
  // Two others are known. Beyond a third they are told apart by whether anything is known of them.
  if (history.branches < kBranching || (is_new && history.branches < 255)) history.branches++;
}

bool Hazard::count_request() {
  const u64 requests = h_.requests.load(std::memory_order_relaxed) + 1;
  h_.requests.store(requests, std::memory_order_relaxed);
  if (requests % kDecayEvery == 0)
    for (u32 group = 0; group < kGroups; group++)
      for (u32 age = 0; age < kAges; age++) {
        h_.used[group][age] *= kDecay;
        h_.lost[group][age] *= kDecay;
      }
  return requests % kLearnEvery == 0;
}

namespace {

struct Counts {
  float reuses[kAges] = {},
        exposed[kAges] = {};  // of blocks that reached the bucket, those that came back in it
  void add(const Counts& other) {
    for (u32 age = 0; age < kAges; age++) {
      reuses[age] += other.reuses[age];
      exposed[age] += other.exposed[age];
    }
  }
};

struct Rates {
  float at[kAges];
};

// What is likely for all, corrected by what these few have shown: a factor for the whole, then the shape.
Rates shrink(const Counts& counts, const Rates& all) {
  float expected = 0, seen = 0;
  for (u32 age = 0; age < kAges; age++) {
    expected += counts.exposed[age] * all.at[age];
    seen += counts.reuses[age];
  }
  const float factor = (seen + kFactorPrior) / (expected + kFactorPrior);
  Rates rates;
  for (u32 age = 0; age < kAges; age++) {
    const float prior = kShapePrior * std::min(1.0f, factor * all.at[age]);
    rates.at[age] = std::min(1.0f, (counts.reuses[age] + prior) / (counts.exposed[age] + kShapePrior));
  }
  return rates;
}

// For each age, the best that staying on can give: over all horizons, the chance to come back within it by
// the time that the block then takes up (an index as Gittins defines it for jobs of unknown length).
void write_index(const Rates& rates, const float* edges, float* index) {
  for (u32 age = 0; age < kAges; age++) {
    float unused = 1, stay_s = 0, best = 0;
    for (u32 until = age; until < kAges; until++) {
      const float rate = rates.at[until];
      stay_s += unused * (edges[until + 1] - edges[until]) * (1 - rate / 2);
      unused *= 1 - rate;
      best = std::max(best, (1 - unused) / stay_s);
    }
    index[age] = best;
  }
}

}  // namespace

void Hazard::learn() {
  Counts groups[kGroups], families[kGroups], all;
  for (u32 level = 0; level < kLevels; level++) {
    const u32 head = h_.now >> level;
    for (u32 back = 0; back < kBins && back <= head; back++) {
      const u32 begin = (head - back) << level, middle = begin + ((1u << level) >> 1);
      const u32* living = h_.alive[level][(head - back) % kBins];
      const u32 age = age_of(h_.now - std::min(middle, h_.now));
      for (u32 group = 0; group < kGroups; group++) groups[group].exposed[age] += float(living[group]);
    }
  }
  for (u32 group = 0; group < kGroups; group++) {
    Counts& counts = groups[group];
    float reached = 0;
    for (u32 age = kAges; age-- > 0;) {
      const float reuses = float(h_.used[group][age]);
      reached += counts.exposed[age] + reuses + float(h_.lost[group][age]);
      counts.exposed[age] = reached;
      counts.reuses[age] = reuses;
    }
    families[family_of(group)].add(counts);
    all.add(counts);
  }
  Rates common;
  for (u32 age = 0; age < kAges; age++)
    common.at[age] = all.exposed[age] > 0 ? all.reuses[age] / (all.exposed[age] + 1)
                                          : (age ? common.at[age - 1] / 2 : 0.01f);
  float edges[kAges + 1];
  for (u32 age = 0; age <= kAges; age++) edges[age] = edge_s(age);
  Rates family[kGroups];
  for (u32 i = 0; i < kGroups; i++) family[i] = shrink(families[i], common);
  for (u32 group = 0; group < kGroups; group++)
    write_index(shrink(groups[group], family[family_of(group)]), edges, h_.index[group]);
}

template <class Call>
void Hazard::each_living(Call&& call) const {
  for (u32 slab = 0; slab < s_.geometry().slab_count; slab++) {
    const u64 bytes = s_.slab_slot_bytes(slab);
    if (bytes == 0) continue;
    const u32 first = u32(slab * s_.geometry().slots_per_slab),
              count = u32(s_.geometry().slots_in_slab(bytes));
    for (u32 slot = first; slot < first + count; slot++) {
      SlotRecord& r = s_.record(slot);
      const SlotState state = word_state(r.word.load(std::memory_order_relaxed));
      if (state == SlotState::reserved || state == SlotState::published) call(r.history);
    }
  }
  for (u64 i = 0; i < ghost_count_; i++)
    if (ghosts_[i].in_use) call(ghosts_[i].history);
}

static bool is_sound(const double (&counts)[kGroups][kAges]) {
  for (const auto& group : counts)
    for (double count : group)
      if (!(count >= 0 && count < 1e15)) return false;
  return true;
}

void Hazard::rebuild() {
  for (u64 i = 0; i < u64(kClassLimit) * kGroups; i++) orders_[i] = {kNil, kNil, 0};
  if (!is_sound(h_.used) || !is_sound(h_.lost)) {
    std::memset(h_.used, 0, sizeof h_.used);
    std::memset(h_.lost, 0, sizeof h_.lost);
    h_.requests = 0;
  }
  h_.now = s_.tick();
  std::memset(h_.alive, 0, sizeof h_.alive);
  each_living([this](History& history) {
    if (history.group >= kGroups) history = fresh();
    history.born = std::min(history.born, h_.now);
    alive(history)++;
  });
  if (h_.requests >= kLearnEvery) {
    learn();
    return;
  }
  for (auto& index : h_.index)
    for (u32 age = 0; age < kAges; age++)
      index[age] = 1 / (1 + edge_s(age));  // knows nothing: the oldest goes
}

void Hazard::audit() const {
  auto require = [](bool holds, const char* invariant) {
    if (!holds) throw InvariantError(invariant);
  };
  std::vector<u32> counted(sizeof h_.alive / sizeof(u32));
  each_living([&](const History& history) {
    require(history.group < kGroups, "a block is in one of the groups");
    require(history.born <= h_.now, "nothing was used in the future");
    const Place at = place_of(history.born);
    counted[(at.level * kBins + at.bin) * kGroups + history.group]++;
  });
  require(std::memcmp(counted.data(), h_.alive, sizeof h_.alive) == 0,
          "every known block is counted at its age");
  require(is_sound(h_.used) && is_sound(h_.lost), "what was learned are counts");
  for (const auto& group : h_.index)
    for (float index : group) require(index >= 0 && index <= 1e6f, "an index is a rate");
}

}  // namespace umbp
