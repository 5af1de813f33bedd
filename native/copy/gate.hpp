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

  // Whether the pinned object may be scattered into this block; `object` is set if so.
  CopyStatus load(i64 block, u64 ticket, bool checksum, Place& object) const {
    const u32 slot = ticket_slot(ticket);
    if (!objects_.names(ticket, SlotState::published) && !objects_.names(ticket, SlotState::doomed))
      return CopyStatus::bad_ticket;
    if (segment_.my_pin(slot).load(std::memory_order_acquire) == 0) return CopyStatus::bad_ticket;
    Place found{};
    if (CopyStatus status = place(block, slot, found); status != CopyStatus::ok) return status;
    // Slots say themselves whose bytes they hold: damage to the tables is no reason to hand out another's.
    const Trailer& trailer = found.trailer();
    if (trailer.magic != kTrailerMagic || trailer.generation != ticket_generation(ticket) ||
        trailer.key != segment_.record(slot).digest)
      return CopyStatus::bad_checksum;
    if (checksum &&
        (!(trailer.flags & 1) || trailer.checksum != checksum_of(found.payload, runs_.object_bytes)))
      return CopyStatus::bad_checksum;
    object = found;
    return CopyStatus::ok;
  }

  // Adds the checksum of a stored object's bytes.
  void add_checksum(const Place& object) const {
    set_checksum(object, checksum_of(object.payload, runs_.object_bytes));
  }
  static void set_checksum(const Place& object, u64 checksum) {
    Trailer& trailer = object.trailer();
    trailer.checksum = checksum;
    trailer.flags |= 1;
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
