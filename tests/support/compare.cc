#include "support/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "support/dtypes.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<double> rounded(const std::vector<double>& values, Dtype dtype) {
  std::vector<double> result(values);
  for (double& value : result) value = round_to(dtype, value);
  return result;
}

// The strictly lower part of every chunk of Akk; false when the rest is not that of a unit lower triangular matrix.
bool take_strictly_lower(const OpCase& c, const std::vector<double>& Akk, std::vector<double>& lower) {
  const std::vector<std::int64_t> rows = rows_in_chunk(c);
  for (std::int64_t e = 0; e < static_cast<std::int64_t>(Akk.size()); ++e) {
    const std::int64_t row = rows[e / c.chunk_size % c.T];
    const std::int64_t column = e % c.chunk_size;
    if (column < row) {
      lower.push_back(Akk[e]);
    } else if (Akk[e] != (column == row ? 1 : 0)) {
      return false;
    }
  }
  return true;
}

}  // namespace

double device_tolerance = 0;

double relative_error(const std::vector<double>& actual, const std::vector<double>& expected) {
  if (actual.size() != expected.size()) return kInfinity;
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(actual[i]) || std::isnan(expected[i])) return kInfinity;
    if (std::isinf(actual[i]) || std::isinf(expected[i])) {
      if (actual[i] != expected[i]) return kInfinity;
      continue;
    }
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  if (norm == 0) return std::sqrt(difference);
  // What is all smaller comes from decays that are 0 in fp32, but for subnormal numbers.
  return std::sqrt(difference / std::max(norm, 1e-60 * static_cast<double>(expected.size())));
}

std::vector<std::int64_t> rows_in_chunk(const OpCase& c) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(c.T));
  const std::vector<std::int64_t> bounds = c.cu_seqlens.value_or(std::vector<std::int64_t>{0, c.T});
  for (std::size_t n = 0; n + 1 < bounds.size(); ++n) {
    for (std::int64_t t = bounds[n]; t < bounds[n + 1]; ++t) rows[t] = (t - bounds[n]) % c.chunk_size;
  }
  return rows;
}

Comparison compare(const OpCase& c, int output, const std::vector<double>& actual,
                   const std::vector<double>& expected) {
  const Dtype dtype = output == kFinalState || output == kGk ? Dtype::kFloat32 : c.dtype;
  std::vector<double> got = actual;
  std::vector<double> wanted = expected;
  if (output == kAkk) {
    std::vector<double> lower;
    wanted.clear();
    if (!take_strictly_lower(c, expected, wanted))
      throw std::logic_error("compare: Akk of the reference is not triangular");
    const bool triangular = take_strictly_lower(c, actual, lower);
    if (!triangular) lower.assign(1, std::numeric_limits<double>::quiet_NaN());
    got = std::move(lower);
  }
  Comparison result;
  const std::vector<double> best = rounded(wanted, dtype);
  // What overflows its dtype has to be an infinity.
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (std::isinf(best[i])) wanted[i] = best[i];
  }
  result.error = relative_error(got, wanted);
  result.rounding = relative_error(best, wanted);
  if (dtype == Dtype::kFloat32) {
    result.bound = 1e-5;
  } else {
    result.bound = 1.05 * result.rounding + (output == kAttnOut ? 0 : 1e-5);
  }
  if (output == kAttnOut || output == kFinalState || output == kVNew || output == kH) {
    // Errors across the one direction in which keys are alike are never corrected and add up.
    result.bound += c.keys == Keys::kRandom ? device_tolerance : 3 * device_tolerance;
  }
  return result;
}

}  // namespace kda::testing
