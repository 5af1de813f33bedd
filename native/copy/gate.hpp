// Which objects of a batch may be copied, whoever moves the bytes: the core's threads or a device.
#pragma once

#include <cstddef>

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
    if (trailer.magic != kTrailerMagic || trailer.generation != ticket_generation(ticket) ||
        trailer.key != segment_.record(slot).digest)
      return CopyStatus::bad_checksum;
    const u32 flags = __atomic_load_n(&trailer.flags, __ATOMIC_RELAXED);
    compares = checksum || (flags & kIsUnread);
    if (compares && !(flags & kHasChecksum)) return CopyStatus::bad_checksum;
    object = found;
    return CopyStatus::ok;
  }

  // What a load's comparison says, of the checksum of the bytes that it has read.
  CopyStatus compare(const Place& object, u64 checksum) const {
    Trailer& trailer = object.trailer();
    // Flags and the generation that they are of, as one: should the slot become another object's at this very
    // moment, which only happens to a process that was taken for dead, that one keeps its mark.
    static_assert(offsetof(Trailer, generation) % 8 == 0 && offsetof(Trailer, flags) % 8 == 4);
    u64* word = reinterpret_cast<u64*>(&trailer.generation);
    u64 seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    constexpr u64 kMark = u64(kIsUnread) << 32;
    if (trailer.checksum != checksum)
      return seen & kMark ? CopyStatus::bad_arrival : CopyStatus::bad_checksum;
    if ((seen & kMark) && is_still_ours())
      __atomic_compare_exchange_n(word, &seen, seen & ~kMark, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return CopyStatus::ok;
  }
  u64 checksum_in(const Place& object) const { return checksum_of(object.payload, runs_.object_bytes); }

  // Adds the checksum of a stored object's bytes.
  void add_checksum(const Place& object) const { set_checksum(object, checksum_in(object)); }
  static void set_checksum(const Place& object, u64 checksum) {
    Trailer& trailer = object.trailer();
    trailer.checksum = checksum;
    trailer.flags |= kHasChecksum;
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
