#include "bindings/shared_pool.hpp"

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

nb::list namespaces(const Pool& pool) {
  nb::list rows;
  for (const NamespaceInfo& ns : pool.namespaces())
    rows.append(nb::make_tuple(text_of(ns.name), ns.id, ns.epoch, ns.used_bytes, ns.quota_bytes, ns.objects));
  return rows;
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
  pool.def("namespaces", &namespaces)
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
