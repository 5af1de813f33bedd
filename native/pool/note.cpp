#include "pool/note.hpp"

#include <algorithm>

namespace umbp {

void RequestNote::find(Objects& objects, std::size_t from, std::size_t count) {
  for (std::size_t i = from; i < from + count; i++) {
    objects.index.prefetch_home(chain_[i]);
    objects.hazard->prefetch_ghost(chain_[i]);
  }
  for (std::size_t i = 0; i < count; i++) {
    const i64 at = objects.index.find(chain_[from + i]);
    Block& block = found_[i];
    block.slot = at < 0 ? kNil : ref_slot(objects.index.ref(at));
    if (block.slot == kNil) continue;
    prefetch(&objects.s.record(block.slot));
    prefetch(&objects.s.record(block.slot).history);
  }
  for (std::size_t i = 0; i < count; i++) {
    Block& block = found_[i];
    block.history =
        block.slot != kNil ? &objects.s.record(block.slot).history : objects.hazard->ghost(chain_[from + i]);
  }
}

// A marked block with many children is where requests part, not where a conversation went on. The end of a
// request looks for the mark that its own beginning has set.
bool RequestNote::find_turn(Objects& objects, std::size_t from, std::size_t count) {
  find(objects, from, count);
  for (std::size_t i = count; i-- > 0;) {
    const History* history = found_[i].history;
    if (!history || history->turn == 0 || (!is_end_ && history->branches >= kBranching)) continue;
    turn_ = is_end_ ? history->turn : std::min(history->turn + 1u, 255u);
    return true;
  }
  return false;
}

void RequestNote::apply(Objects& objects, std::size_t from, std::size_t count, Outcome* outcomes) {
  find(objects, from, count);
  for (std::size_t i = count; i-- > 0;) {
    Block& block = found_[i];
    const bool is_stored = block.slot != kNil && objects.state(block.slot) == SlotState::published;
    outcomes[from + i] = is_stored ? Outcome::touched : Outcome::miss;
    // A ghost that this batch has made may have taken the place of one that was found before.
    if (block.slot == kNil) block.history = objects.hazard->ghost(chain_[from + i]);
    apply_one(objects, from + i, block);
    crash_point();
  }
}

void RequestNote::apply_one(Objects& objects, std::size_t i, const Block& block) {
  Hazard& hazard = *objects.hazard;
  History* history = block.history;
  const bool was_unknown = !history || history->uses == 0;
  if (!history) {
    if (is_end_) return;  // generated, and not stored
    history = &hazard.remember(chain_[i], hazard.fresh());
  }
  const bool is_in_order = block.slot != kNil && objects.state(block.slot) == SlotState::published &&
                           objects.s.record(block.slot).pins == 0;
  if (is_in_order) objects.leave_orders(block.slot);
  if (is_end_) {
    history->uses = std::max<u8>(history->uses, 1);
  } else {
    hazard.use(*history);
    if (i + 1 < chain_.size())
      Hazard::branch(*history, chain_[i + 1], is_child_new_);
    else
      history->turn = u8(turn_);
    is_child_new_ = was_unknown;
  }
  hazard.move(*history, Hazard::group_of(*history, turn_, answer_), hazard.now());
  if (is_in_order) objects.enter_orders(block.slot);
}

}  // namespace umbp
