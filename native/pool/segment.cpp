#include "pool/segment.hpp"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "pool/liveness.hpp"
#include "pool/reap.hpp"
#include "pool/registry.hpp"

namespace umbp {

static std::atomic<u64> forks{0};

static bool watch_forks() {
  auto before = [] { Registry::get().mutex.lock(); };
  auto in_parent = [] { Registry::get().mutex.unlock(); };
  auto in_child = [] {
    forks.fetch_add(1);
    Registry::get().segments.clear();  // the parent's; the child attaches afresh
    Registry::get().mutex.unlock();
  };
  pthread_atfork(before, in_parent, in_child);
  return true;
}

u64 fork_epoch() {
  static const bool is_watching = watch_forks();
  return is_watching ? forks.load(std::memory_order_relaxed) : 0;
}

void Segment::damaged() {
  throw SegmentError("the pool is damaged: an index in it lies outside its tables");
}

void Segment::refuse_after_fork() const {
  if (__builtin_expect(fork_epoch_ != fork_epoch(), 0))
    throw SegmentError(
        "this pool was attached before a fork; a child process must attach it again by its handle");
}

static u32 clock_tick() {
  return u32(monotonic_ns() / (1000000000ull / kTicksPerSecond));
}

u32 Segment::tick() const {
  const u32 set = set_tick_.load(std::memory_order_relaxed);
  return set ? set : clock_tick();
}

void Segment::set_time(double seconds) {
  constexpr u32 kZeroUnit = 1u << 27;  // four years
  const u64 zero = round_up(clock_tick() + 1ull, kZeroUnit);
  set_tick_.store(u32(zero + u64(std::max(seconds, 0.0) * kTicksPerSecond)), std::memory_order_relaxed);
}

u64 Segment::slab_slot_bytes(u32 slab_index) const {
  u64 bytes = slab(slab_index).slot_bytes.load(std::memory_order_relaxed);
  if (bytes <= kSlabMoving) return 0;
  if (bytes % kPageBytes || bytes > geometry_.slab_bytes ||
      bytes < slot_bytes_for(geometry_.min_object_bytes))
    damaged();
  return bytes;
}

Place Segment::place(u32 slot) const {
  u32 slab_index = slab_of(slot);
  u64 bytes = slab_slot_bytes(slab_index);
  u64 position = slot - u64(slab_index) * geometry_.slots_per_slab;
  if (bytes == 0 || position >= geometry_.slots_in_slab(bytes)) damaged();
  return {base_ + geometry_.arena_at + slab_index * geometry_.slab_bytes + position * bytes, bytes};
}

u64 Segment::pinned_slots() const {
  auto row =
      reinterpret_cast<const u64*>(base_ + geometry_.pins_at + process_slot_ * geometry_.pin_row_bytes);
  u64 count = 0;
  for (u64 i = 0; i < geometry_.pin_row_bytes / sizeof(u64); i++)
    for (u64 four = __atomic_load_n(row + i, __ATOMIC_RELAXED); four; four >>= 16)
      count += (four & 0xffff) != 0;
  return count;
}

bool Segment::back_range(u64 offset, u64 bytes) const {
  u64 first = offset / kPageBytes * kPageBytes;
  while (fallocate(fd_, 0, i64(first), i64(round_up(offset + bytes, kPageBytes) - first)) != 0)
    if (errno != EINTR) return false;
  return true;
}

bool Segment::unback_range(u64 offset, u64 bytes) const {
  while (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, i64(offset), i64(bytes)) != 0)
    if (errno != EINTR) return false;
  return true;
}

bool Segment::is_replaced(u64 interval_ns) const {
  if (path_.empty()) return false;
  const u64 now = monotonic_ns();
  u64 looked = looked_at_ns_.load(std::memory_order_relaxed);
  const bool is_due = looked == 0 || now - looked >= interval_ns;
  if (is_due && looked_at_ns_.compare_exchange_strong(looked, now, std::memory_order_relaxed)) {
    struct stat info;
    // A path that can't be examined at all says nothing about the pool.
    const bool is_there = stat(path_.c_str(), &info) == 0;
    const bool is_gone = !is_there && (errno == ENOENT || errno == ENOTDIR);
    was_replaced_ = is_gone || (is_there && id_of(info) != id_);
  }
  return was_replaced_;
}

static MemoryFacts reserve_memory(int fd, const Geometry& geometry, u64 capacity_bytes,
                                  const CreateParameters& parameters) {
  if (ftruncate(fd, i64(geometry.total_bytes)) != 0)
    throw CapacityError("the pool's file can't have " + std::to_string(geometry.total_bytes) +
                        " bytes: " + reason());
  try {
    MemoryTaker taker(fd, geometry.total_bytes, parameters.memory);
    taker.take(0, geometry.records_at, {});  // records and pin rows get memory when they are first needed
    taker.take(geometry.arena_at, capacity_bytes, parameters.may_take);
    return taker.facts();
  } catch (const std::system_error& error) {
    throw CapacityError("reserving " + std::to_string(capacity_bytes) + " bytes for the pool failed (" +
                        std::strerror(error.code().value()) +
                        "); nothing is kept: choose a smaller capacity_bytes");
  }
}

static void write_header(int fd, const Geometry& geometry, const CreateParameters& parameters, u32 owner) {
  alignas(Header) std::byte bytes[sizeof(Header)] = {};
  Header& header = *reinterpret_cast<Header*>(bytes);
  header.magic = kMagic;
  header.version = kFormatVersion;
  header.header_bytes = sizeof(Header);
  header.geometry = geometry;
  u64 random[3] = {};
  if (getrandom(random, sizeof random, 0) != ssize_t(sizeof random))
    throw SegmentError("no random bytes for the pool's hash seed: " + reason());
  header.hash_seed = parameters.hash_seed.value_or(random[0]);
  header.pool_id[0] = random[1];
  header.pool_id[1] = random[2];
  header.owner_uid = owner;
  header.process_limit = kProcessLimit;
  header.high_ppm = parameters.high_ppm;
  header.low_ppm = parameters.low_ppm;
  header.group_gid = parameters.group_gid;
  header.created_s = u64(time(nullptr));
  header.checksum = header_checksum(header);
  header.dirty = 1;  // whoever locks it first builds the derived tables
  header.state = u32(SegmentState::ready);
  if (pwrite(fd, bytes, sizeof bytes, 0) != ssize_t(sizeof bytes))
    throw SegmentError("the pool's header can't be written: " + reason());
}

// The slabs beyond the capacity get no memory and say so.
static void mark_absent(int fd, const Geometry& geometry, u64 capacity_bytes) {
  const u64 first = capacity_bytes / geometry.slab_bytes;
  std::vector<std::byte> bytes((geometry.slab_count - first) * sizeof(Slab));
  for (u64 i = 0; i < geometry.slab_count - first; i++)
    reinterpret_cast<Slab*>(bytes.data())[i].slot_bytes = kSlabAbsent;
  const u64 at = geometry.slabs_at + first * sizeof(Slab);
  for (u64 done = 0; done < bytes.size();) {
    ssize_t written = pwrite(fd, bytes.data() + done, bytes.size() - done, i64(at + done));
    if (written < 0 && errno != EINTR) throw SegmentError("the pool's slabs can't be written: " + reason());
    if (written > 0) done += u64(written);
  }
}

static bool is_member(u32 gid) {
  if (gid == getegid()) return true;
  const int count = getgroups(0, nullptr);
  std::vector<gid_t> groups(count > 0 ? std::size_t(count) : 0);
  const int got = count > 0 ? getgroups(count, groups.data()) : 0;
  return std::find(groups.begin(), groups.begin() + std::max(got, 0), gid) !=
         groups.begin() + std::max(got, 0);
}

static void check_parameters(const CreateParameters& parameters) {
  if (parameters.low_ppm == 0 || parameters.low_ppm > parameters.high_ppm || parameters.high_ppm > 1000000)
    throw ConfigError("watermarks must be 0 < low <= high <= 1");
  if (parameters.slab_bytes && parameters.capacity_bytes < parameters.slab_bytes)
    throw ConfigError("a pool's size must be at least one slab (" + std::to_string(parameters.slab_bytes) +
                      " bytes), not " + std::to_string(parameters.capacity_bytes));
  if (parameters.max_bytes && parameters.max_bytes < parameters.capacity_bytes)
    throw ConfigError(
        "a pool's size must not exceed what it may grow to: " + std::to_string(parameters.capacity_bytes) +
        " and " + std::to_string(parameters.max_bytes) + " bytes");
}

// Takes the memory and writes what an attacher checks.
static MemoryFacts furnish(int fd, const CreateParameters& parameters) {
  const Geometry geometry =
      Geometry::make(std::max(parameters.max_bytes, parameters.capacity_bytes), parameters.slab_bytes,
                     parameters.min_object_bytes, u64(parameters.eviction_policy));
  const u64 capacity_bytes = parameters.capacity_bytes / geometry.slab_bytes * geometry.slab_bytes;
  MemoryFacts memory = reserve_memory(fd, geometry, capacity_bytes, parameters);
  mark_absent(fd, geometry, capacity_bytes);
  write_header(fd, geometry, parameters, geteuid());
  return memory;
}

// A pool's file has memory for all that is used; a copy of it, made by a tool that leaves zeros out, has
// holes, and whoever wrote to one in a full file system would die of it.
static void fill_holes(const Segment& s) {
  const Geometry& g = s.geometry();
  u64 least = g.records_at;
  for (u32 slab = 0; slab < g.slab_count; slab++) least += s.has_memory(slab) ? g.slab_bytes : 0;
  if (u64(stat_of(s.fd()).st_blocks) * 512 >= least) return;
  bool is_whole = s.back_range(0, g.records_at);
  for (u32 slab = 0; slab < g.slab_count && is_whole; slab++)
    if (s.has_memory(slab))
      is_whole = s.back_range(g.records_at + slab * g.slots_per_slab * sizeof(SlotRecord),
                              g.slots_per_slab * sizeof(SlotRecord)) &&
                 s.back_range(g.arena_at + slab * g.slab_bytes, g.slab_bytes);
  if (!is_whole)
    throw CapacityError(s.name() +
                        " can't be attached: its file has holes (a sparse copy of a pool?) and there is no "
                        "memory to fill them");
}

std::shared_ptr<Segment> Registry::adopt(int fd, const Header& header, FileId id, std::string name,
                                         std::string path) {
  Descriptor descriptor(fd);
  std::unique_ptr<Segment, void (*)(Segment*)> segment(new Segment, [](Segment* broken) {
    if (broken->base_) munmap(broken->base_, broken->geometry_.total_bytes);
    delete broken;
  });
  segment->geometry_ = header.geometry;
  segment->hash_seed_ = header.hash_seed;
  segment->high_ppm_ = header.high_ppm;
  segment->low_ppm_ = header.low_ppm;
  segment->name_ = std::move(name);
  segment->path_ = std::move(path);
  segment->id_ = id;
  segment->fork_epoch_ = fork_epoch();
  try {
    segment->base_ = map_shared(fd, header.geometry.total_bytes);
  } catch (const std::system_error& error) {
    throw SegmentError(segment->name_ + " can't be mapped: " + std::strerror(error.code().value()));
  }
  madvise(segment->base_, header.geometry.total_bytes,
          MADV_DONTFORK);  // a forgotten child must not keep the memory
  segment->fd_ = fd;
  fill_holes(*segment);

  for (u32 slot = 0;; slot++) {
    if (slot == kProcessLimit)
      throw SegmentError(segment->name_ + " can't be attached: all its " + std::to_string(kProcessLimit) +
                         " places for processes are taken");
    if (!take_byte_lock(fd, slot)) continue;
    segment->process_slot_ = slot;
    break;
  }
  segment->process_generation_ = claim_generation(*segment, segment->process_slot_);
  join_process_table(*segment);
  descriptor.give();
  std::shared_ptr<Segment> shared(segment.release(), [id](Segment* last) { Registry::detach(last, id); });
  segments[id] = shared;
  return shared;
}

void Registry::detach(Segment* segment, FileId id) {
  if (segment->fork_epoch_ != fork_epoch()) return;  // the child of a fork: nothing of this is ours
  Registry& registry = get();
  std::lock_guard<std::mutex> guard(registry.mutex);
  leave_process_table(*segment);
  munmap(segment->base_, segment->geometry_.total_bytes);
  close(segment->fd_);
  registry.segments.erase(id);
  registry.detached.notify_all();
  delete segment;
}

std::shared_ptr<Segment> Segment::create_memfd(const CreateParameters& parameters) {
  check_parameters(parameters);
  Descriptor file(memfd_create("umbp-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.fd < 0) throw SegmentError("no memory file for the pool: " + reason());
  fchmod(file.fd, 0600);
  MemoryFacts memory = furnish(file.fd, parameters);
  fcntl(file.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  struct stat info = stat_of(file.fd);
  alignas(Header) std::byte bytes[sizeof(Header)];
  if (pread(file.fd, bytes, sizeof bytes, 0) != ssize_t(sizeof bytes))
    throw SegmentError("the pool's header: " + reason());
  Registry& registry = Registry::get();
  std::lock_guard<std::mutex> guard(registry.mutex);
  auto segment = registry.adopt(file.give(), *reinterpret_cast<Header*>(bytes), id_of(info), "memfd pool");
  segment->memory_ = std::move(memory);
  return segment;
}

static void share_with_group(int fd, const std::string& path, u32 gid) {
  const bool is_shared = gid != kNoGroup;
  if (is_shared && fchown(fd, uid_t(-1), gid) != 0)
    throw SegmentError("the pool at " + path + " can't be given to group " + std::to_string(gid) + ": " +
                       reason() + "; its creator must be a member of the group, or root");
  if (fchmod(fd, is_shared ? 0660 : 0600) != 0)
    throw SegmentError("the pool at " + path + " can't get its mode: " + reason());
}

[[noreturn]] static void refuse_path(const std::string& path) {
  throw SegmentError(
      "no pool can be made at " + path + ": " +
      (errno == EEXIST ? "it exists; destroy it first, resize it, or choose another name" : reason()));
}

static void refuse_taken(const std::string& path, bool is_ours) {
  struct stat info;
  if (is_ours || lstat(path.c_str(), &info) != 0) return;
  errno = EEXIST;
  refuse_path(path);
}

std::shared_ptr<Segment> Segment::create_file(const std::string& path, const CreateParameters& parameters) {
  check_parameters(parameters);
  std::string folder = path.find('/') == std::string::npos ? "." : path.substr(0, path.rfind('/') + 1);
  // Nameless until it is whole: a creator that dies leaves nothing behind, and of two creators one gets the
  // name.
  Descriptor file(open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  const bool named = file.fd < 0;
  if (named) file.fd = open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file.fd < 0) refuse_path(path);
  Registry& registry = Registry::get();
  std::unique_lock<std::mutex> guard(registry.mutex, std::defer_lock);
  MemoryFacts memory;
  try {
    share_with_group(file.fd, path, parameters.group_gid);
    refuse_taken(path, named);  // before minutes are spent on its memory
    memory = furnish(file.fd, parameters);
    guard.lock();  // from here on other threads can find the file
    std::string self = "/proc/self/fd/" + std::to_string(file.fd);
    if (!named && linkat(AT_FDCWD, self.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0)
      refuse_path(path);
  } catch (...) {
    if (named) unlink(path.c_str());
    throw;
  }
  struct stat info = stat_of(file.fd);
  alignas(Header) std::byte bytes[sizeof(Header)];
  if (pread(file.fd, bytes, sizeof bytes, 0) != ssize_t(sizeof bytes))
    throw SegmentError("the pool's header: " + reason());
  auto segment = registry.adopt(file.give(), *reinterpret_cast<Header*>(bytes), id_of(info), path, path);
  segment->memory_ = std::move(memory);
  return segment;
}

// Whose pools are trusted: one's own, root's, and those made for a group that one belongs to. Everybody who
// may write to a pool can spoil it for all, so nobody else may.
static void check_owner(const struct stat& info, const Header& header,
                        const std::function<void(const std::string&)>& refuse) {
  const bool is_group_pool = header.group_gid != kNoGroup;
  if (is_group_pool && info.st_gid != header.group_gid)
    refuse("its header names another group than its file (group_gid)");
  if (!is_group_pool && (info.st_mode & S_IWGRP))
    refuse("its group may write to it, and it wasn't made for a group");
  if (info.st_uid == geteuid() || info.st_uid == 0) return;
  if (is_group_pool && is_member(info.st_gid)) return;
  refuse("it belongs to user " + std::to_string(info.st_uid) +
         (is_group_pool ? " and to group " + std::to_string(info.st_gid) + ", whose member you aren't"
                        : "; only your own pools, root's and those made for a group of yours are trusted"));
}

std::shared_ptr<Segment> Segment::attach(const std::string& path) {
  auto refuse = [&path](const std::string& why) -> void {
    throw SegmentError(path + " can't be attached: " + why);
  };
  Registry& registry = Registry::get();
  std::unique_lock<std::mutex> guard(registry.mutex);
  struct stat info;
  if (stat(path.c_str(), &info) != 0) refuse(reason());
  if (!S_ISREG(info.st_mode)) refuse("it isn't a file");
  if (auto living = registry.find(id_of(info), guard)) return living;
  if (info.st_mode & S_IWOTH) refuse("everybody may write to it");
  Descriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (file.fd < 0)
    refuse(errno == EACCES ? "it belongs to user " + std::to_string(info.st_uid) +
                                 ", who hasn't made it for a group of yours"
                           : reason());
  struct stat opened = stat_of(file.fd);
  if (!registry.is_still(file, id_of(info))) refuse("it was replaced while it was being opened; try again");
  alignas(Header) std::byte bytes[sizeof(Header)];
  ssize_t got = pread(file.fd, bytes, sizeof bytes, 0);
  if (got != ssize_t(sizeof bytes)) refuse("it isn't a UMBP pool (shorter than a header)");
  const Header& header = *reinterpret_cast<Header*>(bytes);
  if (header.magic == kMagic && header.version == kFormatVersion) check_owner(opened, header, refuse);
  check_header(header, u64(opened.st_size), opened.st_uid, path);
  const bool is_named = path.compare(0, 6, "/proc/") != 0;
  return registry.adopt(file.give(), header, id_of(opened), path, is_named ? path : "");
}

}  // namespace umbp
