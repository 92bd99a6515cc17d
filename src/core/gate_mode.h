#pragma once

// What the operators that make gates have in common.

#include <cstdint>

namespace kda {

// With x = g + dt_bias: kActivated, the gate is g; kSoftplus, -exp(A_log) * softplus(x); kBounded, lower_bound *
// sigmoid(exp(A_log) * x). kAccumulated: g is gk.
enum class GateMode : std::uint8_t { kActivated, kSoftplus, kBounded, kAccumulated };

// exp(A_log), kept finite so that its product with 0 is 0, and, unless A_log is -inf, above 0 so that its product with
// infinity is infinity.
[[nodiscard]] float bounded_exp(float A_log) noexcept;

}  // namespace kda
