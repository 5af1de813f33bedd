#include "copy/checksum.hpp"

#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
// The header then has its AVX2 loops beside those of the baseline, and leaves the choice to us.
#define XXH_DISPATCH_AVX2 1
#define XXH_TARGET_AVX2 __attribute__((target("avx2")))
#endif
#define XXH_INLINE_ALL
#include "xxhash.h"

namespace umbp {

namespace {

using Update = void (*)(XXH3_state_t* state, const void* data, std::size_t bytes);

void update_baseline(XXH3_state_t* state, const void* data, std::size_t bytes) {
  XXH3_64bits_update(state, data, bytes);
}

#if defined(__x86_64__)
XXH_TARGET_AVX2 void update_avx2(XXH3_state_t* state, const void* data, std::size_t bytes) {
  XXH3_update(state, static_cast<const xxh_u8*>(data), bytes, XXH3_accumulate_avx2, XXH3_scrambleAcc_avx2);
}
#endif

Update update_of_this_cpu() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) return update_avx2;
#endif
  return update_baseline;
}

}  // namespace

static XXH3_state_t* state_in(std::byte* bytes) {
  return std::launder(reinterpret_cast<XXH3_state_t*>(bytes));
}

Checksum::Checksum() {
  static_assert(sizeof(XXH3_state_t) <= sizeof state_ && alignof(XXH3_state_t) <= 64);
  auto* state = new (state_) XXH3_state_t;
  XXH3_INITSTATE(state);
  XXH3_64bits_reset(state);
}

void Checksum::add(const void* data, std::size_t bytes) {
  static const Update update = update_of_this_cpu();
  update(state_in(state_), data, bytes);
}

u64 Checksum::value() const {
  return XXH3_64bits_digest(state_in(const_cast<std::byte*>(state_)));
}

u64 checksum_of(const void* data, std::size_t bytes) {
  Checksum sum;
  sum.add(data, bytes);
  return sum.value();
}

}  // namespace umbp
