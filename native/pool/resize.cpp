#include "pool/resize.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "pool/objects.hpp"
#include "pool/reap.hpp"

namespace umbp {

static constexpr u64 kPatienceNs = 2000000000ull;
static constexpr u64 kFinishPatienceNs = 20000000ull;  // once what a dead resizer was at has been begun
static constexpr u64 kHoldPatienceNs = 500000000ull;   // for who holds the size, as some do for milliseconds
static constexpr u64 kPortionBytes = 256ull << 20;     // taken or given back between two holds of the lock,
static constexpr u64 kPortionSlabs = 256;              // of so many slabs at most
static constexpr u64 kLookBatch = 4096;                // slabs looked at in one hold
static constexpr u64 kEvictBatch = 256;                // objects evicted in one hold

namespace {

// The process that has the role of resizing, or kNil where there is none or it is dead.
u32 living_resizer(Segment& s) {
  const u32 word = s.header().resizer.load();
  if (word == 0 || owner_is_dead(s, word)) return kNil;
  return (word & 0x7f) - 1;
}

u32 living_size_holder(Segment& s) {
  for (u32 process = 0; process < kProcessLimit; process++) {
    const Process& entry = s.process(process);
    if (entry.in_use.load() && entry.size_holds.load() && !is_dead(s, process)) return process;
  }
  return kNil;
}

class Resizing {
  template <class Call>
  auto with_lock(Call&& call) {
    Patience patience{patience_ns_};
    Locked lock(s_, patience);
    if (!lock) throw SegmentError(s_.name() + " can't be resized now: a stopped process holds its lock");
    return call(*lock);
  }

 public:
  Resizing(Segment& segment, const ResizeParameters& parameters)
      : s_(segment),
        p_(parameters),
        slab_bytes_(segment.geometry().slab_bytes),
        target_(parameters.capacity_bytes / slab_bytes_),
        portion_(std::clamp<u64>(kPortionBytes / slab_bytes_, 1, kPortionSlabs)) {}

  void run() {
    if (target_ == 0 || target_ > s_.geometry().slab_count)
      throw ConfigError("this pool's size must be from one slab (" + std::to_string(slab_bytes_) +
                        " bytes) to what it was made to grow to (" + std::to_string(s_.geometry().max_bytes) +
                        " bytes), not " + std::to_string(p_.capacity_bytes));
    claim();
    try {
      wait_for_holders();
      reap();
      settle();
      refuse_unless_enough_is_unused();
      for (u64 told = ~0ull;;) {
        const u64 present = with_lock([](Objects& o) -> u64 {
          const u64 counted = o.s.header().present_slabs;
          require_sound(counted <= o.s.geometry().slab_count, "it counts more slabs than it can have");
          return counted;
        });
        if (present != told && p_.reached) p_.reached(present * slab_bytes_);
        told = present;
        if (present == target_) break;
        if (present < target_)
          grow(target_ - present);
        else
          shrink(present - target_);
      }
    } catch (...) {
      resign();
      throw;
    }
    resign();
  }

  // After one who died: ends what he was at. What can't be done in time is left to the next.
  void finish_for_the_dead(u32 word, const Patience& patience) {
    bool is_mine = false;
    patience_ns_ = patience.left_ns;
    with_lock([&](Objects&) {
      is_mine = s_.header().resizer.load() == word && owner_is_dead(s_, word);
      if (is_mine) s_.header().resizer.store(mine());
      return 0;
    });
    if (!is_mine) return;
    crash_point();
    patience_ns_ = std::max(patience_ns_, kFinishPatienceNs);
    u32 role = mine();
    try {
      settle();
    } catch (const SegmentError&) {
      s_.header().resizer.compare_exchange_strong(role, word);
      throw;
    }
    crash_point();
    s_.header().resizer.compare_exchange_strong(role, 0);
  }

 private:
  u32 mine() const { return lock_word(s_.process_slot(), s_.process_generation()); }

  // Takes the role, which keeps new holders of the size off.
  void claim() {
    std::string why;
    with_lock([&](Objects&) {
      const u32 other = living_resizer(s_);
      if (s_.is_destroyed())
        why = "it has been destroyed";
      else if (other != kNil)
        why = "process " + std::to_string(s_.process(other).pid.load()) + " is resizing it";
      else
        s_.header().resizer.store(mine());
      return 0;
    });
    if (!why.empty()) throw SegmentError(s_.name() + " can't be resized: " + why);
    crash_point();
  }

  void wait_for_holders() {
    const u64 end_ns = monotonic_ns() + kHoldPatienceNs;
    for (u32 holder = size_holder(); holder != kNil; holder = size_holder()) {
      if (monotonic_ns() > end_ns)
        throw SegmentError(s_.name() + " can't be resized: process " +
                           std::to_string(s_.process(holder).pid.load()) +
                           " has registered its memory with a device, or maps all of it just now; end that "
                           "process first, or make a new pool");
      usleep(2000);
    }
  }

  u32 size_holder() {
    return with_lock([&](Objects&) { return living_size_holder(s_); });
  }

  // What the dead hold is in nobody's use.
  void reap() {
    Patience patience{patience_ns_};
    reap_dead(s_, patience);
  }

  void resign() {
    try {
      with_lock([&](Objects& objects) { return reopen(objects), 0; });
    } catch (const SegmentError&) {
      return;  // the role stays ours until we leave; then somebody ends it for us
    }
    crash_point();
    u32 word = mine();
    s_.header().resizer.compare_exchange_strong(word, 0);
  }

  // Slabs that a dead resizer left half way: those between the two states lose their memory, a closed one
  // opens.
  void settle() {
    std::vector<u32> moving;
    for (u64 at = 0; at < s_.geometry().slab_count;) {
      moving.clear();
      with_lock([&](Objects& objects) {
        const u64 end = std::min(at + kLookBatch, s_.geometry().slab_count);
        for (; at < end && moving.size() < portion_; at++) {
          const u32 slab = u32(at);
          if (s_.slab(slab).slot_bytes.load() == kSlabMoving)
            moving.push_back(slab);
          else if (s_.slab(slab).closed && objects.space.slots_in(slab))
            objects.space.reopen_slab(slab);
        }
        return 0;
      });
      give_back(moving);
    }
  }

  // Refused before anything is changed, where it is clear from the start.
  void refuse_unless_enough_is_unused() {
    u64 used = 0, present = 0;
    each_slab([&](u32 slab) {
      present += s_.has_memory(slab);
      used += s_.slab_slot_bytes(slab) != 0 && s_.slab(slab).pinned != 0;
    });
    if (target_ < present && used > target_) refuse_what_is_in_use(used);
  }

  void refuse_what_is_in_use(u64 used) {
    throw SegmentError(s_.name() + " can't shrink to " + std::to_string(target_ * slab_bytes_) +
                       " bytes now: " + std::to_string(used * slab_bytes_) +
                       " bytes of it hold objects that are being written or read, or are promised to "
                       "requests; it has " +
                       std::to_string(s_.capacity_bytes()) + " bytes now");
  }

  template <class Call>
  void each_slab(Call&& call) {
    for (u64 at = 0; at < s_.geometry().slab_count;)
      with_lock([&](Objects&) {
        const u64 end = std::min(at + kLookBatch, s_.geometry().slab_count);
        for (; at < end; at++) call(u32(at));
        return 0;
      });
  }

  u64 place_of(u32 slab) const { return s_.geometry().arena_at + u64(slab) * slab_bytes_; }

  void give_back(const std::vector<u32>& slabs) {
    if (slabs.empty()) return;
    for (u32 slab : slabs) {
      if (s_.is_expelled())
        throw SegmentError(s_.name() + ": this process was taken for dead while it resized the pool");
      if (!s_.unback_range(place_of(slab), slab_bytes_))
        throw SegmentError(s_.name() + ": its file system can't take memory back");
      crash_point();
    }
    with_lock([&](Objects& objects) {
      for (u32 slab : slabs) objects.space.leave_out(slab);
      return 0;
    });
  }

  void grow(u64 wanted) {
    if (p_.may_take) p_.may_take(wanted * slab_bytes_);
    const std::vector<u32> slabs = claim_absent(std::min(wanted, portion_));
    require_sound(!slabs.empty(), "it has fewer slabs without memory than it counts");
    try {
      // One for all portions: its patience with huge pages is for the whole of it.
      if (!taker_) taker_.emplace(s_.fd(), s_.geometry().total_bytes, p_.memory);
      for (u32 slab : slabs) {
        taker_->take(place_of(slab), slab_bytes_, {});
        crash_point();
      }
    } catch (const std::system_error& error) {
      give_back(slabs);
      throw CapacityError(s_.name() + " can't grow: there is no memory for another slab (" +
                          std::strerror(error.code().value()) + "); it has " +
                          std::to_string(s_.capacity_bytes()) + " bytes now");
    }
    with_lock([&](Objects& objects) {
      for (u32 slab : slabs) objects.space.bring_in(slab);
      return 0;
    });
  }

  std::vector<u32> claim_absent(u64 wanted) {
    std::vector<u32> slabs;
    u64 at = 0;
    while (slabs.size() < wanted && at < s_.geometry().slab_count)
      with_lock([&](Objects&) {
        const u64 end = std::min(at + kLookBatch, s_.geometry().slab_count);
        for (; at < end && slabs.size() < wanted; at++) {
          Slab& slab = s_.slab(u32(at));
          if (slab.slot_bytes.load() != kSlabAbsent) continue;
          slab.slot_bytes.store(kSlabMoving);
          crash_point();
          slabs.push_back(u32(at));
        }
        return 0;
      });
    return slabs;
  }

  // One step: takes out what is free, or else evicts a batch from the coldest slab that nobody uses.
  void shrink(u64 wanted) {
    std::vector<u32> slabs;
    bool is_stuck = false;
    with_lock([&](Objects& objects) {
      while (slabs.size() < std::min(wanted, portion_)) {
        const u32 slab = objects.space.take_out();
        if (slab == kNil) break;
        slabs.push_back(slab);
      }
      is_stuck = slabs.empty() && !evict_some(objects);
      return 0;
    });
    crash_point();
    if (is_stuck) look_for_candidates();
    give_back(slabs);
  }

  bool evict_some(Objects& objects) {
    if (!is_emptying(objects) && !choose_next(objects)) return false;
    u64 evicted = 0;
    const u32 end = objects.space.first_slot(emptied_) + objects.space.slots_in(emptied_);
    require_sound(position_ < end, "a slab without objects is in use");
    for (; position_ < end && evicted < kEvictBatch; position_++) {
      if (objects.state(position_) != SlotState::published) continue;
      objects.evict(position_);
      evicted++;
    }
    return true;
  }

  bool is_emptying(Objects& objects) {
    if (emptied_ == kNil) return false;
    const Slab& slab = s_.slab(emptied_);
    if (objects.space.slots_in(emptied_) && slab.closed && slab.pinned == 0) return true;
    reopen(objects);  // somebody uses it now, or it has become free
    return false;
  }

  void reopen(Objects& objects) {
    if (emptied_ != kNil && objects.space.slots_in(emptied_) && s_.slab(emptied_).closed)
      objects.space.reopen_slab(emptied_);
    emptied_ = kNil;
  }

  bool choose_next(Objects& objects) {
    while (!candidates_.empty()) {
      const u32 slab = candidates_.back();
      candidates_.pop_back();
      if (objects.space.slots_in(slab) == 0 || s_.slab(slab).pinned) continue;
      objects.space.close_slab(slab);
      emptied_ = slab;
      position_ = objects.space.first_slot(slab);
      return true;
    }
    return false;
  }

  // Copies in flight pin for moments: looks again for a while before it gives up.
  void look_for_candidates() {
    std::vector<std::pair<u64, u32>> found;
    u64 used = 0;
    each_slab([&](u32 slab) {
      if (s_.slab_slot_bytes(slab) == 0) return;
      if (s_.slab(slab).pinned)
        used++;
      else
        found.emplace_back(s_.slab(slab).touched, slab);
    });
    const u64 now = monotonic_ns();
    if (!found.empty())
      stuck_since_ns_ = 0;
    else if (stuck_since_ns_ == 0)
      stuck_since_ns_ = now;
    else if (now - stuck_since_ns_ > kPatienceNs)
      refuse_what_is_in_use(used);
    if (found.empty()) {
      usleep(5000);
      reap();
    }
    std::sort(found.rbegin(), found.rend());
    candidates_.clear();
    for (const auto& [touched, slab] : found) candidates_.push_back(slab);
  }

  Segment& s_;
  const ResizeParameters& p_;
  const u64 slab_bytes_, target_, portion_;
  std::optional<MemoryTaker> taker_;
  std::vector<u32> candidates_;  // the coldest last
  u32 emptied_ = kNil, position_ = 0;
  u64 stuck_since_ns_ = 0, patience_ns_ = kPatienceNs;
};

}  // namespace

void resize(Segment& segment, const ResizeParameters& parameters) {
  Resizing(segment, parameters).run();
}

void hold_size(Segment& s) {
  bool is_busy = false;
  {
    Patience patience{kPatienceNs};
    Locked lock(s, patience);
    if (!lock)
      throw SegmentError(s.name() + ": its size can't be held now: a stopped process holds its lock");
    is_busy = living_resizer(s) != kNil;
    if (!is_busy) s.process(s.process_slot()).size_holds.fetch_add(1);
  }
  if (is_busy) throw SegmentError(s.name() + ": its size can't be held while it is being resized");
}

void release_size(Segment& s) {
  std::atomic<u32>& holds = s.process(s.process_slot()).size_holds;
  u32 count = holds.load();
  while (count && !holds.compare_exchange_weak(count, count - 1)) {
  }
}

void finish_dead_resize(Segment& s, const Patience& patience) {
  const u32 word = s.header().resizer.load();
  if (word == 0 || !owner_is_dead(s, word)) return;
  try {
    Resizing(s, {s.geometry().slab_bytes, {}, {}, {}}).finish_for_the_dead(word, patience);
  } catch (const SegmentError&) {
    // Not now: the next reaper, or the next to resize, ends it.
  }
}

}  // namespace umbp
