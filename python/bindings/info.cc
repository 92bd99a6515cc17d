#include "info.h"

#include "array.h"
#include "kda/info.h"

namespace kda::python {
namespace nb = nanobind;

void bind_info(nb::module_& module) {
  module.def("version", &version);
  module.def("default_num_threads", &default_num_threads);
  module.def("cpu_instruction_set", [] { return to_str(cpu_instruction_set()); });
  module.def("cpu_instruction_sets", [] {
    nb::list names;
    for (const std::string& name : cpu_instruction_sets()) names.append(to_str(name));
    return names;
  });
  module.def("backends", [] {
    nb::list found;
    for (const BackendInfo& backend : backends()) {
      found.append(nb::make_tuple(to_str(backend.name), backend.available, to_str(backend.detail)));
    }
    return found;
  });
}

}  // namespace kda::python
