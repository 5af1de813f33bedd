#include "pool/inspect.hpp"

#include <fcntl.h>

#include <algorithm>

#include "pool/liveness.hpp"
#include "pool/registry.hpp"

namespace umbp {

namespace {

// False where the file ends before.
bool read_all(int fd, void* to, u64 bytes, u64 from) {
  for (u64 done = 0; done < bytes;) {
    const ssize_t got = pread(fd, static_cast<std::byte*>(to) + done, bytes - done, i64(from + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += u64(got);
  }
  return true;
}

template <class T>
std::vector<std::byte> table(int fd, u64 at, u64 count) {
  std::vector<std::byte> bytes(count * sizeof(T));
  if (!read_all(fd, bytes.data(), bytes.size(), at)) bytes.assign(bytes.size(), std::byte{0});
  return bytes;
}

template <class T>
const T& row(const std::vector<std::byte>& bytes, u64 i) {
  return reinterpret_cast<const T*>(bytes.data())[i];
}

u64 pinned_slots(int fd, const Geometry& g, u32 process) {
  const auto pins = table<u16>(fd, g.pins_at + process * g.pin_row_bytes, g.max_slots);
  u64 count = 0;
  for (u64 slot = 0; slot < g.max_slots; slot++) count += row<u16>(pins, slot) != 0;
  return count;
}

// `own_place`: our own byte lock, if we are attached, is one that we can't see.
void report_processes(int fd, const Header& h, u32 own_place, bool in_full, PoolReport& report) {
  const auto processes = table<Process>(fd, h.geometry.processes_at, kProcessLimit);
  for (u32 i = 0; i < kProcessLimit; i++) {
    const Process& p = row<Process>(processes, i);
    if (p.in_use.load() == 0) continue;
    const bool is_alive = i == own_place || other_holds_byte_lock(fd, i);
    report.processes.push_back({i, p.pid.load(), p.uid, is_alive, p.size_holds.load() != 0,
                                in_full ? pinned_slots(fd, h.geometry, i) : 0});
    const u32 resizer = h.resizer.load();
    if (is_alive && resizer != 0 && (resizer & 0x7f) - 1 == i) report.resizing_pid = p.pid.load();
  }
}

void report_tables(int fd, const Header& h, PoolReport& report) {
  const auto classes = table<Class>(fd, h.geometry.classes_at, kClassLimit);
  for (u32 i = 0; i < std::min(h.class_count, kClassLimit); i++) {
    const Class& c = row<Class>(classes, i);
    if (c.slabs) report.classes.push_back({c.slot_bytes, c.slabs, c.free_slots});
  }
  const auto namespaces = table<Namespace>(fd, h.geometry.namespaces_at, kNamespaceLimit);
  for (u32 i = 0; i < kNamespaceLimit; i++) {
    const Namespace& ns = row<Namespace>(namespaces, i);
    if (ns.epoch.load() == 0) break;
    report.namespaces.push_back({std::string(ns.name, strnlen(ns.name, sizeof ns.name)), i, ns.epoch.load(),
                                 ns.used_bytes, ns.quota_bytes, ns.objects});
  }
  // A pool that nobody has locked yet has not counted its slabs.
  const auto slabs = table<Slab>(fd, h.geometry.slabs_at, h.geometry.slab_count);
  u64 present = 0;
  for (u64 i = 0; i < h.geometry.slab_count; i++) {
    const u64 says = row<Slab>(slabs, i).slot_bytes.load();
    present += says != kSlabAbsent && says != kSlabMoving;
    report.free_slabs += says == kSlabFree;
  }
  report.capacity_bytes = present * h.geometry.slab_bytes;
}

void report_header(const Header& h, PoolReport& report) {
  report.group_gid = h.group_gid;
  report.created_s = h.created_s;
  report.max_bytes = h.geometry.max_bytes;
  report.slab_bytes = h.geometry.slab_bytes;
  report.min_object_bytes = h.geometry.min_object_bytes;
  report.eviction_policy = EvictionPolicy(h.geometry.eviction_policy);
  report.high_watermark = h.high_ppm / 1e6;
  report.low_watermark = h.low_ppm / 1e6;
  report.used_bytes = h.used_bytes;
  report.objects = h.objects;
  report.counters = {
      {"hits", h.acquired_hits}, {"misses", h.acquired_misses},   {"stored", h.published_total},
      {"evicted", h.evicted},    {"orphaned", h.removed_orphans}, {"refused_full", h.full},
      {"not_now", h.not_now},    {"slab_moves", h.slab_moves},    {"cleared", h.cleared},
      {"reaped", h.reaped},      {"takeovers", h.takeovers},      {"rebuilds", h.rebuilds}};
}

}  // namespace

PoolReport inspect(const std::string& path, bool in_full) {
  PoolReport report;
  Registry& registry = Registry::get();
  std::shared_ptr<Segment> attached;  // let go after the mutex
  std::unique_lock<std::mutex> guard(registry.mutex);
  struct stat info;
  if (stat(path.c_str(), &info) != 0) throw SegmentError(path + ": " + reason());
  if (!S_ISREG(info.st_mode)) throw SegmentError(path + " isn't a file");
  report.owner_uid = info.st_uid;
  report.mode = info.st_mode & 07777;
  report.file_bytes = u64(info.st_size);
  report.memory_bytes = u64(info.st_blocks) * 512;
  attached = registry.find(id_of(info), guard);
  Descriptor own(attached ? -1 : open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  const int fd = attached ? attached->fd() : own.fd;
  if (fd < 0) {
    report.problem = path + " can't be read: " + reason();
    return report;
  }
  if (!attached && !registry.is_still(own, id_of(info))) {
    report.problem = path + " was replaced while it was being opened; try again";
    return report;
  }
  alignas(Header) std::byte bytes[sizeof(Header)] = {};
  const bool is_whole = read_all(fd, bytes, sizeof bytes, 0);
  const Header& header = *reinterpret_cast<Header*>(bytes);
  report.is_pool = header.magic == kMagic;
  try {
    if (!is_whole) throw SegmentError(path + " can't be attached: it is shorter than a pool's header");
    check_header(header, report.file_bytes, report.owner_uid, path);
  } catch (const SegmentError& error) {
    report.problem = error.what();
    return report;
  }
  report_header(header, report);
  report_tables(fd, header, report);
  report_processes(fd, header, attached ? attached->process_slot() : kProcessLimit, in_full, report);
  return report;
}

}  // namespace umbp
