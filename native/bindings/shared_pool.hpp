// The life of a pool that others share: resizing, destroying, quotas, who is in it.
#pragma once

#include <nanobind/nanobind.h>

#include "pool/pool.hpp"

void bind_shared_pool(nanobind::module_& m, nanobind::class_<umbp::Pool>& pool);
