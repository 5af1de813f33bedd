// Copies that go past the cache: streaming stores write whole lines without reading them first, which a third
// of an ordinary copy's memory traffic is. Which kernel runs is decided at run time; nothing here needs more
// than the baseline to be compiled.
#pragma once

#include <span>
#include <string_view>

#include "pool/base.hpp"

namespace umbp {

// Equal pieces at constant steps on both sides; nothing overlaps.
struct Pieces {
  std::byte* to;
  const std::byte* from;
  i64 to_step, from_step;
  std::size_t bytes, count;
};

struct Kernel {
  const char* name;
  // Any alignment, any length. `next` is where the reading will go on (null: unknown); its head is
  // prefetched.
  void (*copy)(const Pieces& pieces, const std::byte* next);
  // Streaming stores are weakly ordered: a thread drains its own before it tells anybody that bytes are there
  // (that is, before the job ends which the caller of publish() waits for).
  void (*drain)();
};

// memcpy, piece by piece: where streaming doesn't pay, and where there is none.
const Kernel& portable_kernel();
// Those that this processor runs, the best first; portable is the last.
std::span<const Kernel* const> kernels();
// Throws ConfigError where this processor has none of that name.
const Kernel& kernel_named(std::string_view name);

}  // namespace umbp
