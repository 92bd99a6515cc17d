#include "chunk_kda_fwd.h"

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "array.h"
#include "errors.h"
#include "kda/chunk_kda_fwd.h"
#include "kda/reference.h"

namespace kda::python {
namespace {

constexpr std::string_view kLibraryName = "chunk_kda_fwd";

struct InputField {
  std::string_view name;
  std::string_view dtypes;
  TensorView ChunkKdaFwdInputs::*view;
};

constexpr std::array kInputs = {
    InputField{"q", "float16 or bfloat16", &ChunkKdaFwdInputs::q},
    InputField{"k", "float16 or bfloat16", &ChunkKdaFwdInputs::k},
    InputField{"v", "float16 or bfloat16", &ChunkKdaFwdInputs::v},
    InputField{"g", "float32 or bfloat16", &ChunkKdaFwdInputs::g},
    InputField{"beta", "float32 or bfloat16", &ChunkKdaFwdInputs::beta},
    InputField{"A_log", "float32", &ChunkKdaFwdInputs::A_log},
    InputField{"dt_bias", "float32", &ChunkKdaFwdInputs::dt_bias},
    InputField{"initial_state", "float32", &ChunkKdaFwdInputs::initial_state},
};

using OutputViews = std::array<TensorView ChunkKdaFwdOutputs::*, kChunkKdaFwdOutputCount>;
constexpr OutputViews kOutputs = {
    &ChunkKdaFwdOutputs::attn_out, &ChunkKdaFwdOutputs::final_state, &ChunkKdaFwdOutputs::gk, &ChunkKdaFwdOutputs::Aqk,
    &ChunkKdaFwdOutputs::Akk,      &ChunkKdaFwdOutputs::w,           &ChunkKdaFwdOutputs::u,  &ChunkKdaFwdOutputs::qg,
    &ChunkKdaFwdOutputs::kg,       &ChunkKdaFwdOutputs::v_new,       &ChunkKdaFwdOutputs::h};

using ReferenceResult = reference::ChunkKdaFwdResult;
using ReferenceNumbers = std::array<std::vector<double> ReferenceResult::*, kChunkKdaFwdOutputCount>;
constexpr ReferenceNumbers kReferenceNumbers = {
    &ReferenceResult::attn_out, &ReferenceResult::final_state, &ReferenceResult::gk, &ReferenceResult::Aqk,
    &ReferenceResult::Akk,      &ReferenceResult::w,           &ReferenceResult::u,  &ReferenceResult::qg,
    &ReferenceResult::kg,       &ReferenceResult::v_new,       &ReferenceResult::h};

// One checked call: its inputs (kept alive), its attributes and what its outputs must look like. Immutable, so that any
// number of threads may use it at once.
class ChunkKdaFwdCall {
 public:
  // `op` is the Python function that is called; errors bear its name.
  ChunkKdaFwdCall(std::string op, const nb::tuple& inputs, std::string_view layout, std::optional<double> scale,
                  std::int64_t chunk_size, bool use_gate_in_kernel, bool safe_gate, double lower_bound,
                  bool state_v_first, nb::handle cu_seqlens, nb::handle chunk_indices, bool qk_l2norm,
                  std::string_view beta_activation, bool any_lower_bound, bool g_is_gk, bool h_has_batch,
                  bool cu_seqlens_may_be_on_gpu, std::string_view state_products)
      : op_(std::move(op)),
        g_name_(g_is_gk ? "gk" : "g"),
        cu_seqlens_(cu_seqlens_may_be_on_gpu
                        ? integers(cu_seqlens, {op_, "cu_seqlens", "int64 or int32"}, false, gpu_cu_seqlens_)
                        : integers(cu_seqlens, {op_, "cu_seqlens", "int64 or int32"}, false)),
        chunk_indices_(integers(chunk_indices, {op_, "chunk_indices", "int64 or int32"}, true)),
        state_products_(state_products == "bfloat16" ? StateProducts::kBFloat16 : StateProducts::kFloat32) {
    read_inputs(inputs, g_is_gk);
    inputs_.cu_seqlens = gpu_cu_seqlens_.view();
    attributes_.scale = scale.value_or(default_scale());
    attributes_.chunk_size = chunk_size;
    attributes_.use_gate_in_kernel = use_gate_in_kernel;
    attributes_.safe_gate = safe_gate;
    attributes_.lower_bound = lower_bound;
    attributes_.state_v_first = state_v_first;
    attributes_.fusions = {.qk_l2norm = qk_l2norm,
                           .beta = parse_beta_activation(beta_activation),
                           .any_lower_bound = any_lower_bound,
                           .g_is_gk = g_is_gk};
    if (cu_seqlens_) attributes_.cu_seqlens = *cu_seqlens_;
    if (chunk_indices_) attributes_.chunk_indices = *chunk_indices_;
    speaking([&] {
      attributes_.layout = parse_layout(layout);
      expected_ = chunk_kda_fwd_outputs(inputs_, attributes_);
    });
    if (h_has_batch && (cu_seqlens_ || inputs_.cu_seqlens.present())) expected_.h = with_batch(expected_.h);
  }
  ChunkKdaFwdCall(const ChunkKdaFwdCall&) = delete;
  ChunkKdaFwdCall& operator=(const ChunkKdaFwdCall&) = delete;

  [[nodiscard]] nb::list outputs() const {
    nb::list result;
    for (auto output : kOutputs) result.append(to_spec(expected_.*output));
    return result;
  }

  [[nodiscard]] nb::dict plan(const nb::tuple& wanted, int num_threads) const {
    ChunkKdaFwdOutputs outputs;
    for (std::size_t i = 0; i < kOutputs.size(); ++i) {
      if (nb::cast<bool>(wanted[i])) outputs.*kOutputs[i] = expected_.*kOutputs[i];
    }
    const ChunkKdaFwdPlan plan =
        speaking([&] { return ChunkKdaFwdPlan(inputs_, outputs, attributes_, options(num_threads)); });
    nb::list regions;
    for (const WorkspaceRegion& region : plan.workspace_regions()) {
      regions.append(nb::make_tuple(to_str(region.name), region.offset, region.bytes));
    }
    nb::dict result;
    result["backend"] = to_str(plan.backend());
    result["num_threads"] = plan.num_threads();
    result["state_products"] = plan.state_products() == StateProducts::kBFloat16 ? "bfloat16" : "float32";
    result["variant"] = plan.variant();
    result["launches"] = plan.launches();
    result["workspace_bytes"] = plan.workspace_bytes();
    result["workspace_regions"] = regions;
    return result;
  }

  // On a GPU: puts the launches on `stream`. `allocate` takes a number of bytes and returns (owner, address), which is
  // let go on return; None leaves the workspace to the library, which then waits for the GPU.
  void execute(const nb::tuple& arrays, int num_threads, std::uintptr_t stream, nb::handle allocate) const {
    std::array<ArrayView, kOutputs.size()> views;
    ChunkKdaFwdOutputs outputs;
    for (std::size_t i = 0; i < kOutputs.size(); ++i) {
      views[i] = ArrayView(arrays[i], {op_, kChunkKdaFwdOutputNames[i], name_of((expected_.*kOutputs[i]).dtype)});
      outputs.*kOutputs[i] = views[i].view();
    }
    if (allocate.is_none()) {
      const nb::gil_scoped_release release;
      return speaking([&] { chunk_kda_fwd(inputs_, outputs, attributes_, options(num_threads)); });
    }
    const ChunkKdaFwdPlan plan =
        speaking([&] { return ChunkKdaFwdPlan(inputs_, outputs, attributes_, options(num_threads)); });
    const std::size_t bytes = plan.workspace_bytes();
    nb::tuple workspace;
    void* address = nullptr;
    if (bytes > 0) {
      workspace = nb::cast<nb::tuple>(allocate(bytes));
      address = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(workspace[1]));
    }
    const nb::gil_scoped_release release;
    speaking([&] { plan.execute(inputs_, outputs, {address, bytes}, reinterpret_cast<Stream>(stream)); });
  }

  [[nodiscard]] nb::list reference(bool intermediates) const {
    ReferenceResult result;
    {
      const nb::gil_scoped_release release;
      speaking([&] { result = reference::chunk_kda_fwd(inputs_, attributes_, intermediates); });
    }
    nb::list arrays;
    for (std::size_t i = 0; i < kOutputs.size(); ++i) {
      const bool made = intermediates || i < 2;
      arrays.append(made ? to_numpy(std::move(result.*kReferenceNumbers[i]), (expected_.*kOutputs[i]).sizes())
                         : nb::none());
    }
    return arrays;
  }

 private:
  void read_inputs(const nb::tuple& inputs, bool g_is_gk) {
    for (std::size_t i = 0; i < kInputs.size(); ++i) {
      const InputField& field = kInputs[i];
      const bool is_float32 = g_is_gk && (field.name == "g" || field.name == "beta");
      const Argument argument{op_, field.name == "g" ? g_name_ : field.name, is_float32 ? "float32" : field.dtypes};
      arrays_[i] = ArrayView(inputs[i], argument);
      const TensorView& view = arrays_[i].view();
      if (is_float32 && view.present() && view.dtype != Dtype::kFloat32) refuse_dtype(argument, name_of(view.dtype));
      inputs_.*field.view = view;
    }
  }

  // Runs a function of the library, whose errors then name the Python function and its arguments.
  template <typename Function>
  [[nodiscard]] std::invoke_result_t<Function> speaking(Function function) const {
    return renaming_errors(kLibraryName, op_, "g", g_name_, function);
  }

  // K ** -0.5; anything for a q that will be refused.
  [[nodiscard]] double default_scale() const {
    const auto sizes = inputs_.q.sizes();
    return std::pow(sizes.empty() ? 1.0 : static_cast<double>(std::max<std::int64_t>(sizes.back(), 1)), -0.5);
  }

  [[nodiscard]] PlanOptions options(int num_threads) const {
    return {.num_threads = num_threads, .state_products = state_products_};
  }

  static BetaActivation parse_beta_activation(std::string_view name) {
    if (name == "sigmoid") return BetaActivation::kSigmoid;
    return name == "twice_sigmoid" ? BetaActivation::kTwiceSigmoid : BetaActivation::kNone;
  }

  static TensorView with_batch(const TensorView& view) {
    std::vector<std::int64_t> shape(view.sizes().begin(), view.sizes().end());
    shape.insert(shape.begin(), 1);
    return TensorView::contiguous(nullptr, view.dtype, shape, view.device);
  }

  std::string op_;
  std::string_view g_name_;
  std::array<ArrayView, kInputs.size()> arrays_;
  ArrayView gpu_cu_seqlens_;  // before the next member, whose making may set it
  std::optional<std::vector<std::int64_t>> cu_seqlens_;
  std::optional<std::vector<std::int64_t>> chunk_indices_;
  StateProducts state_products_;
  ChunkKdaFwdInputs inputs_;
  ChunkKdaFwdAttributes attributes_;
  ChunkKdaFwdOutputs expected_;
};

}  // namespace

void bind_chunk_kda_fwd(nb::module_& module) {
  nb::list names;
  for (const std::string_view name : kChunkKdaFwdOutputNames) names.append(to_str(name));
  module.attr("CHUNK_KDA_FWD_OUTPUTS") = nb::tuple(names);
  nb::class_<ChunkKdaFwdCall>(module, "ChunkKdaFwdCall")
      .def(nb::init<std::string, const nb::tuple&, std::string_view, std::optional<double>, std::int64_t, bool, bool,
                    double, bool, nb::handle, nb::handle, bool, std::string_view, bool, bool, bool, bool,
                    std::string_view>(),
           nb::arg("op"), nb::arg("inputs"), nb::arg("layout"), nb::arg("scale").none(), nb::arg("chunk_size"),
           nb::arg("use_gate_in_kernel"), nb::arg("safe_gate"), nb::arg("lower_bound"), nb::arg("state_v_first"),
           nb::arg("cu_seqlens").none(), nb::arg("chunk_indices").none(), nb::arg("qk_l2norm"),
           nb::arg("beta_activation"), nb::arg("any_lower_bound"), nb::arg("g_is_gk"), nb::arg("h_has_batch"),
           nb::arg("cu_seqlens_may_be_on_gpu"), nb::arg("state_products"))
      .def("outputs", &ChunkKdaFwdCall::outputs)
      .def("plan", &ChunkKdaFwdCall::plan, nb::arg("wanted"), nb::arg("num_threads"))
      .def("execute", &ChunkKdaFwdCall::execute, nb::arg("arrays"), nb::arg("num_threads"), nb::arg("stream") = 0,
           nb::arg("allocate") = nb::none())
      .def("reference", &ChunkKdaFwdCall::reference, nb::arg("intermediates"));
}

}  // namespace kda::python
