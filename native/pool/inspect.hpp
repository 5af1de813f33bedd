// What can be told of a pool's file from outside: nothing is attached, mapped or written, so it works on
// pools of others that may be read, on damaged ones, and while a stopped process holds the lock. The figures
// are read while others change them, and need not fit each other to the byte.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "pool/format.hpp"

namespace umbp {

struct ProcessReport {
  u32 place, pid, uid;
  bool is_alive, holds_size;
  u64 pinned_slots;
};

struct ClassReport {
  u64 slot_bytes, slabs, free_slots;
};

struct NamespaceReport {
  std::string name;  // of a long one the head
  u32 id, epoch;
  u64 used_bytes, quota_bytes, objects;
};

struct PoolReport {
  bool is_pool = false;  // its magic says so
  std::string problem;   // why nobody can attach it; empty where all is well
  u32 owner_uid = 0, group_gid = kNoGroup, mode = 0;
  u64 file_bytes = 0, memory_bytes = 0;
  // All else only where there is no problem.
  u64 created_s = 0, capacity_bytes = 0, max_bytes = 0, slab_bytes = 0, min_object_bytes = 0;
  u64 used_bytes = 0, objects = 0, free_slabs = 0;
  u32 resizing_pid = 0;
  EvictionPolicy eviction_policy = EvictionPolicy::lru;
  double high_watermark = 0, low_watermark = 0;
  std::vector<ProcessReport> processes;
  std::vector<ClassReport> classes;
  std::vector<NamespaceReport> namespaces;
  std::vector<std::pair<std::string, u64>> counters;
};

// Throws SegmentError where there is no such file. `in_full` counts every process's pins as well.
PoolReport inspect(const std::string& path, bool in_full);

}  // namespace umbp
