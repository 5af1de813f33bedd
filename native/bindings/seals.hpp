// Seals: what objects carry with them beyond this pool.
#pragma once

#include <nanobind/nanobind.h>

#include "pool/pool.hpp"

void bind_seals(nanobind::module_& m, nanobind::class_<umbp::Pool>& pool);
