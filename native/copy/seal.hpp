// The seal, 64 bytes directly behind an object's payload: whose bytes these are, for whoever finds them on
// another host. Its layout is fixed (docs/design.md has it as a table) and knows nothing of any pool.
//
// All verbs take the tickets that this process holds, pins and reservations alike, take no lock, and
// stay within the slots that the pool's geometry has, whatever its tables say. SegmentError where those are
// damaged.
#pragma once

#include <span>
#include <string_view>

#include "pool/pool.hpp"

namespace umbp {

enum class SealStatus : u8 {
  ok = 0,
  invalid = 1,       // not held by this process, or its slot's trailer names something else
  no_seal = 2,       // none, or of another version
  wrong_key = 3,     // another key's
  wrong_length = 4,  // of a payload of another length
  bad_checksum = 5,  // damaged, or sealed without the checksum that was asked for
};

struct Seal {
  u64 magic;
  u32 version, flags;  // flag 1: payload_checksum is set
  u64 length;
  Digest fingerprint;  // of the key's text, without a seed
  u64 payload_checksum;
  u64 zero;
  u64 checksum;  // of all bytes before it
};
static_assert(sizeof(Seal) == kSealBytes);

// Writes the seals of objects that are complete: ok, wrong_key (the ticket is another key's), invalid. Where
// the trailer has the payload's checksum the seal repeats it, so damage since then isn't sealed as sound. Two
// processes may seal one object at once: they write the same.
void seal_objects(const Pool& pool, std::span<const u64> tickets, std::span<const std::string_view> keys,
                  bool checksum, SealStatus* statuses);

// Whether payload and seal are this key's, and sound. The checksum of a reservation that is found sound goes
// to its trailer: it counts as stored with one.
void check_seals(const Pool& pool, std::span<const u64> tickets, std::span<const std::string_view> keys,
                 bool checksum, SealStatus* statuses);

// For reservations whose payload and seal have come from elsewhere: whether the seal is this key's, and says
// a checksum. The payload isn't read: whoever loads it first compares it.
void adopt_seals(const Pool& pool, std::span<const u64> tickets, std::span<const std::string_view> keys,
                 SealStatus* statuses);

// Where payload and seal lie as one range; 0 for what isn't held.
void sealed_ranges(const Pool& pool, std::span<const u64> tickets, u64* addresses, u64* lengths);

}  // namespace umbp
