// What the hazard policy knows: how long blocks of each kind stay unused, and which kind each block is.
//
// Every block that a request has named in the recent past has a History: in its slot record while it is
// stored, in a ghost otherwise. A note of a request puts its blocks into groups (turn of the conversation and
// length of the answer, or branches below, or times seen), and counts for each block that was known already
// at which age it came back. From counts and from the ages of the blocks that have not come back follows, for
// each group and age, the chance of coming back per second that a block stays: its index. The policy
// (hazard_lru.cpp) evicts where that is lowest.
//
// All of it lies in the segment, 0.3 MiB and 32 bytes for each ghost, is changed under the lock, and is
// advice: no value in it decides what may be read. Counts and ghosts outlive a crash where they can be true;
// how many blocks are alive at which age is counted again.
#pragma once

#include "pool/segment.hpp"

namespace umbp {

constexpr u64 kGhostWays = 4;  // entries that a digest may be in; the oldest gives way

// Groups: seven turns times seven kinds of answer, then five by branches, four by uses, one for what no note
// has named.
constexpr u32 kTurns = 7, kAnswers = 7;
constexpr u32 kBranchGroups = kTurns * kAnswers, kUseGroups = kBranchGroups + 5, kUnnoted = kUseGroups + 4;
constexpr u32 kGroups = 64;
constexpr u32 kAges = 40;      // half octaves of seconds; the first ends at one second
constexpr u32 kBranching = 3;  // a block with so many children is a trunk that requests share

// How a request ended, as far as it tells how soon its conversation goes on.
enum class Answer : u8 { unknown = 0, tiny, brief, medium, full, tool_call, end_of_turn };
Answer answer_of(u64 output_tokens, bool is_tool_call, bool is_end_of_turn);

// Blocks alive (stored or ghosts) by group and by when they were last used, in bins that get wider with age:
// a bin of level L is 2^L ticks wide, and each level keeps the eight youngest. So a block's bin follows from
// its birth and the present tick alone, and a count can be moved in constant time.
constexpr u32 kLevels = 24, kBins = 8;

struct HazardState {
  u32 now;
  u32 unused;
  std::atomic<u64> requests;    // noted
  double used[kGroups][kAges];  // blocks that came back, by their age then
  double lost[kGroups][kAges];  // ghosts that gave way, by the age that they had reached unused
  float index[kGroups][kAges];
  u32 alive[kLevels][kBins][kGroups];
};

struct Ghost {
  Digest digest;
  History history;
  u32 in_use;
};
static_assert(sizeof(Ghost) == 32);

u64 ghosts_for(u64 max_slots);
u64 hazard_bytes(u64 ghosts);
u32 age_of(u32 ticks);  // its bucket

class Hazard {
 public:
  explicit Hazard(Segment& segment);

  u32 now() const { return h_.now; }
  u64 requests() const { return h_.requests.load(std::memory_order_relaxed); }
  // Time only goes forward; called first in each hold of the lock.
  void advance(u32 tick);

  // The block of a slot is stored from now on: takes its ghost over if there is one.
  void arrive(u32 slot);
  // It no longer is: leaves a ghost.
  void depart(u32 slot);
  // A use ends now: the age counts from here. Teaches nothing.
  void rest(History& history) { move(history, history.group, h_.now); }

  // What is known of a block that isn't stored; null if nothing.
  History* ghost(const Digest& digest);
  void prefetch_ghost(const Digest& digest) const {
    const Ghost* ways = ghosts_ + first_way(digest);
    prefetch(ways);
    prefetch(ways + kGhostWays / 2);
  }
  // A block that isn't stored and has no ghost: it gets one.
  History& remember(const Digest& digest, const History& history);
  History fresh() const { return History{h_.now, kUnnoted, 0, 0, 0, {0, 0}}; }

  // A request uses the block: its age is learned, and begins again.
  void use(History& history);
  // A request goes on from it to `child`, of which nothing was known if it `is_new`.
  static void branch(History& history, const Digest& child, bool is_new);
  static u8 group_of(const History& history, u32 turn, Answer answer);
  void move(History& history, u8 group, u32 born);

  // A request has been noted; true if the index is due to be computed.
  bool count_request();
  void learn();
  float index(const History& history) const {
    return h_.index[history.group % kGroups][age_of(h_.now - history.born)];
  }

  // The evictable blocks of one size class and group.
  Order& order(u32 klass, u32 group) const {
    return orders_[klass % kClassLimit * kGroups + group % kGroups];
  }

  // After a crash: orders empty; what can't be true is forgotten, and the living are counted again.
  void rebuild();
  // Throws InvariantError where the living aren't counted right.
  void audit() const;

 private:
  struct Place {
    u32 level, bin;
  };
  Place place_of(u32 born) const;
  u32& alive(const History& history) const {
    const Place at = place_of(history.born);
    return h_.alive[at.level][at.bin][history.group % kGroups];
  }
  u64 first_way(const Digest& digest) const {
    return u64((unsigned __int128)(digest.high) * (ghost_count_ / kGhostWays) >> 64) * kGhostWays;
  }
  template <class Call>
  void each_living(Call&& call) const;
  void forget(Ghost& ghost);

  Segment& s_;
  HazardState& h_;
  Order* const orders_;
  Ghost* const ghosts_;
  const u64 ghost_count_;
};

}  // namespace umbp
