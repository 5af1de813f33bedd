#include "copy/summed.hpp"

#include <algorithm>

namespace umbp {

// Copied, then summed: few enough for the nearest cache, many enough for both loops to get going.
static constexpr std::size_t kPartBytes = 8192;
// How far ahead is read: what the copy of one part and its sum leave time for.
static constexpr std::size_t kAheadBytes = 4096;

void SummedCopy::copy(const Pieces& pieces, const std::byte* next) {
  // The piece that is read ahead while one is copied; of long ones the next.
  const std::size_t distance = std::max<std::size_t>(1, kAheadBytes / pieces.bytes);
  std::byte* to = pieces.to;
  const std::byte* from = pieces.from;
  for (std::size_t i = 0; i < pieces.count; i++) {
    const std::byte* at = is_store_ ? to : from;
    is_in_order_ = is_in_order_ && at == end_;
    end_ = at + pieces.bytes;
    copy_piece(to, from, pieces.bytes,
               i + distance < pieces.count ? from + i64(distance) * pieces.from_step : next);
    to += pieces.to_step, from += pieces.from_step;
  }
}

void SummedCopy::copy_piece(std::byte* to, const std::byte* from, std::size_t bytes, const std::byte* next) {
  for (std::size_t done = 0; done < bytes; done += kPartBytes) {
    const std::size_t part = std::min(kPartBytes, bytes - done);
    // The first bytes of the next piece come with the last of this one.
    const std::byte* ahead = done + part < bytes ? from + done + kAheadBytes : next;
    kernel_.copy(Pieces{to + done, from + done, 0, 0, part, 1}, ahead);
    if (is_in_order_) sum_.add(from + done, part);
  }
}

}  // namespace umbp
