#pragma once

#include <nanobind/nanobind.h>

namespace kda::python {

void bind_gates(nanobind::module_& module);

}  // namespace kda::python
