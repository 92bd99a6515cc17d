#include <algorithm>
#include <string>

#include "core/checks.h"
#include "kda_gate_cumsum/problem.h"

namespace kda {
namespace {

constexpr std::int64_t kMaxDim = 256;

Argument argument(std::string_view name) { return {kKdaGateCumsumName, name}; }

[[noreturn]] void fail_value(std::string_view name, const std::string& expected, const std::string& got) {
  fail(ErrorKind::kValue, argument(name), expected, got);
}

GateMode gate_mode_of(const KdaGateCumsumAttributes& attributes) noexcept {
  if (!attributes.use_gate_in_kernel) return GateMode::kActivated;
  return attributes.safe_gate ? GateMode::kBounded : GateMode::kSoftplus;
}

void check_given(const KdaGateCumsumInputs& inputs, const TensorView* gk, const KdaGateCumsumAttributes& attributes) {
  require_given(argument("g"), inputs.g);
  if (attributes.use_gate_in_kernel && !is_given(inputs.A_log)) {
    fail(ErrorKind::kMissing, argument("A_log"), "a tensor, as use_gate_in_kernel is set", "none");
  }
  if (gk != nullptr) require_given(argument("gk"), *gk);
}

void check_attributes(const KdaGateCumsumAttributes& attributes) {
  const std::int64_t C = attributes.chunk_size;
  if (C != 32 && C != 64 && C != 128) fail_value("chunk_size", "32, 64 or 128", std::to_string(C));
  const double bound = attributes.lower_bound;
  if (gate_mode_of(attributes) == GateMode::kBounded && !(bound >= -5.0 && bound < 0)) {
    fail_value("lower_bound", "a number in [-5, 0)", format_number(bound));
  }
}

void check_dtypes(const KdaGateCumsumInputs& inputs, const TensorView* gk) {
  require_dtype(argument("g"), inputs.g, {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16});
  if (is_given(inputs.A_log)) require_dtype(argument("A_log"), inputs.A_log, {Dtype::kFloat32});
  if (is_given(inputs.dt_bias)) require_dtype(argument("dt_bias"), inputs.dt_bias, {Dtype::kFloat32});
  if (gk != nullptr) require_dtype(argument("gk"), *gk, {Dtype::kFloat32});
}

void check_view(std::string_view name, const TensorView& view, const Device& device) {
  if (!is_given(view)) return;
  require_view(argument(name), view);
  require_device(argument(name), view, device);
}

// All sizes, from g.
void read_sizes(KdaGateCumsumProblem& p, const TensorView& g) {
  if (g.rank != 3 && g.rank != 4) {
    fail_value("g", "rank 4, [B,HV,T,K], or rank 3, [HV,T,K]",
               "rank " + std::to_string(g.rank) + ", " + format_shape(g.sizes()));
  }
  const auto extent = [&](int from_last) { return g.shape[static_cast<std::size_t>(g.rank - from_last)]; };
  if (g.rank == 4) p.B = extent(4);
  p.HV = extent(3);
  p.T = extent(2);
  p.K = extent(1);
  if (p.HV < 1) fail_value("g", "HV at least 1", "HV = " + std::to_string(p.HV));
  if (p.K < 1 || p.K > kMaxDim) fail_value("g", "K in 1..256", "K = " + std::to_string(p.K));
}

// For [B,HV,T,K] or [HV,T,K].
RowStrides row_strides(const TensorView& view) {
  RowStrides strides;
  if (view.rank == 4) strides.batch = used_stride(view, 0);
  strides.head = used_stride(view, view.rank - 3);
  strides.token = used_stride(view, view.rank - 2);
  strides.inner = used_stride(view, view.rank - 1);
  return strides;
}

Shape shape_of(const KdaGateCumsumProblem& p, int rank) {
  if (rank == 4) return {{"B", p.B}, {"HV", p.HV}, {"T", p.T}, {"K", p.K}};
  return {{"HV", p.HV}, {"T", p.T}, {"K", p.K}};
}

void set_sequences(KdaGateCumsumProblem& p, const KdaGateCumsumAttributes& attributes) {
  if (!attributes.cu_seqlens) return;
  if (p.B != 1) fail_value("g", "B = 1, as cu_seqlens is given", "B = " + std::to_string(p.B));
  check_cu_seqlens(kKdaGateCumsumName, *attributes.cu_seqlens, p.T);
  p.cu_seqlens.assign(attributes.cu_seqlens->begin(), attributes.cu_seqlens->end());
  p.first_chunk = first_chunks(p.cu_seqlens, p.C);
}

void set_parameters(KdaGateCumsumProblem& p, const KdaGateCumsumInputs& inputs) {
  if (is_given(inputs.A_log)) {
    require_shape(argument("A_log"), inputs.A_log, {{"HV", p.HV}});
    p.A_log_stride = used_stride(inputs.A_log, 0);
  }
  p.has_dt_bias = is_given(inputs.dt_bias);
  if (p.has_dt_bias) {
    // HV may be large, and HV * K with it; then no such dt_bias exists.
    require_shape(argument("dt_bias"), inputs.dt_bias, {{"HV*K", saturating_mul(p.HV, p.K)}});
    p.dt_bias_stride = used_stride(inputs.dt_bias, 0);
  }
}

}  // namespace

KdaGateCumsumProblem make_problem(const KdaGateCumsumInputs& given_inputs, const TensorView* gk,
                                  const KdaGateCumsumAttributes& attributes) {
  check_given(given_inputs, gk, attributes);
  check_attributes(attributes);
  check_dtypes(given_inputs, gk);

  KdaGateCumsumProblem p;
  p.gate_mode = gate_mode_of(attributes);
  const KdaGateCumsumInputs inputs = inputs_read(given_inputs, p.gate_mode);
  p.device = inputs.g.device;
  check_view("g", inputs.g, p.device);
  check_view("A_log", inputs.A_log, p.device);
  check_view("dt_bias", inputs.dt_bias, p.device);
  if (gk != nullptr) check_view("gk", *gk, p.device);

  p.C = attributes.chunk_size;
  p.g_dtype = inputs.g.dtype;
  if (p.gate_mode == GateMode::kBounded) p.lower_bound = static_cast<float>(attributes.lower_bound);
  read_sizes(p, inputs.g);
  set_sequences(p, attributes);
  set_parameters(p, inputs);
  p.g = row_strides(inputs.g);
  if (gk != nullptr) {
    require_shape(argument("gk"), *gk, shape_of(p, inputs.g.rank));
    require_own_elements(argument("gk"), *gk);
    p.gk = row_strides(*gk);
  }
  return p;
}

GateChunk chunk_of(const KdaGateCumsumProblem& p, std::int64_t index) noexcept {
  GateChunk chunk;
  if (p.is_packed()) {
    // The last sequence that starts at or before the chunk; empty ones before it start there too.
    const auto after = std::upper_bound(p.first_chunk.begin(), p.first_chunk.end(), index);
    const auto n = static_cast<std::size_t>(after - p.first_chunk.begin()) - 1;
    chunk.sequence = {.batch = 0,
                      .first_token = p.cu_seqlens[n],
                      .tokens = p.cu_seqlens[n + 1] - p.cu_seqlens[n],
                      .first_chunk = p.first_chunk[n]};
    chunk.token = (index - p.first_chunk[n]) * p.C;
  } else {
    const std::int64_t per_sequence = ceil_div(p.T, p.C);
    chunk.sequence = {.batch = index / per_sequence, .first_token = 0, .tokens = p.T, .first_chunk = 0};
    chunk.token = index % per_sequence * p.C;
  }
  chunk.rows = static_cast<int>(std::min(p.C, chunk.sequence.tokens - chunk.token));
  return chunk;
}

KdaGateCumsumInputs inputs_read(const KdaGateCumsumInputs& inputs, GateMode gate_mode) noexcept {
  KdaGateCumsumInputs read = inputs;
  if (gate_mode == GateMode::kActivated) {
    read.A_log = {};
    read.dt_bias = {};
  }
  return read;
}

void check_pointers(const KdaGateCumsumInputs& inputs, const TensorView& gk) {
  require_data(argument("g"), inputs.g);
  require_data(argument("A_log"), inputs.A_log);
  require_data(argument("dt_bias"), inputs.dt_bias);
  require_data(argument("gk"), gk);
  require_no_overlap(argument("gk"), gk, "g", inputs.g);
  require_no_overlap(argument("gk"), gk, "A_log", inputs.A_log);
  require_no_overlap(argument("gk"), gk, "dt_bias", inputs.dt_bias);
}

KdaGateCumsumPointers pointers_of(const KdaGateCumsumInputs& inputs, const TensorView& gk) {
  const auto data = [](const TensorView& view) { return view.numel() == 0 ? nullptr : view.data; };
  return {.g = data(inputs.g),
          .A_log = static_cast<const float*>(data(inputs.A_log)),
          .dt_bias = static_cast<const float*>(data(inputs.dt_bias)),
          .gk = static_cast<float*>(data(gk))};
}

}  // namespace kda
