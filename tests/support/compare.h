#pragma once

// Errors against float64 and the bounds that tests/op_cases/README.md sets.

#include <cmath>
#include <vector>

#include "kda/chunk_kda_fwd.h"
#include "support/op_cases.h"

namespace kda::testing {

// The Frobenius norm of actual - expected, relative to that of expected, or of 1e-30 per element where that is more;
// absolute where expected is 0. Infinite if a number is NaN, or infinite where the other one is not.
[[nodiscard]] double relative_error(const std::vector<double>& actual, const std::vector<double>& expected);

struct Comparison {
  double error = 0;
  double rounding = 0;  // error of the float64 result rounded to the output's dtype
  double bound = 0;

  // An error that is not finite is never right, not even beside a bound that is not.
  [[nodiscard]] bool ok() const { return std::isfinite(error) && error <= bound; }
};

// What compare() allows beyond the CPU's bounds, where tests/op_cases/README.md says so of the device under test: on
// attn_out, final_state, v_new and h.
extern double device_tolerance;

// Tokens before each token of the token axis in its own chunk.
[[nodiscard]] std::vector<std::int64_t> rows_in_chunk(const OpCase& c);

// One output (an index into kChunkKdaFwdOutputNames) of a case, both sides row-major.
[[nodiscard]] Comparison compare(const OpCase& c, int output, const std::vector<double>& actual,
                                 const std::vector<double>& expected);

}  // namespace kda::testing
