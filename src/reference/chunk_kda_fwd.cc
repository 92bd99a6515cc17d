#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <numbers>
#include <numeric>
#include <vector>

#include "chunk_kda_fwd/arguments.h"
#include "chunk_kda_fwd/problem.h"
#include "core/checked.h"
#include "core/planning.h"
#include "cpu/float_environment.h"
#include "kda/reference.h"
#include "reference/numbers.h"
#include "reference/parallel.h"

namespace kda::reference {
namespace {

// One call: what is read and where results go.
struct Call {
  const ChunkKdaFwdProblem& problem;
  const ChunkKdaFwdPointers& pointers;
  ChunkKdaFwdResult& result;
  bool intermediates;

  // Offsets into the contiguous results, for tensors of `width` values per token and value head.
  [[nodiscard]] std::int64_t sequence_major(std::int64_t b, std::int64_t t, std::int64_t hv, std::int64_t width) const {
    return ((b * problem.dims.T + t) * problem.dims.HV + hv) * width;
  }
  [[nodiscard]] std::int64_t head_major(std::int64_t b, std::int64_t t, std::int64_t hv, std::int64_t width) const {
    return ((b * problem.dims.HV + hv) * problem.dims.T + t) * width;
  }
};

// Sequence n of one value head.
struct Place {
  Sequence sequence;
  std::int64_t n = 0;
  std::int64_t hv = 0;
};

// Its inputs: q, k, gate and decay [tokens, K], v [tokens, V], beta [tokens]. gate is the natural logarithm of decay.
struct Head {
  std::vector<double> q, k, v, gate, decay, beta;
};

std::vector<double> load_rows(const void* data, Dtype dtype, const RowStrides& strides, const Sequence& sequence,
                              std::int64_t head, std::int64_t width) {
  std::vector<double> rows(static_cast<std::size_t>(sequence.tokens * width));
  for (std::int64_t t = 0; t < sequence.tokens; ++t) {
    const std::int64_t row = strides.offset(sequence.batch, sequence.first_token + t, head);
    for (std::int64_t d = 0; d < width; ++d) rows[t * width + d] = load(data, dtype, row + d * strides.inner);
  }
  return rows;
}

// gk as it was given becomes the steps it was accumulated from, chunk by chunk; no change, from -inf to -inf too, is 0.
void undo_accumulation(const ChunkKdaFwdProblem& p, std::vector<double>& gk) {
  const std::int64_t K = p.dims.K;
  const std::int64_t tokens = static_cast<std::int64_t>(gk.size()) / K;
  for (std::int64_t t = tokens - 1; t >= 0; --t) {
    for (std::int64_t d = 0; d < K; ++d) {
      const double before = t % p.dims.C == 0 ? 0 : gk[(t - 1) * K + d];
      gk[t * K + d] = gk[t * K + d] == before ? 0 : (gk[t * K + d] - before) * std::numbers::ln2;
    }
  }
}

// Each row divided by its length.
void normalize_rows(std::int64_t K, std::vector<double>& rows) {
  for (auto row = rows.begin(); row != rows.end(); row += K) {
    const double norm = std::sqrt(std::inner_product(row, row + K, row, 0.0) + 1e-6);
    std::for_each(row, row + K, [&](double& x) { x /= norm; });
  }
}

void activate_beta(BetaActivation activation, std::vector<double>& beta) {
  if (activation == BetaActivation::kNone) return;
  const double factor = activation == BetaActivation::kSigmoid ? 1 : 2;
  for (double& b : beta) b = factor * sigmoid(b);
}

// g as it was given becomes the gate.
void apply_gate(const Call& call, std::int64_t hv, std::vector<double>& g) {
  const ChunkKdaFwdProblem& p = call.problem;
  if (p.gate_mode == GateMode::kActivated) return;
  if (p.gate_mode == GateMode::kAccumulated) return undo_accumulation(p, g);
  const std::int64_t K = p.dims.K;
  const double rate = p.has_A_log ? gate_rate(call.pointers.A_log[hv * p.A_log_stride]) : 1;
  for (std::size_t i = 0; i < g.size(); ++i) {
    const std::int64_t channel = hv * K + static_cast<std::int64_t>(i) % K;
    const double bias = p.has_dt_bias ? call.pointers.dt_bias[channel * p.dt_bias_stride] : 0;
    const double x = g[i] + bias;
    g[i] = p.gate_mode == GateMode::kSoftplus ? -rate * softplus(x) : p.lower_bound * sigmoid(rate * x);
  }
}

Head load_head(const Call& call, const Place& place) {
  const ChunkKdaFwdProblem& p = call.problem;
  const ChunkKdaFwdPointers& data = call.pointers;
  const std::int64_t hq = place.hv / p.group();
  Head head;
  head.q = load_rows(data.q, p.dtype, p.q, place.sequence, hq, p.dims.K);
  head.k = load_rows(data.k, p.dtype, p.k, place.sequence, hq, p.dims.K);
  head.v = load_rows(data.v, p.dtype, p.v, place.sequence, place.hv, p.dims.V);
  head.beta = load_rows(data.beta, p.beta_dtype, p.beta, place.sequence, place.hv, 1);
  head.gate = load_rows(data.g, p.g_dtype, p.g, place.sequence, place.hv, p.dims.K);
  apply_gate(call, place.hv, head.gate);
  if (p.qk_l2norm) {
    normalize_rows(p.dims.K, head.q);
    normalize_rows(p.dims.K, head.k);
  }
  activate_beta(p.beta_activation, head.beta);
  head.decay.resize(head.gate.size());
  std::transform(head.gate.begin(), head.gate.end(), head.decay.begin(), [](double gate) { return std::exp(gate); });
  return head;
}

// [K, V], whatever state_v_first says.
std::vector<double> load_state(const Call& call, const Place& place) {
  const ChunkKdaFwdProblem& p = call.problem;
  std::vector<double> state(static_cast<std::size_t>(p.dims.K * p.dims.V), 0.0);
  if (!p.has_initial_state) return state;
  const StateStrides& strides = p.initial_state;
  const float* data = call.pointers.initial_state + place.n * strides.seq + place.hv * strides.head;
  for (std::int64_t d = 0; d < p.dims.K; ++d) {
    for (std::int64_t j = 0; j < p.dims.V; ++j) state[d * p.dims.V + j] = data[d * strides.k + j * strides.v];
  }
  return state;
}

void store_state(const ChunkKdaFwdDims& dims, bool v_first, const std::vector<double>& state, double* to) {
  for (std::int64_t d = 0; d < dims.K; ++d) {
    for (std::int64_t j = 0; j < dims.V; ++j) to[v_first ? j * dims.K + d : d * dims.V + j] = state[d * dims.V + j];
  }
}

// One token: S = diag(decay) S; v_new = beta (v - S^T k); S += k v_new^T; out = scale S^T q.
void step(const ChunkKdaFwdProblem& p, const Head& head, std::int64_t t, std::vector<double>& state, double* v_new,
          double* out) {
  const std::int64_t K = p.dims.K;
  const std::int64_t V = p.dims.V;
  std::fill_n(v_new, V, 0.0);
  for (std::int64_t d = 0; d < K; ++d) {
    const double decay = head.decay[t * K + d];
    const double k = head.k[t * K + d];
    double* row = &state[d * V];
    for (std::int64_t j = 0; j < V; ++j) {
      row[j] *= decay;
      v_new[j] += k * row[j];
    }
  }
  for (std::int64_t j = 0; j < V; ++j) v_new[j] = head.beta[t] * (head.v[t * V + j] - v_new[j]);
  std::fill_n(out, V, 0.0);
  for (std::int64_t d = 0; d < K; ++d) {
    const double k = head.k[t * K + d];
    const double q = p.scale * head.q[t * K + d];
    double* row = &state[d * V];
    for (std::int64_t j = 0; j < V; ++j) {
      row[j] += k * v_new[j];
      out[j] += q * row[j];
    }
  }
}

// attn_out, final_state, v_new and h.
void run_recurrence(const Call& call, const Place& place, const Head& head, bool v_first) {
  const ChunkKdaFwdDims& dims = call.problem.dims;
  const Sequence& s = place.sequence;
  const std::int64_t state_size = dims.K * dims.V;
  std::vector<double> state = load_state(call, place);
  std::vector<double> v_new(static_cast<std::size_t>(dims.V));
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    if (call.intermediates && t % dims.C == 0) {
      const std::int64_t chunk = s.batch * dims.NC + s.first_chunk + t / dims.C;
      store_state(dims, v_first, state, &call.result.h[(chunk * dims.HV + place.hv) * state_size]);
    }
    const std::int64_t token = s.first_token + t;
    step(call.problem, head, t, state, v_new.data(),
         &call.result.attn_out[call.sequence_major(s.batch, token, place.hv, dims.V)]);
    if (call.intermediates) {
      std::copy(v_new.begin(), v_new.end(), &call.result.v_new[call.head_major(s.batch, token, place.hv, dims.V)]);
    }
  }
  store_state(dims, v_first, state, &call.result.final_state[(place.n * dims.HV + place.hv) * state_size]);
}

// One chunk: its inputs, and its rows of every intermediate.
struct Chunk {
  std::int64_t rows = 0;
  const double *q, *k, *v, *gate, *decay, *beta;
  double *gk, *Aqk, *Akk, *w, *u, *qg, *kg;
};

// gk, and qg = q exp2(gk).
void make_gk_and_qg(const ChunkKdaFwdDims& dims, const Chunk& chunk) {
  for (std::int64_t d = 0; d < dims.K; ++d) {
    double sum = 0;
    double product = 1;
    for (std::int64_t i = 0; i < chunk.rows; ++i) {
      sum += chunk.gate[i * dims.K + d];
      product *= chunk.decay[i * dims.K + d];
      chunk.gk[i * dims.K + d] = sum / std::numbers::ln2;
      chunk.qg[i * dims.K + d] = chunk.q[i * dims.K + d] * product;
    }
  }
}

// Row i of Aqk and of A, and for the last row kg. E_ij is the product of the decays after j up to i, never a difference
// of sums, so that a gate of -inf or one huge gate costs nothing.
void make_attention_row(const ChunkKdaFwdProblem& p, const Chunk& chunk, std::int64_t i, double* A) {
  const std::int64_t K = p.dims.K;
  std::vector<double> E(static_cast<std::size_t>(K), 1.0);
  for (std::int64_t j = i; j >= 0; --j) {
    double qk = 0;
    double kk = 0;
    for (std::int64_t d = 0; d < K; ++d) {
      const double k = chunk.k[j * K + d] * E[d];
      qk += chunk.q[i * K + d] * k;
      kk += chunk.k[i * K + d] * k;
      if (i == chunk.rows - 1) chunk.kg[j * K + d] = k;
      E[d] *= chunk.decay[j * K + d];
    }
    chunk.Aqk[i * p.dims.C + j] = p.scale * qk;
    if (j < i) A[j] = chunk.beta[i] * kk;
  }
}

// Row i of Akk = (I + A)^-1 by forward substitution: Akk_i = e_i - sum_{j<i} A_ij Akk_j.
void make_inverse_row(const ChunkKdaFwdDims& dims, const Chunk& chunk, std::int64_t i, const double* A) {
  double* row = &chunk.Akk[i * dims.C];
  for (std::int64_t j = 0; j < i; ++j) {
    for (std::int64_t m = 0; m <= j; ++m) row[m] -= A[j] * chunk.Akk[j * dims.C + m];
  }
  row[i] = 1;
}

// Row i of u = Akk (beta v) and w = Akk (beta k exp2(gk)); decayed is k exp2(gk).
void make_wu_row(const ChunkKdaFwdDims& dims, const Chunk& chunk, std::int64_t i, const std::vector<double>& decayed) {
  for (std::int64_t j = 0; j <= i; ++j) {
    const double factor = chunk.Akk[i * dims.C + j] * chunk.beta[j];
    for (std::int64_t d = 0; d < dims.K; ++d) chunk.w[i * dims.K + d] += factor * decayed[j * dims.K + d];
    for (std::int64_t d = 0; d < dims.V; ++d) chunk.u[i * dims.V + d] += factor * chunk.v[j * dims.V + d];
  }
}

void run_chunk(const ChunkKdaFwdProblem& p, const Chunk& chunk) {
  const std::int64_t K = p.dims.K;
  make_gk_and_qg(p.dims, chunk);
  std::vector<double> decayed(static_cast<std::size_t>(chunk.rows * K));
  std::vector<double> product(static_cast<std::size_t>(K), 1.0);
  std::vector<double> A(static_cast<std::size_t>(chunk.rows));
  for (std::int64_t i = 0; i < chunk.rows; ++i) {
    for (std::int64_t d = 0; d < K; ++d) {
      product[d] *= chunk.decay[i * K + d];
      decayed[i * K + d] = chunk.k[i * K + d] * product[d];
    }
    make_attention_row(p, chunk, i, A.data());
    make_inverse_row(p.dims, chunk, i, A.data());
    make_wu_row(p.dims, chunk, i, decayed);
  }
}

// gk, Aqk, Akk, w, u, qg and kg.
void run_formulas(const Call& call, const Place& place, const Head& head) {
  const ChunkKdaFwdDims& dims = call.problem.dims;
  const Sequence& s = place.sequence;
  ChunkKdaFwdResult& r = call.result;
  for (std::int64_t t = 0; t < s.tokens; t += dims.C) {
    const std::int64_t row = call.head_major(s.batch, s.first_token + t, place.hv, 1);
    Chunk chunk{};
    chunk.rows = std::min(dims.C, s.tokens - t);
    chunk.q = &head.q[t * dims.K];
    chunk.k = &head.k[t * dims.K];
    chunk.v = &head.v[t * dims.V];
    chunk.gate = &head.gate[t * dims.K];
    chunk.decay = &head.decay[t * dims.K];
    chunk.beta = &head.beta[t];
    chunk.gk = &r.gk[row * dims.K];
    chunk.Aqk = &r.Aqk[row * dims.C];
    chunk.Akk = &r.Akk[row * dims.C];
    chunk.w = &r.w[row * dims.K];
    chunk.u = &r.u[row * dims.V];
    chunk.qg = &r.qg[row * dims.K];
    chunk.kg = &r.kg[row * dims.K];
    run_chunk(call.problem, chunk);
  }
}

// Zeros. Products beyond 64 bits are more than memory holds, as their largest value is.
void fill(std::vector<double>& values, std::initializer_list<std::int64_t> extents) {
  std::int64_t count = 1;
  for (const std::int64_t extent : extents) count = saturating_mul(count, extent);
  values.assign(static_cast<std::size_t>(count), 0.0);
}

ChunkKdaFwdResult allocate(const ChunkKdaFwdDims& d, bool intermediates) {
  ChunkKdaFwdResult result;
  fill(result.attn_out, {d.B, d.T, d.HV, d.V});
  fill(result.final_state, {d.N, d.HV, d.K, d.V});
  if (!intermediates) return result;
  for (auto* values : {&result.gk, &result.w, &result.qg, &result.kg}) fill(*values, {d.B, d.T, d.HV, d.K});
  for (auto* values : {&result.u, &result.v_new}) fill(*values, {d.B, d.T, d.HV, d.V});
  for (auto* values : {&result.Aqk, &result.Akk}) fill(*values, {d.B, d.T, d.HV, d.C});
  fill(result.h, {d.B, d.NC, d.HV, d.K, d.V});
  return result;
}

ChunkKdaFwdResult compute(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdAttributes& attributes,
                          bool intermediates) {
  const cpu::DefaultFloatEnvironment environment;
  const ChunkKdaFwdProblem problem = make_problem(inputs, nullptr, attributes);
  if (problem.device.type != DeviceType::kCpu) {
    throw Error(ErrorKind::kUnavailable, "chunk_kda_fwd: the float64 reference reads CPU memory only");
  }
  check_pointers(inputs, {});
  const ChunkKdaFwdPointers pointers = pointers_of(inputs, {});
  ChunkKdaFwdResult result = allocate(problem.dims, intermediates);
  const Call call{problem, pointers, result, intermediates};

  // Every (sequence, value head) reads inputs and writes results of its own.
  const std::int64_t HV = problem.dims.HV;
  for_each(problem.dims.N * HV, [&](std::int64_t item) {
    const Place place{problem.sequence(item / HV), item / HV, item % HV};
    const Head head = load_head(call, place);
    run_recurrence(call, place, head, attributes.state_v_first);
    if (intermediates) run_formulas(call, place, head);
  });
  return result;
}

}  // namespace

ChunkKdaFwdResult chunk_kda_fwd(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdAttributes& attributes,
                                bool intermediates) {
  return guard_memory(kChunkKdaFwdName, kMemory, [&] { return compute(inputs, attributes, intermediates); });
}

}  // namespace kda::reference
