#include "copy/stream.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace umbp {
namespace {

constexpr std::size_t kLineBytes = 64;

// Hardware prefetchers follow a piece but can't guess where the next one lies: its head is fetched while this
// one is copied, of short pieces several ahead. Within a piece they do better alone.
class Ahead {
 public:
  Ahead(const Pieces& pieces, const std::byte* next)
      : next_(next),
        count_(pieces.count),
        distance_(1 + (kAheadBytes - 1) / pieces.bytes),
        step_(i64(distance_) * pieces.from_step),
        bytes_(pieces.from_step == i64(pieces.bytes) ? 0 : std::min(pieces.bytes, kAheadBytes)),
        next_bytes_(next ? std::min(pieces.bytes, kAheadBytes) : 0) {}

  void fetch(const std::byte* from, std::size_t i) const {
    if (i + distance_ < count_)
      fetch_head(from + step_, bytes_);
    else if (i + 1 == count_)
      fetch_head(next_, next_bytes_);
  }

 private:
  static constexpr std::size_t kAheadBytes = 2048;

  static void fetch_head(const std::byte* at, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; i += kLineBytes) prefetch(at + i);
  }

  const std::byte* const next_;
  const std::size_t count_, distance_;
  const i64 step_;
  const std::size_t bytes_, next_bytes_;
};

namespace portable {

void copy(const Pieces& pieces, const std::byte* next) {
  const Ahead ahead(pieces, next);
  std::byte* to = pieces.to;
  const std::byte* from = pieces.from;
  for (std::size_t i = 0; i < pieces.count; i++) {
    ahead.fetch(from, i);
    std::memcpy(to, from, pieces.bytes);
    to += pieces.to_step, from += pieces.from_step;
  }
}

void drain() {
  std::atomic_thread_fence(std::memory_order_release);
}

constexpr Kernel kernel{"portable", copy, drain};

}  // namespace portable

#if defined(__x86_64__)

void drain_x86() {
  _mm_sfence();
}

namespace sse2 {
#define UMBP_TARGET
struct Line {
  __m128i part[4];
};
inline Line load_line(const std::byte* from) {
  auto parts = reinterpret_cast<const __m128i*>(from);
  return {_mm_loadu_si128(parts), _mm_loadu_si128(parts + 1), _mm_loadu_si128(parts + 2),
          _mm_loadu_si128(parts + 3)};
}
inline void stream_line(std::byte* to, const Line& line) {
  for (int i = 0; i < 4; i++) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line.part[i]);
}
#include "copy/stream_loop.inc"
#undef UMBP_TARGET
constexpr Kernel kernel{"sse2", copy, drain_x86};
}  // namespace sse2

namespace avx2 {
#define UMBP_TARGET __attribute__((target("avx2")))
struct Line {
  __m256i low, high;
};
UMBP_TARGET inline Line load_line(const std::byte* from) {
  auto parts = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(parts), _mm256_loadu_si256(parts + 1)};
}
UMBP_TARGET inline void stream_line(std::byte* to, const Line& line) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), line.low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, line.high);
}
#include "copy/stream_loop.inc"
#undef UMBP_TARGET
constexpr Kernel kernel{"avx2", copy, drain_x86};
}  // namespace avx2

namespace avx512 {
#define UMBP_TARGET __attribute__((target("avx512f")))
using Line = __m512i;
UMBP_TARGET inline Line load_line(const std::byte* from) {
  return _mm512_loadu_si512(from);
}
UMBP_TARGET inline void stream_line(std::byte* to, const Line& line) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
}
#include "copy/stream_loop.inc"
#undef UMBP_TARGET
constexpr Kernel kernel{"avx512", copy, drain_x86};
}  // namespace avx512

#elif defined(__aarch64__)

namespace neon {
#define UMBP_TARGET
struct Line {
  uint8x16_t part[4];
};
inline Line load_line(const std::byte* from) {
  auto bytes = reinterpret_cast<const u8*>(from);
  return {vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)};
}
// No intrinsic has the non-temporal pair store.
inline void stream_line(std::byte* to, const Line& line) {
  asm volatile(
      "stnp %q1, %q2, [%0]\n\t"
      "stnp %q3, %q4, [%0, #32]" ::"r"(to),
      "w"(line.part[0]), "w"(line.part[1]), "w"(line.part[2]), "w"(line.part[3])
      : "memory");
}
#include "copy/stream_loop.inc"
#undef UMBP_TARGET
void drain() {
  asm volatile("dmb ishst" ::: "memory");
}
constexpr Kernel kernel{"neon", copy, drain};
}  // namespace neon

#endif

std::vector<const Kernel*> kernels_here() {
  std::vector<const Kernel*> found;
#if defined(__x86_64__)
  // Whole lines at a time have shown no gain over halves, and cost older processors clock speed.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) found.push_back(&avx2::kernel);
  if (__builtin_cpu_supports("avx512f")) found.push_back(&avx512::kernel);
  found.push_back(&sse2::kernel);
#elif defined(__aarch64__)
  found.push_back(&neon::kernel);
#endif
  found.push_back(&portable::kernel);
  return found;
}

}  // namespace

const Kernel& portable_kernel() {
  return portable::kernel;
}

std::span<const Kernel* const> kernels() {
  static const std::vector<const Kernel*> found = kernels_here();
  return found;
}

const Kernel& kernel_named(std::string_view name) {
  std::string known;
  for (const Kernel* kernel : kernels()) {
    if (name == kernel->name) return *kernel;
    known += (known.empty() ? "" : ", ") + std::string(kernel->name);
  }
  throw ConfigError("this processor has no copy kernel '" + std::string(name) + "'; it has " + known);
}

}  // namespace umbp
