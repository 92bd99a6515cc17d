// kda_gate: accuracy over all of fp32, values that are no numbers, strides, threads, sizes.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <thread>
#include <vector>

#include "kda/info.h"
#include "kda/kda_gate.h"
#include "kda/reference.h"
#include "support/dtypes.h"
#include "support/gate_cases.h"

namespace kda::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Parameters {
  float A_log = 0;
  float dt_bias = 0;
  std::optional<double> lower_bound;
};

std::vector<float> gates(const std::vector<float>& g, const Parameters& p, Dtype out_dtype = Dtype::kFloat32) {
  const auto count = static_cast<std::int64_t>(g.size());
  KdaGateInputs inputs;
  inputs.g = TensorView::contiguous(g.data(), Dtype::kFloat32, {count, 1, 1});
  inputs.A_log = TensorView::contiguous(&p.A_log, Dtype::kFloat32, {1});
  if (p.dt_bias != 0) inputs.dt_bias = TensorView::contiguous(&p.dt_bias, Dtype::kFloat32, {1});
  std::vector<float> memory(g.size());
  execute_gate(inputs, TensorView::contiguous(memory.data(), out_dtype, {count, 1, 1}), {p.lower_bound}, {});
  std::vector<float> result(g.size());
  for (std::int64_t e = 0; e < count; ++e) result[static_cast<std::size_t>(e)] = load(memory.data(), out_dtype, e);
  return result;
}

double exact_gate(float g, const Parameters& p) {
  const double x = double{g} + double{p.dt_bias};
  const double rate = std::min<double>(std::exp(double{p.A_log}), FLT_MAX);
  if (!p.lower_bound) return -rate * (x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)));
  const double z = rate * x;
  return *p.lower_bound * (z > 0 ? 1 / (1 + std::exp(-z)) : std::exp(z) / (1 + std::exp(z)));
}

// The spacing of fp32 at a number.
double ulp(double x) {
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(1.0, std::max(exponent - 24, -149));
}

// Finite numbers of every exponent and sign, and many in the ranges that gates come from.
std::vector<float> sweep(std::uint32_t step) {
  std::vector<float> values;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += step) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (std::isfinite(x)) values.push_back(x);
  }
  for (int i = 0; i < 200'000; ++i) {
    const float unit = static_cast<float>(i) / 200'000;
    values.push_back(-110 + 130 * unit);
    values.push_back(-4 + 8 * unit);
  }
  return values;
}

// Without fused multiply-add the corrections of rounding errors are rounded themselves.
double promised_ulp() {
  if (gate_ulps > 0) return gate_ulps;
  return cpu_instruction_set() == "SSE4" ? 3.0 : 2.0;
}

void expect_within_promise(const std::vector<float>& g, const Parameters& p) {
  const std::vector<float> actual = gates(g, p);
  double worst = 0;
  float worst_at = 0;
  for (std::size_t i = 0; i < g.size(); ++i) {
    const double expected = exact_gate(g[i], p);
    if (std::abs(expected) > FLT_MAX) {
      ASSERT_GE(std::abs(actual[i]), FLT_MAX) << "g " << g[i];
      continue;
    }
    const double error = std::abs(actual[i] - expected) / ulp(expected);
    if (!(error <= worst)) {
      worst = error;
      worst_at = g[i];
    }
  }
  EXPECT_LE(worst, promised_ulp()) << "at g " << worst_at << ", A_log " << p.A_log << ", dt_bias " << p.dt_bias;
}

TEST(KdaGate, SoftplusIsWithinTwoUlpEverywhere) {
  const std::vector<float> g = sweep(16411);
  for (const float A_log : {0.0f, -0.37f, 1.13f, 5.3f, -20.0f, 60.0f, 88.7f, -86.0f, 100.0f}) {
    for (const float dt_bias : {0.0f, 0.7318f, -13.3f}) expect_within_promise(g, {A_log, dt_bias, {}});
  }
}

TEST(KdaGate, BoundedIsWithinTwoUlpEverywhere) {
  const std::vector<float> g = sweep(16411);
  for (const float A_log : {0.0f, -0.37f, 1.13f, 5.3f, -20.0f, 60.0f, 100.0f}) {
    for (const float dt_bias : {0.0f, 0.7318f, -13.3f}) {
      for (const double bound : {-5.0, -0.3, 2.5e38, -1e-30}) expect_within_promise(g, {A_log, dt_bias, bound});
    }
  }
}

TEST(KdaGate, EverySixteenBitInputGivesTheGateOfItsValue) {
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    std::vector<std::uint16_t> g(1 << 16);
    std::iota(g.begin(), g.end(), std::uint16_t{0});
    std::vector<float> wide(g.size());
    for (std::size_t i = 0; i < g.size(); ++i) wide[i] = load(g.data(), dtype, static_cast<std::int64_t>(i));
    const float A_log = 0.4f;
    KdaGateInputs inputs;
    inputs.g = TensorView::contiguous(g.data(), dtype, {1 << 16, 1, 1});
    inputs.A_log = TensorView::contiguous(&A_log, Dtype::kFloat32, {1});
    std::vector<float> actual(g.size());
    execute_gate(inputs, TensorView::contiguous(actual.data(), Dtype::kFloat32, {1 << 16, 1, 1}), {}, {});
    const std::vector<float> expected = gates(wide, {A_log, 0, {}});
    for (std::size_t i = 0; i < g.size(); ++i) {
      if (std::isnan(wide[i])) {
        ASSERT_TRUE(std::isnan(actual[i]));
      } else {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(actual[i]), std::bit_cast<std::uint32_t>(expected[i])) << wide[i];
      }
    }
  }
}

void expect_rounded_fp32_gates(Dtype dtype) {
  const std::vector<float> g = sweep(1'000'003);
  for (const std::optional<double> bound : {std::optional<double>(), std::optional(-5.0)}) {
    const std::vector<float> wide = gates(g, {0.3f, 0.1f, bound});
    const std::vector<float> narrow = gates(g, {0.3f, 0.1f, bound}, dtype);
    for (std::size_t i = 0; i < g.size(); ++i) ASSERT_EQ(narrow[i], round_to(dtype, wide[i])) << g[i];
  }
}

TEST(KdaGate, Float16OutputsAreTheRoundedFp32Gates) { expect_rounded_fp32_gates(Dtype::kFloat16); }
TEST(KdaGate, BFloat16OutputsAreTheRoundedFp32Gates) { expect_rounded_fp32_gates(Dtype::kBFloat16); }

TEST(KdaGate, InfinitiesHaveTheirLimits) {
  for (const float dt_bias : {0.0f, 1.5f}) {
    for (const float A_log : {0.0f, 0.3f, -40.0f, 88.0f, 1000.0f}) {
      const auto softplus = gates({-kInf, kInf, kNan, 1.0f, -FLT_MAX, FLT_MAX}, {A_log, dt_bias, {}});
      EXPECT_EQ(softplus[0], 0);
      EXPECT_EQ(softplus[1], -kInf);
      EXPECT_TRUE(std::isnan(softplus[2]));
      EXPECT_TRUE(std::isfinite(softplus[3]) || A_log > 80);
      EXPECT_EQ(softplus[4], 0);
      EXPECT_FALSE(std::isnan(softplus[5]));
      const auto bounded = gates({-kInf, kInf, kNan, 1.0f, -FLT_MAX, FLT_MAX}, {A_log, dt_bias, -5.0});
      EXPECT_EQ(bounded[0], 0);
      EXPECT_EQ(bounded[1], -5);
      EXPECT_TRUE(std::isnan(bounded[2]));
      EXPECT_TRUE(std::isfinite(bounded[3]));
      EXPECT_EQ(bounded[4], 0);
      EXPECT_EQ(bounded[5], -5);
    }
  }
}

TEST(KdaGate, AVanishingFactorTimesInfinityIsInfinite) {
  for (const float dt_bias : {0.0f, 1.5f}) {
    for (const float A_log : {-88.0f, -104.0f, -200.0f, -700.0f, -1000.0f, -FLT_MAX}) {
      const auto softplus = gates({-kInf, kInf, kNan, 1.0f}, {A_log, dt_bias, {}});
      EXPECT_EQ(softplus[0], 0);
      EXPECT_EQ(softplus[1], -kInf);
      EXPECT_TRUE(std::isnan(softplus[2]));
      EXPECT_NEAR(softplus[3], 0, 1e-37);
      const auto bounded = gates({-kInf, kInf, kNan, 1.0f, -FLT_MAX, FLT_MAX}, {A_log, dt_bias, -5.0});
      EXPECT_EQ(bounded[0], 0);
      EXPECT_EQ(bounded[1], -5);
      EXPECT_TRUE(std::isnan(bounded[2]));
      EXPECT_EQ(bounded[3], -2.5);
      if (A_log < -88) {
        EXPECT_NEAR(bounded[4], -2.5, 1e-5);
        EXPECT_NEAR(bounded[5], -2.5, 1e-5);
      }
    }
  }
}

TEST(KdaGate, AHugeFactorTimesNothingIsNothing) {
  for (const float A_log : {89.0f, 1000.0f, kInf}) {
    const auto softplus = gates({-1e4f, -1000.0f, 0.0f}, {A_log, 0, {}});
    EXPECT_EQ(softplus[0], 0);
    EXPECT_EQ(softplus[1], 0);
    EXPECT_NEAR(softplus[2] / FLT_MAX, -std::log(2.0), 1e-6);
    const auto bounded = gates({-1.0f, 0.0f, 1.0f}, {A_log, 0, -5.0});
    EXPECT_EQ(bounded[0], 0);
    EXPECT_EQ(bounded[1], -2.5);
    EXPECT_EQ(bounded[2], -5);
  }
  EXPECT_TRUE(std::isnan(gates({1.0f}, {kNan, 0, {}})[0]));
  EXPECT_TRUE(std::isnan(gates({1.0f}, {kNan, 0, -5.0})[0]));
  EXPECT_EQ(gates({1.0f}, {-kInf, 0, {}})[0], 0);
  EXPECT_EQ(gates({1.0f}, {-kInf, 0, -5.0})[0], -2.5);
}

TEST(KdaGate, NanStaysInItsElement) {
  GateCase c;
  c.shape = {50, 3, 100};
  c.dtype = Dtype::kFloat32;
  c.dt_bias = Bias::kFlat;
  for (const std::optional<double> bound : {std::optional<double>(), std::optional(-5.0)}) {
    c.lower_bound = bound;
    GateCall clean(c);
    execute_gate(clean.inputs, clean.out, clean.attributes, {});
    GateCall dirty(c);
    for (std::int64_t e = 0; e < 15000; e += 37) store(dirty.g.data(), c.dtype, e, e % 2 == 0 ? kNan : kInf);
    execute_gate(dirty.inputs, dirty.out, dirty.attributes, {});
    for (std::int64_t e = 0; e < 15000; ++e) {
      const float value = load(dirty.output.data(), c.output_dtype, e);
      if (e % 37 != 0) {
        ASSERT_EQ(value, load(clean.output.data(), c.output_dtype, e)) << e;
      } else if (e % 2 == 0) {
        ASSERT_TRUE(std::isnan(value)) << e;
      } else {
        ASSERT_EQ(value, bound ? -5.0f : -kInf) << e;
      }
    }
  }
}

TEST(KdaGate, OddBiasesStayInTheirColumns) {
  const std::vector<float> biases = {0.25f, kInf, -kInf, kNan, 0.25f, 1e30f, -1e30f};
  const auto D = static_cast<std::int64_t>(biases.size());
  const std::vector<float> g(64 * biases.size(), 0.5f);
  for (const float A_log : {0.3f, -kInf}) {
    for (const std::optional<double> bound : {std::optional<double>(), std::optional(-5.0)}) {
      KdaGateInputs inputs;
      inputs.g = TensorView::contiguous(g.data(), Dtype::kFloat32, {64, 1, D});
      inputs.A_log = TensorView::contiguous(&A_log, Dtype::kFloat32, {1});
      inputs.dt_bias = TensorView::contiguous(biases.data(), Dtype::kFloat32, {D});
      std::vector<float> actual(g.size());
      execute_gate(inputs, TensorView::contiguous(actual.data(), Dtype::kFloat32, {64, 1, D}), {bound}, {});
      for (std::size_t i = 0; i < actual.size(); ++i) {
        const float bias = biases[i % biases.size()];
        const float alone = gates({0.5f}, {A_log, bias, bound})[0];
        EXPECT_TRUE(actual[i] == alone || (std::isnan(actual[i]) && std::isnan(alone))) << bias << " " << actual[i];
        EXPECT_TRUE(!std::isnan(bias) || std::isnan(actual[i]));
      }
    }
  }
}

// Memory for a strided view of a shape, and where its first element is.
struct Strided {
  std::vector<std::byte> memory;
  TensorView view;

  Strided(Dtype dtype, const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides) {
    std::int64_t low = 0;
    std::int64_t high = 1;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      const std::int64_t reach = (shape[i] - 1) * strides[i];
      (reach < 0 ? low : high) += reach;
    }
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    memory.assign(static_cast<std::size_t>((high - low) * size), std::byte{0xff});
    view = TensorView::strided(memory.data() - low * size, dtype, shape, strides);
  }

  // f(offset, row-major index) for every element.
  template <class F>
  void for_each(const F& f) const {
    for (std::int64_t e = 0; e < view.numel(); ++e) {
      std::int64_t rest = e;
      std::int64_t offset = 0;
      for (std::size_t axis = view.sizes().size(); axis-- > 0;) {
        offset += rest % view.shape[axis] * view.strides[axis];
        rest /= view.shape[axis];
      }
      f(offset, e);
    }
  }
};

struct StrideCase {
  const char* name;
  std::vector<std::int64_t> g;
  std::vector<std::int64_t> out;
};

// An element's place, neighbours and company have no say in its gate: not how many channels there are, nor where rows
// begin, nor that others are far from 0 or no numbers.
void expect_elements_alone(Dtype dtype, Dtype out_dtype, std::optional<double> bound, bool has_bias) {
  SCOPED_TRACE(std::string(name_of(dtype)) + " to " + std::string(name_of(out_dtype)) + (bound ? ", bounded" : "") +
               (has_bias ? ", bias" : ""));
  constexpr std::int64_t kRows = 7, kHeads = 2, kMost = 40;
  const std::vector<float> odd = {kInf, -kInf, kNan, 95.0f, -90.0f, -1000.0f, 3e4f, 0.0f};
  GateCase c;
  c.shape = {kRows, kHeads, kMost};
  c.dtype = dtype;
  c.output_dtype = out_dtype;
  c.lower_bound = bound;
  if (has_bias) c.dt_bias = Bias::kMatrix;
  GateCall all(c);
  for (std::int64_t e = 0; e < all.inputs.g.numel(); e += 11) {
    store(all.g.data(), dtype, e, odd[static_cast<std::size_t>(e / 11) % odd.size()]);
  }
  if (has_bias) {
    all.dt_bias[13] = 85;
    all.dt_bias[30] = kNan;
    all.dt_bias[57] = -kInf;
  }
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  const auto out_size = static_cast<std::int64_t>(size_of(out_dtype));
  std::vector<float> alone(static_cast<std::size_t>(all.out.numel()));
  for (std::int64_t column = 0; column < kHeads * kMost; ++column) {
    std::vector<std::byte> rows(static_cast<std::size_t>(kRows * size)),
        gates(static_cast<std::size_t>(kRows * out_size));
    for (std::int64_t r = 0; r < kRows; ++r) {
      std::memcpy(rows.data() + r * size, all.g.data() + (r * kHeads * kMost + column) * size,
                  static_cast<std::size_t>(size));
    }
    KdaGateInputs inputs;
    inputs.g = TensorView::contiguous(rows.data(), dtype, {kRows, 1, 1});
    inputs.A_log = TensorView::contiguous(&all.A_log[static_cast<std::size_t>(column / kMost)], Dtype::kFloat32, {1});
    if (has_bias) {
      inputs.dt_bias = TensorView::contiguous(&all.dt_bias[static_cast<std::size_t>(column)], Dtype::kFloat32, {1});
    }
    execute_gate(inputs, TensorView::contiguous(gates.data(), out_dtype, {kRows, 1, 1}), all.attributes, {});
    for (std::int64_t r = 0; r < kRows; ++r) {
      alone[static_cast<std::size_t>(r * kHeads * kMost + column)] = load(gates.data(), out_dtype, r);
    }
  }
  for (std::int64_t D = 1; D <= kMost; ++D) {
    // Rows without gaps, and with them; where memory is aligned, and an element further on.
    for (const std::int64_t gap : {std::int64_t{0}, std::int64_t{8}}) {
      for (const std::int64_t shift : {0, 1}) {
        const std::int64_t row = kHeads * D + gap;
        std::vector<std::byte> g(static_cast<std::size_t>((kRows * row + 1) * size));
        std::vector<std::byte> out(static_cast<std::size_t>((kRows * row + 1) * out_size));
        for (std::int64_t r = 0; r < kRows; ++r) {
          for (std::int64_t h = 0; h < kHeads; ++h) {
            std::memcpy(g.data() + (shift + r * row + h * D) * size, all.g.data() + ((r * kHeads + h) * kMost) * size,
                        static_cast<std::size_t>(D * size));
          }
        }
        KdaGateInputs inputs = all.inputs;
        inputs.g = TensorView::strided(g.data() + shift * size, dtype, {kRows, kHeads, D}, {row, D, 1});
        if (has_bias) {
          inputs.dt_bias = TensorView::strided(all.dt_bias.data(), Dtype::kFloat32, {kHeads, D}, {kMost, 1});
        }
        const TensorView to =
            TensorView::strided(out.data() + shift * out_size, out_dtype, {kRows, kHeads, D}, {row, D, 1});
        execute_gate(inputs, to, all.attributes, {});
        for (std::int64_t e = 0; e < to.numel(); ++e) {
          const std::int64_t r = e / D / kHeads, h = e / D % kHeads, d = e % D;
          const float actual = load(to.data, out_dtype, r * row + h * D + d);
          const float expected = alone[static_cast<std::size_t>((r * kHeads + h) * kMost + d)];
          ASSERT_TRUE(std::bit_cast<std::uint32_t>(actual) == std::bit_cast<std::uint32_t>(expected) ||
                      (std::isnan(actual) && std::isnan(expected)))
              << "D " << D << ", gap " << gap << ", shift " << shift << ", at " << r << " " << h << " " << d << ": "
              << actual << ", alone " << expected;
        }
      }
    }
  }
}

TEST(KdaGate, AnElementIsWhatItIsAlone) {
  constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16};
  for (const Dtype dtype : kDtypes) {
    for (const Dtype out_dtype : kDtypes) {
      for (const std::optional<double> bound : {std::optional<double>(), std::optional(-5.0)}) {
        for (const bool has_bias : {false, true}) expect_elements_alone(dtype, out_dtype, bound, has_bias);
      }
    }
  }
}

// Bits of strided calls of shape [4,5,3,D] equal those of the contiguous one, and gaps stay untouched.
void expect_strides_do_not_matter(std::int64_t D, const StrideCase& strides, Dtype dtype, Dtype out_dtype) {
  SCOPED_TRACE(strides.name);
  GateCase c;
  c.shape = {4, 5, 3, D};
  c.dtype = dtype;
  c.output_dtype = out_dtype;
  c.dt_bias = Bias::kMatrix;
  GateCall call(c);
  execute_gate(call.inputs, call.out, call.attributes, {});

  Strided g(dtype, c.shape, strides.g);
  g.for_each(
      [&](std::int64_t offset, std::int64_t e) { store(g.view.data, dtype, offset, load(call.g.data(), dtype, e)); });
  Strided out(out_dtype, c.shape, strides.out);
  KdaGateInputs inputs = call.inputs;
  inputs.g = g.view;
  execute_gate(inputs, out.view, call.attributes, {});
  std::vector<std::byte> expected(out.memory.size(), std::byte{0xff});
  const auto size = static_cast<std::int64_t>(size_of(out_dtype));
  std::byte* first = expected.data() + (static_cast<std::byte*>(out.view.data) - out.memory.data());
  out.for_each([&](std::int64_t offset, std::int64_t e) {
    std::memcpy(first + offset * size, call.output.data() + e * size, static_cast<std::size_t>(size));
  });
  EXPECT_TRUE(out.memory == expected);
}

TEST(KdaGate, StridesDoNotMatter) {
  for (const std::int64_t D : {1, 5, 33, 128}) {
    const std::vector<std::int64_t> plain = {15 * D, 3 * D, D, 1};
    const StrideCase cases[] = {
        {"plain", plain, plain},
        {"padded rows of g", {20 * D + 100, 4 * D + 7, D, 1}, plain},
        {"padded rows", {20 * D + 100, 4 * D + 7, D, 1}, {20 * D + 33, 4 * D + 5, D, 1}},
        {"heads first", {15 * D, D, 5 * D, 1}, plain},
        {"heads first in out", plain, {15 * D, D, 5 * D, 1}},
        {"channels first", {15 * D, 3, 1, 15}, {15 * D, 3, 1, 15}},
        {"gaps between channels", {45 * D, 9 * D, 3 * D, 3}, {30 * D, 6 * D, 2 * D, 2}},
        {"backwards", {-15 * D, -3 * D, -D, -1}, {15 * D, -3 * D, D, -1}},
        {"batch last", {3 * D, 12 * D, D, 1}, {3 * D, 12 * D, D, 1}},
    };
    for (const StrideCase& strides : cases) {
      expect_strides_do_not_matter(D, strides, Dtype::kBFloat16, Dtype::kFloat32);
      expect_strides_do_not_matter(D, strides, Dtype::kFloat32, Dtype::kFloat16);
    }
  }
}

TEST(KdaGate, OneElementMayStandForAll) {
  const float value = 0.75f;
  const float parameters[] = {0.1f, 0.2f};
  for (const std::int64_t D : {1, 100}) {
    KdaGateInputs inputs;
    inputs.g = TensorView::strided(&value, Dtype::kFloat32, {9, 2, D}, {0, 0, 0});
    inputs.A_log = TensorView::strided(&parameters[0], Dtype::kFloat32, {2}, {0});
    inputs.dt_bias = TensorView::strided(&parameters[1], Dtype::kFloat32, {2, D}, {0, 0});
    std::vector<float> out(static_cast<std::size_t>(18 * D));
    execute_gate(inputs, TensorView::contiguous(out.data(), Dtype::kFloat32, {9, 2, D}), {}, {});
    const float expected = gates({value}, {0.1f, 0.2f, {}})[0];
    for (const float gate : out) ASSERT_EQ(gate, expected);
  }
}

TEST(KdaGate, ThreadsDoNotMatter) {
  for (const std::vector<std::int64_t>& shape : std::vector<std::vector<std::int64_t>>{
           {300, 32, 128}, {10000, 2, 7}, {3, 40, 3, 100}, {2, 3000, 5}, {20000, 1, 1}}) {
    GateCase c;
    c.shape = shape;
    c.dt_bias = Bias::kFlat;
    GateCall call(c);
    kda_gate(call.inputs, call.out, call.attributes, {.num_threads = 1});
    const std::vector<std::byte> expected = call.output;
    for (const int threads : {2, 3, 7, 64}) {
      std::fill(call.output.begin(), call.output.end(), std::byte{0xff});
      kda_gate(call.inputs, call.out, call.attributes, {.num_threads = threads});
      EXPECT_TRUE(call.output == expected) << threads;
    }
  }
}

TEST(KdaGate, APlanServesSeveralThreadsAtOnce) {
  GateCase c;
  c.shape = {200, 8, 100};
  c.dt_bias = Bias::kFlat;
  GateCall call(c);
  const KdaGatePlan plan(call.inputs, call.out, call.attributes, {.num_threads = 3});
  EXPECT_EQ(plan.workspace_bytes(), 0u);
  EXPECT_TRUE(plan.workspace_regions().empty());
  EXPECT_EQ(plan.backend(), "cpu");
  EXPECT_EQ(plan.launches(), 1);
  plan.execute(call.inputs, call.out);
  std::vector<std::vector<std::byte>> outputs(4, std::vector<std::byte>(call.output.size()));
  std::vector<std::thread> threads;
  for (auto& output : outputs) {
    threads.emplace_back([&] {
      TensorView out = call.out;
      out.data = output.data();
      for (int i = 0; i < 20; ++i) plan.execute(call.inputs, out);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& output : outputs) EXPECT_TRUE(output == call.output);
}

TEST(KdaGate, NothingIsDoneWithoutElements) {
  const float A_log[] = {0, 0};
  KdaGateInputs inputs;
  inputs.g = TensorView::contiguous(nullptr, Dtype::kBFloat16, {0, 2, 3});
  inputs.A_log = TensorView::contiguous(A_log, Dtype::kFloat32, {2});
  const TensorView out = TensorView::contiguous(nullptr, Dtype::kFloat32, {0, 2, 3});
  EXPECT_NO_THROW(kda_gate(inputs, out, {}));
  EXPECT_TRUE(reference::kda_gate(inputs, {}).empty());
  EXPECT_EQ(KdaGatePlan(inputs, out, {}).launches(), 0);
}

// Virtual memory of any size on few pages: the same file mapped again and again.
class RepeatedPages {
 public:
  RepeatedPages(std::size_t page_bytes, std::size_t count) : bytes_(page_bytes * count) {
    const int file = memfd_create("pages", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(page_bytes)) != 0) return;
    void* base = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base != MAP_FAILED) data_ = static_cast<std::byte*>(base);
    for (std::size_t i = 0; data_ != nullptr && i < count; ++i) {
      if (mmap(data_ + i * page_bytes, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) ==
          MAP_FAILED) {
        munmap(data_, bytes_);
        data_ = nullptr;
      }
    }
    close(file);
  }
  ~RepeatedPages() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  RepeatedPages(const RepeatedPages&) = delete;
  RepeatedPages& operator=(const RepeatedPages&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

TEST(KdaGate, MoreThanTwoToThe31Elements) {
  constexpr std::int64_t kRow = 1 << 15;
  constexpr std::int64_t kRows = (1 << 16) + 3;
  constexpr std::int64_t kRowsPerPart = 1 << 10;
  const RepeatedPages pages(kRowsPerPart * kRow * 2, kRows / kRowsPerPart + 1);
  if (pages.data() == nullptr) GTEST_SKIP() << "no such mapping here";
  GateCase c;
  c.shape = {1, 256, 128};
  c.output_dtype = Dtype::kBFloat16;
  GateCall row(c);
  kda_gate(row.inputs, row.out, row.attributes);

  KdaGateInputs inputs = row.inputs;
  inputs.g = TensorView::strided(row.g.data(), c.dtype, {kRows, 256, 128}, {0, 128, 1});
  const TensorView out = TensorView::contiguous(pages.data(), Dtype::kBFloat16, {kRows, 256, 128});
  ASSERT_GT(out.numel(), std::int64_t{1} << 31);
  kda_gate(inputs, out, row.attributes);
  for (std::int64_t i = 0; i < kRowsPerPart; ++i) {
    ASSERT_EQ(std::memcmp(pages.data() + i * kRow * 2, row.output.data(), kRow * 2), 0) << i;
  }
}

// One illegal call: how it comes about, and the message that refuses it.
struct Refusal {
  const char* name;
  std::function<void(GateCall&)> change;
  ErrorKind kind;
  std::string message;
};

void PrintTo(const Refusal& refusal, std::ostream* stream) { *stream << refusal.name; }

class GateRefusals : public ::testing::TestWithParam<Refusal> {};

TEST_P(GateRefusals, NameArgumentExpectedAndGot) {
  GateCase c;
  c.shape = {5, 2, 3};
  c.dt_bias = Bias::kFlat;
  GateCall call(c);
  const std::vector<std::byte> untouched = call.output;
  GetParam().change(call);
  try {
    kda_gate(call.inputs, call.out, call.attributes);
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), GetParam().kind);
    EXPECT_EQ(error.what(), "kda_gate: " + GetParam().message);
  }
  EXPECT_TRUE(call.output == untouched);
}

TensorView view(Dtype dtype, std::initializer_list<std::int64_t> shape) {
  static std::vector<std::byte> memory(1 << 16);
  return TensorView::contiguous(memory.data(), dtype, shape);
}

constexpr auto kMissing = ErrorKind::kMissing;
constexpr auto kDtype = ErrorKind::kDtype;
constexpr auto kValue = ErrorKind::kValue;
constexpr auto kF32 = Dtype::kFloat32;

INSTANTIATE_TEST_SUITE_P(
    KdaGate, GateRefusals,
    ::testing::Values(
        Refusal{"NoG", [](GateCall& c) { c.inputs.g = {}; }, kMissing, "g: expected a tensor, got none"},
        Refusal{"NoOut", [](GateCall& c) { c.out = {}; }, kMissing, "out: expected a tensor, got none"},
        Refusal{"NoALog", [](GateCall& c) { c.inputs.A_log = {}; }, kMissing,
                "A_log: expected a tensor, as lower_bound is absent, got none"},
        Refusal{"BoundNan", [](GateCall& c) { c.attributes.lower_bound = std::nan(""); }, kValue,
                "lower_bound: expected a finite number, got nan"},
        Refusal{"BoundInf", [](GateCall& c) { c.attributes.lower_bound = -HUGE_VAL; }, kValue,
                "lower_bound: expected a finite number, got -inf"},
        Refusal{"GDtype", [](GateCall& c) { c.inputs.g.dtype = Dtype::kInt32; }, kDtype,
                "g: expected dtype float32 or float16 or bfloat16, got int32"},
        Refusal{"OutDtype", [](GateCall& c) { c.out.dtype = Dtype::kFloat64; }, kDtype,
                "out: expected dtype float32 or float16 or bfloat16, got float64"},
        Refusal{"ALogDtype", [](GateCall& c) { c.inputs.A_log.dtype = Dtype::kBFloat16; }, kDtype,
                "A_log: expected dtype float32, got bfloat16"},
        Refusal{"BiasDtype", [](GateCall& c) { c.inputs.dt_bias.dtype = Dtype::kFloat16; }, kDtype,
                "dt_bias: expected dtype float32, got float16"},
        Refusal{"GRank", [](GateCall& c) { c.inputs.g = view(kF32, {6}); }, kValue,
                "g: expected rank 2..8, [...,H,D], got rank 1, [6]"},
        Refusal{"GRank9", [](GateCall& c) { c.inputs.g.rank = 9; }, kValue, "g: expected rank 0..8, got rank 9"},
        Refusal{"NoHeads",
                [](GateCall& c) {
                  c.inputs.g = view(kF32, {5, 0, 3});
                },
                kValue, "g: expected H at least 1, got H = 0"},
        Refusal{"NoChannels",
                [](GateCall& c) {
                  c.inputs.g = view(kF32, {5, 2, 0});
                },
                kValue, "g: expected D at least 1, got D = 0"},
        Refusal{"NegativeExtent", [](GateCall& c) { c.inputs.g.shape[0] = -1; }, kValue,
                "g: expected extents >= 0, got [-1,2,3]"},
        Refusal{"GTooFar", [](GateCall& c) { c.inputs.g.strides[0] = std::int64_t{1} << 62; }, kValue,
                "g: expected addresses within 64 bits, got bfloat16 [5,2,3] strides [4611686018427387904,3,1] on cpu"},
        Refusal{"ALogShape", [](GateCall& c) { c.inputs.A_log = view(kF32, {3}); }, kValue,
                "A_log: expected shape [H] = [2], got [3]"},
        Refusal{"ALogRank",
                [](GateCall& c) {
                  c.inputs.A_log = view(kF32, {2, 1});
                },
                kValue, "A_log: expected rank 1, [H], got rank 2, [2,1]"},
        Refusal{"BiasShape",
                [](GateCall& c) {
                  c.inputs.dt_bias = view(kF32, {3, 2});
                },
                kValue, "dt_bias: expected shape [H*D] = [6] or [H,D] = [2,3], got [3,2]"},
        Refusal{"OutShape",
                [](GateCall& c) {
                  c.out = view(kF32, {5, 3, 2});
                },
                kValue, "out: expected shape of g = [5,2,3], got [5,3,2]"},
        Refusal{"OutRank",
                [](GateCall& c) {
                  c.out = view(kF32, {5, 6});
                },
                kValue, "out: expected shape of g = [5,2,3], got [5,6]"},
        Refusal{
            "OutOverlapsItself", [](GateCall& c) { c.out.strides[0] = 0; }, kValue,
            "out: expected strides that give every element memory of its own, got float32 [5,2,3] strides [0,3,1] on "
            "cpu"},
        Refusal{"OutIsG", [](GateCall& c) { c.inputs.g = c.out; }, kValue,
                "out: expected memory of its own, got memory shared with g"},
        Refusal{"OutIsALog", [](GateCall& c) { c.inputs.A_log.data = c.out.data; }, kValue,
                "out: expected memory of its own, got memory shared with A_log"},
        Refusal{"OutIsBias", [](GateCall& c) { c.inputs.dt_bias.data = c.out.data; }, kValue,
                "out: expected memory of its own, got memory shared with dt_bias"},
        Refusal{"NullG", [](GateCall& c) { c.inputs.g.data = nullptr; }, kMissing,
                "g: expected data, got a null pointer"},
        Refusal{"NullOut", [](GateCall& c) { c.out.data = nullptr; }, kMissing,
                "out: expected data, got a null pointer"},
        Refusal{"NullALog", [](GateCall& c) { c.inputs.A_log.data = nullptr; }, kMissing,
                "A_log: expected data, got a null pointer"},
        Refusal{"NullBias", [](GateCall& c) { c.inputs.dt_bias.data = nullptr; }, kMissing,
                "dt_bias: expected data, got a null pointer"},
        Refusal{"OutDevice", [](GateCall& c) { c.out.device = {DeviceType::kCuda, 0}; }, kValue,
                "out: expected device cpu, got cuda:0"}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(KdaGate, ExecutionsAreAsPlanned) {
  GateCase c;
  c.shape = {5, 2, 3};
  GateCall call(c);
  const KdaGatePlan plan(call.inputs, call.out, call.attributes);
  KdaGateInputs other = call.inputs;
  other.g.strides[0] = 7;
  EXPECT_THROW(plan.execute(other, call.out), Error);
  other = call.inputs;
  other.A_log = {};
  EXPECT_THROW(plan.execute(other, call.out), Error);
  EXPECT_THROW(plan.execute(call.inputs, {}), Error);
  EXPECT_THROW(KdaGatePlan(call.inputs, call.out, call.attributes, {.num_threads = -1}), Error);
}

}  // namespace
}  // namespace kda::testing
