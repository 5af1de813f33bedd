#include "bindings/seals.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace umbp;

namespace {

using Verb = void (*)(const Pool&, std::span<const u64>, std::span<const std::string_view>, bool,
                      SealStatus*);

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
