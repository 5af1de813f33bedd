#include "copy/team.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "pool/segment.hpp"

namespace umbp {

namespace {

struct Job {
  std::size_t count, share;
  const Team::Share& work;
  std::atomic<std::size_t> next{0};
  std::size_t users = 0;  // helpers at work on it; under the team's mutex

  void run() {
    for (;;) {
      const std::size_t begin = next.fetch_add(share, std::memory_order_relaxed);
      if (begin >= count) return;
      work(begin, std::min(begin + share, count));
    }
  }
};

void bind_this_thread(const std::vector<u32>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (u32 core : cores)
    if (core < CPU_SETSIZE) CPU_SET(core, &set);
  if (CPU_COUNT(&set)) (void)sched_setaffinity(0, sizeof set, &set);
}

}  // namespace

// Apart from the team, because a forked child must leave it alone: its threads aren't there, and destroying a
// condition that they waited for would wait for them for ever.
struct Team::State {
  std::mutex mutex;
  std::condition_variable wanted, finished;
  std::deque<Job*> jobs;
  std::vector<std::thread> helpers;
  std::vector<pid_t> ids;  // of the helpers that have begun
  std::vector<u32> cores;
  u32 threads = 1, working = 0;
  int avoided = -1;  // the core that unbound helpers keep off
  bool is_closing = false;

  // Keeps helpers that may run anywhere off the core of the thread that brings a job. Where all cores have
  // something to do, as when engines poll, a thread that is woken often lands on the core of its waker, and
  // the two take turns. Under the mutex.
  void make_way() {
    const int core = sched_getcpu();
    if (!cores.empty() || working || core < 0 || core == avoided) return;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) return;
    CPU_CLR(core, &set);
    if (!CPU_COUNT(&set)) return;
    for (pid_t id : ids) (void)sched_setaffinity(id, sizeof set, &set);
    avoided = core;
  }

  void help() {
    bind_this_thread(cores);
    std::unique_lock<std::mutex> guard(mutex);
    ids.push_back(pid_t(syscall(SYS_gettid)));
    avoided = -1;
    for (;;) {
      wanted.wait(guard, [this] { return is_closing || !jobs.empty(); });
      if (jobs.empty()) return;
      Job* job = jobs.front();
      if (job->next.load(std::memory_order_relaxed) >= job->count) {
        jobs.pop_front();
        continue;
      }
      job->users++;
      working++;
      guard.unlock();
      job->run();
      guard.lock();
      working--;
      if (--job->users == 0) finished.notify_all();
    }
  }
};

Team::Team(u32 threads, std::vector<u32> cores) : fork_epoch_(fork_epoch()) {
  if (threads == 0 || threads > 256) throw ConfigError("a copy engine has between 1 and 256 threads");
  state_ = std::make_unique<State>();
  state_->cores = std::move(cores);
  try {
    for (u32 i = 1; i < threads; i++) state_->helpers.emplace_back([state = state_.get()] { state->help(); });
  } catch (const std::system_error&) {
    // No more threads for this process: those that are there do the work.
  }
  state_->threads = u32(state_->helpers.size()) + 1;
}

Team::~Team() {
  if (fork_epoch_ == fork_epoch())
    close();
  else
    (void)state_.release();
}

u32 Team::threads() const {
  return state_->threads;
}

const std::vector<u32>& Team::cores() const {
  return state_->cores;
}

void Team::close() {
  if (fork_epoch_ != fork_epoch()) return;
  std::vector<std::thread> helpers;
  {
    std::lock_guard<std::mutex> guard(state_->mutex);
    state_->is_closing = true;
    helpers.swap(state_->helpers);
  }
  state_->wanted.notify_all();
  for (std::thread& helper : helpers) helper.join();
}

void Team::run(std::size_t count, std::size_t share, const Share& work) {
  if (fork_epoch_ != fork_epoch())
    throw SegmentError("this copy engine was made before a fork; make another");
  Job job{count, share, work};
  const bool is_shared = state_->threads > 1 && count > share;
  {
    std::lock_guard<std::mutex> guard(state_->mutex);
    if (state_->is_closing) throw ConfigError("this copy engine has been closed");
    if (is_shared) {
      state_->jobs.push_back(&job);
      state_->make_way();
    }
  }
  if (is_shared) state_->wanted.notify_all();
  job.run();
  if (!is_shared) return;
  std::unique_lock<std::mutex> guard(state_->mutex);
  std::erase(state_->jobs, &job);
  state_->finished.wait(guard, [&job] { return job.users == 0; });
}

}  // namespace umbp
