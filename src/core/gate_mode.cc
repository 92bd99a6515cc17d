#include "core/gate_mode.h"

#include <cfloat>
#include <cmath>

namespace kda {

float bounded_exp(float A_log) noexcept {
  const double factor = std::exp(static_cast<double>(A_log));
  if (factor < FLT_TRUE_MIN && A_log > -HUGE_VALF) return FLT_TRUE_MIN;
  return factor > FLT_MAX ? FLT_MAX : static_cast<float>(factor);
}

}  // namespace kda
