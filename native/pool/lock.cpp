#include "pool/lock.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "pool/liveness.hpp"
#include "pool/segment.hpp"

namespace umbp {

// Waiters look at the lock again this often: the waiter that a wake-up was meant for may be dead, or may wait
// for a processor while the lock is free.
static constexpr u64 kLookAgainNs = 100000;

static void futex_wait(std::atomic<u32>& word, u32 seen, u64 timeout_ns) {
  timespec timeout{time_t(timeout_ns / 1000000000ull), long(timeout_ns % 1000000000ull)};
  syscall(SYS_futex, reinterpret_cast<u32*>(&word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

static void futex_wake_one(std::atomic<u32>& word) {
  syscall(SYS_futex, reinterpret_cast<u32*>(&word), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

bool owner_is_dead(Segment& segment, u32 word) {
  u32 slot = (word & 0x7f) - 1, generation = word >> 8;
  if (slot >= kProcessLimit) return true;  // no process writes this: damage, repaired like a death
  if (slot == segment.process_slot()) return generation != (segment.process_generation() & 0xffffffu);
  if (!other_holds_byte_lock(segment.fd(), slot)) return true;
  return (segment.process(slot).generation.load() & 0xffffffu) != generation;
}

bool lock_segment(Segment& segment, Patience& patience) {
  u64 since = 0;  // when we began to wait
  auto done = [&](bool is_ours) {
    if (since) patience.left_ns -= std::min(patience.left_ns, monotonic_ns() - since);
    return is_ours;
  };
  std::atomic<u32>& word = segment.header().lock;
  const u32 mine = lock_word(segment.process_slot(), segment.process_generation());
  u32 wanted = mine;  // once we have slept, others may sleep too: keep the waiters bit
  for (int spin = 0;; spin++) {
    u32 seen = word.load(std::memory_order_relaxed);
    if ((seen & ~kLockWaiters) == 0) {
      if (word.compare_exchange_weak(seen, wanted | (seen & kLockWaiters), std::memory_order_acquire))
        return done(true);
      continue;
    }
    if (spin < 100) {
      pause_cpu();
      continue;
    }
    if (owner_is_dead(segment, seen)) {
      // The compare fails if the word has changed since it was judged.
      if (word.compare_exchange_strong(seen, mine | kLockWaiters, std::memory_order_acquire)) {
        segment.header().dirty.store(1);
        segment.header().takeovers.fetch_add(1, std::memory_order_relaxed);
        return done(true);
      }
      continue;
    }
    u64 now = monotonic_ns();
    if (since == 0) since = now;
    if (now - since >= patience.left_ns) return done(false);
    wanted = mine | kLockWaiters;
    if (!(seen & kLockWaiters) && !word.compare_exchange_strong(seen, seen | kLockWaiters)) continue;
    futex_wait(word, seen | kLockWaiters, std::min(since + patience.left_ns - now, kLookAgainNs));
  }
}

// Only our own word: had we been taken for dead, the lock would be another's by now.
void unlock_segment(Segment& segment) {
  std::atomic<u32>& word = segment.header().lock;
  const u32 mine = lock_word(segment.process_slot(), segment.process_generation());
  u32 seen = word.load(std::memory_order_relaxed);
  while ((seen & ~kLockWaiters) == mine) {
    if (!word.compare_exchange_weak(seen, 0, std::memory_order_release, std::memory_order_relaxed)) continue;
    if (seen & kLockWaiters) futex_wake_one(word);
    return;
  }
}

}  // namespace umbp
