// What a pool does with objects: lookups, reservations, pins, eviction's memory, removal.
#pragma once

#include <nanobind/nanobind.h>

#include "pool/pool.hpp"

void bind_objects(nanobind::class_<umbp::Pool>& pool);
