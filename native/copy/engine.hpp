// Moves objects between engine memory and pool slots: one call for a batch, objects split over a few threads.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "pool/pool.hpp"

namespace umbp {

// The contiguous runs of one block of a cache group, by column: run i of block b lies at
// base[i] + b * block_stride[i] in engine memory and at object_offset[i] in the object.
struct Runs {
  std::vector<u64> base;
  std::vector<i64> block_stride;
  std::vector<u64> run_bytes, object_offset;
  i64 block_count = 0;
  u64 object_bytes = 0;

  // Throws ConfigError where the columns don't fit each other or the object.
  void check() const;
};

enum class CopyStatus : u8 {
  ok = 0,
  bad_ticket = 1,    // not held by this process in the state that the copy needs
  bad_block = 2,     // a block id outside the cache
  bad_length = 3,    // the slot's object has another length
  bad_checksum = 4,  // damaged, or stored without a checksum
  failed = 5,        // a device's driver could not move it
};

class CopyEngine {
 public:
  explicit CopyEngine(u32 threads);
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  void store(const Runs& runs, std::span<const i64> blocks, const Pool& pool, std::span<const u64> tickets,
             bool checksum, CopyStatus* statuses);
  void load(const Runs& runs, std::span<const i64> blocks, const Pool& pool, std::span<const u64> tickets,
            bool checksum, CopyStatus* statuses);

  // For bytes that a device moves itself, in two halves with its copy between them. An opening call says
  // which objects may be copied and where they lie (0: not to be touched); seal_stores adds the checksums of
  // what has arrived; after a load, ask still_ours().
  void open_stores(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                   std::span<const u64> tickets, CopyStatus* statuses, u64* addresses);
  void seal_stores(const Runs& runs, const Pool& pool, std::span<const u64> tickets, CopyStatus* statuses);
  void open_loads(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                  std::span<const u64> tickets, bool checksum, CopyStatus* statuses, u64* addresses);

  u32 threads() const;
  void close();

 private:
  struct State;
  template <class One>
  void run(std::size_t count, std::size_t object_bytes, One&& one);

  std::unique_ptr<State> state_;
  const u64 fork_epoch_;
};

}  // namespace umbp
