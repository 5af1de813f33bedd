#include "copy/engine.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "copy/gate.hpp"
#include "copy/move.hpp"

namespace umbp {

// A share of the objects is handed to a thread at a time; small objects in larger shares.
static constexpr u64 kShareBytes = 1u << 20;
// What an object counts where it is only looked at.
static constexpr u64 kNoBytes = 1u << 10;

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

void CopyEngine::store(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                       std::span<const u64> tickets, bool checksum, CopyStatus* statuses) {
  auto segment = pool.segment();
  const Gate gate(runs, *segment);
  run(blocks.size(), runs.object_bytes, [&](std::size_t i) {
    std::byte* object = nullptr;
    statuses[i] = CopyStatus::bad_ticket;
    statuses[i] = gate.store(blocks[i], tickets[i], object);
    if (statuses[i] != CopyStatus::ok) return;
    gather(runs, blocks[i], object);
    if (checksum) gate.seal(tickets[i]);
  });
}

void CopyEngine::load(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                      std::span<const u64> tickets, bool checksum, CopyStatus* statuses) {
  auto segment = pool.segment();
  const Gate gate(runs, *segment);
  run(blocks.size(), runs.object_bytes, [&](std::size_t i) {
    std::byte* object = nullptr;
    statuses[i] = CopyStatus::bad_ticket;
    statuses[i] = gate.load(blocks[i], tickets[i], checksum, object);
    if (statuses[i] != CopyStatus::ok) return;
    scatter(runs, blocks[i], object);
    if (!gate.is_still_ours()) statuses[i] = CopyStatus::bad_ticket;
  });
}

void CopyEngine::open_stores(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                             std::span<const u64> tickets, CopyStatus* statuses, u64* addresses) {
  auto segment = pool.segment();
  const Gate gate(runs, *segment);
  run(blocks.size(), kNoBytes, [&](std::size_t i) {
    std::byte* object = nullptr;
    statuses[i] = CopyStatus::bad_ticket;
    addresses[i] = 0;
    statuses[i] = gate.store(blocks[i], tickets[i], object);
    addresses[i] = reinterpret_cast<u64>(object);
  });
}

void CopyEngine::seal_stores(const Runs& runs, const Pool& pool, std::span<const u64> tickets,
                             CopyStatus* statuses) {
  auto segment = pool.segment();
  const Gate gate(runs, *segment);
  run(tickets.size(), runs.object_bytes, [&](std::size_t i) {
    std::byte* object = nullptr;
    statuses[i] = CopyStatus::bad_ticket;
    statuses[i] = gate.store(0, tickets[i], object);
    if (statuses[i] == CopyStatus::ok) gate.seal(tickets[i]);
  });
}

void CopyEngine::open_loads(const Runs& runs, std::span<const i64> blocks, const Pool& pool,
                            std::span<const u64> tickets, bool checksum, CopyStatus* statuses,
                            u64* addresses) {
  auto segment = pool.segment();
  const Gate gate(runs, *segment);
  run(blocks.size(), checksum ? runs.object_bytes : kNoBytes, [&](std::size_t i) {
    std::byte* object = nullptr;
    statuses[i] = CopyStatus::bad_ticket;
    addresses[i] = 0;
    statuses[i] = gate.load(blocks[i], tickets[i], checksum, object);
    addresses[i] = reinterpret_cast<u64>(object);
  });
}

}  // namespace umbp
