// The pool's verbs on objects, with numpy columns in and out. All work happens with the GIL released; the key
// strings are kept alive by a tuple of references meanwhile.
#include "bindings/objects.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/columns.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace umbp;

namespace {

BoolArray lookup(const Pool& pool, const Keys& keys) {
  bool* hits = new bool[keys.size()];
  BoolArray result = array_of(hits, {keys.size()});
  nb::gil_scoped_release release;
  pool.lookup(keys.digests(), hits);
  return result;
}

U8Array states(const Pool& pool, const Keys& keys) {
  KeyState* found = new KeyState[keys.size()];
  U8Array result = array_of(reinterpret_cast<u8*>(found), {keys.size()});
  nb::gil_scoped_release release;
  pool.states(keys.digests(), found);
  return result;
}

template <class Call>
U8Array outcomes_by(size_t count, Call&& call) {
  Outcome* outcomes = new Outcome[count];
  U8Array result = array_of(reinterpret_cast<u8*>(outcomes), {count});
  nb::gil_scoped_release release;
  call(outcomes);
  return result;
}

nb::tuple acquire(Pool& pool, const Keys& keys) {
  u64* tickets = new u64[keys.size()];
  U64Array ticket_array = array_of(tickets, {keys.size()});
  U8Array outcomes =
      outcomes_by(keys.size(), [&](Outcome* out) { pool.acquire(keys.digests(), tickets, out); });
  return nb::make_tuple(ticket_array, outcomes);
}

nb::tuple reserve(Pool& pool, u32 ns, const Keys& keys, nb::object object_bytes, nb::object parents,
                  u64 tokens) {
  const size_t count = keys.size();
  std::vector<u64> bytes;
  if (PyLong_Check(object_bytes.ptr())) {
    bytes.assign(count, nb::cast<u64>(object_bytes));
  } else {
    auto column = nb::cast<Column<u64>>(object_bytes);
    if (column.shape(0) != count) throw ConfigError("object_bytes and keys have unequal lengths");
    bytes.assign(column.data(), column.data() + count);
  }
  nb::tuple parent_owner;
  std::vector<std::optional<std::string_view>> parent_texts;
  if (!parents.is_none()) {
    parent_owner = nb::steal<nb::tuple>(PySequence_Tuple(parents.ptr()));
    if (!parent_owner.is_valid()) throw nb::python_error();
    if (nb::len(parent_owner) != count) throw ConfigError("parents and keys have unequal lengths");
    for (size_t i = 0; i < count; i++) {
      PyObject* item = PyTuple_GetItem(parent_owner.ptr(), Py_ssize_t(i));
      if (item == Py_None)
        parent_texts.emplace_back();
      else
        parent_texts.emplace_back(Texts::text(item, keys.raw));
    }
  }
  u64* tickets = new u64[count];
  U64Array ticket_array = array_of(tickets, {count});
  U8Array outcomes = outcomes_by(count, [&](Outcome* out) {
    std::vector<std::optional<Digest>> parent_digests;
    parent_digests.reserve(parent_texts.size());
    RawHasher hasher(keys.prefix, keys.seed);
    for (const auto& text : parent_texts) {
      if (!text)
        parent_digests.emplace_back();
      else
        parent_digests.emplace_back(keys.raw ? hasher(*text) : digest_of(*text, keys.seed));
    }
    pool.reserve(ns, keys.digests(), bytes, parent_digests, tokens, tickets, out);
  });
  return nb::make_tuple(ticket_array, outcomes);
}

// Only engines that parse tool calls themselves tell them apart; "stop" alone says nothing.
U8Array note(Pool& pool, const Keys& keys, const std::string& phase, u64 output_tokens,
             const std::string& finish) {
  if (phase != "admit" && phase != "end")
    throw ConfigError("a request is noted at its phase admit or end, not '" + phase + "'");
  const bool is_end = phase == "end";
  const bool is_tool_call = finish == "tool_calls" || finish == "tool_use";
  const Answer answer =
      is_end ? answer_of(output_tokens, is_tool_call, finish == "end_turn") : Answer::unknown;
  return outcomes_by(keys.size(), [&](Outcome* out) { pool.note(keys.digests(), is_end, answer, out); });
}

U64Array digest_array(const std::vector<Digest>& digests) {
  u64* data = new u64[2 * digests.size() + 1];
  if (!digests.empty()) std::memcpy(data, digests.data(), digests.size() * sizeof(Digest));
  return array_of(data, {digests.size(), 2});
}

nb::dict stats_dict(const Pool& pool) {
  Stats s = pool.stats();
  nb::dict d;
  // clang-format off
#define X(name) d[#name] = s.name;
  X(capacity_bytes) X(max_bytes) X(used_bytes) X(objects) X(slabs) X(free_slabs) X(slots) X(processes) X(namespaces)
  X(evicted) X(evicted_bytes) X(evicted_tokens) X(orphaned) X(reserved) X(published) X(abandoned) X(not_now) X(takeovers) X(rebuilds)
  X(reaped) X(full) X(slab_moves) X(cleared) X(removed_total) X(noted) X(pinned) X(pinned_here) X(deferred_here) X(acquired_hits)
  X(acquired_misses)
#undef X
      // clang-format on
      return d;
}

}  // namespace

void bind_objects(nb::class_<Pool>& pool) {
  pool.def(
          "lookup", [](const Pool& p, nb::handle keys) { return lookup(p, Keys(p, keys)); }, "keys"_a)
      .def(
          "lookup_raw",
          [](const Pool& p, std::string prefix, nb::handle hashes) {
            return lookup(p, Keys(p, std::move(prefix), hashes));
          },
          "prefix"_a, "hashes"_a)
      .def(
          "states", [](const Pool& p, nb::handle keys) { return states(p, Keys(p, keys)); }, "keys"_a)
      .def(
          "match",
          [](const Pool& p, const std::string& prefix, nb::handle hashes) {
            Texts texts(hashes, true);
            nb::gil_scoped_release release;
            return p.match(texts.views, prefix);
          },
          "prefix"_a, "hashes"_a)
      .def(
          "digests", [](const Pool& p, nb::handle keys) { return digest_array(Keys(p, keys).digests()); },
          "keys"_a)
      .def(
          "digests_raw",
          [](const Pool& p, std::string prefix, nb::handle hashes) {
            return digest_array(Keys(p, std::move(prefix), hashes).digests());
          },
          "prefix"_a, "hashes"_a)
      .def(
          "namespace", [](Pool& p, const std::string& name) { return p.open_namespace(name); }, "name"_a,
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "reserve",
          [](Pool& p, u32 ns, nb::handle keys, nb::object object_bytes, nb::object parents, u64 tokens) {
            return reserve(p, ns, Keys(p, keys), object_bytes, parents, tokens);
          },
          "ns"_a, "keys"_a, "object_bytes"_a, "parents"_a = nb::none(), "tokens"_a = 0)
      .def(
          "reserve_raw",
          [](Pool& p, u32 ns, std::string prefix, nb::handle hashes, nb::object object_bytes,
             nb::object parents, u64 tokens) {
            return reserve(p, ns, Keys(p, std::move(prefix), hashes), object_bytes, parents, tokens);
          },
          "ns"_a, "prefix"_a, "hashes"_a, "object_bytes"_a, "parents"_a = nb::none(), "tokens"_a = 0)
      .def(
          "publish",
          [](Pool& p, Column<u64> tickets) {
            return outcomes_by(tickets.shape(0), [&](Outcome* out) { p.publish(span_of(tickets), out); });
          },
          "tickets"_a)
      .def(
          "abandon",
          [](Pool& p, Column<u64> tickets) {
            return outcomes_by(tickets.shape(0), [&](Outcome* out) { p.abandon(span_of(tickets), out); });
          },
          "tickets"_a)
      .def(
          "acquire", [](Pool& p, nb::handle keys) { return acquire(p, Keys(p, keys)); }, "keys"_a)
      .def(
          "acquire_raw",
          [](Pool& p, std::string prefix, nb::handle hashes) {
            return acquire(p, Keys(p, std::move(prefix), hashes));
          },
          "prefix"_a, "hashes"_a)
      .def(
          "release",
          [](Pool& p, Column<u64> tickets) {
            return outcomes_by(tickets.shape(0), [&](Outcome* out) { p.release(span_of(tickets), out); });
          },
          "tickets"_a)
      .def(
          "touch",
          [](Pool& p, nb::handle keys) {
            Keys k(p, keys);
            return outcomes_by(k.size(), [&](Outcome* out) { p.touch(k.digests(), out); });
          },
          "keys"_a)
      .def(
          "touch_raw",
          [](Pool& p, std::string prefix, nb::handle hashes) {
            Keys k(p, std::move(prefix), hashes);
            return outcomes_by(k.size(), [&](Outcome* out) { p.touch(k.digests(), out); });
          },
          "prefix"_a, "hashes"_a)
      .def(
          "note",
          [](Pool& p, nb::handle keys, const std::string& phase, u64 output_tokens,
             const std::string& finish) { return note(p, Keys(p, keys), phase, output_tokens, finish); },
          "keys"_a, "phase"_a, "output_tokens"_a, "finish"_a)
      .def(
          "note_raw",
          [](Pool& p, std::string prefix, nb::handle hashes, const std::string& phase, u64 output_tokens,
             const std::string& finish) {
            return note(p, Keys(p, std::move(prefix), hashes), phase, output_tokens, finish);
          },
          "prefix"_a, "hashes"_a, "phase"_a, "output_tokens"_a, "finish"_a)
      .def(
          "set_time", [](Pool& p, double seconds) { p.segment()->set_time(seconds); }, "seconds"_a)
      .def("longest_hold_s", [](const Pool& p) { return double(p.segment()->take_longest_hold_ns()) / 1e9; })
      .def(
          "remove",
          [](Pool& p, nb::handle keys) {
            Keys k(p, keys);
            return outcomes_by(k.size(), [&](Outcome* out) { p.remove(k.digests(), out); });
          },
          "keys"_a)
      .def("clear", &Pool::clear, "ns"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("lingering", &Pool::lingering, "ns"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "removed_since",
          [](const Pool& p, u64 cursor) {
            std::vector<Digest> removed;
            std::optional<u64> head = p.removed_since(cursor, removed);
            if (!head) removed.clear();
            return nb::make_tuple(digest_array(removed), head ? *head : p.removed_head(), !head);
          },
          "cursor"_a)
      .def("removed_head", &Pool::removed_head)
      .def(
          "payload",
          [](const Pool& p, Column<u64> tickets) {
            size_t count = tickets.shape(0);
            u64 *addresses = new u64[count], *lengths = new u64[count];
            U64Array a = array_of(addresses, {count}), l = array_of(lengths, {count});
            p.payload(span_of(tickets), addresses, lengths);
            return nb::make_tuple(a, l);
          },
          "tickets"_a)
      .def("stats", &stats_dict)
      .def("audit", &Pool::audit, nb::call_guard<nb::gil_scoped_release>())
      .def("reap", &Pool::reap, nb::call_guard<nb::gil_scoped_release>());
}
