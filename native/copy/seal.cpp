#include "copy/seal.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "copy/checksum.hpp"
#include "pool/objects.hpp"

namespace umbp {

static_assert(std::endian::native == std::endian::little, "seals are little-endian");

namespace {

constexpr u64 kSealMagic = 0x4c41455350424d55ull;  // "UMBPSEAL"
constexpr u32 kSealVersion = 1;
constexpr u32 kHasPayloadChecksum = 1;
constexpr u64 kNoSeed = 0;

u64 checksum_of_seal(const Seal& seal) {
  return checksum_of(&seal, offsetof(Seal, checksum));
}

// Byte by byte, at any address: others may be writing the same bytes at this moment.
void write_seal(std::byte* at, const Seal& seal) {
  const u8* from = reinterpret_cast<const u8*>(&seal);
  for (u64 i = 0; i < kSealBytes; i++)
    __atomic_store_n(reinterpret_cast<u8*>(at) + i, from[i], __ATOMIC_RELAXED);
}
Seal read_seal(const std::byte* at) {
  Seal seal;
  u8* to = reinterpret_cast<u8*>(&seal);
  for (u64 i = 0; i < kSealBytes; i++)
    to[i] = __atomic_load_n(reinterpret_cast<const u8*>(at) + i, __ATOMIC_RELAXED);
  return seal;
}

struct Held {
  std::byte* payload = nullptr;
  u64 length = 0;
  Trailer* trailer = nullptr;
  bool is_reserved = false;

  std::byte* seal() const { return payload + length; }
};

// One call's look at one segment.
class Seals {
 public:
  explicit Seals(Segment& segment) : segment_(segment), objects_(segment) {}

  bool find(u64 ticket, Held& held) const {
    const u32 slot = ticket_slot(ticket);
    held.is_reserved = objects_.names(ticket, SlotState::reserved);
    const bool is_pinned =
        objects_.names(ticket, SlotState::published) || objects_.names(ticket, SlotState::doomed);
    if (held.is_reserved && word_owner(objects_.word(slot)) != segment_.process_slot()) return false;
    if (!held.is_reserved && !is_pinned) return false;
    if (segment_.my_pin(slot).load(std::memory_order_acquire) == 0) return false;
    const Place place = segment_.place(slot);
    const u64 length = size_length(__atomic_load_n(&segment_.record(slot).size, __ATOMIC_RELAXED));
    if (length == 0 || length > place.payload_limit()) return false;
    held.payload = place.payload;
    held.length = length;
    held.trailer = &place.trailer();
    return true;
  }

  SealStatus seal(u64 ticket, std::string_view key, bool checksum) const {
    Held held;
    if (SealStatus status = open(ticket, key, held); status != SealStatus::ok) return status;
    Seal seal{kSealMagic, kSealVersion, 0, held.length, digest_of(key, kNoSeed), 0, 0, 0};
    const u32 flags = mark_flags(held.trailer->seen_mark());
    // What nobody has compared yet keeps its checksum: without it damage would leave as sound.
    if (checksum || (flags & kIsUnread)) {
      const bool is_known = flags & kHasChecksum;
      seal.payload_checksum = is_known ? held.trailer->checksum : checksum_of(held.payload, held.length);
      seal.flags = kHasPayloadChecksum;
    }
    seal.checksum = checksum_of_seal(seal);
    if (segment_.is_expelled()) return SealStatus::invalid;  // not ours any more, perhaps
    write_seal(held.seal(), seal);
    return SealStatus::ok;
  }

  SealStatus check(u64 ticket, std::string_view key, bool checksum) const {
    Held held;
    Seal seal;
    if (SealStatus status = read(ticket, key, held, seal); status != SealStatus::ok) return status;
    if (!checksum) return SealStatus::ok;
    if (!(seal.flags & kHasPayloadChecksum)) return SealStatus::bad_checksum;
    if (seal.payload_checksum != checksum_of(held.payload, held.length)) return SealStatus::bad_checksum;
    if (held.is_reserved) set_checksum(held, seal, 0);
    return SealStatus::ok;
  }

  SealStatus adopt(u64 ticket, std::string_view key) const {
    Held held;
    Seal seal;
    if (SealStatus status = read(ticket, key, held, seal); status != SealStatus::ok) return status;
    if (!held.is_reserved) return SealStatus::invalid;
    if (!(seal.flags & kHasPayloadChecksum)) return SealStatus::bad_checksum;
    set_checksum(held, seal, kIsUnread);
    return SealStatus::ok;
  }

  // Had this process been taken for dead meanwhile, its slots may have got other objects.
  void finish(SealStatus* statuses, std::size_t count) const {
    ordered();
    if (segment_.is_expelled()) std::fill(statuses, statuses + count, SealStatus::invalid);
  }

 private:
  // The seal, sound by itself and this key's.
  SealStatus read(u64 ticket, std::string_view key, Held& held, Seal& seal) const {
    if (SealStatus status = open(ticket, key, held); status != SealStatus::ok) return status;
    seal = read_seal(held.seal());
    if (seal.magic != kSealMagic || seal.version != kSealVersion) return SealStatus::no_seal;
    if (seal.checksum != checksum_of_seal(seal)) return SealStatus::bad_checksum;
    if ((seal.flags & ~kHasPayloadChecksum) || seal.zero) return SealStatus::no_seal;
    if (seal.fingerprint != digest_of(key, kNoSeed)) return SealStatus::wrong_key;
    if (seal.length != held.length) return SealStatus::wrong_length;
    return SealStatus::ok;
  }

  static void set_checksum(const Held& held, const Seal& seal, u32 flags) {
    held.trailer->checksum = seal.payload_checksum;
    held.trailer->mark = make_mark(mark_generation(held.trailer->mark), kHasChecksum | flags);
  }

  // Whether the ticket is held and its slot is the key's, by its record and by its trailer.
  SealStatus open(u64 ticket, std::string_view key, Held& held) const {
    if (!find(ticket, held)) return SealStatus::invalid;
    const Digest digest = digest_of(key, segment_.hash_seed());
    if (segment_.record(ticket_slot(ticket)).digest != digest) return SealStatus::wrong_key;
    const Trailer& trailer = *held.trailer;
    const bool agrees = trailer.magic == kTrailerMagic && trailer.key == digest &&
                        trailer.length == held.length &&
                        mark_generation(trailer.seen_mark()) == ticket_generation(ticket);
    return agrees ? SealStatus::ok : SealStatus::invalid;
  }

  Segment& segment_;
  Objects objects_;
};

}  // namespace

void seal_objects(const Pool& pool, std::span<const u64> tickets, std::span<const std::string_view> keys,
                  bool checksum, SealStatus* statuses) {
  auto segment = pool.segment();
  const Seals seals(*segment);
  for (std::size_t i = 0; i < tickets.size(); i++) statuses[i] = seals.seal(tickets[i], keys[i], checksum);
  seals.finish(statuses, tickets.size());
}

void check_seals(const Pool& pool, std::span<const u64> tickets, std::span<const std::string_view> keys,
                 bool checksum, SealStatus* statuses) {
  auto segment = pool.segment();
  const Seals seals(*segment);
  for (std::size_t i = 0; i < tickets.size(); i++) statuses[i] = seals.check(tickets[i], keys[i], checksum);
  seals.finish(statuses, tickets.size());
}

void adopt_seals(const Pool& pool, std::span<const u64> tickets, std::span<const std::string_view> keys,
                 SealStatus* statuses) {
  auto segment = pool.segment();
  const Seals seals(*segment);
  for (std::size_t i = 0; i < tickets.size(); i++) statuses[i] = seals.adopt(tickets[i], keys[i]);
  seals.finish(statuses, tickets.size());
}

void sealed_ranges(const Pool& pool, std::span<const u64> tickets, u64* addresses, u64* lengths) {
  auto segment = pool.segment();
  const Seals seals(*segment);
  for (std::size_t i = 0; i < tickets.size(); i++) {
    Held held;
    const bool is_held = seals.find(tickets[i], held);
    addresses[i] = is_held ? reinterpret_cast<u64>(held.payload) : 0;
    lengths[i] = is_held ? held.length + kSealBytes : 0;
  }
}

}  // namespace umbp
