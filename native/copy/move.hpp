// The inner loops: one object's runs, gathered into a slot or scattered out of it. The place for streaming
// stores.
#pragma once

#include <cstring>

#include "copy/engine.hpp"

namespace umbp {

inline void gather(const Runs& runs, i64 block, std::byte* object) {
  for (std::size_t i = 0; i < runs.base.size(); i++) {
    auto from = reinterpret_cast<const std::byte*>(runs.base[i] + u64(block * runs.block_stride[i]));
    std::memcpy(object + runs.object_offset[i], from, runs.run_bytes[i]);
  }
}

inline void scatter(const Runs& runs, i64 block, const std::byte* object) {
  for (std::size_t i = 0; i < runs.base.size(); i++) {
    auto to = reinterpret_cast<std::byte*>(runs.base[i] + u64(block * runs.block_stride[i]));
    std::memcpy(to, object + runs.object_offset[i], runs.run_bytes[i]);
  }
}

}  // namespace umbp
