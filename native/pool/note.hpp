// What the scheduler tells about one request: that it begins, with its chain of blocks, and how it ended.
#pragma once

#include <span>

#include "pool/objects.hpp"
#include "pool/pool.hpp"

namespace umbp {

// One note under the hazard policy, batch after batch under the lock, from the leaf to the root. First the
// deepest mark is looked for (the turn), then the blocks are taken in.
class RequestNote {
 public:
  RequestNote(std::span<const Digest> chain, bool is_end, Answer answer)
      : chain_(chain), is_end_(is_end), answer_(answer) {}

  // Looks for the mark of an earlier prompt in a batch; true if there is no need to look further.
  bool find_turn(Objects& objects, std::size_t from, std::size_t count);
  // Uses a batch's blocks (at the end of a request: groups them anew), the deepest first.
  void apply(Objects& objects, std::size_t from, std::size_t count, Outcome* outcomes);

 private:
  struct Block {
    u32 slot;          // kNil: not stored
    History* history;  // null: nothing is known of it
  };
  void find(Objects& objects, std::size_t from, std::size_t count);
  void apply_one(Objects& objects, std::size_t i, const Block& block);

  const std::span<const Digest> chain_;
  const bool is_end_;
  const Answer answer_;
  u32 turn_ = 1;
  bool is_child_new_ = false;
  Block found_[Pool::kBatch];
};

}  // namespace umbp
