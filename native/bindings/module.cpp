// umbp._native: the core's verbs with numpy columns in and out. All work happens with the GIL released; the
// key strings are kept alive by a tuple of references meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "bindings/columns.hpp"
#include "bindings/seals.hpp"
#include "bindings/shared_pool.hpp"
#include "copy/engine.hpp"
#include "pool/pool.hpp"

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

EvictionPolicy policy_of(const std::string& name) {
  if (name == "lru") return EvictionPolicy::lru;
  if (name == "hazard") return EvictionPolicy::hazard;
  throw ConfigError("eviction_policy must be lru or hazard, not '" + name + "'");
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

template <class T>
std::vector<T> vector_of(const Column<T>& column) {
  return {column.data(), column.data() + column.shape(0)};
}

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
      .def(
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
      .def_prop_ro("eviction_policy",
                   [](const Pool& p) {
                     return p.segment()->eviction_policy() == EvictionPolicy::hazard ? "hazard" : "lru";
                   })
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
  bind_shared_pool(m, pool_class);
  bind_seals(m, pool_class);

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
