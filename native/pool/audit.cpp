#include <string>

#include "pool/objects.hpp"
#include "pool/pool.hpp"

namespace umbp {

namespace {

class Audit {
 public:
  explicit Audit(Objects& objects) : o_(objects), s_(objects.s) {}

  void run() {
    walk_slabs();
    walk_index();
    walk_orders();
    check_totals();
  }

 private:
  void require(bool holds, const char* invariant, u64 where) {
    if (!holds) throw InvariantError(std::string(invariant) + " (at " + std::to_string(where) + ")");
  }

  void walk_slabs() {
    per_class_.assign(kClassLimit, {});
    per_ns_.assign(kNamespaceLimit, {});
    for (u32 i = 0; i < s_.geometry().slab_count; i++) {
      const Slab& slab = s_.slab(i);
      u64 slot_bytes = s_.slab_slot_bytes(i);
      if (!s_.has_memory(i)) continue;
      present_slabs_++;
      if (slot_bytes == 0) {
        free_slabs_++;
        continue;
      }
      require(slab.klass < s_.header().class_count && s_.klass(slab.klass).slot_bytes == slot_bytes,
              "a slab's class has its slot size", i);
      u32 used = 0, pinned = 0, free = 0, first = o_.space.first_slot(i), count = o_.space.slots_in(i);
      for (u32 slot = first; slot < first + count; slot++) {
        if (o_.state(slot) == SlotState::free) {
          free++;
          check_free(slot);
          continue;
        }
        used++;
        pinned += check_object(slot, slot_bytes);
      }
      require(slab.used == used, "a slab counts its used slots", i);
      require(slab.pinned == pinned, "a slab counts its pinned slots", i);
      u32 listed = count - slab.fresh;
      for (u32 slot = slab.free_head; slot != kNil; slot = s_.record(slot).next_free) {
        require(s_.slab_of(slot) == i && o_.state(slot) == SlotState::free,
                "a slab's free list has its own free slots", slot);
        require(++listed <= count, "a slab's free list ends", i);
      }
      require(listed == free, "every free slot is in its slab's free list", i);
      PerClass& c = per_class_[slab.klass];
      c.slabs++;
      if (slab.closed) continue;
      c.free_slots += free;
      c.partial += free > 0;
    }
  }

  void check_free(u32 slot) {
    for (u32 p = 0; p < kProcessLimit; p++)
      if (s_.process(p).in_use.load())
        require(s_.pin(p, slot).load() == 0, "nobody has a pin on a free slot", slot);
  }

  bool check_object(u32 slot, u64 slot_bytes) {
    const SlotRecord& r = s_.record(slot);
    const u64 word = o_.word(slot);
    const SlotState state = word_state(word);
    require(state <= SlotState::doomed, "a slot's state is one of four", slot);
    const u64 length = size_length(r.size);
    require(length > 0 && length + kSlotOverheadBytes <= slot_bytes, "an object fits its slot", slot);
    require(r.ns < kNamespaceLimit, "an object's namespace is one of the pool's", slot);
    used_bytes_ += slot_bytes;
    per_ns_[r.ns].used_bytes += slot_bytes;
    u64 pins = 0;
    for (u32 p = 0; p < kProcessLimit; p++)
      if (s_.process(p).in_use.load()) pins += s_.pin(p, slot).load();
    require(r.pins == pins, "an object's pins are the sum of its processes' pins", slot);
    if (state == SlotState::reserved) {
      require(pins == 1 && word_owner(word) < kProcessLimit && s_.process(word_owner(word)).in_use.load() &&
                  s_.pin(word_owner(word), slot).load() == 1,
              "a reservation is its owner's one pin", slot);
    }
    require(state != SlotState::doomed || pins > 0, "a removed object stays only while pinned", slot);
    if (state == SlotState::published) {
      published_++;
      per_ns_[r.ns].objects++;
      per_ns_[r.ns].evictable += pins == 0;
      per_class_[s_.slab(s_.slab_of(slot)).klass].evictable += pins == 0;
    }
    const bool outdated = !o_.is_current(r);
    const bool swept = s_.ns(r.ns).swept_epoch == s_.ns(r.ns).epoch.load();
    require(!(outdated && swept && state == SlotState::published),
            "a cleared namespace has no published object", slot);
    i64 at = o_.index.find(r.digest);
    const bool indexed = at >= 0 && ref_slot(o_.index.ref(at)) == slot;
    if (state != SlotState::doomed && !outdated) {
      require(indexed, "every object is found by its key", slot);
      require(o_.index.ref(at) == make_ref(slot, word_generation(word), state == SlotState::published),
              "an index entry says what its slot says", slot);
    }
    if (indexed) indexed_++;
    require(!indexed || state != SlotState::doomed, "a removed object isn't found", slot);
    check_links(slot, r);
    return pins > 0;
  }

  void check_links(u32 slot, const SlotRecord& r) {
    u32 children = 0, previous = kNil;
    for (u32 child = r.first_child; child != kNil; child = s_.record(child).next_sibling) {
      require(++children <= r.children, "an object counts its children", slot);
      require(o_.tree.parent_of(s_.record(child)) == slot, "a child names its parent", child);
      require(s_.record(child).prev_sibling == previous, "siblings are linked both ways", child);
      previous = child;
    }
    require(children == r.children, "an object counts its children", slot);
    links_ += children;
    named_ += o_.tree.parent_of(r) != kNil;
  }

  void walk_index() {
    u64 entries = 0, published = 0;
    for (u64 at = 0; at < s_.geometry().index_entries; at++) {
      u64 ref = s_.entry(at).ref.load();
      if (ref == 0) continue;
      entries++;
      published += ref & 1;
      Digest digest{s_.entry(at).low.load(), s_.entry(at).high.load()};
      require(o_.index.find(digest) == i64(at), "an index entry is where its key is looked for", at);
      require(s_.record(ref_slot(ref)).digest == digest, "an index entry and its slot have one key", at);
    }
    require(entries == indexed_, "no index entry without its object", entries);
    require(entries == s_.header().index_used, "the index counts its entries", entries);
  }

  void walk_orders() {
    for (u32 k = 0; k < s_.header().class_count; k++) {
      const Class& c = s_.klass(k);
      u64 listed = 0;
      if (o_.hazard)
        for (u32 group = 0; group < kGroups; group++) {
          listed += walk_order(k, o_.hazard->order(k, group));
          for (u32 slot = o_.hazard->order(k, group).old; slot != kNil; slot = s_.record(slot).lru_prev)
            require(s_.record(slot).history.group == group, "an object is in its own group's order", slot);
        }
      else
        listed = walk_order(k, c.order);
      require(listed == per_class_[k].evictable, "every evictable object is in its order", k);
      u64 partial = 0;
      for (u32 slab = c.partial_head; slab != kNil; slab = s_.slab(slab).next) {
        require(s_.slab(slab).klass == k && s_.slab(slab).used < o_.space.slots_in(slab),
                "slabs with room are their class's", slab);
        require(++partial <= c.slabs, "a class's list of slabs with room ends", k);
      }
      require(partial == per_class_[k].partial, "every slab with room is in its class's list", k);
      require(c.slabs == per_class_[k].slabs, "a class counts its slabs", k);
      require(c.free_slots == per_class_[k].free_slots, "a class counts its free slots", k);
    }
    if (o_.hazard) o_.hazard->audit();
  }

  u64 walk_order(u32 k, const Order& order) {
    u64 listed = 0, stamp = ~0ull;
    u32 younger = kNil;
    for (u32 slot = order.young; slot != kNil; slot = s_.record(slot).lru_next) {
      const SlotRecord& r = s_.record(slot);
      require(++listed <= order.count, "a class's order ends", k);
      require(o_.state(slot) == SlotState::published && r.pins == 0,
              "only unpinned published objects are in the order", slot);
      require(s_.slab(s_.slab_of(slot)).klass == k, "an object is in its own class's order", slot);
      require(r.lru_prev == younger, "the order is linked both ways", slot);
      require(r.stamp < stamp, "the order runs from young to old", slot);
      require(r.stamp <= s_.slab(s_.slab_of(slot)).touched, "a slab knows its newest touch", slot);
      stamp = r.stamp;
      younger = slot;
    }
    require(younger == order.old, "a class's order ends at its oldest", k);
    require(listed == order.count, "an order counts its objects", k);
    return listed;
  }

  void check_totals() {
    const Header& h = s_.header();
    u64 listed = 0;
    for (u32 slab = h.free_slab_head; slab != kNil; slab = s_.slab(slab).next) {
      require(s_.slab_slot_bytes(slab) == 0, "free slabs belong to no class", slab);
      require(++listed <= s_.geometry().slab_count, "the list of free slabs ends", slab);
    }
    require(listed == free_slabs_ && listed == h.free_slabs, "every free slab is in the list", listed);
    require(h.used_bytes == used_bytes_, "used bytes are the sum of used slots", used_bytes_);
    require(h.objects == published_, "the pool counts its objects", published_);
    require(links_ == named_, "a parent that is there knows its child", named_);
    require(h.present_slabs == present_slabs_, "the pool counts its slabs that have memory", present_slabs_);
    for (u32 ns = 0; ns < kNamespaceLimit; ns++) check_namespace(ns);
  }

  void check_namespace(u32 ns) {
    const Namespace& entry = s_.ns(ns);
    const PerNamespace& found = per_ns_[ns];
    require(entry.used_bytes == found.used_bytes, "a namespace counts its bytes", ns);
    require(entry.objects == found.objects, "a namespace counts its objects", ns);
    if (entry.epoch.load() == 0) return;
    u64 listed = 0;
    u32 younger = kNil;
    for (u32 slot = entry.young; slot != kNil; slot = s_.record(slot).own_next) {
      require(++listed <= found.evictable, "a namespace's order ends", ns);
      require(s_.record(slot).ns == ns && o_.state(slot) == SlotState::published && s_.record(slot).pins == 0,
              "only a namespace's own evictable objects are in its order", slot);
      require(s_.record(slot).own_prev == younger, "a namespace's order is linked both ways", slot);
      younger = slot;
    }
    require(younger == entry.old && listed == found.evictable,
            "every evictable object is in its namespace's order", ns);
  }

  struct PerClass {
    u64 slabs = 0, free_slots = 0, partial = 0, evictable = 0;
  };
  struct PerNamespace {
    u64 used_bytes = 0, objects = 0, evictable = 0;
  };
  Objects& o_;
  Segment& s_;
  std::vector<PerClass> per_class_;
  std::vector<PerNamespace> per_ns_;
  u64 free_slabs_ = 0, present_slabs_ = 0, used_bytes_ = 0, published_ = 0, indexed_ = 0, links_ = 0,
      named_ = 0;
};

}  // namespace

void audit_segment(Objects& objects) {
  Audit(objects).run();
}

}  // namespace umbp
