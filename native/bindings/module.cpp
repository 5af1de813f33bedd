// umbp._native: the core for Python. Here errors, geometry, and how a pool is made and attached.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>

#include "bindings/columns.hpp"
#include "bindings/copy.hpp"
#include "bindings/objects.hpp"
#include "bindings/seals.hpp"
#include "bindings/shared_pool.hpp"
#include "pool/pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace umbp;

namespace {

EvictionPolicy policy_of(const std::string& name) {
  if (name == "lru") return EvictionPolicy::lru;
  if (name == "hazard") return EvictionPolicy::hazard;
  throw ConfigError("eviction_policy must be lru or hazard, not '" + name + "'");
}

void raise_as(const char* kind, const char* message) {
  nb::object type = nb::module_::import_("umbp.errors").attr(kind);
  PyErr_SetString(type.ptr(), message);
}

void arm_from_environment() {
  const char* point = std::getenv("UMBP_CRASH_POINT");
  const char* signal = std::getenv("UMBP_CRASH_SIGNAL");
  if (point)
    arm_crash_point(std::strtoull(point, nullptr, 10), signal && std::string_view(signal) == "STOP", -1);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // pools may live in globals until the interpreter is gone
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const CapacityError& e) {
      raise_as("CapacityError", e.what());
    } catch (const SegmentError& e) {
      raise_as("SegmentError", e.what());
    } catch (const InvariantError& e) {
      raise_as("InvariantError", e.what());
    } catch (const ConfigError& e) {
      raise_as("ConfigError", e.what());
    }
  });

  m.def("arm_crash_point", &arm_crash_point, "countdown"_a, "stop"_a = false, "report_fd"_a = -1);
  arm_from_environment();
  m.def(
      "reserved_bytes",
      [](u64 capacity, u64 max, u64 slab, u64 smallest, u64 processes, const std::string& policy) {
        return Geometry::make(std::max(capacity, max), slab, smallest, u64(policy_of(policy)))
            .reserved_bytes(capacity / slab, processes);
      },
      "capacity_bytes"_a, "max_bytes"_a, "slab_bytes"_a, "min_object_bytes"_a, "processes"_a,
      "eviction_policy"_a = "lru");
  m.def("slot_bytes", &slot_bytes_for, "object_bytes"_a);
  m.def(
      "geometry",
      [](u64 max, u64 slab, u64 smallest, const std::string& policy) {
        Geometry g = Geometry::make(max, slab, smallest, u64(policy_of(policy)));
        nb::dict d;
#define X(name) d[#name] = g.name;
        UMBP_GEOMETRY_FIELDS(X)
#undef X
        return d;
      },
      "max_bytes"_a, "slab_bytes"_a, "min_object_bytes"_a, "eviction_policy"_a = "lru");

  nb::class_<MemoryPolicy>(m, "MemoryPolicy")
      .def(
          "__init__",
          [](MemoryPolicy* self, bool use_huge_pages, int node, double huge_patience_s) {
            new (self) MemoryPolicy{use_huge_pages, node, u64(huge_patience_s * 1e9)};
          },
          "use_huge_pages"_a, "node"_a, "huge_patience_s"_a);
  m.def("nodes_of", [](Column<u64> addresses) { return nodes_of(vector_of(addresses)); }, "addresses"_a);
  m.def("populate", &populate, "address"_a, "size"_a, nb::call_guard<nb::gil_scoped_release>());

  auto parameters = [](u64 capacity, u64 max, u64 slab, u64 smallest, double high, double low,
                       const std::string& policy, nb::callable& may_take, const MemoryPolicy& memory) {
    CreateParameters p;
    p.capacity_bytes = capacity;
    p.max_bytes = max;
    p.slab_bytes = slab;
    p.min_object_bytes = smallest;
    p.high_ppm = u32(high * 1e6 + 0.5);
    p.low_ppm = u32(low * 1e6 + 0.5);
    p.eviction_policy = policy_of(policy);
    p.may_take = [&may_take](u64 left_bytes) {
      nb::gil_scoped_acquire hold;
      may_take(left_bytes);
    };
    p.memory = memory;
    return p;
  };
  nb::class_<Pool> pool_class(m, "Pool");
  pool_class
      .def_static(
          "create_memfd",
          [parameters](u64 capacity, u64 slab, u64 smallest, double high, double low,
                       const std::string& policy, double patience_s, nb::callable may_take,
                       const MemoryPolicy& memory, std::optional<u64> hash_seed) {
            nb::gil_scoped_release release;
            CreateParameters p =
                parameters(capacity, capacity, slab, smallest, high, low, policy, may_take, memory);
            p.hash_seed = hash_seed;
            return new Pool(Segment::create_memfd(p), u64(patience_s * 1e9));
          },
          "capacity_bytes"_a, "slab_bytes"_a, "min_object_bytes"_a, "high"_a, "low"_a, "eviction_policy"_a,
          "lock_patience_s"_a, "may_take"_a, "memory"_a, "hash_seed"_a.none() = nb::none())
      .def_static(
          "create_file",
          [parameters](const std::string& path, u64 capacity, u64 max, u64 slab, u64 smallest, double high,
                       double low, const std::string& policy, std::optional<u32> group, double patience_s,
                       nb::callable may_take, const MemoryPolicy& memory) {
            nb::gil_scoped_release release;
            CreateParameters p =
                parameters(capacity, max, slab, smallest, high, low, policy, may_take, memory);
            p.group_gid = group.value_or(kNoGroup);
            return new Pool(Segment::create_file(path, p), u64(patience_s * 1e9));
          },
          "path"_a, "capacity_bytes"_a, "max_bytes"_a, "slab_bytes"_a, "min_object_bytes"_a, "high"_a,
          "low"_a, "eviction_policy"_a, "group_gid"_a.none(), "lock_patience_s"_a, "may_take"_a, "memory"_a)
      .def_static(
          "attach",
          [](const std::string& path, double patience_s) {
            nb::gil_scoped_release release;
            return new Pool(Segment::attach(path), u64(patience_s * 1e9));
          },
          "path"_a, "lock_patience_s"_a)
      .def("close", &Pool::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("closed", &Pool::is_closed)
      .def_prop_ro("fd", [](const Pool& p) { return p.segment()->fd(); })
      .def_prop_ro("is_expelled", [](const Pool& p) { return p.segment()->is_expelled(); })
      .def_prop_ro("process_slot", [](const Pool& p) { return p.segment()->process_slot(); })
      .def_prop_ro("capacity_bytes", [](const Pool& p) { return p.segment()->capacity_bytes(); })
      .def_prop_ro("max_bytes", [](const Pool& p) { return p.segment()->geometry().max_bytes; })
      .def_prop_ro("slab_bytes", [](const Pool& p) { return p.segment()->geometry().slab_bytes; })
      .def_prop_ro("min_object_bytes", [](const Pool& p) { return p.segment()->geometry().min_object_bytes; })
      .def_prop_ro("memory",
                   [](const Pool& p) {
                     const MemoryFacts& facts = p.segment()->memory();
                     nb::dict d;
                     d["asked_bytes"] = facts.asked_bytes;
                     d["huge_bytes"] = facts.huge_bytes;
                     d["taken_s"] = double(facts.taken_ns) / 1e9;
                     d["huge_reason"] = facts.huge_reason;
                     d["node_reason"] = facts.node_reason;
                     return d;
                   })
      .def_prop_ro("arena",
                   [](const Pool& p) {
                     auto s = p.segment();
                     u64 address = reinterpret_cast<u64>(s->base() + s->geometry().arena_at);
                     return nb::make_tuple(address, s->geometry().max_bytes);
                   })
      .def_prop_ro("eviction_policy", [](const Pool& p) {
        return p.segment()->eviction_policy() == EvictionPolicy::hazard ? "hazard" : "lru";
      });
  bind_objects(pool_class);
  bind_shared_pool(m, pool_class);
  bind_seals(m, pool_class);
  bind_copy(m);
}
