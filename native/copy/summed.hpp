// A copy that sums the object that it fills or reads, out of the cache that has just read its bytes.
//
// A sum that comes before the copy waits at the head of every run for memory; one that comes after it has
// all in the nearest cache, as streaming stores leave that alone. Memory is read once, and a little ahead.
#pragma once

#include "copy/checksum.hpp"
#include "copy/stream.hpp"

namespace umbp {

class SummedCopy {
 public:
  // The object, from its first byte on: what is filled by a store, what is read by a load.
  SummedCopy(const Kernel& kernel, const std::byte* object, bool is_store)
      : kernel_(kernel), end_(object), is_store_(is_store) {}

  // As the kernel's `copy`.
  void copy(const Pieces& pieces, const std::byte* next);

  // Whether the sum is that of the first `bytes` bytes of the object: these were moved in order.
  bool covers(const std::byte* object, std::size_t bytes) const {
    return is_in_order_ && end_ == object + bytes;
  }
  u64 value() const { return sum_.value(); }

 private:
  void copy_piece(std::byte* to, const std::byte* from, std::size_t bytes, const std::byte* next);

  const Kernel& kernel_;
  Checksum sum_;
  const std::byte* end_;  // of what has been moved of the object
  const bool is_store_;
  bool is_in_order_ = true;
};

}  // namespace umbp
