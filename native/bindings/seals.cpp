#include "bindings/seals.hpp"

#include "bindings/columns.hpp"
#include "copy/seal.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace umbp;

namespace {

using Verb = void (*)(const Pool&, std::span<const u64>, std::span<const std::string_view>, bool,
                      SealStatus*);

// A status for each ticket, from `verb(tickets, keys, statuses)`, which runs with the GIL released.
template <class Verb>
U8Array seal_statuses(const Column<u64>& tickets, nb::handle keys, Verb&& verb) {
  const Texts texts(keys, false);
  const size_t count = tickets.shape(0);
  if (texts.views.size() != count) throw ConfigError("tickets and keys have unequal lengths");
  SealStatus* statuses = new SealStatus[count];
  U8Array result = array_of(reinterpret_cast<u8*>(statuses), {count});
  nb::gil_scoped_release release;
  verb(span_of(tickets), std::span<const std::string_view>(texts.views), statuses);
  return result;
}

template <Verb verb>
U8Array statuses_by(const Pool& pool, const Column<u64>& tickets, nb::handle keys, bool checksum) {
  return seal_statuses(tickets, keys,
                       [&](auto t, auto k, SealStatus* statuses) { verb(pool, t, k, checksum, statuses); });
}

}  // namespace

void bind_seals(nb::module_& m, nb::class_<Pool>& pool) {
  m.attr("SEAL_BYTES") = kSealBytes;
  pool.def("seal", &statuses_by<seal_objects>, "tickets"_a, "keys"_a, "checksum"_a)
      .def("check_seal", &statuses_by<check_seals>, "tickets"_a, "keys"_a, "checksum"_a)
      .def(
          "adopt_seal",
          [](const Pool& p, const Column<u64>& tickets, nb::handle keys) {
            return seal_statuses(tickets, keys, [&p](auto t, auto k, SealStatus* statuses) {
              adopt_seals(p, t, k, statuses);
            });
          },
          "tickets"_a, "keys"_a)
      .def(
          "sealed_ranges",
          [](const Pool& p, Column<u64> tickets) {
            const size_t count = tickets.shape(0);
            u64 *addresses = new u64[count], *lengths = new u64[count];
            U64Array a = array_of(addresses, {count}), l = array_of(lengths, {count});
            sealed_ranges(p, span_of(tickets), addresses, lengths);
            return nb::make_tuple(a, l);
          },
          "tickets"_a);
}
