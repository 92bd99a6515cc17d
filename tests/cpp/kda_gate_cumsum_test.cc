// kda_gate_cumsum: the gk of chunk_kda_fwd bit for bit, strides, threads, what is refused.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "kda/chunk_kda_fwd.h"
#include "kda/kda_gate_cumsum.h"
#include "kda/reference.h"
#include "support/dtypes.h"
#include "support/gate_cases.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits;
  bits.reserve(values.size());
  for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  return bits;
}

// gk of chunk_kda_fwd for the same gates; q, k, v and beta are 0.
std::vector<float> gk_of_chunk_kda_fwd(const GateCumsumCase& c, const GateCumsumCall& call) {
  const bool is_rank4 = c.shape.size() == 4;
  const std::int64_t K = c.shape.back();
  std::vector<std::int64_t> scalars(c.shape.begin(), c.shape.end() - 1);
  std::vector<std::int64_t> v_shape = c.shape;
  v_shape.back() = 16;
  const std::vector<std::uint16_t> zeros(call.output.size() + 16);
  std::vector<std::uint16_t> attn_out(call.output.size() / static_cast<std::size_t>(K) * 16);
  ChunkKdaFwdInputs inputs;
  inputs.q = TensorView::contiguous(zeros.data(), Dtype::kBFloat16, c.shape);
  inputs.k = inputs.q;
  inputs.v = TensorView::contiguous(zeros.data(), Dtype::kBFloat16, v_shape);
  inputs.g = call.inputs.g;
  inputs.beta = TensorView::contiguous(zeros.data(), Dtype::kBFloat16, scalars);
  inputs.A_log = call.inputs.A_log;
  inputs.dt_bias = call.inputs.dt_bias;
  ChunkKdaFwdAttributes attributes;
  attributes.layout = is_rank4 ? Layout::kBNSD : Layout::kNTD;
  attributes.scale = 1.0;
  attributes.chunk_size = c.chunk_size;
  attributes.use_gate_in_kernel = c.use_gate_in_kernel;
  attributes.safe_gate = c.safe_gate;
  attributes.lower_bound = c.lower_bound;
  if (c.cu_seqlens) attributes.cu_seqlens = *c.cu_seqlens;
  ChunkKdaFwdOutputs outputs;
  outputs.attn_out = chunk_kda_fwd_outputs(inputs, attributes).attn_out;
  outputs.attn_out.data = attn_out.data();
  std::vector<float> gk(call.output.size());
  outputs.gk = TensorView::contiguous(gk.data(), Dtype::kFloat32, c.shape);
  bool untouched = true;
  execute_call(inputs, outputs, attributes, {}, untouched);
  EXPECT_TRUE(untouched);
  return gk;
}

void expect_equal_to_chunk_kda_fwd(const GateCumsumCase& c) {
  SCOPED_TRACE(c.name);
  const GateCumsumCall call(c);
  execute_gate_cumsum(call.inputs, call.gk, call.attributes, {});
  EXPECT_EQ(bits_of(call.output), bits_of(gk_of_chunk_kda_fwd(c, call)));
}

TEST(KdaGateCumsum, IsTheGkOfChunkKdaFwdBitForBit) {
  for (const std::int64_t C : {64, 128}) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      for (const int mode : {0, 1, 2}) {
        for (const std::int64_t K : {16, 48, 128, 256}) {
          GateCumsumCase c;
          c.name = std::string("C ").append(std::to_string(C)).append(", mode ").append(std::to_string(mode));
          c.chunk_size = C;
          c.dtype = dtype;
          c.use_gate_in_kernel = mode > 0;
          c.safe_gate = mode > 1;
          c.dt_bias = mode > 0;
          c.gate_scale = 3;
          c.shape = {2, 3, 150, K};
          expect_equal_to_chunk_kda_fwd(c);
          c.shape = {3, 201, K};
          c.cu_seqlens = {0, 70, 70, 87, 201};
          expect_equal_to_chunk_kda_fwd(c);
          c.shape = {1, 3, 201, K};
          expect_equal_to_chunk_kda_fwd(c);
        }
      }
    }
  }
}

GateCumsumCase softplus_case(std::vector<std::int64_t> shape) {
  GateCumsumCase c;
  c.shape = std::move(shape);
  c.dtype = Dtype::kFloat16;
  c.use_gate_in_kernel = true;
  c.dt_bias = true;
  return c;
}

TEST(KdaGateCumsum, ThreadsDoNotMatter) {
  for (const std::int64_t K : {7, 128}) {
    const GateCumsumCase c = softplus_case({2, 5, 333, K});
    GateCumsumCall call(c);
    kda_gate_cumsum(call.inputs, call.gk, call.attributes, {.num_threads = 1});
    const auto expected = bits_of(call.output);
    for (const int threads : {2, 5, 40}) {
      std::fill(call.output.begin(), call.output.end(), kNan);
      kda_gate_cumsum(call.inputs, call.gk, call.attributes, {.num_threads = threads});
      EXPECT_EQ(bits_of(call.output), expected) << threads;
    }
  }
}

TEST(KdaGateCumsum, APlanServesSeveralThreadsAtOnce) {
  GateCumsumCall call(softplus_case({2, 5, 333, 40}));
  const KdaGateCumsumPlan plan(call.inputs, call.gk, call.attributes, {.num_threads = 3});
  EXPECT_EQ(plan.workspace_bytes(), 0u);
  EXPECT_EQ(plan.backend(), "cpu");
  plan.execute(call.inputs, call.gk);
  std::vector<std::vector<float>> outputs(4, std::vector<float>(call.output.size()));
  std::vector<std::thread> threads;
  for (auto& output : outputs) {
    threads.emplace_back([&] {
      TensorView gk = call.gk;
      gk.data = output.data();
      for (int i = 0; i < 20; ++i) plan.execute(call.inputs, gk);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& output : outputs) EXPECT_EQ(bits_of(output), bits_of(call.output));
}

TEST(KdaGateCumsum, StridesDoNotMatter) {
  for (const std::int64_t K : {1, 16, 37, 100}) {
    GateCumsumCase c = softplus_case({2, 3, 70, K});
    GateCumsumCall call(c);
    execute_gate_cumsum(call.inputs, call.gk, call.attributes, {});
    // Token-major, backwards in time, gaps of NaN between channels.
    const std::int64_t row = 3 * K;
    std::vector<std::uint16_t> g(static_cast<std::size_t>(2 * 70 * 3 * row), 0xffff);
    std::vector<float> gk(g.size(), 12345.0f);
    const std::int64_t batch = 70 * 3 * row, token = 3 * row;
    const auto at = [&](std::int64_t e) {
      const std::int64_t k = e % K, t = e / K % 70, h = e / K / 70 % 3, b = e / K / 70 / 3;
      return static_cast<std::size_t>(b * batch + (69 - t) * token + h * row + k * 3);
    };
    for (std::int64_t e = 0; e < call.inputs.g.numel(); ++e) {
      g[at(e)] = to_float16(load(call.g.data(), Dtype::kFloat16, e));
    }
    KdaGateCumsumInputs inputs = call.inputs;
    inputs.g = TensorView::strided(g.data() + 69 * token, Dtype::kFloat16, {2, 3, 70, K}, {batch, row, -token, 3});
    execute_gate_cumsum(
        inputs, TensorView::strided(gk.data() + 69 * token, Dtype::kFloat32, {2, 3, 70, K}, {batch, row, -token, 3}),
        call.attributes, {});
    for (std::int64_t e = 0; e < call.inputs.g.numel(); ++e) {
      ASSERT_EQ(gk[at(e)], call.output[static_cast<std::size_t>(e)]) << e;
      gk[at(e)] = 12345.0f;
    }
    for (const float gap : gk) ASSERT_EQ(gap, 12345.0f);
  }
}

TEST(KdaGateCumsum, ANanReachesOnlyWhatFollowsInItsChunkAndChannel) {
  GateCumsumCase c;
  c.shape = {2, 100, 20};
  c.chunk_size = 32;
  GateCumsumCall clean(c);
  execute_gate_cumsum(clean.inputs, clean.gk, clean.attributes, {});
  GateCumsumCall dirty(c);
  store(dirty.g.data(), c.dtype, (1 * 100 + 40) * 20 + 7, kNan);
  store(dirty.g.data(), c.dtype, (1 * 100 + 70) * 20 + 3, -kInf);
  execute_gate_cumsum(dirty.inputs, dirty.gk, dirty.attributes, {});
  for (std::int64_t e = 0; e < 4000; ++e) {
    const std::int64_t k = e % 20, t = e / 20 % 100, h = e / 2000;
    const float value = dirty.output[static_cast<std::size_t>(e)];
    if (h == 1 && k == 7 && t >= 40 && t < 64) {
      ASSERT_TRUE(std::isnan(value)) << e;
    } else if (h == 1 && k == 3 && t >= 70 && t < 96) {
      ASSERT_EQ(value, -kInf) << e;
    } else {
      ASSERT_EQ(value, clean.output[static_cast<std::size_t>(e)]) << e;
    }
  }
}

// 0 times infinity is nobody's gate: exp(A_log) is above 0, however small.
TEST(KdaGateCumsum, AVanishingFactorTimesInfinityIsInfinite) {
  GateCumsumCase c;
  c.shape = {1, 1, 40, 5};
  c.chunk_size = 32;
  c.use_gate_in_kernel = true;
  c.dt_bias = true;
  for (const bool is_bounded : {false, true}) {
    c.safe_gate = is_bounded;
    GateCumsumCall call(c);
    for (const float A_log : {-90.0f, -104.0f, -1000.0f}) {
      call.A_log[0] = A_log;
      for (std::int64_t e = 0; e < 200; e += 7) {
        store(call.g.data(), c.dtype, e, e % 2 == 0 || !is_bounded ? -kInf : kInf);
      }
      if (!is_bounded) store(call.g.data(), c.dtype, 199, kInf);
      execute_gate_cumsum(call.inputs, call.gk, call.attributes, {});
      const std::vector<double> expected = reference::kda_gate_cumsum(call.inputs, call.attributes);
      for (std::size_t e = 0; e < expected.size(); ++e) {
        if (std::isinf(expected[e])) {
          EXPECT_EQ(call.output[e], expected[e]) << e;
        } else {
          EXPECT_NEAR(call.output[e], expected[e], 1e-5 * std::abs(expected[e]) + 1e-36) << e;
        }
      }
    }
  }
}

TEST(KdaGateCumsum, ParametersAreNotReadWhenGatesAreActivated) {
  GateCumsumCase c;
  c.shape = {2, 40, 20};
  GateCumsumCall call(c);
  // Shapes and data that no other mode would accept.
  call.inputs.A_log = TensorView::contiguous(nullptr, Dtype::kFloat32, {77});
  call.inputs.dt_bias = TensorView::contiguous(nullptr, Dtype::kFloat32, {1, 2, 3});
  call.attributes.lower_bound = 9;
  call.attributes.safe_gate = true;
  EXPECT_NO_THROW(kda_gate_cumsum(call.inputs, call.gk, call.attributes));
}

// One illegal call: how it comes about, and the message that refuses it.
struct Refusal {
  const char* name;
  std::function<void(GateCumsumCall&)> change;
  ErrorKind kind;
  std::string message;
};

void PrintTo(const Refusal& refusal, std::ostream* stream) { *stream << refusal.name; }

class GateCumsumRefusals : public ::testing::TestWithParam<Refusal> {};

TEST_P(GateCumsumRefusals, NameArgumentExpectedAndGot) {
  GateCumsumCase c = softplus_case({1, 2, 10, 3});
  c.safe_gate = true;
  GateCumsumCall call(c);
  GetParam().change(call);
  try {
    kda_gate_cumsum(call.inputs, call.gk, call.attributes);
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), GetParam().kind);
    EXPECT_EQ(error.what(), "kda_gate_cumsum: " + GetParam().message);
  }
  for (const float value : call.output) EXPECT_TRUE(std::isnan(value));
}

TensorView view(Dtype dtype, std::initializer_list<std::int64_t> shape) {
  static std::vector<std::byte> memory(1 << 16);
  return TensorView::contiguous(memory.data(), dtype, shape);
}

void set_cu_seqlens(GateCumsumCall& call, std::initializer_list<std::int64_t> values) {
  static std::vector<std::int64_t> kept;
  kept = values;
  call.attributes.cu_seqlens = kept;
}

constexpr auto kMissing = ErrorKind::kMissing;
constexpr auto kDtype = ErrorKind::kDtype;
constexpr auto kValue = ErrorKind::kValue;
constexpr auto kF32 = Dtype::kFloat32;

INSTANTIATE_TEST_SUITE_P(
    KdaGateCumsum, GateCumsumRefusals,
    ::testing::Values(
        Refusal{"NoG", [](GateCumsumCall& c) { c.inputs.g = {}; }, kMissing, "g: expected a tensor, got none"},
        Refusal{"NoGk", [](GateCumsumCall& c) { c.gk = {}; }, kMissing, "gk: expected a tensor, got none"},
        Refusal{"NoALog", [](GateCumsumCall& c) { c.inputs.A_log = {}; }, kMissing,
                "A_log: expected a tensor, as use_gate_in_kernel is set, got none"},
        Refusal{"ChunkSize", [](GateCumsumCall& c) { c.attributes.chunk_size = 16; }, kValue,
                "chunk_size: expected 32, 64 or 128, got 16"},
        Refusal{"Bound", [](GateCumsumCall& c) { c.attributes.lower_bound = -5.5; }, kValue,
                "lower_bound: expected a number in [-5, 0), got -5.5"},
        Refusal{"BoundNan", [](GateCumsumCall& c) { c.attributes.lower_bound = std::nan(""); }, kValue,
                "lower_bound: expected a number in [-5, 0), got nan"},
        Refusal{"GDtype", [](GateCumsumCall& c) { c.inputs.g.dtype = Dtype::kInt64; }, kDtype,
                "g: expected dtype float32 or float16 or bfloat16, got int64"},
        Refusal{"GkDtype", [](GateCumsumCall& c) { c.gk.dtype = Dtype::kBFloat16; }, kDtype,
                "gk: expected dtype float32, got bfloat16"},
        Refusal{"ALogDtype", [](GateCumsumCall& c) { c.inputs.A_log.dtype = Dtype::kBFloat16; }, kDtype,
                "A_log: expected dtype float32, got bfloat16"},
        Refusal{"BiasDtype", [](GateCumsumCall& c) { c.inputs.dt_bias.dtype = Dtype::kFloat64; }, kDtype,
                "dt_bias: expected dtype float32, got float64"},
        Refusal{"GRank",
                [](GateCumsumCall& c) {
                  c.inputs.g = view(kF32, {10, 3});
                },
                kValue, "g: expected rank 4, [B,HV,T,K], or rank 3, [HV,T,K], got rank 2, [10,3]"},
        Refusal{"NoHeads",
                [](GateCumsumCall& c) {
                  c.inputs.g = view(kF32, {0, 10, 3});
                },
                kValue, "g: expected HV at least 1, got HV = 0"},
        Refusal{"K0",
                [](GateCumsumCall& c) {
                  c.inputs.g = view(kF32, {2, 10, 0});
                },
                kValue, "g: expected K in 1..256, got K = 0"},
        Refusal{"K257",
                [](GateCumsumCall& c) {
                  c.inputs.g = view(kF32, {2, 10, 257});
                },
                kValue, "g: expected K in 1..256, got K = 257"},
        Refusal{"GkShape",
                [](GateCumsumCall& c) {
                  c.gk = view(kF32, {1, 2, 3, 10});
                },
                kValue, "gk: expected shape [B,HV,T,K] = [1,2,10,3], got [1,2,3,10]"},
        Refusal{"GkRank",
                [](GateCumsumCall& c) {
                  c.gk = view(kF32, {2, 10, 3});
                },
                kValue, "gk: expected rank 4, [B,HV,T,K], got rank 3, [2,10,3]"},
        Refusal{"ALogShape", [](GateCumsumCall& c) { c.inputs.A_log = view(kF32, {3}); }, kValue,
                "A_log: expected shape [HV] = [2], got [3]"},
        Refusal{"BiasShape", [](GateCumsumCall& c) { c.inputs.dt_bias = view(kF32, {5}); }, kValue,
                "dt_bias: expected shape [HV*K] = [6], got [5]"},
        Refusal{"PackedBatch",
                [](GateCumsumCall& c) {
                  c.inputs.g = view(kF32, {2, 2, 5, 3});
                  c.gk = view(kF32, {2, 2, 5, 3});
                  set_cu_seqlens(c, {0, 5});
                },
                kValue, "g: expected B = 1, as cu_seqlens is given, got B = 2"},
        Refusal{"CuSeqlensShort", [](GateCumsumCall& c) { set_cu_seqlens(c, {0}); }, kValue,
                "cu_seqlens: expected N + 1 values with N in 1..1024, got 1 values"},
        Refusal{"CuSeqlensFirst",
                [](GateCumsumCall& c) {
                  set_cu_seqlens(c, {1, 10});
                },
                kValue, "cu_seqlens: expected cu_seqlens[0] = 0, got 1"},
        Refusal{"CuSeqlensOrder",
                [](GateCumsumCall& c) {
                  set_cu_seqlens(c, {0, 7, 5, 10});
                },
                kValue, "cu_seqlens: expected cu_seqlens[2] >= cu_seqlens[1] = 7, got 5"},
        Refusal{"CuSeqlensLast",
                [](GateCumsumCall& c) {
                  set_cu_seqlens(c, {0, 7, 9});
                },
                kValue, "cu_seqlens: expected cu_seqlens[2] = T = 10, got 9"},
        Refusal{"GkOverlapsItself", [](GateCumsumCall& c) { c.gk.strides[2] = 0; }, kValue,
                "gk: expected strides that give every element memory of its own, got float32 [1,2,10,3] strides "
                "[60,30,0,1] "
                "on cpu"},
        Refusal{"GkIsG", [](GateCumsumCall& c) { c.inputs.g = c.gk; }, kValue,
                "gk: expected memory of its own, got memory shared with g"},
        Refusal{"GkIsALog", [](GateCumsumCall& c) { c.inputs.A_log.data = c.gk.data; }, kValue,
                "gk: expected memory of its own, got memory shared with A_log"},
        Refusal{"GkIsBias", [](GateCumsumCall& c) { c.inputs.dt_bias.data = c.gk.data; }, kValue,
                "gk: expected memory of its own, got memory shared with dt_bias"},
        Refusal{"NullG", [](GateCumsumCall& c) { c.inputs.g.data = nullptr; }, kMissing,
                "g: expected data, got a null pointer"},
        Refusal{"NullGk", [](GateCumsumCall& c) { c.gk.data = nullptr; }, kMissing,
                "gk: expected data, got a null pointer"},
        Refusal{"GkDevice", [](GateCumsumCall& c) { c.gk.device = {DeviceType::kCuda, 1}; }, kValue,
                "gk: expected device cpu, got cuda:1"}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace kda::testing
