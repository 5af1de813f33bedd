// Integer names, the core's error kinds, and the few primitives that crash safety rests on.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <stdexcept>
#include <string>

namespace umbp {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

struct SegmentError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct CapacityError : SegmentError {
  using SegmentError::SegmentError;
};
struct InvariantError : std::logic_error {
  using std::logic_error::logic_error;
};
struct ConfigError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Whoever is killed has executed a prefix of its instructions, so the only order that a crash can see is the
// compiler's. ordered() forbids the compiler to move memory accesses across it.
inline void ordered() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void prefetch(const void* address) {
  __builtin_prefetch(address, 0, 3);
  asm volatile(
      "");  // else GCC takes a function that only prefetches for one without effect, and drops its calls
}

// A number that is changed under the lock and shown without it: readers may see an old value, never half of
// one.
template <class T>
class Shown {
 public:
  Shown() = default;
  Shown(const Shown& other) : value_(T(other)) {}
  operator T() const { return value_.load(std::memory_order_relaxed); }
  Shown& operator=(T value) {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  Shown& operator=(const Shown& other) { return *this = T(other); }
  Shown& operator+=(T by) { return *this = *this + by; }
  Shown& operator-=(T by) { return *this = *this - by; }
  void operator++(int) { *this += 1; }
  void operator--(int) { *this -= 1; }

 private:
  std::atomic<T> value_;
};

u64 monotonic_ns();
u64 coarse_monotonic_ns();  // some milliseconds behind, for a fraction of the price
u64 processor_ns();         // that this thread has had

// Crash points: inert (one predictable branch) unless arm_crash_point or the environment variable
// UMBP_CRASH_POINT arms them. The n-th point passed after arming ends the process with SIGKILL, or stops it
// with UMBP_CRASH_SIGNAL=STOP; its place, "file:line" and a newline, is written to `report_fd` before, if
// that isn't negative.
extern std::atomic<bool> crash_armed;
void crash_point_reached(std::source_location place);
void arm_crash_point(u64 countdown, bool stop, int report_fd);
inline void crash_point(std::source_location place = std::source_location::current()) {
  ordered();
  if (__builtin_expect(crash_armed.load(std::memory_order_relaxed), 0)) crash_point_reached(place);
  ordered();
}

}  // namespace umbp
