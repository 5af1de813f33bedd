#include "copy/runs.hpp"

namespace umbp {

static void check(const Runs::Columns& c, i64 block_count, u64 object_bytes) {
  if (c.block_stride.size() != c.base.size() || c.run_bytes.size() != c.base.size() ||
      c.object_offset.size() != c.base.size())
    throw ConfigError("the columns of a layout's runs have unequal lengths");
  if (c.base.empty() || block_count <= 0 || object_bytes == 0)
    throw ConfigError("a layout needs runs, blocks and bytes");
  for (std::size_t i = 0; i < c.base.size(); i++)
    if (c.base[i] == 0 || c.run_bytes[i] == 0 || c.run_bytes[i] > object_bytes ||
        c.object_offset[i] > object_bytes - c.run_bytes[i])
      throw ConfigError("run " + std::to_string(i) + " of a layout lies outside its object");
}

Runs::Runs(const Columns& c, i64 block_count_, u64 object_bytes_)
    : block_count(block_count_), object_bytes(object_bytes_) {
  check(c, block_count, object_bytes);
  Family piece{};
  for (std::size_t i = 0; i < c.base.size(); i++) {
    const bool follows = piece.bytes && c.base[i] == piece.base + piece.bytes &&
                         c.object_offset[i] == piece.object_offset + piece.bytes &&
                         c.block_stride[i] == piece.block_stride;
    if (follows) {
      piece.bytes += c.run_bytes[i];
    } else {
      if (piece.bytes) add(piece);
      piece = {.base = c.base[i],
               .block_stride = c.block_stride[i],
               .base_step = 0,
               .object_offset = c.object_offset[i],
               .object_step = 0,
               .bytes = c.run_bytes[i],
               .count = 1,
               .before = moved_bytes_};
    }
    moved_bytes_ += c.run_bytes[i];
  }
  add(piece);
}

void Runs::add(const Family& piece) {
  pieces_++;
  if (!families_.empty()) {
    Family& f = families_.back();
    const i64 base_step = i64(piece.base - (f.base + u64(i64(f.count - 1) * f.base_step)));
    const i64 object_step =
        i64(piece.object_offset - (f.object_offset + u64(i64(f.count - 1) * f.object_step)));
    const bool is_alike = f.bytes == piece.bytes && f.block_stride == piece.block_stride;
    if (is_alike && (f.count == 1 || (base_step == f.base_step && object_step == f.object_step))) {
      f.base_step = base_step;
      f.object_step = object_step;
      f.count++;
      return;
    }
  }
  families_.push_back(piece);
}

}  // namespace umbp
