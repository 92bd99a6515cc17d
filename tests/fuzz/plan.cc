// Plans of all operators from the C++ API: any call is refused with a message, or planned; what is planned and small is
// executed too, in exactly the memory that it names, and compared with the reference.

#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "fuzz/views.h"
#include "kda/kda.h"
#include "kda/reference.h"

namespace kda::fuzz {
namespace {

using testing::GeneratedTensor;
using testing::Generator;

constexpr std::int64_t kMostElements = 1 << 16;  // of a tensor that is executed
constexpr std::int64_t kMostWork = 1 << 20;      // tokens * HV * K * V

// Numbers of a call: tame ones, which every operator must keep finite, or hostile ones.
struct Numbers {
  std::uint64_t seed = 0;
  bool hostile = false;
  bool resets = false;  // gates of -inf and -1000 here and there

  explicit Numbers(FuzzedDataProvider& draw)
      : seed(draw.ConsumeIntegral<std::uint16_t>()), hostile(draw.ConsumeBool()), resets(draw.ConsumeBool()) {}

  [[nodiscard]] double plain(const Generator& from, std::int64_t i, double low, double high) const {
    constexpr std::array<double, 8> kHostile{NAN, INFINITY, -INFINITY, 3e38, -3e38, 1e-40, -0.0, -1e4};
    if (hostile && from.bits(i) % 5 == 0) return kHostile[from.bits(i) / 5 % kHostile.size()];
    return low + (high - low) * from.uniform(i);
  }
  [[nodiscard]] double gate(const Generator& from, std::int64_t i) const {
    if (resets && from.bits(i) % 7 == 0) return from.bits(i) % 2 == 0 ? -1000.0 : -INFINITY;
    return plain(from, i, -2, 0);
  }
};

// The memory of a call's tensors.
class Call {
 public:
  // False when a tensor is too large to be executed, or has a dtype that only its metadata may have.
  bool add(TensorView& view, bool is_output) {
    if (!view.present()) return true;
    Extent extent;
    if (size_of(view.dtype) > 4 || view.dtype == Dtype::kInt32 || !extent_of(view, kMostElements, extent)) return false;
    tensors_.push_back({Memory(view, extent), &view, is_output});
    return true;
  }

  template <typename Element>
  void fill(const TensorView& view, const Element& element) {
    for (Tensor& tensor : tensors_) {
      if (tensor.view == &view) tensor.memory.fill(view.dtype, element);
    }
  }

  void remember_inputs() {
    for (Tensor& tensor : tensors_) {
      if (!tensor.is_output) tensor.memory.remember();
    }
  }

  void require_only_outputs_written() const {
    for (const Tensor& tensor : tensors_) {
      if (tensor.is_output) {
        require(tensor.memory.gaps_are_intact(*tensor.view), "nothing between the elements of an output is written");
      } else {
        require(tensor.memory.is_unchanged(), "inputs are not written");
      }
    }
  }

  void require_no_nan() const {
    for (const Tensor& tensor : tensors_) {
      if (tensor.is_output) require(!has_nan(values_of(*tensor.view)), "finite inputs make no NaN");
    }
  }

  [[nodiscard]] bool has_output() const {
    return std::any_of(tensors_.begin(), tensors_.end(), [](const Tensor& tensor) { return tensor.is_output; });
  }

 private:
  struct Tensor {
    Memory memory;
    TensorView* view;
    bool is_output;
  };
  std::deque<Tensor> tensors_;
};

// Now and then a number of threads that there cannot be, or products of no format.
PlanOptions draw_options(FuzzedDataProvider& draw) {
  const int drawn = draw.ConsumeIntegralInRange(0, 6 * 3 - 1);
  return {.num_threads = drawn % 6 - 1, .state_products = static_cast<StateProducts>(drawn / 6)};
}

std::int64_t draw_tokens(FuzzedDataProvider& draw) {
  constexpr std::array<std::int64_t, 14> kTokens{17, 0, 1, 2, 5, 15, 16, 31, 63, 64, 65, 100, 129, 200};
  return draw.PickValueInArray(kTokens);
}

Dtype draw_float(FuzzedDataProvider& draw) {
  return draw.PickValueInArray({Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16});
}

// Runs an execution with a workspace of exactly the planned size, or spoiled arguments, which it must refuse.
template <typename Plan, typename Execute>
void execute(const Plan& plan, const Execute& execute) {
  const std::size_t bytes = plan.workspace_bytes();
  const auto memory = std::make_unique<std::byte[]>(bytes);
  std::memset(memory.get(), 0xff, bytes);
  execute(Workspace{memory.get(), bytes});
}

// chunk_kda_fwd.

struct Fwd {
  ChunkKdaFwdInputs in;
  ChunkKdaFwdOutputs out;
  ChunkKdaFwdAttributes attributes;
  std::vector<std::int64_t> cu_seqlens, chunk_indices;

  [[nodiscard]] std::array<TensorView*, 8> inputs() {
    return {&in.q, &in.k, &in.v, &in.g, &in.beta, &in.A_log, &in.dt_bias, &in.initial_state};
  }
  [[nodiscard]] std::array<TensorView*, 11> outputs() {
    return {&out.attn_out, &out.final_state, &out.gk, &out.Aqk,   &out.Akk, &out.w,
            &out.u,        &out.qg,          &out.kg, &out.v_new, &out.h};
  }
};

// Packed sequences; returns their tokens.
std::int64_t draw_sequences(FuzzedDataProvider& draw, Fwd& call) {
  call.cu_seqlens = {0};
  const int count = draw.ConsumeIntegralInRange(1, 5);
  for (int n = 0; n < count; ++n) call.cu_seqlens.push_back(call.cu_seqlens.back() + draw_tokens(draw));
  call.attributes.cu_seqlens = call.cu_seqlens;
  if (draw.ConsumeBool()) {
    for (std::int64_t n = 0; n < count; ++n) {
      const auto i = static_cast<std::size_t>(n);
      const std::int64_t chunks =
          (call.cu_seqlens[i + 1] - call.cu_seqlens[i] + call.attributes.chunk_size - 1) / call.attributes.chunk_size;
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk)
        call.chunk_indices.insert(call.chunk_indices.end(), {n, chunk});
    }
    call.attributes.chunk_indices = call.chunk_indices;
  }
  return call.cu_seqlens.back();
}

void draw_attributes(FuzzedDataProvider& draw, ChunkKdaFwdAttributes& attributes) {
  attributes.layout = draw.PickValueInArray({Layout::kBSND, Layout::kBNSD, Layout::kTND, Layout::kNTD});
  attributes.scale = 0.25;
  attributes.chunk_size = draw.ConsumeBool() ? 64 : 128;
  attributes.use_gate_in_kernel = draw.ConsumeBool();
  attributes.safe_gate = draw.ConsumeBool();
  attributes.lower_bound = draw.PickValueInArray({-5.0, -1.0, -1e-3});
  attributes.state_v_first = draw.ConsumeBool();
  attributes.fusions.qk_l2norm = draw.ConsumeBool();
  attributes.fusions.beta =
      draw.PickValueInArray({BetaActivation::kNone, BetaActivation::kSigmoid, BetaActivation::kTwiceSigmoid});
}

void spoil(FuzzedDataProvider& draw, Fwd& call) {
  ChunkKdaFwdAttributes& attributes = call.attributes;
  switch (draw.ConsumeIntegralInRange(0, 15)) {
    case 0:
      attributes.layout = static_cast<Layout>(draw.ConsumeIntegral<std::uint8_t>());
      break;
    case 1:
      attributes.scale = draw.ConsumeBool() ? std::nullopt : std::optional(draw.ConsumeFloatingPoint<double>());
      break;
    case 2:
      attributes.chunk_size = draw_wild(draw);
      break;
    case 3:
      attributes.lower_bound = draw.ConsumeFloatingPoint<double>();
      break;
    case 4:
      attributes.fusions.any_lower_bound = true;
      attributes.fusions.g_is_gk = draw.ConsumeBool();
      break;
    case 5:
      if (!call.cu_seqlens.empty()) {
        call.cu_seqlens[draw.ConsumeIntegralInRange<std::size_t>(0, call.cu_seqlens.size() - 1)] = draw_wild(draw);
      }
      break;
    case 6:
      if (!call.chunk_indices.empty()) {
        call.chunk_indices[draw.ConsumeIntegralInRange<std::size_t>(0, call.chunk_indices.size() - 1)] =
            draw_wild(draw);
      }
      break;
    case 7:
      attributes.cu_seqlens = std::span(call.cu_seqlens).first(0);
      break;
    case 8:
      attributes.chunk_indices = std::span(call.chunk_indices);
      break;
    case 9:
    case 10:
    case 11:
      spoil_view(draw, *draw.PickValueInArray({&call.out.attn_out, &call.out.final_state, &call.out.gk, &call.out.Akk,
                                               &call.out.w, &call.out.v_new, &call.out.h}));
      break;
    default:
      spoil_view(draw, *call.inputs()[draw.ConsumeIntegralInRange<std::size_t>(0, 7)]);
      break;
  }
}

// A legal call without data, of any size.
void describe(FuzzedDataProvider& draw, Fwd& call) {
  draw_attributes(draw, call.attributes);
  const bool is_rank3 = call.attributes.layout == Layout::kTND || call.attributes.layout == Layout::kNTD;
  const bool is_packed = draw.ConsumeBool();
  const bool is_huge = rarely(draw);
  std::int64_t T = is_packed ? draw_sequences(draw, call) : draw_tokens(draw);
  std::int64_t B = is_packed || is_rank3 ? 1 : draw.PickValueInArray<std::int64_t>({1, 2, 3, 0});
  if (is_huge && !is_packed) T = std::max<std::int64_t>(0, draw_wild(draw));
  if (is_huge && !is_packed && !is_rank3) B = std::max<std::int64_t>(0, draw_wild(draw));
  const std::int64_t H = draw.ConsumeIntegralInRange<std::int64_t>(1, 3);
  const std::int64_t HV = H * draw.ConsumeIntegralInRange<std::int64_t>(1, 2);
  const std::int64_t K = 16 * draw.ConsumeIntegralInRange<std::int64_t>(1, 4);
  const std::int64_t V = 16 * draw.ConsumeIntegralInRange<std::int64_t>(1, 4);
  const auto rows = [&](std::int64_t heads, std::optional<std::int64_t> inner) {
    std::vector<std::int64_t> shape;
    if (!is_rank3) shape.push_back(B);
    const bool by_head = call.attributes.layout == Layout::kBNSD || call.attributes.layout == Layout::kNTD;
    shape.insert(shape.end(), {by_head ? heads : T, by_head ? T : heads});
    if (inner) shape.push_back(*inner);
    return shape;
  };
  const Dtype half = draw.ConsumeBool() ? Dtype::kFloat16 : Dtype::kBFloat16;
  const auto wide = [&] { return draw.ConsumeBool() ? Dtype::kFloat32 : Dtype::kBFloat16; };
  const auto input = [&](Dtype dtype, const std::vector<std::int64_t>& shape) {
    TensorView view = draw_strided(draw, dtype, shape, true);
    if (is_huge) view.strides = {};
    return view;
  };
  call.in.q = input(half, rows(H, K));
  call.in.k = input(half, rows(H, K));
  call.in.v = input(half, rows(HV, V));
  call.in.g = input(wide(), rows(HV, K));
  call.in.beta = input(wide(), rows(HV, std::nullopt));
  if (call.attributes.use_gate_in_kernel || draw.ConsumeBool()) call.in.A_log = input(Dtype::kFloat32, {HV});
  if (draw.ConsumeBool()) call.in.dt_bias = input(Dtype::kFloat32, {HV * K});
  if (draw.ConsumeBool()) {
    const std::int64_t N = is_packed ? static_cast<std::int64_t>(call.cu_seqlens.size()) - 1 : B;
    const auto state = call.attributes.state_v_first ? std::vector{N, HV, V, K} : std::vector{N, HV, K, V};
    call.in.initial_state = input(Dtype::kFloat32, state);
  }
  call.out = chunk_kda_fwd_outputs(call.in, call.attributes);
  for (TensorView* view : call.outputs()) {
    if (view != &call.out.attn_out && draw.ConsumeIntegralInRange(0, 2) == 2) {
      *view = {};
    } else {
      *view = draw_strided(draw, view->dtype, {view->sizes().begin(), view->sizes().end()}, false);
    }
  }
}

void fill(const Fwd& call, const Numbers& numbers, Call& memory) {
  const double unit = 1 / std::sqrt(static_cast<double>(call.in.q.shape[static_cast<std::size_t>(call.in.q.rank - 1)]));
  const auto uniform = [&](const TensorView& view, GeneratedTensor tensor, double low, double high) {
    memory.fill(view, [&, from = Generator(numbers.seed, tensor)](std::int64_t i) {
      return numbers.plain(from, i, low, high);
    });
  };
  uniform(call.in.q, testing::kQ, -unit, unit);
  uniform(call.in.k, testing::kK, -unit, unit);
  uniform(call.in.v, testing::kV, -1, 1);
  uniform(call.in.beta, testing::kBeta, 0, 1);
  uniform(call.in.A_log, testing::kALog, -1, 1);
  uniform(call.in.dt_bias, testing::kDtBias, -1, 1);
  uniform(call.in.initial_state, testing::kInitialState, -1, 1);
  memory.fill(call.in.g, [&, from = Generator(numbers.seed, testing::kG)](std::int64_t i) {
    return call.attributes.use_gate_in_kernel ? numbers.plain(from, i, -4, 4) : numbers.gate(from, i);
  });
}

// Makes an execution illegal, and requires that it is refused.
void require_refusal(FuzzedDataProvider& draw, const ChunkKdaFwdPlan& plan, Fwd call, Workspace workspace) {
  int kind = draw.ConsumeIntegralInRange(0, 7);
  if (kind == 0 || kind > 5) return;
  --kind;
  if (kind == 0 && workspace.bytes == 0) return;
  if (kind == 0) --workspace.bytes;
  if (kind == 1 && call.in.q.numel() == 0) return;
  if (kind == 1) call.in.q.data = nullptr;
  if (kind == 2 && call.out.attn_out.numel() == 0) return;
  if (kind == 2) call.out.attn_out.data = call.in.v.data;
  if (kind == 3) call.in.v.shape[0] += 1;
  if (kind == 4) call.out.attn_out = {};
  try {
    plan.execute(call.in, call.out, workspace);
  } catch (const Error& error) {
    return require_message(error);
  }
  require(false, "an illegal execution is refused");
}

void run_fwd(FuzzedDataProvider& draw) {
  Fwd call;
  describe(draw, call);
  for (int i = draw.ConsumeIntegralInRange(0, 2); i > 0; --i) spoil(draw, call);
  const PlanOptions options = draw_options(draw);
  const ChunkKdaFwdPlan plan(call.in, call.out, call.attributes, options);
  const ChunkKdaFwdDims& dims = plan.dims();
  require(plan.num_threads() >= 1 && plan.launches() >= 0, "a plan can say how it runs");
  require(plan.state_products() == StateProducts::kFloat32 || plan.state_products() == options.state_products,
          "a plan uses no products that nobody asked for");
  const double tokens = static_cast<double>(dims.T) * (call.attributes.cu_seqlens ? 1.0 : static_cast<double>(dims.B));
  if (tokens * static_cast<double>(dims.HV * dims.K * dims.V) > kMostWork) return;

  Call memory;
  for (TensorView* view : call.inputs()) {
    if (!memory.add(*view, false)) return;
  }
  for (TensorView* view : call.outputs()) {
    if (!memory.add(*view, true)) return;
  }
  const Numbers numbers(draw);
  fill(call, numbers, memory);
  memory.remember_inputs();
  execute(plan, [&](Workspace workspace) {
    require_refusal(draw, plan, call, workspace);
    plan.execute(call.in, call.out, workspace);
  });
  memory.require_only_outputs_written();
  const bool is_tame = std::abs(*call.attributes.scale) <= 1 && !numbers.hostile && !call.attributes.fusions.g_is_gk &&
                       std::abs(call.attributes.lower_bound) <= 5;
  if (!is_tame) return;
  memory.require_no_nan();
  const auto expected = reference::chunk_kda_fwd(call.in, call.attributes, false);
  require(are_close(values_of(call.out.attn_out), expected.attn_out), "attn_out is the reference's");
  if (call.out.final_state.present()) {
    require(are_close(values_of(call.out.final_state), expected.final_state), "final_state is the reference's");
  }
}

// kda_gate.

void run_gate(FuzzedDataProvider& draw) {
  std::vector<std::int64_t> shape;
  for (int i = draw.ConsumeIntegralInRange(0, 3); i > 0; --i) shape.push_back(draw.ConsumeIntegralInRange(0, 5));
  const std::int64_t H = draw.ConsumeIntegralInRange(1, 6);
  const std::int64_t D = draw.ConsumeIntegralInRange(1, 140);
  shape.insert(shape.end(), {H, D});
  KdaGateInputs in;
  KdaGateAttributes attributes;
  in.g = draw_strided(draw, draw_float(draw), shape, true);
  if (draw.ConsumeBool()) attributes.lower_bound = draw.PickValueInArray({-5.0, -0.25, 3.0});
  if (!attributes.lower_bound || draw.ConsumeBool()) in.A_log = draw_strided(draw, Dtype::kFloat32, {H}, true);
  if (draw.ConsumeBool()) {
    in.dt_bias = draw_strided(draw, Dtype::kFloat32, draw.ConsumeBool() ? std::vector{H * D} : std::vector{H, D}, true);
  }
  TensorView out = draw_strided(draw, draw_float(draw), shape, false);
  for (int i = draw.ConsumeIntegralInRange(0, 2); i > 0; --i) {
    spoil_view(draw, *draw.PickValueInArray({&in.g, &in.g, &in.A_log, &in.dt_bias, &out}));
  }
  const bool any_bound = rarely(draw);
  if (any_bound) attributes.lower_bound = draw.ConsumeFloatingPoint<double>();

  const KdaGatePlan plan(in, out, attributes, draw_options(draw));
  Call memory;
  for (TensorView* view : {&in.g, &in.A_log, &in.dt_bias}) {
    if (!memory.add(*view, false)) return;
  }
  if (!memory.add(out, true)) return;
  const Numbers numbers(draw);
  const auto uniform = [&](const TensorView& view, GeneratedTensor tensor, double low, double high) {
    memory.fill(view, [&, from = Generator(numbers.seed, tensor)](std::int64_t i) {
      return numbers.plain(from, i, low, high);
    });
  };
  uniform(in.g, testing::kG, -20, 20);
  uniform(in.A_log, testing::kALog, -2, 2);
  uniform(in.dt_bias, testing::kDtBias, -4, 4);
  memory.remember_inputs();
  execute(plan, [&](Workspace workspace) { plan.execute(in, out, workspace); });
  memory.require_only_outputs_written();
  if (numbers.hostile || any_bound) return;
  memory.require_no_nan();
  require(are_close(values_of(out), reference::kda_gate(in, attributes)), "the gate is the reference's");
}

// kda_gate_cumsum.

void run_gate_cumsum(FuzzedDataProvider& draw) {
  Fwd sequences;
  KdaGateCumsumAttributes attributes;
  attributes.chunk_size = draw.PickValueInArray({32, 64, 128});
  attributes.use_gate_in_kernel = draw.ConsumeBool();
  attributes.safe_gate = draw.ConsumeBool();
  attributes.lower_bound = draw.PickValueInArray({-5.0, -1.0, -1e-3});
  const bool is_packed = draw.ConsumeBool();
  const std::int64_t T = is_packed ? draw_sequences(draw, sequences) : draw_tokens(draw);
  if (is_packed) attributes.cu_seqlens = sequences.cu_seqlens;
  const std::int64_t HV = draw.ConsumeIntegralInRange(1, 4);
  const std::int64_t K = draw.ConsumeIntegralInRange(1, 256);
  std::vector<std::int64_t> shape{HV, T, K};
  if (draw.ConsumeBool()) shape.insert(shape.begin(), is_packed ? 1 : draw.ConsumeIntegralInRange(0, 3));
  KdaGateCumsumInputs in;
  in.g = draw_strided(draw, draw_float(draw), shape, true);
  if (attributes.use_gate_in_kernel || draw.ConsumeBool()) in.A_log = draw_strided(draw, Dtype::kFloat32, {HV}, true);
  if (draw.ConsumeBool()) in.dt_bias = draw_strided(draw, Dtype::kFloat32, {HV * K}, true);
  TensorView gk = draw_strided(draw, Dtype::kFloat32, shape, false);
  for (int i = draw.ConsumeIntegralInRange(0, 2); i > 0; --i) {
    spoil_view(draw, *draw.PickValueInArray({&in.g, &in.g, &in.A_log, &in.dt_bias, &gk}));
  }
  if (rarely(draw)) attributes.chunk_size = draw_wild(draw);
  if (rarely(draw)) attributes.lower_bound = draw.ConsumeFloatingPoint<double>();
  if (is_packed && rarely(draw)) sequences.cu_seqlens.back() = draw_wild(draw);

  const KdaGateCumsumPlan plan(in, gk, attributes, draw_options(draw));
  Call memory;
  for (TensorView* view : {&in.g, &in.A_log, &in.dt_bias}) {
    if (!memory.add(*view, false)) return;
  }
  if (!memory.add(gk, true)) return;
  const Numbers numbers(draw);
  memory.fill(in.g, [&, from = Generator(numbers.seed, testing::kG)](std::int64_t i) {
    return attributes.use_gate_in_kernel ? numbers.plain(from, i, -8, 8) : numbers.gate(from, i);
  });
  memory.fill(in.A_log, [&, from = Generator(numbers.seed, testing::kALog)](std::int64_t i) {
    return numbers.plain(from, i, -2, 2);
  });
  memory.fill(in.dt_bias, [&, from = Generator(numbers.seed, testing::kDtBias)](std::int64_t i) {
    return numbers.plain(from, i, -2, 2);
  });
  memory.remember_inputs();
  execute(plan, [&](Workspace workspace) { plan.execute(in, gk, workspace); });
  memory.require_only_outputs_written();
  if (numbers.hostile) return;
  memory.require_no_nan();
  require(are_close(values_of(gk), reference::kda_gate_cumsum(in, attributes)), "gk is the reference's");
}

}  // namespace
}  // namespace kda::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider draw(data, size);
  try {
    switch (draw.ConsumeIntegralInRange(0, 3)) {
      case 0:
        kda::fuzz::run_gate(draw);
        break;
      case 1:
        kda::fuzz::run_gate_cumsum(draw);
        break;
      default:
        kda::fuzz::run_fwd(draw);
        break;
    }
  } catch (const kda::Error& error) {
    kda::fuzz::require_message(error);
  }
  return 0;
}
