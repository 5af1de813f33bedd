// Where the bytes of a block lie: its contiguous runs, and the walk over them that a copy takes.
#pragma once

#include <algorithm>
#include <vector>

#include "copy/stream.hpp"
#include "pool/base.hpp"

namespace umbp {

// The contiguous runs of one block of a cache group. What lies together on both sides is one piece, and
// pieces of one length at constant steps are one family, so that a block torn into thousands of pieces is a
// few loops.
class Runs {
 public:
  // By column: run i of block b lies at base[i] + b * block_stride[i] in engine memory and at
  // object_offset[i] in the object.
  struct Columns {
    std::vector<u64> base;
    std::vector<i64> block_stride;
    std::vector<u64> run_bytes, object_offset;
  };

  // Throws ConfigError where the columns don't fit each other or the object.
  Runs(const Columns& columns, i64 block_count, u64 object_bytes);

  const i64 block_count;
  const u64 object_bytes;

  // The bytes that a copy moves; less than the object's where it has gaps.
  u64 moved_bytes() const { return moved_bytes_; }
  // Of all pieces.
  u64 mean_piece_bytes() const { return moved_bytes_ / pieces_; }
  // Where reading begins in engine memory.
  const std::byte* first(i64 block) const { return engine_side(families_.front(), block); }

  // Calls `move(pieces, next)` for the moved bytes from `begin` to `end`, in order, with the engine's memory
  // as the pieces' `from` (is_store) or `to`. `next` is where reading goes on within these bytes, else
  // `after`.
  template <class Move>
  void walk(i64 block, std::byte* object, bool is_store, u64 begin, u64 end, const std::byte* after,
            Move&& move) const;

 private:
  struct Family {
    u64 base;
    i64 block_stride, base_step;
    u64 object_offset;
    i64 object_step;
    u64 bytes, count;  // of a piece; of pieces
    u64 before;        // moved bytes before this family
  };

  static std::byte* engine_side(const Family& f, i64 block) {
    return reinterpret_cast<std::byte*>(f.base + u64(block * f.block_stride));
  }
  void add(const Family& piece);  // to the last family if it is alike

  std::vector<Family> families_;
  u64 moved_bytes_ = 0, pieces_ = 0;
};

template <class Move>
void Runs::walk(i64 block, std::byte* object, bool is_store, u64 begin, u64 end, const std::byte* after,
                Move&& move) const {
  auto source = [&](const Family& f) -> const std::byte* {
    return is_store ? engine_side(f, block) : object + f.object_offset;
  };
  for (std::size_t n = 0; n < families_.size(); n++) {
    const Family& f = families_[n];
    const u64 family_end = f.before + f.bytes * f.count;
    if (family_end <= begin) continue;
    if (f.before >= end) return;
    const std::byte* next = n + 1 < families_.size() && family_end < end ? source(families_[n + 1]) : after;
    // [from, to) of this family's bytes: the end of a piece, whole pieces, the beginning of a piece.
    u64 from = std::max(begin, f.before) - f.before;
    const u64 to = std::min(end, family_end) - f.before;
    while (from < to) {
      const u64 index = from / f.bytes, within = from % f.bytes;
      const bool is_whole = within == 0 && to - from >= f.bytes;
      const u64 count = is_whole ? (to - from) / f.bytes : 1;
      const u64 bytes = is_whole ? f.bytes : std::min(f.bytes - within, to - from);
      std::byte* engine = engine_side(f, block) + i64(index) * f.base_step + within;
      std::byte* pool = object + f.object_offset + i64(index) * f.object_step + within;
      from += count * bytes;
      const std::byte* follows =
          from < to ? source(f) + i64(from / f.bytes) * (is_store ? f.base_step : f.object_step) : next;
      if (is_store)
        move(Pieces{pool, engine, f.object_step, f.base_step, bytes, count}, follows);
      else
        move(Pieces{engine, pool, f.base_step, f.object_step, bytes, count}, follows);
    }
  }
}

}  // namespace umbp
