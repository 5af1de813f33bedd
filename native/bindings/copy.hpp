// Copies between the engine's memory and a pool's slots.
#pragma once

#include <nanobind/nanobind.h>

void bind_copy(nanobind::module_& m);
