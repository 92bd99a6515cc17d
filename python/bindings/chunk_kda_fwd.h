#pragma once

#include <nanobind/nanobind.h>

namespace kda::python {

void bind_chunk_kda_fwd(nanobind::module_& module);

}  // namespace kda::python
