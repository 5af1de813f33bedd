// The segment's format: what lies where, and which of it is truth.
//
//   header | processes | namespaces | classes | slabs | ring | hazard | index | slot records | pin rows |
//   arena
//
// Truth, from which everything else is rebuilt after a crash: a slab's slot_bytes; a slot record's state word
// with the fields that it vouches for; the pin rows of living processes; namespace names, epochs and quotas;
// who is resizing. Derived: the index, free lists, eviction order links, child links, counts, uses. Neither:
// what the hazard policy has learned (hazard.hpp), which is kept where it can be true and never decides what
// may be read.
//
// A slot: the payload | its seal | room | its trailer. The trailer is this pool's own note, at the slot's
// end, in digests that mean nothing elsewhere. The seal lies directly behind the payload, so that both leave
// the pool as one range, and means the same on every host (copy/seal.hpp).
//
// The file is as long as the pool may ever become (max_bytes); slabs that are absent have no memory. So a
// pool grows and shrinks slab by slab, and nobody who is attached has to map anything anew.
//
// Lock-free readers read the index (and namespace epochs) and nothing else.
#pragma once

#include "pool/base.hpp"
#include "pool/digest.hpp"

namespace umbp {

constexpr u32 kNil = 0xffffffffu;
constexpr u64 kMagic = 0x4c4f4f5050424d55ull;       // "UMBPPOOL"
constexpr u64 kTrailerMagic = 0x314c4941525450ull;  // "PTRAIL1"
constexpr u32 kFormatVersion = 4;
constexpr u64 kPageBytes = 4096;
constexpr u32 kProcessLimit = 64;
constexpr u32 kNamespaceLimit = 1024;
constexpr u32 kNamespaceNameBytes = 192;  // of longer names the head; a namespace is known by its digest
constexpr u32 kNoGroup = 0xffffffffu;
constexpr u32 kClassLimit = 256;
constexpr u64 kRingEntries = 65536;
constexpr u64 kSealBytes = 64, kTrailerBytes = 64;
constexpr u64 kSlotOverheadBytes = kSealBytes + kTrailerBytes;  // what a slot has beside the payload
constexpr u32 kTicksPerSecond = 4;  // of the eviction policy's time, which runs since boot
constexpr u64 kMaxBytes = 1ull << 50;
constexpr u64 kMaxObjectBytes = 1ull << 39, kMaxObjectTokens = 1ull << 23;
constexpr i64 kLockBase = 1ll << 60;  // byte locks live far behind the file's end

inline u64 round_up(u64 value, u64 unit) {
  return (value + unit - 1) / unit * unit;
}
inline u64 slot_bytes_for(u64 object_bytes) {
  return round_up(object_bytes + kSlotOverheadBytes, kPageBytes);
}

enum class EvictionPolicy : u64 { lru = 0, hazard = 1 };

enum class SegmentState : u32 { initialising = 0, ready = 1, destroyed = 2 };

// Everything that fixes where things lie. The last fields follow from the first four; an attacher computes
// them afresh and compares, so a damaged field is found by name.
// clang-format off
#define UMBP_GEOMETRY_FIELDS(X)                                                                  \
  X(max_bytes) X(slab_bytes) X(min_object_bytes) X(eviction_policy) X(slab_count)                \
  X(slots_per_slab) X(max_slots) X(index_entries) X(ghosts) X(processes_at) X(namespaces_at)     \
  X(classes_at) X(slabs_at) X(ring_at) X(hazard_at) X(index_at) X(records_at) X(pins_at)         \
  X(pin_row_bytes) X(arena_at) X(total_bytes)
// clang-format on

struct Geometry {
#define X(name) u64 name = 0;
  UMBP_GEOMETRY_FIELDS(X)
#undef X
  // Throws ConfigError with one sentence if the four can't make a pool.
  static Geometry make(u64 max_bytes, u64 slab_bytes, u64 min_object_bytes, u64 eviction_policy);
  u64 slots_in_slab(u64 slot_bytes) const { return slab_bytes / slot_bytes; }
  // All that a pool of `slabs` slabs may come to use with `processes` attached: metadata in full and the
  // arena.
  u64 reserved_bytes(u64 slabs, u64 processes) const;
};

struct alignas(64) Header {
  // Fixed at creation.
  u64 magic;
  u32 version;
  u32 header_bytes;
  Geometry geometry;
  u64 hash_seed;
  u64 pool_id[2];
  u32 owner_uid;
  u32 process_limit;
  u32 high_ppm, low_ppm;
  u32 group_gid;  // whose members may attach; kNoGroup: the owner alone
  u64 created_s;  // since the epoch, for people
  u64 checksum;   // of all bytes before it

  alignas(64) std::atomic<u32> state;
  // Each hot word has a cache line of its own: lookups read `moves`, everybody fights for `lock`.
  alignas(64) std::atomic<u32> lock;
  std::atomic<u32>
      dirty;  // set while the lock holder changes things; found set, everything derived is rebuilt
  alignas(64) std::atomic<u64> moves;      // odd while index entries move
  alignas(64) std::atomic<u64> ring_head;  // digests ever removed
  alignas(64) u64 clock;                   // touch stamps
  u32 call_id, plan_id;                    // tags for per-call and per-plan marks in slot records
  u32 free_slab_head, class_count;
  u32 draining;   // evicting from the high watermark down to the low one
  u32 slab_hand;  // where the next look for a cold slab begins
  Shown<u64> free_slabs, present_slabs, used_bytes, objects;
  u64 index_used;
  // The lock word of the process that is resizing the pool; 0: nobody.
  std::atomic<u32> resizer;
  alignas(64) std::atomic<u64> evicted;
  std::atomic<u64> removed_orphans, reserved_total, published_total, abandoned_total, not_now, takeovers,
      rebuilds, reaped, full, slab_moves, cleared, acquired_hits, acquired_misses, evicted_bytes,
      evicted_tokens;
  std::atomic<u64> next_reap_ns;  // when somebody is to look for the dead again; 0: at once
};
static_assert(sizeof(Header) <= kPageBytes);

// What a place's in_use says. Who is being reaped may have been taken for dead while it lived: it is shut out
// before the first of its pins is returned, so that it adds none behind the reaper.
constexpr u32 kPlaceFree = 0, kPlaceTaken = 1, kPlaceReaped = 2;

struct alignas(64) Process {
  std::atomic<u32> generation;  // of the attachment; 24 bits are used
  std::atomic<u32> in_use;
  std::atomic<u32> pid;
  u32 uid;
  std::atomic<u32> size_holds;  // above 0: the pool may not be resized as long as this process lives
  u64 attached_ns;
  u64 returned_slots;  // how far into its row its reapers have got
};

struct alignas(256) Namespace {
  Shown<u64> used_bytes;
  Shown<u64> quota_bytes;  // ~0: none
  Shown<u64> objects;
  std::atomic<u32> epoch;  // 0: the entry is free
  Shown<u32> swept_epoch;  // differs from epoch while a clear() still has objects to drop
  u32 young, old;          // its evictable objects by last use
  Digest digest;
  char name[kNamespaceNameBytes];
};
static_assert(sizeof(Namespace) == 256);

// One end of a list of evictable slots to the other, linked through their records.
struct Order {
  u32 young, old, count;
};

struct alignas(64) Class {
  u64 slot_bytes;  // 0: the entry is free
  u32 slabs, partial_head;
  u64 free_slots;
  Order order;  // under leaf-first LRU; the hazard policy has orders of its own
  u32 call;     // the reserve call that last asked for it: not to be replaced within it
};

// What a slab's slot_bytes says while it isn't a size.
constexpr u64 kSlabFree = 0;
constexpr u64 kSlabAbsent = 1;  // no memory
constexpr u64 kSlabMoving = 2;  // nothing in it; its memory is just being taken or given back

struct alignas(64) Slab {
  std::atomic<u64> slot_bytes;  // truth
  u64 touched;                  // newest stamp of its objects
  u32 klass, used;
  Shown<u32> pinned;
  u32 fresh;                  // slots from here on were never used since it joined its class
  u32 free_head, prev, next;  // partial list of its class, or the list of free slabs
  u32 backed;                 // slot records that have memory
  u32 call;                   // the reserve call that last spared one of its objects
  u32 closed;                 // hands out no more slots: it is being emptied for a smaller pool
};

struct RingEntry {
  std::atomic<u64> low, high;
};

struct IndexEntry {
  std::atomic<u64> low, high;
  std::atomic<u64> ref;  // slot(32) | generation(31) | published(1); 0: empty
  std::atomic<u64> aux;  // namespace(32) | epoch(32)
};

enum class SlotState : u8 {
  free = 0,
  reserved = 1,
  published = 2,
  doomed = 3
};  // doomed: removed, still pinned

// What the hazard policy remembers of a block, stored or not.
struct History {
  u32 born;      // tick of its last use: its age counts from here
  u8 group;      // its class
  u8 uses;       // requests that had it, up to 255
  u8 branches;   // distinct children that requests ever gave it, up to 255
  u8 turn;       // of the newest prompt that ended with it; 0: none
  u16 known[2];  // the first two children, by 16 bits of their digests; 0: none
};
static_assert(sizeof(History) == 12);

struct alignas(128) SlotRecord {
  std::atomic<u64> word;  // generation(32) | state(8) | owner(8)
  Digest digest;
  u64 parent;  // slot(32) | generation(32); stale once that slot has another generation; 0: none
  u64 size;    // tokens(24) | length(40): of the payload, and what it counts for in evicted_tokens
  u64 stamp;
  u32 ns, epoch;
  u32 pins, children;
  // derived
  alignas(64) u32 lru_prev;  // younger
  u32 lru_next;              // older
  u32 first_child, next_sibling, prev_sibling, next_free;
  u32 call;                              // marked by this reserve call: not to be evicted for it
  u32 plan, plan_seen;                   // chosen, or looked through, by this eviction plan
  u32 plan_children_tag, plan_children;  // children chosen by that plan
  u32 own_prev, own_next;                // its namespace's order
  History history;
};
static_assert(sizeof(SlotRecord) == 128);

constexpr u32 kHasChecksum = 1;  // of the payload, as it was stored or as its seal says
constexpr u32 kIsUnread = 2;     // the payload came from elsewhere, and nobody has compared it yet

struct Trailer {
  Digest ns, key;
  u64 length;
  u64 mark;  // flags(32) | generation(32): one word, as flags may change while others read
  u64 checksum;
  u64 magic;

  u64 seen_mark() const { return __atomic_load_n(&mark, __ATOMIC_RELAXED); }
};
static_assert(sizeof(Trailer) == kTrailerBytes);

inline u64 make_mark(u32 generation, u32 flags) {
  return u64(flags) << 32 | generation;
}
inline u32 mark_generation(u64 mark) {
  return u32(mark);
}
inline u32 mark_flags(u64 mark) {
  return u32(mark >> 32);
}

inline u64 make_word(u32 generation, SlotState state, u32 owner) {
  return u64(generation) << 32 | u64(state) << 8 | owner;
}
inline u32 word_generation(u64 word) {
  return u32(word >> 32);
}
inline SlotState word_state(u64 word) {
  return SlotState(u8(word >> 8));
}
inline u32 word_owner(u64 word) {
  return u8(word);
}

inline u64 make_size(u64 length, u64 tokens) {
  return tokens << 40 | length;
}
inline u64 size_length(u64 size) {
  return size & ((1ull << 40) - 1);
}
inline u64 size_tokens(u64 size) {
  return size >> 40;
}

inline u64 make_ticket(u32 slot, u32 generation) {
  return u64(slot) << 32 | generation;
}
inline u32 ticket_slot(u64 ticket) {
  return u32(ticket >> 32);
}
inline u32 ticket_generation(u64 ticket) {
  return u32(ticket);
}

inline u64 make_ref(u32 slot, u32 generation, bool published) {
  return u64(slot) << 32 | u64(generation) << 1 | u64(published);
}
inline u32 ref_slot(u64 ref) {
  return u32(ref >> 32);
}
inline u32 ref_generation(u64 ref) {
  return u32(ref) >> 1;
}
inline u32 next_generation(u32 generation) {
  return (generation & 0x7fffffffu) == 0x7fffffffu ? 1 : generation + 1;
}

u64 header_checksum(const Header& header);

// Checks a copied header against the file that it came from; throws SegmentError naming what is wrong.
void check_header(const Header& header, u64 file_bytes, u32 file_uid, const std::string& where);

}  // namespace umbp
