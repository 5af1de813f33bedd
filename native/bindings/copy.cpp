// Copies, with numpy columns in and out; all work happens with the GIL released.
#include "bindings/copy.hpp"

#include <nanobind/stl/string.h>

#include "bindings/columns.hpp"
#include "copy/engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace umbp;

namespace {

U8Array copy(CopyEngine& engine, bool is_store, const Runs& runs, const Column<i64>& blocks, const Pool& pool,
             const Column<u64>& tickets, bool checksum) {
  const size_t count = blocks.shape(0);
  if (tickets.shape(0) != count) throw ConfigError("block ids and tickets have unequal lengths");
  CopyStatus* statuses = new CopyStatus[count];
  U8Array result = array_of(reinterpret_cast<u8*>(statuses), {count});
  nb::gil_scoped_release release;
  std::span<const i64> block_span(blocks.data(), count);
  if (is_store)
    engine.store(runs, block_span, pool, span_of(tickets), checksum, statuses);
  else
    engine.load(runs, block_span, pool, span_of(tickets), checksum, statuses);
  return result;
}

// Statuses, and where the objects lie that may be copied.
template <class Open>
nb::tuple opened(const Column<i64>& blocks, const Column<u64>& tickets, Open&& open) {
  const size_t count = blocks.shape(0);
  if (tickets.shape(0) != count) throw ConfigError("block ids and tickets have unequal lengths");
  CopyStatus* statuses = new CopyStatus[count];
  U8Array status_array = array_of(reinterpret_cast<u8*>(statuses), {count});
  u64* addresses = new u64[count];
  U64Array address_array = array_of(addresses, {count});
  {
    nb::gil_scoped_release release;
    open(std::span<const i64>(blocks.data(), count), span_of(tickets), statuses, addresses);
  }
  return nb::make_tuple(status_array, address_array);
}

}  // namespace

void bind_copy(nb::module_& m) {
  nb::class_<Runs>(m, "Runs")
      .def(
          "__init__",
          [](Runs* self, Column<u64> base, Column<i64> stride, Column<u64> bytes, Column<u64> offset,
             i64 block_count, u64 object_bytes) {
            new (self) Runs({vector_of(base), vector_of(stride), vector_of(bytes), vector_of(offset)},
                            block_count, object_bytes);
          },
          "base_address"_a, "block_stride"_a, "run_bytes"_a, "object_offset"_a, "block_count"_a,
          "object_bytes"_a)
      .def_ro("object_bytes", &Runs::object_bytes)
      .def_ro("block_count", &Runs::block_count);

  m.def("copy_kernel", [] { return CopyEngine(1, {}).kernel().name; });
  m.def("copy_kernels", [] {
    nb::list names;
    for (const Kernel* kernel : kernels()) names.append(kernel->name);
    return names;
  });
  nb::class_<CopyEngine>(m, "CopyEngine")
      .def(
          "__init__",
          [](CopyEngine* self, u32 threads, Column<u32> cores) {
            new (self) CopyEngine(threads, vector_of(cores));
          },
          "threads"_a, "cores"_a)
      .def_prop_ro("threads", &CopyEngine::threads)
      .def_prop_ro("kernel", [](const CopyEngine& e) { return e.kernel().name; })
      .def_prop_ro("cores",
                   [](const CopyEngine& e) {
                     nb::list cores;
                     for (u32 core : e.cores()) cores.append(core);
                     return cores;
                   })
      .def("close", &CopyEngine::close, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "store",
          [](CopyEngine& e, const Runs& runs, Column<i64> blocks, const Pool& pool, Column<u64> tickets,
             bool checksum) { return copy(e, true, runs, blocks, pool, tickets, checksum); },
          "runs"_a, "block_ids"_a, "pool"_a, "tickets"_a, "checksum"_a)
      .def(
          "load",
          [](CopyEngine& e, const Runs& runs, Column<i64> blocks, const Pool& pool, Column<u64> tickets,
             bool checksum) { return copy(e, false, runs, blocks, pool, tickets, checksum); },
          "runs"_a, "block_ids"_a, "pool"_a, "tickets"_a, "checksum"_a)
      .def(
          "open_stores",
          [](CopyEngine& e, const Runs& runs, Column<i64> blocks, const Pool& pool, Column<u64> tickets) {
            return opened(blocks, tickets, [&](auto b, auto t, CopyStatus* statuses, u64* addresses) {
              e.open_stores(runs, b, pool, t, statuses, addresses);
            });
          },
          "runs"_a, "block_ids"_a, "pool"_a, "tickets"_a)
      .def(
          "checksum_stores",
          [](CopyEngine& e, const Runs& runs, const Pool& pool, Column<u64> tickets) {
            const size_t count = tickets.shape(0);
            CopyStatus* statuses = new CopyStatus[count];
            U8Array result = array_of(reinterpret_cast<u8*>(statuses), {count});
            nb::gil_scoped_release release;
            e.checksum_stores(runs, pool, span_of(tickets), statuses);
            return result;
          },
          "runs"_a, "pool"_a, "tickets"_a)
      .def(
          "open_loads",
          [](CopyEngine& e, const Runs& runs, Column<i64> blocks, const Pool& pool, Column<u64> tickets,
             bool checksum) {
            return opened(blocks, tickets, [&](auto b, auto t, CopyStatus* statuses, u64* addresses) {
              e.open_loads(runs, b, pool, t, checksum, statuses, addresses);
            });
          },
          "runs"_a, "block_ids"_a, "pool"_a, "tickets"_a, "checksum"_a);
}
