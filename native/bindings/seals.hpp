// Seals: what objects carry with them beyond this pool.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/columns.hpp"
#include "copy/seal.hpp"

// A status for each ticket, from `verb(tickets, keys, statuses)`, which runs with the GIL released.
template <class Verb>
umbp::U8Array seal_statuses(const umbp::Column<umbp::u64>& tickets, nanobind::handle keys, Verb&& verb) {
  const umbp::Texts texts(keys, false);
  const size_t count = tickets.shape(0);
  if (texts.views.size() != count) throw umbp::ConfigError("tickets and keys have unequal lengths");
  auto* statuses = new umbp::SealStatus[count];
  umbp::U8Array result = umbp::array_of(reinterpret_cast<umbp::u8*>(statuses), {count});
  nanobind::gil_scoped_release release;
  verb(umbp::span_of(tickets), std::span<const std::string_view>(texts.views), statuses);
  return result;
}

void bind_seals(nanobind::module_& m, nanobind::class_<umbp::Pool>& pool);
