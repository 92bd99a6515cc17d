#include "core/planning.h"

#include "core/checks.h"

namespace kda {

void check_options(std::string_view op, const PlanOptions& options) {
  if (options.num_threads < 0) {
    fail(ErrorKind::kValue, {op, "num_threads"}, "0 or more", std::to_string(options.num_threads));
  }
  if (options.state_products != StateProducts::kFloat32 && options.state_products != StateProducts::kBFloat16) {
    fail(ErrorKind::kValue, {op, "state_products"}, "kFloat32 or kBFloat16",
         std::to_string(static_cast<int>(options.state_products)));
  }
}

void require_planned(Argument argument, const TensorView& planned, const TensorView& given) {
  if (same_metadata(planned, given)) return;
  fail(is_given(given) ? ErrorKind::kValue : ErrorKind::kMissing, argument, "as planned " + describe(planned),
       describe(given));
}

}  // namespace kda
