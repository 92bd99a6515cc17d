#include <algorithm>
#include <cmath>

#include "chunk_kda_fwd/arguments.h"
#include "chunk_kda_fwd/problem.h"
#include "chunk_kda_fwd/shapes.h"
#include "core/checked.h"
#include "core/checks.h"

namespace kda {
namespace {

using Metadata = std::span<const std::int64_t>;

constexpr std::int64_t kMaxHeads = 128;
constexpr std::int64_t kDimStep = 16;
constexpr std::int64_t kMaxDim = 256;
constexpr double kLowestBound = -5.0;

Argument argument(std::string_view name) { return {kChunkKdaFwdName, name}; }

[[noreturn]] void fail_value(std::string_view name, const std::string& expected, const std::string& got) {
  fail(ErrorKind::kValue, argument(name), expected, got);
}

std::string is(std::string_view symbol, std::int64_t value) {
  return std::string(symbol) + " = " + std::to_string(value);
}

GateMode gate_mode_of(const ChunkKdaFwdAttributes& attributes) noexcept {
  if (attributes.fusions.g_is_gk) return GateMode::kAccumulated;
  if (!attributes.use_gate_in_kernel) return GateMode::kActivated;
  return attributes.safe_gate ? GateMode::kBounded : GateMode::kSoftplus;
}

// Presence.

void check_given(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs* outputs,
                 const ChunkKdaFwdAttributes& attributes) {
  require_given(argument("q"), inputs.q);
  require_given(argument("k"), inputs.k);
  require_given(argument("v"), inputs.v);
  require_given(argument("g"), inputs.g);
  require_given(argument("beta"), inputs.beta);
  const bool needs_A_log =
      attributes.use_gate_in_kernel && !(attributes.safe_gate && attributes.fusions.any_lower_bound);
  if (needs_A_log && !is_given(inputs.A_log)) {
    fail(ErrorKind::kMissing, argument("A_log"), "a tensor, as use_gate_in_kernel is set", "none");
  }
  if (outputs != nullptr) require_given(argument("attn_out"), outputs->attn_out);
  if (!attributes.scale) fail(ErrorKind::kMissing, argument("scale"), "a number", "none");
}

// Attributes.

void check_scale(double scale) {
  if (!std::isfinite(scale)) fail_value("scale", "a finite number", format_number(scale));
  if (!std::isfinite(static_cast<float>(scale))) {
    fail_value("scale", "a number that float32 can hold", format_number(scale));
  }
}

void check_lower_bound(const ChunkKdaFwdAttributes& attributes) {
  const double bound = attributes.lower_bound;
  if (attributes.fusions.any_lower_bound) {
    if (!std::isfinite(static_cast<float>(bound))) {
      fail_value("lower_bound", "a finite number that float32 can hold", format_number(bound));
    }
    return;
  }
  if (!(bound >= kLowestBound && bound < 0)) fail_value("lower_bound", "a number in [-5, 0)", format_number(bound));
}

void check_attributes(const ChunkKdaFwdAttributes& attributes) {
  if (name_of(attributes.layout).empty()) {
    fail_value("layout", "BSND, BNSD, TND or NTD", std::to_string(static_cast<int>(attributes.layout)));
  }
  if (attributes.chunk_size != 64 && attributes.chunk_size != 128) {
    fail_value("chunk_size", "64 or 128", std::to_string(attributes.chunk_size));
  }
  check_scale(*attributes.scale);
  if (gate_mode_of(attributes) == GateMode::kBounded) check_lower_bound(attributes);
  if (attributes.fusions.g_is_gk && attributes.use_gate_in_kernel) {
    fail_value("use_gate_in_kernel", "false, as g is gk", "true");
  }
}

// Dtypes, devices, and views as such.

void check_input_dtypes(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdFusions& fusions) {
  require_dtype(argument("q"), inputs.q, {Dtype::kFloat16, Dtype::kBFloat16});
  require_dtype(argument("k"), inputs.k, {inputs.q.dtype});
  require_dtype(argument("v"), inputs.v, {inputs.q.dtype});
  require_dtype(argument("g"), inputs.g, {Dtype::kFloat32, Dtype::kBFloat16});
  if (fusions.g_is_gk) require_dtype(argument("g"), inputs.g, {Dtype::kFloat32});
  require_dtype(argument("beta"), inputs.beta, {Dtype::kFloat32, Dtype::kBFloat16});
  if (is_given(inputs.A_log)) require_dtype(argument("A_log"), inputs.A_log, {Dtype::kFloat32});
  if (is_given(inputs.dt_bias)) require_dtype(argument("dt_bias"), inputs.dt_bias, {Dtype::kFloat32});
  if (is_given(inputs.initial_state)) require_dtype(argument("initial_state"), inputs.initial_state, {Dtype::kFloat32});
  if (is_given(inputs.cu_seqlens)) {
    require_dtype(argument("cu_seqlens"), inputs.cu_seqlens, {Dtype::kInt32, Dtype::kInt64});
  }
}

void check_output_dtypes(const ChunkKdaFwdOutputs& outputs, Dtype q_dtype) {
  for (int i = 0; i < kChunkKdaFwdOutputCount; ++i) {
    const OutputMember& output = kChunkKdaFwdOutputs[static_cast<std::size_t>(i)];
    if (!is_given(output.of(outputs))) continue;
    require_dtype(output.argument(), output.of(outputs), {output_dtype(i, q_dtype)});
  }
}

template <typename Owner, std::size_t count>
void check_views(const std::array<TensorMember<Owner>, count>& members, const Owner& owner, const Device& device) {
  for (const TensorMember<Owner>& member : members) {
    if (!is_given(member.of(owner))) continue;
    require_view(member.argument(), member.of(owner));
    require_device(member.argument(), member.of(owner), device);
  }
}

// Sizes.

void check_dim(std::string_view name, std::string_view symbol, std::int64_t value) {
  if (value < kDimStep || value > kMaxDim || value % kDimStep != 0) {
    fail_value(name, std::string(symbol) + " a multiple of 16 in 16..256", is(symbol, value));
  }
}

void check_heads(const ChunkKdaFwdDims& dims) {
  if (dims.H < 1 || dims.H > kMaxHeads) fail_value("q", "H in 1..128", is("H", dims.H));
  if (dims.HV < dims.H || dims.HV > kMaxHeads) {
    fail_value("v", "HV in H..128 with " + is("H", dims.H), is("HV", dims.HV));
  }
  if (dims.HV % dims.H != 0) fail_value("v", "HV a multiple of " + is("H", dims.H), is("HV", dims.HV));
}

// All sizes but N and NC.
ChunkKdaFwdDims read_sizes(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdAttributes& attributes) {
  require_rank(argument("q"), inputs.q, row_shape(attributes.layout, {}, {"H"}, {"K"}));
  require_rank(argument("v"), inputs.v, row_shape(attributes.layout, {}, {"HV"}, {"V"}));
  const LayoutAxes axes = axes_of(attributes.layout);
  const auto extent = [](const TensorView& view, int axis) { return view.shape[static_cast<std::size_t>(axis)]; };
  ChunkKdaFwdDims dims;
  dims.B = axes.has_batch() ? extent(inputs.q, axes.batch) : 1;
  dims.T = extent(inputs.q, axes.token);
  dims.H = extent(inputs.q, axes.head);
  dims.K = extent(inputs.q, axes.inner);
  dims.HV = extent(inputs.v, axes.head);
  dims.V = extent(inputs.v, axes.inner);
  dims.C = attributes.chunk_size;
  return dims;
}

void check_sizes(const ChunkKdaFwdDims& dims) {
  check_dim("q", "K", dims.K);
  check_dim("v", "V", dims.V);
  check_heads(dims);
}

// Metadata of packed sequences.

void check_chunk_index(Metadata chunk_indices, std::size_t index, std::int64_t expected, std::string_view meaning) {
  if (chunk_indices[index] == expected) return;
  fail_value("chunk_indices",
             is("chunk_indices[" + std::to_string(index) + "]", expected) + " (" + std::string(meaning) + ")",
             std::to_string(chunk_indices[index]));
}

void check_chunk_indices(Metadata chunk_indices, Metadata first_chunk) {
  const auto chunks = static_cast<std::size_t>(first_chunk.back());
  if (chunk_indices.size() != 2 * chunks) {
    fail_value("chunk_indices", "2*NC = " + std::to_string(2 * chunks) + " values",
               std::to_string(chunk_indices.size()) + " values");
  }
  if (chunks != 0 && chunk_indices.data() == nullptr) {
    fail(ErrorKind::kMissing, argument("chunk_indices"), "data", "a null pointer");
  }
  std::size_t index = 0;
  for (std::size_t n = 0; n + 1 < first_chunk.size(); ++n) {
    for (std::int64_t chunk = 0; chunk < first_chunk[n + 1] - first_chunk[n]; ++chunk) {
      check_chunk_index(chunk_indices, index++, static_cast<std::int64_t>(n), "sequence");
      check_chunk_index(chunk_indices, index++, chunk, "chunk within its sequence");
    }
  }
}

void require_no_chunk_indices(const ChunkKdaFwdAttributes& attributes, std::string_view why) {
  if (attributes.chunk_indices) fail_value("chunk_indices", "none, as cu_seqlens is " + std::string(why), "some");
}

void set_host_sequences(ChunkKdaFwdProblem& problem, const ChunkKdaFwdAttributes& attributes,
                        std::vector<std::int64_t>& first_chunk) {
  ChunkKdaFwdDims& dims = problem.dims;
  check_cu_seqlens(kChunkKdaFwdName, *attributes.cu_seqlens, dims.T);
  problem.cu_seqlens.assign(attributes.cu_seqlens->begin(), attributes.cu_seqlens->end());
  first_chunk = first_chunks(problem.cu_seqlens, dims.C);
  if (attributes.chunk_indices) check_chunk_indices(*attributes.chunk_indices, first_chunk);
  dims.N = static_cast<std::int64_t>(problem.cu_seqlens.size()) - 1;
  dims.NC = first_chunk.back();
}

// Nothing but the number of sequences and a bound on the number of chunks is known.
void set_device_sequences(ChunkKdaFwdProblem& problem, const TensorView& cu_seqlens,
                          const ChunkKdaFwdAttributes& attributes) {
  ChunkKdaFwdDims& dims = problem.dims;
  if (attributes.cu_seqlens) fail_value("cu_seqlens", "an attribute or an input", "both");
  if (cu_seqlens.device.type == DeviceType::kCpu) {
    fail_value("cu_seqlens", "numbers among the attributes, or a tensor on a GPU", "a tensor on the CPU");
  }
  require_rank(argument("cu_seqlens"), cu_seqlens, {{"N+1"}});
  require_sequence_count(kChunkKdaFwdName, cu_seqlens.shape[0] - 1);
  require_no_chunk_indices(attributes, "on the device");
  problem.has_device_cu_seqlens = true;
  problem.cu_seqlens_dtype = cu_seqlens.dtype;
  problem.cu_seqlens_stride = used_stride(cu_seqlens, 0);
  dims.N = cu_seqlens.shape[0] - 1;
  dims.NC = attributes.max_chunks.value_or((dims.T + dims.N * (dims.C - 1)) / dims.C);
  if (dims.NC < 0) fail_value("max_chunks", "0 or more", std::to_string(dims.NC));
}

// Shapes.

void check_input_shapes(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdDims& dims,
                        const ChunkKdaFwdAttributes& attributes) {
  const Layout layout = attributes.layout;
  const Extent heads{"HV", dims.HV};
  const Extent key{"K", dims.K};
  require_shape(argument("k"), inputs.k, row_shape(layout, dims, {"H", dims.H}, key));
  require_shape(argument("v"), inputs.v, row_shape(layout, dims, heads, {"V", dims.V}));
  require_shape(argument("g"), inputs.g, row_shape(layout, dims, heads, key));
  require_shape(argument("beta"), inputs.beta, scalar_shape(layout, dims, heads));
  if (is_given(inputs.A_log)) require_shape(argument("A_log"), inputs.A_log, {heads});
  if (is_given(inputs.dt_bias)) require_shape(argument("dt_bias"), inputs.dt_bias, {{"HV*K", dims.HV * dims.K}});
  if (is_given(inputs.initial_state)) {
    require_shape(argument("initial_state"), inputs.initial_state, state_shape(dims, attributes.state_v_first));
  }
}

// [1,NC,HV,K,V] is as good as [NC,HV,K,V] where the other tensors have a batch axis of extent 1.
bool is_packed_h_with_batch(const TensorView& h, const ChunkKdaFwdDims& dims, const ChunkKdaFwdAttributes& attributes,
                            bool is_packed) {
  const Extent one{"1", 1};
  return is_packed && axes_of(attributes.layout).has_batch() &&
         chunk_state_shape({&one, 1}, dims, attributes.state_v_first).matches(h);
}

void check_output_shapes(const ChunkKdaFwdOutputs& outputs, const ChunkKdaFwdDims& dims,
                         const ChunkKdaFwdAttributes& attributes, bool is_packed) {
  for (int i = 0; i < kChunkKdaFwdOutputCount; ++i) {
    const OutputMember& output = kChunkKdaFwdOutputs[static_cast<std::size_t>(i)];
    const TensorView& view = output.of(outputs);
    if (!is_given(view)) continue;
    const bool is_h = output.member == &ChunkKdaFwdOutputs::h;
    if (!is_h || !is_packed_h_with_batch(view, dims, attributes, is_packed)) {
      require_shape(output.argument(), view, output_shape(i, dims, attributes, is_packed));
    }
    require_own_elements(output.argument(), view);
  }
}

// Strides.

// For a tensor of [B,T,heads,inner] in any order, or of [B,T,heads].
RowStrides row_strides(const TensorView& view, Layout layout) {
  const LayoutAxes axes = axes_of(layout);
  RowStrides strides;
  if (axes.has_batch()) strides.batch = used_stride(view, axes.batch);
  strides.token = used_stride(view, axes.token);
  strides.head = used_stride(view, axes.head);
  if (axes.inner < view.rank) strides.inner = used_stride(view, axes.inner);
  return strides;
}

// For [...,HV,K,V] or [...,HV,V,K].
StateStrides inner_state_strides(const TensorView& view, bool state_v_first) {
  StateStrides strides;
  strides.head = used_stride(view, view.rank - 3);
  strides.k = used_stride(view, view.rank - (state_v_first ? 1 : 2));
  strides.v = used_stride(view, view.rank - (state_v_first ? 2 : 1));
  return strides;
}

StateStrides state_strides(const TensorView& view, bool state_v_first) {
  if (!view.present()) return {};
  StateStrides strides = inner_state_strides(view, state_v_first);
  strides.seq = used_stride(view, 0);
  return strides;
}

StateStrides h_strides(const TensorView& view, bool state_v_first) {
  if (!view.present()) return {};
  StateStrides strides = inner_state_strides(view, state_v_first);
  strides.chunk = used_stride(view, view.rank - 4);
  if (view.rank == 5) strides.seq = used_stride(view, 0);
  return strides;
}

void set_input_strides(ChunkKdaFwdProblem& problem, const ChunkKdaFwdInputs& inputs,
                       const ChunkKdaFwdAttributes& attributes) {
  problem.q = row_strides(inputs.q, attributes.layout);
  problem.k = row_strides(inputs.k, attributes.layout);
  problem.v = row_strides(inputs.v, attributes.layout);
  problem.g = row_strides(inputs.g, attributes.layout);
  problem.beta = row_strides(inputs.beta, attributes.layout);
  problem.has_A_log = inputs.A_log.present();
  if (problem.has_A_log) problem.A_log_stride = used_stride(inputs.A_log, 0);
  problem.has_dt_bias = inputs.dt_bias.present();
  if (problem.has_dt_bias) problem.dt_bias_stride = used_stride(inputs.dt_bias, 0);
  problem.has_initial_state = inputs.initial_state.present();
  problem.initial_state = state_strides(inputs.initial_state, attributes.state_v_first);
}

void set_output_strides(ChunkKdaFwdProblem& problem, const ChunkKdaFwdOutputs& outputs,
                        const ChunkKdaFwdAttributes& attributes) {
  const auto set_row = [](const TensorView& view, Layout layout, RowStrides& strides) {
    if (view.present()) strides = row_strides(view, layout);
    return view.present();
  };
  const Layout by_head = head_major(attributes.layout);
  set_row(outputs.attn_out, token_major(attributes.layout), problem.attn_out);
  problem.has_gk = set_row(outputs.gk, by_head, problem.gk);
  problem.has_Aqk = set_row(outputs.Aqk, by_head, problem.Aqk);
  problem.has_Akk = set_row(outputs.Akk, by_head, problem.Akk);
  problem.has_w = set_row(outputs.w, by_head, problem.w);
  problem.has_u = set_row(outputs.u, by_head, problem.u);
  problem.has_qg = set_row(outputs.qg, by_head, problem.qg);
  problem.has_kg = set_row(outputs.kg, by_head, problem.kg);
  problem.has_v_new = set_row(outputs.v_new, by_head, problem.v_new);
  problem.has_final_state = outputs.final_state.present();
  problem.final_state = state_strides(outputs.final_state, attributes.state_v_first);
  problem.has_h = outputs.h.present();
  problem.h = h_strides(outputs.h, attributes.state_v_first);
}

void set_attributes(ChunkKdaFwdProblem& problem, const ChunkKdaFwdInputs& inputs,
                    const ChunkKdaFwdAttributes& attributes) {
  problem.dtype = inputs.q.dtype;
  problem.g_dtype = inputs.g.dtype;
  problem.beta_dtype = inputs.beta.dtype;
  problem.device = inputs.q.device;
  problem.gate_mode = gate_mode_of(attributes);
  problem.qk_l2norm = attributes.fusions.qk_l2norm;
  problem.beta_activation = attributes.fusions.beta;
  problem.scale = static_cast<float>(*attributes.scale);
  if (problem.gate_mode == GateMode::kBounded) problem.lower_bound = static_cast<float>(attributes.lower_bound);
}

}  // namespace

ChunkKdaFwdProblem make_problem(const ChunkKdaFwdInputs& given_inputs, const ChunkKdaFwdOutputs* outputs,
                                const ChunkKdaFwdAttributes& attributes) {
  check_given(given_inputs, outputs, attributes);
  check_attributes(attributes);
  check_input_dtypes(given_inputs, attributes.fusions);
  if (outputs != nullptr) check_output_dtypes(*outputs, given_inputs.q.dtype);

  const ChunkKdaFwdInputs inputs = inputs_read(given_inputs, gate_mode_of(attributes));
  check_views(kChunkKdaFwdInputs, inputs, inputs.q.device);
  if (outputs != nullptr) check_views(kChunkKdaFwdOutputs, *outputs, inputs.q.device);

  ChunkKdaFwdProblem problem;
  set_attributes(problem, inputs, attributes);
  ChunkKdaFwdDims& dims = problem.dims;
  dims = read_sizes(inputs, attributes);
  check_sizes(dims);
  const bool has_device_cu_seqlens = is_given(inputs.cu_seqlens);
  if ((attributes.cu_seqlens || has_device_cu_seqlens) && dims.B != 1) {
    fail_value("q", "B = 1, as cu_seqlens is given", is("B", dims.B));
  }
  if (!has_device_cu_seqlens && attributes.max_chunks) {
    fail_value("max_chunks", "none, as cu_seqlens is not on the device", std::to_string(*attributes.max_chunks));
  }
  if (has_device_cu_seqlens) {
    set_device_sequences(problem, inputs.cu_seqlens, attributes);
  } else if (attributes.cu_seqlens) {
    set_host_sequences(problem, attributes, problem.first_chunk_);
  } else {
    require_no_chunk_indices(attributes, "absent");
    dims.N = dims.B;
    dims.NC = ceil_div(dims.T, dims.C);
  }

  check_input_shapes(inputs, dims, attributes);
  set_input_strides(problem, inputs, attributes);
  if (outputs != nullptr) {
    check_output_shapes(*outputs, dims, attributes, problem.is_packed());
    set_output_strides(problem, *outputs, attributes);
  }
  return problem;
}

Sequence ChunkKdaFwdProblem::sequence(std::int64_t n) const noexcept {
  if (!is_packed()) return {.batch = n, .first_token = 0, .tokens = dims.T, .first_chunk = 0};
  const auto i = static_cast<std::size_t>(n);
  return {.batch = 0,
          .first_token = cu_seqlens[i],
          .tokens = cu_seqlens[i + 1] - cu_seqlens[i],
          .first_chunk = first_chunk_[i]};
}

ChunkKdaFwdInputs inputs_read(const ChunkKdaFwdInputs& inputs, GateMode gate_mode) noexcept {
  ChunkKdaFwdInputs read = inputs;
  if (gate_mode == GateMode::kActivated || gate_mode == GateMode::kAccumulated) {
    read.A_log = {};
    read.dt_bias = {};
  }
  return read;
}

void check_pointers(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs) {
  for (const InputMember& input : kChunkKdaFwdInputs) require_data(input.argument(), input.of(inputs));
  for (const OutputMember& output : kChunkKdaFwdOutputs) require_data(output.argument(), output.of(outputs));
  for (std::size_t i = 0; i < kChunkKdaFwdOutputs.size(); ++i) {
    const OutputMember& output = kChunkKdaFwdOutputs[i];
    const TensorView& view = output.of(outputs);
    if (view.numel() == 0) continue;
    for (const InputMember& input : kChunkKdaFwdInputs) {
      require_no_overlap(output.argument(), view, input.name, input.of(inputs));
    }
    for (std::size_t j = i + 1; j < kChunkKdaFwdOutputs.size(); ++j) {
      require_no_overlap(output.argument(), view, kChunkKdaFwdOutputs[j].name, kChunkKdaFwdOutputs[j].of(outputs));
    }
  }
}

void check_workspace(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs, const void* workspace,
                     std::size_t bytes) {
  constexpr Dtype kUnit = Dtype::kFloat16;  // none is smaller
  const auto units = static_cast<std::int64_t>(bytes / size_of(kUnit));
  const TensorView view = TensorView::contiguous(workspace, kUnit, {units}, inputs.q.device);
  for (const InputMember& input : kChunkKdaFwdInputs) {
    require_no_overlap(argument("workspace"), view, input.name, input.of(inputs));
  }
  for (const OutputMember& output : kChunkKdaFwdOutputs) {
    require_no_overlap(argument("workspace"), view, output.name, output.of(outputs));
  }
}

ChunkKdaFwdPointers pointers_of(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs) {
  const auto data = [](const TensorView& view) { return view.numel() == 0 ? nullptr : view.data; };
  const auto floats = [&](const TensorView& view) { return static_cast<float*>(data(view)); };
  return {
      .q = data(inputs.q),
      .k = data(inputs.k),
      .v = data(inputs.v),
      .g = data(inputs.g),
      .beta = data(inputs.beta),
      .A_log = floats(inputs.A_log),
      .dt_bias = floats(inputs.dt_bias),
      .initial_state = floats(inputs.initial_state),
      .cu_seqlens = data(inputs.cu_seqlens),
      .attn_out = data(outputs.attn_out),
      .final_state = floats(outputs.final_state),
      .gk = floats(outputs.gk),
      .Aqk = data(outputs.Aqk),
      .Akk = data(outputs.Akk),
      .w = data(outputs.w),
      .u = data(outputs.u),
      .qg = data(outputs.qg),
      .kg = data(outputs.kg),
      .v_new = data(outputs.v_new),
      .h = data(outputs.h),
  };
}

}  // namespace kda
