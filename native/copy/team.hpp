// A few threads that share out a job with the thread that brings it.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "pool/base.hpp"

namespace umbp {

class Team {
 public:
  // `threads` counts the caller's. Helpers run on `cores`, in turn where there are several; empty: wherever
  // the thread that brings a job may run, off its core. What the system refuses is no error: without that
  // core a helper is not bound, without that thread the team is smaller.
  Team(u32 threads, std::vector<u32> cores);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  using Share = std::function<void(std::size_t begin, std::size_t end)>;
  // Calls `work` for shares of [0, count) on this thread and on helpers that are free, and returns when all
  // are done. `work` doesn't throw. Callable from several threads at once.
  void run(std::size_t count, std::size_t share, const Share& work);

  u32 threads() const;
  const std::vector<u32>& cores() const;
  // Jobs at work finish first; none begins after.
  void close();

 private:
  struct State;
  std::unique_ptr<State> state_;
  const u64 fork_epoch_;
};

}  // namespace umbp
