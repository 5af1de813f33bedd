#include "copy/checksum.hpp"

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

u64 checksum_of(const void* data, std::size_t bytes) {
  static const Update update = update_of_this_cpu();
  XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_64bits_reset(&state);
  update(&state, data, bytes);
  return XXH3_64bits_digest(&state);
}

}  // namespace umbp
