#include "copy/engine.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "copy/move.hpp"
#include "pool/objects.hpp"

namespace umbp {

// A share of the objects is handed to a thread at a time; small objects in larger shares.
static constexpr u64 kShareBytes = 1u << 20;

void Runs::check() const {
  if (block_stride.size() != base.size() || run_bytes.size() != base.size() ||
      object_offset.size() != base.size())
    throw ConfigError("the columns of a layout's runs have unequal lengths");
  if (base.empty() || block_count <= 0 || object_bytes == 0)
    throw ConfigError("a layout needs runs, blocks and bytes");
  for (std::size_t i = 0; i < base.size(); i++)
    if (base[i] == 0 || run_bytes[i] == 0 || run_bytes[i] > object_bytes ||
        object_offset[i] > object_bytes - run_bytes[i])
      throw ConfigError("run " + std::to_string(i) + " of a layout lies outside its object");
}

namespace {

struct Job {
  std::size_t count, share;
  std::function<void(std::size_t)> one;  // has set a refusing status if it throws
  std::atomic<std::size_t> next{0};
  std::size_t users = 0;  // threads at work on it; under the engine's mutex

  void run() {
    for (;;) {
      std::size_t from = next.fetch_add(share, std::memory_order_relaxed);
      if (from >= count) return;
      for (std::size_t i = from; i < std::min(from + share, count); i++) {
        try {
          one(i);
        } catch (const SegmentError&) {
          // A damaged slot or slab: this object's status says that it wasn't copied.
        }
      }
    }
  }
};

}  // namespace

// Apart from the engine, because a forked child must leave it alone: its threads aren't there, and destroying
// a condition that they waited for would wait for them for ever.
struct CopyEngine::State {
  std::mutex mutex;
  std::condition_variable wanted, finished;
  std::deque<Job*> jobs;
  std::vector<std::thread> workers;
  u32 threads = 1;
  bool is_closing = false;

  void work() {
    std::unique_lock<std::mutex> guard(mutex);
    for (;;) {
      wanted.wait(guard, [this] { return is_closing || !jobs.empty(); });
      if (jobs.empty()) return;
      Job* job = jobs.front();
      if (job->next.load(std::memory_order_relaxed) >= job->count) {
        jobs.pop_front();
        continue;
      }
      job->users++;
      guard.unlock();
      job->run();
      guard.lock();
      if (--job->users == 0) finished.notify_all();
    }
  }
};

CopyEngine::CopyEngine(u32 threads) : fork_epoch_(fork_epoch()) {
  if (threads == 0 || threads > 256) throw ConfigError("a copy engine has between 1 and 256 threads");
  state_ = std::make_unique<State>();
  state_->threads = threads;
  for (u32 i = 1; i < threads; i++) state_->workers.emplace_back([state = state_.get()] { state->work(); });
}

CopyEngine::~CopyEngine() {
  if (fork_epoch_ == fork_epoch())
    close();
  else
    (void)state_.release();
}

u32 CopyEngine::threads() const {
  return state_->threads;
}

void CopyEngine::close() {
  if (fork_epoch_ != fork_epoch()) return;
  std::vector<std::thread> workers;
  {
    std::lock_guard<std::mutex> guard(state_->mutex);
    state_->is_closing = true;
    workers.swap(state_->workers);
  }
  state_->wanted.notify_all();
  for (std::thread& worker : workers) worker.join();
}

template <class One>
void CopyEngine::run(std::size_t count, std::size_t object_bytes, One&& one) {
  if (fork_epoch_ != fork_epoch())
    throw SegmentError("this copy engine was made before a fork; make another");
  Job job{count, std::max<std::size_t>(1, kShareBytes / object_bytes), std::forward<One>(one)};
  const bool is_shared = state_->threads > 1 && count > job.share;
  {
    std::lock_guard<std::mutex> guard(state_->mutex);
    if (state_->is_closing) throw ConfigError("this copy engine has been closed");
    if (is_shared) state_->jobs.push_back(&job);
  }
  if (is_shared) state_->wanted.notify_all();
  job.run();
  if (!is_shared) return;
  std::unique_lock<std::mutex> guard(state_->mutex);
  std::erase(state_->jobs, &job);
  state_->finished.wait(guard, [&job] { return job.users == 0; });
}

// Reads of slots that this process holds need no lock: nobody else changes them while they are held.
void CopyEngine::store(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                       std::span<const u64> tickets, bool checksum, CopyStatus* statuses) {
  auto segment = pool.segment();
  Objects objects(*segment);
  run(blocks.size(), runs.object_bytes, [&](std::size_t i) {
    const u64 ticket = tickets[i];
    const u32 slot = ticket_slot(ticket);
    statuses[i] = CopyStatus::bad_ticket;
    if (!objects.names(ticket, SlotState::reserved) ||
        word_owner(objects.word(slot)) != segment->process_slot())
      return;
    statuses[i] = CopyStatus::bad_block;
    if (blocks[i] < 0 || blocks[i] >= runs.block_count) return;
    statuses[i] = CopyStatus::bad_length;
    if (segment->record(slot).length != runs.object_bytes ||
        runs.object_bytes > segment->slab_slot_bytes(segment->slab_of(slot)) - kTrailerBytes)
      return;
    std::byte* object = segment->payload(slot);
    gather(runs, blocks[i], object);
    if (checksum) {
      Trailer& trailer = segment->trailer(slot);
      trailer.checksum = checksum_of(object, runs.object_bytes);
      trailer.flags |= 1;
    }
    statuses[i] = CopyStatus::ok;
  });
}

void CopyEngine::load(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                      std::span<const u64> tickets, bool checksum, CopyStatus* statuses) {
  auto segment = pool.segment();
  Objects objects(*segment);
  run(blocks.size(), runs.object_bytes, [&](std::size_t i) {
    const u64 ticket = tickets[i];
    const u32 slot = ticket_slot(ticket);
    statuses[i] = CopyStatus::bad_ticket;
    if (!objects.names(ticket, SlotState::published) && !objects.names(ticket, SlotState::doomed)) return;
    if (segment->my_pin(slot).load(std::memory_order_acquire) == 0) return;
    statuses[i] = CopyStatus::bad_block;
    if (blocks[i] < 0 || blocks[i] >= runs.block_count) return;
    statuses[i] = CopyStatus::bad_length;
    if (segment->record(slot).length != runs.object_bytes ||
        runs.object_bytes > segment->slab_slot_bytes(segment->slab_of(slot)) - kTrailerBytes)
      return;
    const std::byte* object = segment->payload(slot);
    statuses[i] = CopyStatus::bad_checksum;
    if (checksum) {
      const Trailer& trailer = segment->trailer(slot);
      if (trailer.magic != kTrailerMagic || !(trailer.flags & 1) ||
          trailer.key != segment->record(slot).digest ||
          trailer.checksum != checksum_of(object, runs.object_bytes))
        return;
    }
    scatter(runs, blocks[i], object);
    // Should this process have been taken for dead meanwhile, the slot may have got another object.
    ordered();
    if (segment->is_expelled()) {
      statuses[i] = CopyStatus::bad_ticket;
      return;
    }
    statuses[i] = CopyStatus::ok;
  });
}

}  // namespace umbp
