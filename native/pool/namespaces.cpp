// The pool's verbs on namespaces: who shares the memory, how much of it each may take, and clearing.
#include <algorithm>
#include <cstring>

#include "pool/objects.hpp"
#include "pool/pool.hpp"
#include "pool/reap.hpp"

namespace umbp {

static constexpr u64 kNamespacePatienceNs = 1000000000ull;

u32 Pool::open_namespace(std::string_view name) {
  if (name.empty()) throw ConfigError("a namespace needs a name");
  auto s = segment();
  const Digest digest = digest_of(name, 0);
  if (s->is_destroyed())
    throw SegmentError(s->name() + " has been destroyed; attach the pool that replaced it");
  u32 number = 0;
  {
    Patience patience{kNamespacePatienceNs};
    Locked lock(*s, patience);
    if (!lock)
      throw SegmentError("the namespace can't be opened now: a stopped process holds the pool's lock");
    for (; number < kNamespaceLimit; number++) {
      Namespace& ns = s->ns(number);
      if (ns.epoch.load(std::memory_order_relaxed) != 0) {
        if (ns.digest == digest) return number;
        continue;
      }
      ns.digest = digest;
      ns.used_bytes = ns.objects = 0;
      ns.young = ns.old = kNil;
      ns.quota_bytes = ~0ull;
      ns.swept_epoch = 1;
      std::memset(ns.name, 0, sizeof ns.name);
      std::memcpy(ns.name, name.data(), std::min(name.size(), sizeof ns.name - 1));
      ordered();
      ns.epoch.store(1, std::memory_order_release);
      return number;
    }
  }
  throw SegmentError("the pool has no room for another namespace; make a new pool");
}

static void require_namespace(Segment& s, u32 ns) {
  if (ns >= kNamespaceLimit || s.ns(ns).epoch.load() == 0)
    throw ConfigError("no such namespace in this pool");
}

std::vector<NamespaceReport> Pool::namespaces() const {
  auto s = segment();
  std::vector<NamespaceReport> found;
  for (u32 i = 0; i < kNamespaceLimit; i++) {
    const Namespace& ns = s->ns(i);
    const u32 epoch = ns.epoch.load(std::memory_order_acquire);
    if (epoch == 0) break;
    const std::size_t length = strnlen(ns.name, sizeof ns.name);
    found.push_back({std::string(ns.name, length), i, epoch, ns.used_bytes, ns.quota_bytes, ns.objects});
  }
  return found;
}

bool Pool::set_quota(u32 ns, u64 bytes) {
  auto s = segment_to_change();
  require_namespace(*s, ns);
  Patience patience{kNamespacePatienceNs};
  std::vector<u32> victims;
  for (bool is_first = true;; is_first = false) {
    Locked lock(*s, patience);
    if (!lock) return false;
    Namespace& entry = s->ns(ns);
    if (is_first) entry.quota_bytes = bytes;
    if (entry.quota_bytes != bytes || entry.used_bytes <= bytes) return true;  // changed anew, or done
    victims.clear();
    u32 call = 0;
    while (call == 0) call = ++s->header().call_id;
    const u64 most = kBatch * slot_bytes_for(s->geometry().min_object_bytes);
    if (lock->own.choose(ns, kNil, std::min(entry.used_bytes - bytes, most), call, victims) == 0) return true;
    for (u32 victim : victims) lock->evict(victim);
  }
}

// From the new epoch on nothing that was stored or reserved before is visible, or can become so.
static void raise_epoch(Segment& s, u32 ns) {
  std::atomic<u32>& epoch = s.ns(ns).epoch;
  const u32 next = epoch.load() + 1;
  epoch.store(next ? next : 1, std::memory_order_release);
  s.header().cleared.fetch_add(1, std::memory_order_relaxed);
}

bool Pool::clear(u32 ns) {
  auto s = segment_to_change();
  require_namespace(*s, ns);
  if (s->is_destroyed()) return true;
  Patience patience{kNamespacePatienceNs};
  {
    Locked lock(*s, patience);
    if (!lock) return false;
    raise_epoch(*s, ns);
  }
  sweep_namespace(*s, ns, patience);  // if it is cut short, reap() goes on with it
  return true;
}

std::optional<u64> Pool::lingering(u32 ns) {
  auto s = segment_to_change();
  require_namespace(*s, ns);
  Patience patience{kNamespacePatienceNs};
  return count_lingering(*s, ns, patience);
}

bool Pool::clear_all() {
  auto s = segment_to_change();
  if (s->is_destroyed()) return true;
  std::vector<u32> cleared;
  Patience patience{kNamespacePatienceNs};
  {
    Locked lock(*s, patience);
    if (!lock) return false;
    for (u32 ns = 0; ns < kNamespaceLimit && s->ns(ns).epoch.load() != 0; ns++) {
      if (s->ns(ns).used_bytes == 0) continue;
      raise_epoch(*s, ns);
      cleared.push_back(ns);
      crash_point();
    }
  }
  for (u32 ns : cleared)
    if (!sweep_namespace(*s, ns, patience)) break;
  return true;
}

}  // namespace umbp
