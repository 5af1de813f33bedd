// A key's digest: XXH3-128 of its text under the segment's seed. The raw form, prefix + hex(hash), is the
// same text.
#pragma once

#include <cstring>
#include <string_view>
#include <vector>

#include "pool/base.hpp"

namespace umbp {

struct Digest {
  u64 low = 0, high = 0;
  bool operator==(const Digest&) const = default;
};

Digest digest_of(std::string_view key, u64 seed);

// Hashes `prefix` followed by lower-case hex digits; keeps the prefix in place between keys.
class RawHasher {
 public:
  RawHasher(std::string_view prefix, u64 seed) : text_(prefix), prefix_(prefix.size()), seed_(seed) {}
  Digest operator()(std::string_view hash);

 private:
  std::string text_;
  std::size_t prefix_;
  u64 seed_;
};

}  // namespace umbp
