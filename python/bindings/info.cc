#include "info.h"

#include "kda/info.h"

namespace kda::python {
namespace nb = nanobind;

void bind_info(nb::module_& module) {
  module.def("version", &version);
  module.def("default_num_threads", &default_num_threads);
  module.def("cpu_instruction_set", [] { return nb::str(cpu_instruction_set().c_str()); });
  module.def("cpu_instruction_sets", [] {
    nb::list names;
    for (const std::string& name : cpu_instruction_sets()) names.append(nb::str(name.c_str()));
    return names;
  });
  module.def("backends", [] {
    nb::list found;
    for (const BackendInfo& backend : backends()) {
      found.append(nb::make_tuple(nb::str(backend.name.c_str()), backend.available, nb::str(backend.detail.c_str())));
    }
    return found;
  });
}

}  // namespace kda::python
