// The checksum of an object's bytes: XXH3-64, with the widest vectors that it has gained from here. 64 bits
// are plenty for damage; the trailer's digests identify.
//
// It is a pass of its own over a slot. Summing a run on its way, before it is copied out of the cache, has
// been slower: the sum then waits at the head of every run, where a plain pass never waits.
#pragma once

#include <cstddef>

#include "pool/base.hpp"

namespace umbp {

u64 checksum_of(const void* data, std::size_t bytes);

}  // namespace umbp
