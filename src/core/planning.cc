#include "core/planning.h"

#include "core/checks.h"

namespace kda {

void check_options(std::string_view op, const PlanOptions& options) {
  if (options.num_threads >= 0) return;
  fail(ErrorKind::kValue, {op, "num_threads"}, "0 or more", std::to_string(options.num_threads));
}

void require_planned(Argument argument, const TensorView& planned, const TensorView& given) {
  if (same_metadata(planned, given)) return;
  fail(is_given(given) ? ErrorKind::kValue : ErrorKind::kMissing, argument, "as planned " + describe(planned),
       describe(given));
}

}  // namespace kda
