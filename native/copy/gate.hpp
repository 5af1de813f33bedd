// Which objects of a batch may be copied, whoever moves the bytes: the core's threads or a device.
#pragma once

#include "copy/checksum.hpp"
#include "copy/engine.hpp"
#include "pool/objects.hpp"

namespace umbp {

// One call's look at one segment. Reads of slots that this process holds need no lock: nobody else changes
// them while they are held. SegmentError where the segment is damaged.
class Gate {
 public:
  Gate(const Runs& runs, Segment& segment) : runs_(runs), segment_(segment), objects_(segment) {}

  // Whether this block may be gathered into the slot that the ticket reserves; `object` is set if so, and
  // says all that is needed of the slot from then on.
  CopyStatus store(i64 block, u64 ticket, Place& object) const {
    const u32 slot = ticket_slot(ticket);
    if (!objects_.names(ticket, SlotState::reserved) ||
        word_owner(objects_.word(slot)) != segment_.process_slot())
      return CopyStatus::bad_ticket;
    return place(block, slot, object);
  }

  // Whether the pinned object may be scattered into this block; `object` is set if so, and `compares` where
  // its bytes have to be compared with their checksum: all of them, or those that nobody has compared yet.
  CopyStatus load(i64 block, u64 ticket, bool checksum, Place& object, bool& compares) const {
    const u32 slot = ticket_slot(ticket);
    if (!objects_.names(ticket, SlotState::published) && !objects_.names(ticket, SlotState::doomed))
      return CopyStatus::bad_ticket;
    if (segment_.my_pin(slot).load(std::memory_order_acquire) == 0) return CopyStatus::bad_ticket;
    Place found{};
    if (CopyStatus status = place(block, slot, found); status != CopyStatus::ok) return status;
    // Slots say themselves whose bytes they hold: damage to the tables is no reason to hand out another's.
    const Trailer& trailer = found.trailer();
    const u64 mark = trailer.seen_mark();
    if (trailer.magic != kTrailerMagic || mark_generation(mark) != ticket_generation(ticket) ||
        trailer.key != segment_.record(slot).digest)
      return CopyStatus::bad_checksum;
    const u32 flags = mark_flags(mark);
    compares = checksum || (flags & kIsUnread);
    if (compares && !(flags & kHasChecksum)) return CopyStatus::bad_checksum;
    object = found;
    return CopyStatus::ok;
  }

  // What a load's comparison says, of the checksum of the bytes that it has read.
  CopyStatus compare(const Place& object, u64 checksum) const {
    Trailer& trailer = object.trailer();
    // Should the slot become another object's at this very moment, which only happens to a process that was
    // taken for dead, that one has another generation and keeps its flag.
    u64 mark = trailer.seen_mark();
    const bool is_first = mark_flags(mark) & kIsUnread;
    if (trailer.checksum != checksum) return is_first ? CopyStatus::bad_arrival : CopyStatus::bad_checksum;
    if (is_first && is_still_ours())
      __atomic_compare_exchange_n(&trailer.mark, &mark, mark & ~make_mark(0, kIsUnread), false,
                                  __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return CopyStatus::ok;
  }
  u64 checksum_in(const Place& object) const { return checksum_of(object.payload, runs_.object_bytes); }

  // Adds the checksum of a stored object's bytes.
  void add_checksum(const Place& object) const { set_checksum(object, checksum_in(object)); }
  static void set_checksum(const Place& object, u64 checksum) {
    Trailer& trailer = object.trailer();
    trailer.checksum = checksum;
    trailer.mark |= make_mark(0, kHasChecksum);
  }

  // Asked after a load: should this process have been taken for dead meanwhile, the slot may have got another
  // object.
  bool is_still_ours() const {
    ordered();
    return !segment_.is_expelled();
  }

 private:
  CopyStatus place(i64 block, u32 slot, Place& object) const {
    if (block < 0 || block >= runs_.block_count) return CopyStatus::bad_block;
    const Place place = segment_.place(slot);
    if (size_length(segment_.record(slot).size) != runs_.object_bytes ||
        runs_.object_bytes > place.payload_limit())
      return CopyStatus::bad_length;
    object = place;
    return CopyStatus::ok;
  }

  const Runs& runs_;
  Segment& segment_;
  Objects objects_;
};

}  // namespace umbp
