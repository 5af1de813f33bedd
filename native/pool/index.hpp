// The hash index: open addressing, linear probing. Written under the lock; read by anyone without it.
//
// A hit validates itself: the reference is read before and after the digest, and a slot's generation changes
// with every reuse. A miss is believed only if no entry moved meanwhile, else asked again: `moves` is odd
// from the first entry that an erase moves to the last and grows with each. An entry is copied to its new
// place before the old one is overwritten, so at any one value of `moves` every stored key can be found, if
// need be behind the one entry that is just being written: also while whoever moves them is stopped.
#pragma once

#include <algorithm>

#include "pool/segment.hpp"

namespace umbp {

// What a reader finds of a key.
enum class KeyState : u8 { absent = 0, reserved = 1, published = 2 };

class Index {
  // Half of the entries are free, so no run of used ones is ever nearly as long, unless the table is damaged.
  static constexpr u64 kLongestProbe = 4096;

 public:
  explicit Index(Segment& segment)
      : segment_(segment),
        size_(segment.geometry().index_entries),
        longest_(std::min(size_, kLongestProbe)) {}

  u64 home(const Digest& digest) const { return u64((unsigned __int128)(digest.low) * size_ >> 64); }
  void prefetch_home(const Digest& digest) const { prefetch(&segment_.entry(home(digest))); }

  // Under the lock: the entry's position, or -1.
  i64 find(const Digest& digest) const {
    u64 at = home(digest);
    for (u64 steps = 0; steps < longest_; steps++, at = at + 1 == size_ ? 0 : at + 1) {
      IndexEntry& entry = segment_.entry(at);
      if (entry.ref.load(std::memory_order_relaxed) == 0) return -1;
      if (entry.low.load(std::memory_order_relaxed) == digest.low &&
          entry.high.load(std::memory_order_relaxed) == digest.high)
        return i64(at);
    }
    return -1;
  }
  u64 ref(i64 at) const { return segment_.entry(u64(at)).ref.load(std::memory_order_relaxed); }

  void insert(const Digest& digest, u64 ref, u64 aux) {
    u64 at = home(digest);
    for (u64 steps = 0; segment_.entry(at).ref.load(std::memory_order_relaxed) != 0; steps++) {
      require_sound(steps < longest_, "its index is full");
      at = at + 1 == size_ ? 0 : at + 1;
    }
    write(segment_.entry(at), digest, ref, aux);
    segment_.header().index_used++;
  }

  void set_published(i64 at) {
    std::atomic<u64>& ref = segment_.entry(u64(at)).ref;
    ref.store(ref.load(std::memory_order_relaxed) | 1, std::memory_order_release);
  }

  // Backward-shift deletion: no tombstones, so probes stay short for the life of the pool.
  void erase(i64 position) {
    std::atomic<u64>& moves = segment_.header().moves;
    u64 hole = u64(position), at = hole, count = moves.load(std::memory_order_relaxed);
    for (u64 steps = 0; steps < size_; steps++) {
      at = at + 1 == size_ ? 0 : at + 1;
      IndexEntry& entry = segment_.entry(at);
      u64 ref = entry.ref.load(std::memory_order_relaxed);
      if (ref == 0) break;
      Digest digest{entry.low.load(std::memory_order_relaxed), entry.high.load(std::memory_order_relaxed)};
      u64 from_home = distance(home(digest), at), from_hole = distance(hole, at);
      if (from_home < from_hole) continue;
      announce(count = count % 2 ? count + 2 : count + 1);
      write(segment_.entry(hole), digest, ref, entry.aux.load(std::memory_order_relaxed));
      crash_point();
      hole = at;
    }
    if (count % 2) announce(count + 1);  // everything is where it belongs; the last place is a duplicate
    crash_point();
    segment_.entry(hole).ref.store(0, std::memory_order_release);
    segment_.header().index_used--;
  }

  void clear() {
    announce(segment_.header().moves.load(std::memory_order_relaxed) | 1);
    for (u64 at = 0; at < size_; at++) segment_.entry(at).ref.store(0, std::memory_order_relaxed);
    segment_.header().index_used = 0;
  }
  void settle() {
    std::atomic<u64>& moves = segment_.header().moves;
    moves.store((moves.load(std::memory_order_relaxed) | 1) + 1, std::memory_order_release);
  }

  // Without the lock. Which of `keys` are published in their namespace's present epoch.
  void lookup(const Digest* keys, std::size_t count, bool* hits) const {
    find_all(keys, count, hits,
             [this](const Digest& key, u64 holes) { return probe(key, holes) == KeyState::published; });
  }
  // The same, and which of the others are being written.
  void states(const Digest* keys, std::size_t count, KeyState* states) const {
    find_all(keys, count, states, [this](const Digest& key, u64 holes) { return probe(key, holes); });
  }

 private:
  u64 distance(u64 from, u64 to) const { return to >= from ? to - from : to + size_ - from; }

  u64 moves() const { return segment_.header().moves.load(std::memory_order_acquire); }
  // Readers who see anything that is written from here on also see this count.
  void announce(u64 count) {
    segment_.header().moves.store(count, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
  }
  bool have_not_moved_since(u64 before) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return segment_.header().moves.load(std::memory_order_relaxed) == before;
  }

  static void write(IndexEntry& entry, const Digest& digest, u64 ref, u64 aux) {
    entry.ref.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    crash_point();
    entry.low.store(digest.low, std::memory_order_relaxed);
    entry.high.store(digest.high, std::memory_order_relaxed);
    entry.aux.store(aux, std::memory_order_relaxed);
    entry.ref.store(ref, std::memory_order_release);
  }

  // What `find(key, holes)` says of each key; an answer that is false is believed only between two moves.
  template <class Answer, class Find>
  void find_all(const Digest* keys, std::size_t count, Answer* answers, Find&& find) const {
    constexpr std::size_t kAhead = 16;
    const u64 before = moves();
    bool missed = false;
    for (std::size_t i = 0; i < count; i++) {
      if (i + kAhead < count) prefetch_home(keys[i + kAhead]);
      answers[i] = find(keys[i], before % 2);
      missed |= answers[i] == Answer{};
    }
    if (!missed || have_not_moved_since(before)) return;
    for (std::size_t i = 0; i < count; i++)
      if (answers[i] == Answer{}) answers[i] = find_between_moves<Answer>(keys[i], find);
  }

  // One key, until nothing has moved while we looked. Whoever is overtaken every time calls it a miss.
  template <class Answer, class Find>
  Answer find_between_moves(const Digest& digest, Find& find) const {
    for (int tries = 0; tries < 64; tries++) {
      const u64 before = moves();
      if (const Answer answer = find(digest, before % 2); answer != Answer{}) return answer;
      if (have_not_moved_since(before)) return Answer{};
    }
    return Answer{};
  }

  // Looks past `holes` empty entries.
  KeyState probe(const Digest& digest, u64 holes) const {
    u64 at = home(digest);
    for (u64 steps = 0; steps < longest_; steps++, at = at + 1 == size_ ? 0 : at + 1) {
      IndexEntry& entry = segment_.entry(at);
      for (int tries = 0; tries < 16; tries++) {
        u64 ref = entry.ref.load(std::memory_order_acquire);
        if (ref == 0) {
          if (holes == 0) return KeyState::absent;
          holes--;
          break;
        }
        u64 low = entry.low.load(std::memory_order_relaxed),
            high = entry.high.load(std::memory_order_relaxed);
        u64 aux = entry.aux.load(std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_acquire);
        if (entry.ref.load(std::memory_order_relaxed) != ref) continue;
        if (low != digest.low || high != digest.high) break;
        u32 ns = u32(aux >> 32);
        if (ns >= kNamespaceLimit || segment_.ns(ns).epoch.load(std::memory_order_relaxed) != u32(aux))
          return KeyState::absent;
        return ref & 1 ? KeyState::published : KeyState::reserved;
      }
    }
    return KeyState::absent;
  }

  Segment& segment_;
  const u64 size_, longest_;
};

}  // namespace umbp
