#include "gates.h"

#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "array.h"
#include "errors.h"
#include "kda/kda_gate.h"
#include "kda/kda_gate_cumsum.h"
#include "kda/reference.h"

namespace kda::python {
namespace {

constexpr std::string_view kFloats = "float32, float16 or bfloat16";
constexpr std::string_view kFloat32 = "float32";

// What the two gate operators share: their three inputs (kept alive), what their one output must look like, and a name
// for errors. Immutable, so that any number of threads may use it at once.
class GateCallBase {
 public:
  GateCallBase(const GateCallBase&) = delete;
  GateCallBase& operator=(const GateCallBase&) = delete;

  [[nodiscard]] nb::tuple output() const { return to_spec(expected_); }

 protected:
  GateCallBase(std::string op, const nb::tuple& inputs)
      : op_(std::move(op)),
        g_(inputs[0], {op_, "g", kFloats}),
        A_log_(inputs[1], {op_, "A_log", kFloat32}),
        dt_bias_(inputs[2], {op_, "dt_bias", kFloat32}) {}
  ~GateCallBase() = default;

  void expect(Dtype dtype) {
    const TensorView& g = g_.view();
    expected_ = TensorView::contiguous(nullptr, dtype, g.sizes(), g.device);
  }

  template <typename Plan>
  static nb::dict report(const Plan& plan) {
    nb::dict result;
    result["backend"] = to_str(plan.backend());
    result["num_threads"] = plan.num_threads();
    result["launches"] = plan.launches();
    result["workspace_bytes"] = plan.workspace_bytes();
    return result;
  }

  [[nodiscard]] nb::object numbers(std::vector<double> values) const {
    return to_numpy(std::move(values), expected_.sizes());
  }

  std::string op_;
  ArrayView g_;
  ArrayView A_log_;
  ArrayView dt_bias_;
  TensorView expected_;
};

class KdaGateCall : public GateCallBase {
 public:
  KdaGateCall(std::string op, const nb::tuple& inputs, std::string_view output_dtype, std::optional<double> lower_bound)
      : GateCallBase(std::move(op), inputs),
        inputs_{.g = g_.view(), .A_log = A_log_.view(), .dt_bias = dt_bias_.view()},
        attributes_{.lower_bound = lower_bound} {
    expect(dtype_named(output_dtype, {op_, "output_dtype", kFloats}));
    (void)make_plan(1);
  }

  [[nodiscard]] nb::dict plan(int num_threads) const { return report(make_plan(num_threads)); }

  void execute(nb::handle array, int num_threads, std::uintptr_t stream) const {
    const ArrayView out(array, {op_, "out", name_of(expected_.dtype)});
    const nb::gil_scoped_release release;
    speaking([&] {
      KdaGatePlan(inputs_, out.view(), attributes_, {.num_threads = num_threads})
          .execute(inputs_, out.view(), {}, reinterpret_cast<Stream>(stream));
    });
  }

  [[nodiscard]] nb::object reference() const {
    std::vector<double> values;
    {
      const nb::gil_scoped_release release;
      values = speaking([&] { return reference::kda_gate(inputs_, attributes_); });
    }
    return numbers(std::move(values));
  }

 private:
  template <typename Function>
  [[nodiscard]] std::invoke_result_t<Function> speaking(Function function) const {
    return renaming_errors("kda_gate", op_, "out", "output_dtype", function);
  }

  [[nodiscard]] KdaGatePlan make_plan(int num_threads) const {
    return speaking([&] { return KdaGatePlan(inputs_, expected_, attributes_, {.num_threads = num_threads}); });
  }

  KdaGateInputs inputs_;
  KdaGateAttributes attributes_;
};

class KdaGateCumsumCall : public GateCallBase {
 public:
  KdaGateCumsumCall(std::string op, const nb::tuple& inputs, std::int64_t chunk_size, bool use_gate_in_kernel,
                    bool safe_gate, double lower_bound, nb::handle cu_seqlens)
      : GateCallBase(std::move(op), inputs),
        cu_seqlens_(integers(cu_seqlens, {op_, "cu_seqlens", "int64 or int32"}, false)),
        inputs_{.g = g_.view(), .A_log = A_log_.view(), .dt_bias = dt_bias_.view()} {
    attributes_.chunk_size = chunk_size;
    attributes_.use_gate_in_kernel = use_gate_in_kernel;
    attributes_.safe_gate = safe_gate;
    attributes_.lower_bound = lower_bound;
    if (cu_seqlens_) attributes_.cu_seqlens = *cu_seqlens_;
    expect(Dtype::kFloat32);
    (void)make_plan(1);
  }

  [[nodiscard]] nb::dict plan(int num_threads) const { return report(make_plan(num_threads)); }

  void execute(nb::handle array, int num_threads, std::uintptr_t stream) const {
    const ArrayView gk(array, {op_, "gk", kFloat32});
    const nb::gil_scoped_release release;
    KdaGateCumsumPlan(inputs_, gk.view(), attributes_, {.num_threads = num_threads})
        .execute(inputs_, gk.view(), {}, reinterpret_cast<Stream>(stream));
  }

  [[nodiscard]] nb::object reference() const {
    std::vector<double> values;
    {
      const nb::gil_scoped_release release;
      values = reference::kda_gate_cumsum(inputs_, attributes_);
    }
    return numbers(std::move(values));
  }

 private:
  [[nodiscard]] KdaGateCumsumPlan make_plan(int num_threads) const {
    return {inputs_, expected_, attributes_, {.num_threads = num_threads}};
  }

  std::optional<std::vector<std::int64_t>> cu_seqlens_;
  KdaGateCumsumInputs inputs_;
  KdaGateCumsumAttributes attributes_;
};

template <typename Call>
void bind_methods(nb::class_<Call>& bound) {
  bound.def("output", &Call::output)
      .def("plan", &Call::plan, nb::arg("num_threads"))
      .def("execute", &Call::execute, nb::arg("array"), nb::arg("num_threads"), nb::arg("stream") = 0)
      .def("reference", &Call::reference);
}

}  // namespace

void bind_gates(nb::module_& module) {
  nb::class_<KdaGateCall> gate(module, "KdaGateCall");
  gate.def(nb::init<std::string, const nb::tuple&, std::string_view, std::optional<double>>(), nb::arg("op"),
           nb::arg("inputs"), nb::arg("output_dtype"), nb::arg("lower_bound").none());
  bind_methods(gate);
  nb::class_<KdaGateCumsumCall> cumsum(module, "KdaGateCumsumCall");
  cumsum.def(nb::init<std::string, const nb::tuple&, std::int64_t, bool, bool, double, nb::handle>(), nb::arg("op"),
             nb::arg("inputs"), nb::arg("chunk_size"), nb::arg("use_gate_in_kernel"), nb::arg("safe_gate"),
             nb::arg("lower_bound"), nb::arg("cu_seqlens").none());
  bind_methods(cumsum);
}

}  // namespace kda::python
