// The checksum of an object's bytes: XXH3-64, with the widest vectors that it has gained from here. 64 bits
// are plenty for damage; the trailer's digests identify.
#pragma once

#include <cstddef>

#include "pool/base.hpp"

namespace umbp {

u64 checksum_of(const void* data, std::size_t bytes);

// The same of bytes that come in parts.
class Checksum {
 public:
  Checksum();
  void add(const void* data, std::size_t bytes);
  u64 value() const;

 private:
  static constexpr std::size_t kStateBytes = 576;
  alignas(64) std::byte state_[kStateBytes];
};

}  // namespace umbp
