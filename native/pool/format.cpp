#include "pool/format.hpp"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>

#include "pool/hazard.hpp"

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace umbp {

static u64 clock_ns(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return u64(now.tv_sec) * 1000000000ull + u64(now.tv_nsec);
}

u64 monotonic_ns() {
  return clock_ns(CLOCK_MONOTONIC);
}

u64 coarse_monotonic_ns() {
  return clock_ns(CLOCK_MONOTONIC_COARSE);
}

u64 processor_ns() {
  return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

std::atomic<bool> crash_armed{false};
static std::atomic<u64> crash_countdown{0};
static std::atomic<bool> crash_stops{false};
static std::atomic<int> crash_report_fd{-1};

void arm_crash_point(u64 countdown, bool stop, int report_fd) {
  crash_countdown = countdown;
  crash_stops = stop;
  crash_report_fd = report_fd;
  crash_armed = countdown > 0;
}

void crash_point_reached(std::source_location place) {
  if (crash_countdown.fetch_sub(1) != 1) return;
  crash_armed = false;
  if (crash_report_fd >= 0) {
    std::string_view file = place.file_name();
    file.remove_prefix(file.rfind('/') + 1);
    dprintf(crash_report_fd, "%.*s:%u\n", int(file.size()), file.data(), place.line());
  }
  kill(getpid(), crash_stops ? SIGSTOP : SIGKILL);
}

Digest digest_of(std::string_view key, u64 seed) {
  XXH128_hash_t h = XXH3_128bits_withSeed(key.data(), key.size(), seed);
  return {h.low64, h.high64};
}

// Both digits of a byte at a time.
static constexpr std::array<std::array<char, 2>, 256> kHexOfByte = [] {
  std::array<std::array<char, 2>, 256> table{};
  for (std::size_t byte = 0; byte < 256; byte++)
    table[byte] = {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
  return table;
}();

Digest RawHasher::operator()(std::string_view hash) {
  text_.resize(prefix_ + 2 * hash.size());
  char* out = text_.data() + prefix_;
  for (unsigned char byte : hash) {
    std::memcpy(out, kHexOfByte[byte].data(), 2);
    out += 2;
  }
  return digest_of(text_, seed_);
}

Geometry Geometry::make(u64 max_bytes, u64 slab_bytes, u64 min_object_bytes, u64 eviction_policy) {
  if (min_object_bytes == 0 || min_object_bytes > kMaxBytes)
    throw ConfigError("min_object_bytes must be between 1 and 2**50, not " +
                      std::to_string(min_object_bytes));
  if (slab_bytes == 0 || slab_bytes % kPageBytes || slab_bytes > kMaxBytes)
    throw ConfigError("slab_bytes must be a positive multiple of 4096, not " + std::to_string(slab_bytes));
  if (max_bytes < slab_bytes || max_bytes > kMaxBytes)
    throw ConfigError("a pool's size must be between one slab (" + std::to_string(slab_bytes) +
                      " bytes) and 2**50, not " + std::to_string(max_bytes));
  if (slot_bytes_for(min_object_bytes) > slab_bytes)
    throw ConfigError("an object of min_object_bytes=" + std::to_string(min_object_bytes) +
                      " and the 128 bytes of its seal and trailer don't fit a slab of " +
                      std::to_string(slab_bytes) + " bytes");
  if (eviction_policy > u64(EvictionPolicy::hazard))
    throw ConfigError("no eviction policy has the number " + std::to_string(eviction_policy));
  Geometry g;
  g.slab_count = max_bytes / slab_bytes;
  g.max_bytes = g.slab_count * slab_bytes;
  g.slab_bytes = slab_bytes;
  g.min_object_bytes = min_object_bytes;
  g.eviction_policy = eviction_policy;
  g.slots_per_slab = slab_bytes / slot_bytes_for(min_object_bytes);
  g.max_slots = g.slab_count * g.slots_per_slab;
  if (g.max_slots >= kNil)
    throw ConfigError("a pool of up to " + std::to_string(max_bytes) +
                      " bytes with min_object_bytes=" + std::to_string(min_object_bytes) +
                      " makes more than 2**32 slots; raise min_object_bytes");
  g.index_entries = round_up(2 * g.max_slots, kPageBytes / sizeof(IndexEntry));
  const bool learns = eviction_policy == u64(EvictionPolicy::hazard);
  g.ghosts = learns ? ghosts_for(g.max_slots) : 0;
  g.pin_row_bytes = round_up(2 * g.max_slots, kPageBytes);
  u64 at = kPageBytes;
  auto place = [&at](u64 bytes) {
    u64 here = at;
    at += round_up(bytes, kPageBytes);
    return here;
  };
  g.processes_at = place(kProcessLimit * sizeof(Process));
  g.namespaces_at = place(kNamespaceLimit * sizeof(Namespace));
  g.classes_at = place(kClassLimit * sizeof(Class));
  g.slabs_at = place(g.slab_count * sizeof(Slab));
  g.ring_at = place(kRingEntries * sizeof(RingEntry));
  g.hazard_at = place(learns ? hazard_bytes(g.ghosts) : 0);
  g.index_at = place(g.index_entries * sizeof(IndexEntry));
  g.records_at = place(g.max_slots * sizeof(SlotRecord));
  g.pins_at = place(kProcessLimit * g.pin_row_bytes);
  at = round_up(at, 2u << 20);  // huge pages need it, and a hole costs nothing
  g.arena_at = at;
  g.total_bytes = at + g.max_bytes;
  return g;
}

u64 Geometry::reserved_bytes(u64 slabs, u64 processes) const {
  return records_at + slabs * slots_per_slab * sizeof(SlotRecord) + processes * pin_row_bytes +
         slabs * slab_bytes;
}

u64 header_checksum(const Header& header) {
  return XXH3_64bits(&header, offsetof(Header, checksum));
}

void check_header(const Header& header, u64 file_bytes, u32 file_uid, const std::string& where) {
  auto refuse = [&where](const std::string& why) -> void {
    throw SegmentError(where + " can't be attached: " + why);
  };
  if (header.magic != kMagic) refuse("it isn't a UMBP pool");
  if (header.version != kFormatVersion || header.header_bytes != sizeof(Header))
    refuse("it has pool format " + std::to_string(header.version) + ", this package reads format " +
           std::to_string(kFormatVersion) + "; destroy it, or use it with the version that made it");
  auto state = SegmentState(header.state.load());
  if (state == SegmentState::initialising)
    refuse("its creator hasn't finished making it; if that process is gone, delete it");
  if (state == SegmentState::destroyed) refuse("it has been destroyed by its owner");
  if (state != SegmentState::ready) refuse("its header is damaged (state)");
  Geometry want;
  try {
    want = Geometry::make(header.geometry.max_bytes, header.geometry.slab_bytes,
                          header.geometry.min_object_bytes, header.geometry.eviction_policy);
  } catch (const ConfigError& error) {
    refuse(std::string("its header is damaged (") + error.what() + ")");
  }
#define X(name) \
  if (header.geometry.name != want.name) refuse("its header is damaged (" #name ")");
  UMBP_GEOMETRY_FIELDS(X)
#undef X
  if (header.process_limit != kProcessLimit) refuse("its header is damaged (process_limit)");
  if (header.owner_uid != file_uid) refuse("its header names another owner than its file (owner_uid)");
  if (header.low_ppm == 0 || header.low_ppm > header.high_ppm || header.high_ppm > 1000000)
    refuse("its header is damaged (watermarks)");
  if (header.checksum != header_checksum(header)) refuse("its header is damaged (checksum)");
  if (want.total_bytes != file_bytes)
    refuse("its file has " + std::to_string(file_bytes) + " bytes where its header says " +
           std::to_string(want.total_bytes));
}

}  // namespace umbp
