// Moves objects between engine memory and pool slots: one call for a batch, objects split over a few threads.
#pragma once

#include <span>
#include <vector>

#include "copy/runs.hpp"
#include "copy/team.hpp"
#include "pool/pool.hpp"

namespace umbp {

enum class CopyStatus : u8 {
  ok = 0,
  bad_ticket = 1,    // not held by this process in the state that the copy needs
  bad_block = 2,     // a block id outside the cache
  bad_length = 3,    // the slot's object has another length
  bad_checksum = 4,  // damaged, another's, or stored without the checksum that was asked for
  failed = 5,        // a device's driver could not move it
  bad_arrival = 6,   // it came from elsewhere damaged, which its first load has found
};

class CopyEngine {
 public:
  // The environment variable UMBP_COPY_KERNEL names a kernel that is used for everything.
  CopyEngine(u32 threads, std::vector<u32> cores);

  void store(const Runs& runs, std::span<const i64> blocks, const Pool& pool, std::span<const u64> tickets,
             bool checksum, CopyStatus* statuses);
  void load(const Runs& runs, std::span<const i64> blocks, const Pool& pool, std::span<const u64> tickets,
            bool checksum, CopyStatus* statuses);

  // For bytes that a device moves itself, in two halves with its copy between them. An opening call says
  // which objects may be copied and where they lie (0: not to be touched); checksum_stores adds the checksums
  // of what has arrived. What a load has to compare is read when it is opened.
  void open_stores(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                   std::span<const u64> tickets, CopyStatus* statuses, u64* addresses);
  void checksum_stores(const Runs& runs, const Pool& pool, std::span<const u64> tickets,
                       CopyStatus* statuses);
  void open_loads(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                  std::span<const u64> tickets, bool checksum, CopyStatus* statuses, u64* addresses);

  u32 threads() const { return team_.threads(); }
  const std::vector<u32>& cores() const { return team_.cores(); }
  // What streams where streaming pays.
  const Kernel& kernel() const { return kernel_; }
  void close() { team_.close(); }

 private:
  class Batch;

  template <class One>
  void run(std::size_t count, std::size_t object_bytes, One&& one);
  void move(Batch& batch);
  const Kernel& kernel_for(const Runs& runs, std::size_t count, bool is_store) const;

  Team team_;
  const Kernel& kernel_;
  const bool is_kernel_forced_;
};

}  // namespace umbp
