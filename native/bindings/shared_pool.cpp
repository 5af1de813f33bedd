#include "bindings/shared_pool.hpp"

#include "pool/inspect.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;
using namespace umbp;

namespace {

// A name is user input, cut at some byte: what isn't UTF-8 is replaced.
nb::object text_of(const std::string& bytes) {
  return nb::steal(PyUnicode_DecodeUTF8(bytes.data(), Py_ssize_t(bytes.size()), "replace"));
}

nb::list rows_of(const std::vector<NamespaceReport>& namespaces) {
  nb::list rows;
  for (const NamespaceReport& ns : namespaces)
    rows.append(nb::make_tuple(text_of(ns.name), ns.id, ns.epoch, ns.used_bytes, ns.quota_bytes, ns.objects));
  return rows;
}

nb::dict report_dict(const PoolReport& r) {
  nb::dict d;
  // clang-format off
#define X(name) d[#name] = r.name;
  X(is_pool) X(owner_uid) X(group_gid) X(mode) X(file_bytes) X(memory_bytes) X(created_s)
  X(capacity_bytes) X(max_bytes) X(slab_bytes) X(min_object_bytes) X(used_bytes) X(objects) X(free_slabs)
  X(resizing_pid) X(high_watermark) X(low_watermark)
#undef X
      // clang-format on
      d["problem"] = text_of(r.problem);
  d["eviction_policy"] = r.eviction_policy == EvictionPolicy::hazard ? "hazard" : "lru";
  nb::list processes, classes;
  for (const ProcessReport& p : r.processes)
    processes.append(nb::make_tuple(p.place, p.pid, p.uid, p.is_alive, p.holds_size, p.pinned_slots));
  for (const ClassReport& c : r.classes) classes.append(nb::make_tuple(c.slot_bytes, c.slabs, c.free_slots));
  nb::dict counters;
  for (const auto& [name, value] : r.counters) counters[name.c_str()] = value;
  d["processes"] = processes;
  d["classes"] = classes;
  d["namespaces"] = rows_of(r.namespaces);
  d["counters"] = counters;
  return d;
}

void resize_pool(Pool& pool, u64 capacity_bytes, nb::callable may_take, nb::callable reached,
                 const MemoryPolicy& memory) {
  auto told = [](nb::callable& callable) {
    return [&callable](u64 bytes) {
      nb::gil_scoped_acquire hold;
      callable(bytes);
    };
  };
  nb::gil_scoped_release release;
  pool.resize({capacity_bytes, told(may_take), told(reached), memory});
}

}  // namespace

void bind_shared_pool(nb::module_& m, nb::class_<Pool>& pool) {
  using free_gil = nb::call_guard<nb::gil_scoped_release>;
  m.def("destroy", [](const std::string& path) { Segment::destroy(path); }, "path"_a, free_gil());
  m.def(
      "inspect",
      [](const std::string& path, bool in_full) {
        PoolReport report;
        {
          nb::gil_scoped_release release;
          report = inspect(path, in_full);
        }
        return report_dict(report);
      },
      "path"_a, "in_full"_a);
  pool.def("namespaces", [](const Pool& p) { return rows_of(p.namespaces()); })
      .def("set_quota", &Pool::set_quota, "ns"_a, "quota_bytes"_a, free_gil())
      .def("clear_all", &Pool::clear_all, free_gil())
      .def("resize", &resize_pool, "capacity_bytes"_a, "may_take"_a, "reached"_a, "memory"_a)
      .def("hold_size", &Pool::hold_size, free_gil())
      .def("release_size", &Pool::release_size, free_gil())
      .def("destroy", &Pool::destroy, free_gil())
      .def_prop_ro("is_destroyed", &Pool::is_destroyed)
      .def(
          "is_replaced",
          [](const Pool& p, double interval_s) { return p.is_replaced(u64(interval_s * 1e9)); },
          "interval_s"_a)
      .def_prop_ro("path",
                   [](const Pool& p) {
                     const std::string path = p.segment()->path();
                     return nb::steal(PyUnicode_DecodeFSDefaultAndSize(path.data(), Py_ssize_t(path.size())));
                   })
      .def("arena_ranges", &Pool::arena_ranges);
}
