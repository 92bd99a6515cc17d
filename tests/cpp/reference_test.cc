// The float64 reference against results worked out by hand and against a second formulation.

#include "kda/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "support/case_inputs.h"
#include "support/compare.h"
#include "support/dtypes.h"
#include "support/expect.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

reference::ChunkKdaFwdResult reference_of(const CaseInputs& inputs) {
  return reference::chunk_kda_fwd(inputs.tensors, inputs.attributes);
}

// Two tokens whose q and k are the first unit vector, and a decay of 1/2 per token: only row 0 of the state counts.
class ReferenceTwoTokens : public ::testing::Test {
 protected:
  ReferenceTwoTokens() {
    case_.T = 2;
    case_.K = case_.V = 16;
    case_.scale = 3;
    case_.dtype = Dtype::kFloat16;
    values_.q.assign(32, 0);
    values_.k.assign(32, 0);
    values_.q[0] = values_.q[16] = values_.k[0] = values_.k[16] = 1;
    values_.v.assign(32, 0);
    values_.v[0] = 8;
    values_.v[16] = 5;
    values_.g.assign(32, static_cast<float>(-std::numbers::ln2));
    values_.beta = {1, 0.5f};
    inputs_ = make_inputs(case_, values_);
    result_ = reference_of(inputs_);
  }

  OpCase case_;
  CaseValues values_;
  CaseInputs inputs_;
  reference::ChunkKdaFwdResult result_;
};

// ln 2 in fp32 is off by 1e-8 or so.
constexpr double kTolerance = 1e-6;

TEST_F(ReferenceTwoTokens, Recurrence) {
  // Token 0: v_new = 8, S = 8. Token 1: S = 4, v_new = (5 - 4) / 2, S = 4.5.
  EXPECT_NEAR(result_.v_new[0], 8, kTolerance);
  EXPECT_NEAR(result_.v_new[16], 0.5, kTolerance);
  EXPECT_NEAR(result_.attn_out[0], 24, kTolerance);
  EXPECT_NEAR(result_.attn_out[16], 13.5, kTolerance);
  EXPECT_NEAR(result_.final_state[0], 4.5, kTolerance);
  EXPECT_EQ(result_.final_state[1], 0);
  EXPECT_EQ(result_.final_state[16], 0);
  EXPECT_EQ(result_.h[0], 0);
}

TEST_F(ReferenceTwoTokens, Formulas) {
  EXPECT_NEAR(result_.gk[0], -1, kTolerance);
  EXPECT_NEAR(result_.gk[16], -2, kTolerance);
  EXPECT_NEAR(result_.qg[0], 0.5, kTolerance);
  EXPECT_NEAR(result_.qg[16], 0.25, kTolerance);
  EXPECT_NEAR(result_.kg[0], 0.5, kTolerance);
  EXPECT_EQ(result_.kg[16], 1);
  const auto C = static_cast<std::size_t>(case_.chunk_size);
  EXPECT_EQ(result_.Aqk[0], 3);
  EXPECT_EQ(result_.Aqk[1], 0);
  EXPECT_NEAR(result_.Aqk[C], 1.5, kTolerance);
  EXPECT_EQ(result_.Aqk[C + 1], 3);
  EXPECT_EQ(result_.Akk[0], 1);
  EXPECT_EQ(result_.Akk[1], 0);
  EXPECT_NEAR(result_.Akk[C], -0.25, kTolerance);
  EXPECT_EQ(result_.Akk[C + 1], 1);
  // Seeds of w: 1 * 0.5 and 0.5 * 0.25; of u: 8 and 2.5.
  EXPECT_NEAR(result_.w[0], 0.5, kTolerance);
  EXPECT_NEAR(result_.w[16], -0.25 * 0.5 + 0.125, kTolerance);
  EXPECT_NEAR(result_.u[0], 8, kTolerance);
  EXPECT_NEAR(result_.u[16], -0.25 * 8 + 2.5, kTolerance);
}

TEST_F(ReferenceTwoTokens, InitialState) {
  case_.initial_state = true;
  values_.initial_state.assign(256, 0);
  values_.initial_state[0] = 16;
  values_.initial_state[3] = 4;       // K 0, V 3: read by q and k
  values_.initial_state[5 * 16] = 2;  // K 5, V 0: only decays
  inputs_ = make_inputs(case_, values_);
  result_ = reference_of(inputs_);
  EXPECT_EQ(result_.h[3], 4);
  // Token 0: S = 8, v_new = 8 - 8, S = 8. Token 1: S = 4, v_new = 0.5.
  EXPECT_NEAR(result_.v_new[0], 0, kTolerance);
  EXPECT_NEAR(result_.final_state[0], 4.5, kTolerance);
  // Column 3: S = 2, v_new = -2, S = 0.
  EXPECT_NEAR(result_.v_new[3], -2, kTolerance);
  EXPECT_NEAR(result_.final_state[3], 0, kTolerance);
  EXPECT_NEAR(result_.final_state[5 * 16], 0.5, kTolerance);
}

TEST_F(ReferenceTwoTokens, StateVFirstTransposesTheStates) {
  case_.initial_state = true;
  values_.initial_state.assign(256, 0);
  values_.initial_state[5 * 16 + 2] = 2;
  case_.state_v_first = true;
  inputs_ = make_inputs(case_, values_);
  result_ = reference_of(inputs_);
  EXPECT_EQ(result_.h[2 * 16 + 5], 2);
  EXPECT_NEAR(result_.final_state[2 * 16 + 5], 0.5, kTolerance);
}

TEST_F(ReferenceTwoTokens, MissingDataIsRefused) {
  inputs_.tensors.v.data = nullptr;
  try {
    (void)reference_of(inputs_);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kMissing);
  }
}

TEST_F(ReferenceTwoTokens, IntermediatesCanBeLeftOut) {
  const auto brief = reference::chunk_kda_fwd(inputs_.tensors, inputs_.attributes, /*intermediates=*/false);
  EXPECT_EQ(brief.attn_out, result_.attn_out);
  EXPECT_EQ(brief.final_state, result_.final_state);
  EXPECT_TRUE(brief.gk.empty() && brief.Akk.empty() && brief.h.empty());
}

// One token whose gate can be read from gk.
double gate_of(double g, double A_log, bool safe, double dt_bias = 0) {
  OpCase c;
  c.T = 1;
  c.K = c.V = 16;
  c.use_gate_in_kernel = true;
  c.safe_gate = safe;
  c.dt_bias = true;
  CaseValues values = generate(c);
  values.g.assign(16, static_cast<float>(g));
  values.A_log.assign(1, static_cast<float>(A_log));
  values.dt_bias.assign(16, static_cast<float>(dt_bias));
  return reference_of(make_inputs(c, values)).gk[7] * std::numbers::ln2;
}

TEST(ReferenceGate, Softplus) {
  EXPECT_DOUBLE_EQ(gate_of(0, 0, false), -std::numbers::ln2);
  EXPECT_DOUBLE_EQ(gate_of(2, 0, false, -2), -std::numbers::ln2);
  EXPECT_DOUBLE_EQ(gate_of(1000, 0, false), -1000);
  EXPECT_DOUBLE_EQ(gate_of(-50, 0, false), -std::exp(-50.0));
  EXPECT_DOUBLE_EQ(gate_of(-50, 1, false, 20), -std::exp(-29.0) / (1 + 0.5 * std::exp(-30.0)));
  EXPECT_DOUBLE_EQ(gate_of(1, 200, false),
                   -static_cast<double>(std::numeric_limits<float>::max()) * std::log1p(std::exp(1.0)));
  EXPECT_EQ(gate_of(-kInfinity, 0, false), 0);
  EXPECT_EQ(gate_of(-kInfinity, 200, false), 0);
  EXPECT_EQ(gate_of(kInfinity, 0, false), -kInfinity);
  EXPECT_TRUE(std::isnan(gate_of(kNan, 0, false)));
}

TEST(ReferenceGate, Bounded) {
  EXPECT_DOUBLE_EQ(gate_of(0, 0, true), -2.5);
  EXPECT_DOUBLE_EQ(gate_of(0, 200, true), -2.5);
  EXPECT_DOUBLE_EQ(gate_of(1, 200, true), -5);
  EXPECT_DOUBLE_EQ(gate_of(-1, 200, true), 0);
  EXPECT_DOUBLE_EQ(gate_of(-50, 0, true), -5 * std::exp(-50.0));
  EXPECT_DOUBLE_EQ(gate_of(1, 0, true), -5 / (1 + std::exp(-1.0)));
  EXPECT_EQ(gate_of(-kInfinity, 0, true), 0);
  EXPECT_EQ(gate_of(kInfinity, 0, true), -5);
  EXPECT_TRUE(std::isnan(gate_of(kNan, 0, true)));
}

// One value head of one sequence by the chunk formulas: decays as differences of sums, dense matrices, v_new = u - w h.
struct ChunkForm {
  std::int64_t T, C, K, V;
  double scale;
  std::vector<double> q, k, v, gate, beta, state;
  std::vector<double> attn_out, v_new, h, w, u, Aqk, Akk;

  void run() {
    attn_out.assign(static_cast<std::size_t>(T * V), 0);
    v_new = u = attn_out;
    w.assign(static_cast<std::size_t>(T * K), 0);
    Aqk.assign(static_cast<std::size_t>(T * C), 0);
    Akk = Aqk;
    for (std::int64_t t = 0; t < T; t += C) run_chunk(t, std::min(C, T - t));
  }

 private:
  void run_chunk(std::int64_t t, std::int64_t rows) {
    std::vector<double> gk(static_cast<std::size_t>(rows * K));
    for (std::int64_t e = 0; e < rows * K; ++e) {
      gk[e] = gate[t * K + e] / std::numbers::ln2 + (e >= K ? gk[e - K] : 0.0);
    }
    const std::vector<double> A = make_scores(t, rows, gk);
    solve(t, rows, gk, A);
    invert(t, rows, A);
    h.insert(h.end(), state.begin(), state.end());
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t x = 0; x < V; ++x) {
        double wh = 0;
        for (std::int64_t d = 0; d < K; ++d) wh += w[(t + i) * K + d] * state[d * V + x];
        v_new[(t + i) * V + x] = u[(t + i) * V + x] - wh;
        double out = 0;
        for (std::int64_t d = 0; d < K; ++d) out += q[(t + i) * K + d] * std::exp2(gk[i * K + d]) * state[d * V + x];
        out *= scale;
        for (std::int64_t j = 0; j <= i; ++j) out += Aqk[(t + i) * C + j] * v_new[(t + j) * V + x];
        attn_out[(t + i) * V + x] = out;
      }
    }
    const double* last = &gk[(rows - 1) * K];
    for (std::int64_t d = 0; d < K; ++d) {
      for (std::int64_t x = 0; x < V; ++x) {
        double next = std::exp2(last[d]) * state[d * V + x];
        for (std::int64_t j = 0; j < rows; ++j) {
          next += k[(t + j) * K + d] * std::exp2(last[d] - gk[j * K + d]) * v_new[(t + j) * V + x];
        }
        state[d * V + x] = next;
      }
    }
  }

  // Aqk; returns A.
  std::vector<double> make_scores(std::int64_t t, std::int64_t rows, const std::vector<double>& gk) {
    std::vector<double> A(static_cast<std::size_t>(rows * rows));
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j <= i; ++j) {
        for (std::int64_t d = 0; d < K; ++d) {
          const double kd = k[(t + j) * K + d] * std::exp2(gk[i * K + d] - gk[j * K + d]);
          Aqk[(t + i) * C + j] += scale * q[(t + i) * K + d] * kd;
          if (j < i) A[i * rows + j] += beta[t + i] * k[(t + i) * K + d] * kd;
        }
      }
    }
    return A;
  }

  // w and u from (I + A) x = seed, without the inverse.
  void solve(std::int64_t t, std::int64_t rows, const std::vector<double>& gk, const std::vector<double>& A) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t d = 0; d < K; ++d) {
        double x = beta[t + i] * k[(t + i) * K + d] * std::exp2(gk[i * K + d]);
        for (std::int64_t j = 0; j < i; ++j) x -= A[i * rows + j] * w[(t + j) * K + d];
        w[(t + i) * K + d] = x;
      }
      for (std::int64_t d = 0; d < V; ++d) {
        double x = beta[t + i] * v[(t + i) * V + d];
        for (std::int64_t j = 0; j < i; ++j) x -= A[i * rows + j] * u[(t + j) * V + d];
        u[(t + i) * V + d] = x;
      }
    }
  }

  // X (I + A) = I, column by column from the right: X_ij = e_ij - sum_{m > j} X_im A_mj.
  void invert(std::int64_t t, std::int64_t rows, const std::vector<double>& A) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = i; j >= 0; --j) {
        double x = i == j ? 1 : 0;
        for (std::int64_t m = j + 1; m <= i; ++m) x -= Akk[(t + i) * C + m] * A[m * rows + j];
        Akk[(t + i) * C + j] = x;
      }
    }
  }
};

// values [T, heads, width] of one head, as the dtype keeps them.
std::vector<double> head_of(const std::vector<float>& values, Dtype dtype, std::int64_t heads, std::int64_t head,
                            std::int64_t width) {
  std::vector<double> result;
  for (std::size_t e = 0; e < values.size(); ++e) {
    if (static_cast<std::int64_t>(e) / width % heads == head) result.push_back(round_to(dtype, values[e]));
  }
  return result;
}

// Rows of one head of a head-major result.
std::vector<double> rows_of(const std::vector<double>& result, std::int64_t heads, std::int64_t head) {
  const auto size = static_cast<std::ptrdiff_t>(result.size()) / heads;
  return {result.begin() + head * size, result.begin() + (head + 1) * size};
}

class ReferenceChunkFormulas : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(ReferenceChunkFormulas, GiveTheSame) {
  OpCase c;
  c.T = 150;
  c.H = 2;
  c.HV = 4;
  c.K = 48;
  c.V = 32;
  c.chunk_size = GetParam();
  c.initial_state = true;
  c.keys = Keys::kCorrelated;
  const CaseValues values = generate(c);
  const auto result = reference_of(make_inputs(c, values));
  const float scale = static_cast<float>(std::pow(48.0, -0.5));
  for (std::int64_t hv = 0; hv < c.HV; ++hv) {
    ChunkForm form{};
    form.T = c.T;
    form.C = c.chunk_size;
    form.K = c.K;
    form.V = c.V;
    form.scale = scale;
    form.q = head_of(values.q, c.dtype, c.H, hv / 2, c.K);
    form.k = head_of(values.k, c.dtype, c.H, hv / 2, c.K);
    form.v = head_of(values.v, c.dtype, c.HV, hv, c.V);
    form.gate = head_of(values.g, c.g_dtype, c.HV, hv, c.K);
    form.beta = head_of(values.beta, c.beta_dtype, c.HV, hv, 1);
    form.state.assign(values.initial_state.begin() + hv * c.K * c.V,
                      values.initial_state.begin() + (hv + 1) * c.K * c.V);
    form.run();
    EXPECT_LE(relative_error(rows_of(result.v_new, c.HV, hv), form.v_new), 1e-12);
    EXPECT_LE(relative_error(rows_of(result.w, c.HV, hv), form.w), 1e-12);
    EXPECT_LE(relative_error(rows_of(result.u, c.HV, hv), form.u), 1e-12);
    EXPECT_LE(relative_error(rows_of(result.Aqk, c.HV, hv), form.Aqk), 1e-12);
    EXPECT_LE(relative_error(rows_of(result.Akk, c.HV, hv), form.Akk), 1e-12);
    EXPECT_LE(relative_error(rows_of(result.final_state, c.HV, hv), form.state), 1e-12);
    std::vector<double> attn_out;
    for (std::int64_t t = 0; t < c.T; ++t) {
      const auto row = result.attn_out.begin() + (t * c.HV + hv) * c.V;
      attn_out.insert(attn_out.end(), row, row + c.V);
    }
    EXPECT_LE(relative_error(attn_out, form.attn_out), 1e-12);
    std::vector<double> h;
    for (std::int64_t chunk = 0; chunk * c.chunk_size < c.T; ++chunk) {
      const auto state = result.h.begin() + (chunk * c.HV + hv) * c.K * c.V;
      h.insert(h.end(), state, state + c.K * c.V);
    }
    EXPECT_LE(relative_error(h, form.h), 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(, ReferenceChunkFormulas, ::testing::Values(64, 128));

// After a gate of -inf in every channel a sequence has forgotten what came before.
TEST(ReferenceReset, StartsAnew) {
  OpCase c;
  c.T = 40;
  c.K = 32;
  c.V = 16;
  c.initial_state = true;
  CaseValues values = generate(c);
  constexpr std::int64_t kReset = 23;
  std::fill_n(values.g.begin() + kReset * c.K, c.K, -std::numeric_limits<float>::infinity());
  const auto whole = reference_of(make_inputs(c, values));

  OpCase rest = c;
  rest.T = c.T - kReset;
  rest.initial_state = false;
  CaseValues tail = values;
  tail.initial_state.clear();
  tail.q.erase(tail.q.begin(), tail.q.begin() + kReset * c.K);
  tail.k.erase(tail.k.begin(), tail.k.begin() + kReset * c.K);
  tail.v.erase(tail.v.begin(), tail.v.begin() + kReset * c.V);
  tail.g.erase(tail.g.begin(), tail.g.begin() + kReset * c.K);
  tail.beta.erase(tail.beta.begin(), tail.beta.begin() + kReset);
  const auto anew = reference_of(make_inputs(rest, tail));
  EXPECT_EQ(whole.final_state, anew.final_state);
  EXPECT_EQ(std::vector<double>(whole.attn_out.begin() + kReset * c.V, whole.attn_out.end()), anew.attn_out);
  // Within the chunk: no score reaches back across the reset, and those after it are untouched by it.
  EXPECT_EQ(whole.Aqk[30 * 64 + kReset - 1], 0);
  EXPECT_EQ(whole.Aqk[30 * 64 + kReset], anew.Aqk[7 * 64]);
}

TEST(ReferenceLayoutsAndStrides, ChangeNothing) {
  OpCase c;
  c.T = 21;
  c.H = 2;
  c.HV = 4;
  c.K = 32;
  c.V = 48;
  c.initial_state = true;
  const auto plain = reference_of(make_inputs(c));
  for (const Layout layout : {Layout::kBSND, Layout::kBNSD, Layout::kTND, Layout::kNTD}) {
    for (const Strides strides :
         {Strides::kContiguous, Strides::kPadded, Strides::kFused, Strides::kReversed, Strides::kInner}) {
      c.layout = layout;
      c.strides = strides;
      const auto other = reference_of(make_inputs(c));
      for (const auto member : kReferenceOutputs) EXPECT_EQ(other.*member, plain.*member);
    }
  }
}

// Packed sequences are the sequences one by one; an empty one hands its state on.
TEST(ReferencePacked, IsOneByOne) {
  OpCase c;
  c.T = 70;
  c.K = 16;
  c.V = 32;
  c.initial_state = true;
  c.cu_seqlens = std::vector<std::int64_t>{0, 3, 3, 70};
  const CaseValues values = generate(c);
  const auto packed = reference_of(make_inputs(c, values));
  const auto state = c.K * c.V;
  EXPECT_EQ(packed.h.size(), static_cast<std::size_t>(3 * state));
  for (std::int64_t e = 0; e < state; ++e) ASSERT_EQ(packed.final_state[state + e], values.initial_state[state + e]);

  OpCase last = c;
  last.T = 67;
  last.cu_seqlens.reset();
  CaseValues tail;
  tail.q.assign(values.q.begin() + 3 * c.K, values.q.end());
  tail.k.assign(values.k.begin() + 3 * c.K, values.k.end());
  tail.v.assign(values.v.begin() + 3 * c.V, values.v.end());
  tail.g.assign(values.g.begin() + 3 * c.K, values.g.end());
  tail.beta.assign(values.beta.begin() + 3, values.beta.end());
  tail.initial_state.assign(values.initial_state.begin() + 2 * state, values.initial_state.end());
  const auto alone = reference_of(make_inputs(last, tail));
  EXPECT_EQ(std::vector<double>(packed.attn_out.begin() + 3 * c.V, packed.attn_out.end()), alone.attn_out);
  EXPECT_EQ(std::vector<double>(packed.Akk.begin() + 3 * 64, packed.Akk.end()), alone.Akk);
  EXPECT_EQ(std::vector<double>(packed.h.begin() + state, packed.h.end()), alone.h);
}

TEST(ReferenceNothing, IsFine) {
  OpCase c;
  c.H = 2;
  c.HV = 2;
  c.initial_state = true;
  c.T = 0;
  const auto no_tokens = reference_of(make_inputs(c));
  EXPECT_TRUE(no_tokens.attn_out.empty());
  EXPECT_EQ(no_tokens.final_state.size(), 2u * 128 * 128);
  c.T = 5;
  c.B = 0;
  EXPECT_TRUE(reference_of(make_inputs(c)).final_state.empty());
}

}  // namespace
}  // namespace kda::testing
