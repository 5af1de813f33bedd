// What to evict. A policy orders the evictable objects (published, unpinned) of each class; the pool tells it
// what enters, leaves and is touched, and asks for victims. It runs under the pool's lock and keeps its state
// in the segment, so every process sees one order and the simulator runs this very code.
#pragma once

#include <vector>

#include "pool/hazard.hpp"
#include "pool/segment.hpp"

namespace umbp {

class Policy {
 public:
  virtual ~Policy() = default;
  virtual void arrive(u32 slot) = 0;  // reserved: its record has its digest, and is not evictable yet
  virtual void depart(u32 slot) = 0;  // abandoned or dropped; the record still has its digest
  // The block will soon arrive or depart.
  virtual void prefetch_known(const Digest&) const {}
  virtual void enter(u32 slot) = 0;  // evictable from now on, as the youngest
  virtual void leave(u32 slot) = 0;  // pinned or gone
  // Appends up to `wanted` victims of the class, best first; changes nothing. Objects marked by `call` are
  // spared.
  virtual void choose(u32 klass, u64 wanted, u32 call, std::vector<u32>& victims) = 0;
  // The stamp of the object that would go first; ~0 if the class has none.
  virtual u64 oldest_stamp(u32 klass) = 0;
  // After a crash: all evictable objects, oldest stamp first.
  virtual void rebuild(const std::vector<u32>& oldest_first) = 0;
};

// Leaf-first LRU: a victim with cached children is replaced by its oldest leaf descendant, so prefixes stay
// whole.
class LeafFirstLru final : public Policy {
 public:
  explicit LeafFirstLru(Segment& segment) : s_(segment) {}
  void arrive(u32) override {}
  void depart(u32) override {}
  void enter(u32 slot) override;
  void leave(u32 slot) override;
  void choose(u32 klass, u64 wanted, u32 call, std::vector<u32>& victims) override;
  u64 oldest_stamp(u32 klass) override;
  void rebuild(const std::vector<u32>& oldest_first) override;

 private:
  Order& order_of(u32 slot) const { return s_.klass(s_.slab(s_.slab_of(slot)).klass).order; }

  Segment& s_;
};

// Class-hazard LRU: a leaf-first order for each group of blocks (hazard.hpp). Of the oldest in each, the one
// with the lowest index goes.
class HazardLru final : public Policy {
 public:
  explicit HazardLru(Segment& segment) : s_(segment), hazard(segment) {}
  void arrive(u32 slot) override { hazard.arrive(slot); }
  void depart(u32 slot) override { hazard.depart(slot); }
  void prefetch_known(const Digest& digest) const override { hazard.prefetch_ghost(digest); }
  void enter(u32 slot) override;
  void leave(u32 slot) override;
  void choose(u32 klass, u64 wanted, u32 call, std::vector<u32>& victims) override;
  u64 oldest_stamp(u32 klass) override;
  void rebuild(const std::vector<u32>& oldest_first) override;

 private:
  Order& order_of(u32 slot) const {
    return hazard.order(s_.slab(s_.slab_of(slot)).klass, s_.record(slot).history.group);
  }

  Segment& s_;

 public:
  Hazard hazard;
};

}  // namespace umbp
