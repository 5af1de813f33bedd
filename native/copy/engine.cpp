#include "copy/engine.hpp"

#include <algorithm>
#include <cstdlib>

#include "copy/gate.hpp"
#include "copy/summed.hpp"

namespace umbp {

// A thread takes this many bytes at a time, of small objects several.
static constexpr u64 kShareBytes = 1u << 20;
// Few and large objects are split between threads, in parts of at least this.
static constexpr u64 kPartBytes = 128u << 10;
// What an object counts where it is only looked at.
static constexpr u64 kNoBytes = 1u << 10;
// From where on streaming pays. A store is read again much later if at all; what a load brings is read by the
// next forward, which finds it in the last cache if it is no more than that holds beside other things (copy
// and reading together, measured with 32 MiB of last cache).
static constexpr u64 kStreamStoreBytes = 2u << 20;
static constexpr u64 kStreamLoadBytes = 16u << 20;
static constexpr u64 kStreamPieceBytes = 256;

static const char* forced_kernel() {
  return std::getenv("UMBP_COPY_KERNEL");
}

CopyEngine::CopyEngine(u32 threads, std::vector<u32> cores)
    : team_(threads, std::move(cores)),
      kernel_(forced_kernel() ? kernel_named(forced_kernel()) : *kernels().front()),
      is_kernel_forced_(forced_kernel() != nullptr) {}

const Kernel& CopyEngine::kernel_for(const Runs& runs, std::size_t count, bool is_store) const {
  const u64 from_bytes = is_store ? kStreamStoreBytes : kStreamLoadBytes;
  const bool pays = runs.moved_bytes() * count >= from_bytes && runs.mean_piece_bytes() >= kStreamPieceBytes;
  return pays || is_kernel_forced_ ? kernel_ : portable_kernel();
}

template <class One>
void CopyEngine::run(std::size_t count, std::size_t object_bytes, One&& one) {
  team_.run(count, std::max<std::size_t>(1, kShareBytes / object_bytes), [&](auto begin, auto end) {
    for (std::size_t i = begin; i < end; i++) {
      try {
        one(i);
      } catch (const SegmentError&) {
        // A damaged slot or slab: this object's status says that it wasn't copied.
      }
    }
  });
}

// One call's objects on their way: which may be copied, and the copying of one or of a part of one.
class CopyEngine::Batch {
 public:
  Batch(const Runs& runs, std::span<const i64> blocks, Segment& segment, std::span<const u64> tickets,
        bool is_store, bool checksum, const Kernel& kernel, CopyStatus* statuses)
      : runs_(runs),
        blocks_(blocks),
        tickets_(tickets),
        gate_(runs, segment),
        is_store_(is_store),
        checksum_(checksum),
        kernel_(kernel),
        statuses_(statuses),
        objects_(blocks.size()),
        is_summed_(blocks.size()) {
    std::fill_n(statuses, blocks.size(), CopyStatus::bad_ticket);
  }

  std::size_t size() const { return blocks_.size(); }
  u64 object_bytes() const { return runs_.moved_bytes(); }
  // Once all are admitted: a checksum is computed of a whole object.
  bool can_be_split() const {
    return std::find(is_summed_.begin(), is_summed_.end(), true) == is_summed_.end();
  }

  void admit(std::size_t i) {
    try {
      bool is_summed = checksum_;
      statuses_[i] = is_store_ ? gate_.store(blocks_[i], tickets_[i], objects_[i])
                               : gate_.load(blocks_[i], tickets_[i], checksum_, objects_[i], is_summed);
      is_summed_[i] = is_summed && statuses_[i] == CopyStatus::ok;
    } catch (const SegmentError&) {
      // A damaged slot or slab: the status says that it wasn't copied.
    }
  }

  // Whole objects, each admitted before the one before it is copied, whose copy fetches its head.
  void copy(std::size_t begin, std::size_t end) {
    admit(begin);
    for (std::size_t i = begin; i < end; i++) {
      if (i + 1 < end) admit(i + 1);
      const std::byte* after = i + 1 < end ? head(i + 1) : nullptr;
      if (is_summed_[i])
        copy_summed(i, after);
      else
        copy_part(i, 0, runs_.moved_bytes(), after);
    }
    kernel_.drain();
  }

  void copy_part(std::size_t i, u64 begin, u64 end, const std::byte* after) {
    if (statuses_[i] != CopyStatus::ok) return;
    runs_.walk(blocks_[i], objects_[i].payload, is_store_, begin, end, after,
               [&](const Pieces& pieces, const std::byte* next) { kernel_.copy(pieces, next); });
  }

  void drain() const { kernel_.drain(); }

  // After a load: had this process been taken for dead meanwhile, its slots may have got other objects.
  void finish() {
    if (is_store_ || gate_.is_still_ours()) return;
    for (std::size_t i = 0; i < size(); i++)
      if (statuses_[i] == CopyStatus::ok || is_summed_[i]) statuses_[i] = CopyStatus::bad_ticket;
  }

 private:
  void copy_summed(std::size_t i, const std::byte* after) {
    const Place& object = objects_[i];
    SummedCopy copy(kernel_, object.payload, is_store_);
    runs_.walk(blocks_[i], object.payload, is_store_, 0, runs_.moved_bytes(), after,
               [&](const Pieces& pieces, const std::byte* next) { copy.copy(pieces, next); });
    const bool is_whole = copy.covers(object.payload, runs_.object_bytes);  // else gaps, or another order
    const u64 sum = is_whole ? copy.value() : gate_.checksum_in(object);
    if (is_store_)
      Gate::set_checksum(object, sum);
    else
      statuses_[i] = gate_.compare(object, sum);
  }

  const std::byte* head(std::size_t i) const {
    if (statuses_[i] != CopyStatus::ok) return nullptr;
    return is_store_ ? runs_.first(blocks_[i]) : objects_[i].payload;
  }

  const Runs& runs_;
  const std::span<const i64> blocks_;
  const std::span<const u64> tickets_;
  const Gate gate_;
  const bool is_store_, checksum_;
  const Kernel& kernel_;
  CopyStatus* const statuses_;
  std::vector<Place> objects_;
  std::vector<u8> is_summed_;
};

void CopyEngine::move(Batch& batch) {
  const u64 bytes = batch.object_bytes();
  const u64 shares = 4 * team_.threads();
  u64 parts = 1;
  if (team_.threads() > 1 && batch.size() && batch.size() < shares) {
    for (std::size_t i = 0; i < batch.size(); i++) batch.admit(i);
    if (batch.can_be_split())
      parts = std::clamp<u64>(bytes / kPartBytes, 1, (shares + batch.size() - 1) / batch.size());
  }
  if (parts == 1) {
    team_.run(batch.size(), std::max<u64>(1, kShareBytes / bytes),
              [&](std::size_t begin, std::size_t end) { batch.copy(begin, end); });
  } else {
    const u64 part_bytes = round_up((bytes + parts - 1) / parts, kPageBytes);
    team_.run(batch.size() * parts, 1, [&](std::size_t begin, std::size_t) {
      const u64 from = begin % parts * part_bytes;
      batch.copy_part(begin / parts, from, std::min(from + part_bytes, bytes), nullptr);
      batch.drain();
    });
  }
  batch.finish();
}

void CopyEngine::store(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                       std::span<const u64> tickets, bool checksum, CopyStatus* statuses) {
  auto segment = pool.segment();
  Batch batch(runs, blocks, *segment, tickets, true, checksum, kernel_for(runs, blocks.size(), true),
              statuses);
  move(batch);
}

void CopyEngine::load(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                      std::span<const u64> tickets, bool checksum, CopyStatus* statuses) {
  auto segment = pool.segment();
  Batch batch(runs, blocks, *segment, tickets, false, checksum, kernel_for(runs, blocks.size(), false),
              statuses);
  move(batch);
}

void CopyEngine::open_stores(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                             std::span<const u64> tickets, CopyStatus* statuses, u64* addresses) {
  auto segment = pool.segment();
  const Gate gate(runs, *segment);
  run(blocks.size(), kNoBytes, [&](std::size_t i) {
    Place object{};
    statuses[i] = CopyStatus::bad_ticket;
    addresses[i] = 0;
    statuses[i] = gate.store(blocks[i], tickets[i], object);
    addresses[i] = reinterpret_cast<u64>(object.payload);
  });
}

void CopyEngine::checksum_stores(const Runs& runs, const Pool& pool, std::span<const u64> tickets,
                                 CopyStatus* statuses) {
  auto segment = pool.segment();
  const Gate gate(runs, *segment);
  run(tickets.size(), runs.object_bytes, [&](std::size_t i) {
    Place object{};
    statuses[i] = CopyStatus::bad_ticket;
    statuses[i] = gate.store(0, tickets[i], object);
    if (statuses[i] == CopyStatus::ok) gate.add_checksum(object);
  });
}

void CopyEngine::open_loads(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                            std::span<const u64> tickets, bool checksum, CopyStatus* statuses,
                            u64* addresses) {
  auto segment = pool.segment();
  const Gate gate(runs, *segment);
  std::vector<Place> objects(blocks.size());
  std::vector<u8> compares(blocks.size());
  run(blocks.size(), kNoBytes, [&](std::size_t i) {
    bool is_compared = false;
    statuses[i] = CopyStatus::bad_ticket;
    addresses[i] = 0;
    statuses[i] = gate.load(blocks[i], tickets[i], checksum, objects[i], is_compared);
    compares[i] = is_compared && statuses[i] == CopyStatus::ok;
    addresses[i] = reinterpret_cast<u64>(objects[i].payload);
  });
  if (std::find(compares.begin(), compares.end(), true) == compares.end()) return;
  run(blocks.size(), runs.object_bytes, [&](std::size_t i) {
    if (!compares[i]) return;
    statuses[i] = gate.compare(objects[i], gate.checksum_in(objects[i]));
    if (statuses[i] != CopyStatus::ok) addresses[i] = 0;
  });
}

}  // namespace umbp
