#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <string>

#include "core/checked.h"
#include "core/checks.h"
#include "kda_gate/problem.h"

namespace kda {
namespace {

Argument argument(std::string_view name) { return {kKdaGateName, name}; }

[[noreturn]] void fail_value(std::string_view name, const std::string& expected, const std::string& got) {
  fail(ErrorKind::kValue, argument(name), expected, got);
}

void check_given(const KdaGateInputs& inputs, const TensorView* out, const KdaGateAttributes& attributes) {
  require_given(argument("g"), inputs.g);
  if (!attributes.lower_bound && !is_given(inputs.A_log)) {
    fail(ErrorKind::kMissing, argument("A_log"), "a tensor, as lower_bound is absent", "none");
  }
  if (out != nullptr) require_given(argument("out"), *out);
}

void check_dtypes(const KdaGateInputs& inputs, const TensorView* out) {
  require_dtype(argument("g"), inputs.g, {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16});
  if (is_given(inputs.A_log)) require_dtype(argument("A_log"), inputs.A_log, {Dtype::kFloat32});
  if (is_given(inputs.dt_bias)) require_dtype(argument("dt_bias"), inputs.dt_bias, {Dtype::kFloat32});
  if (out != nullptr) require_dtype(argument("out"), *out, {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16});
}

void check_view(std::string_view name, const TensorView& view, const Device& device) {
  if (!is_given(view)) return;
  require_view(argument(name), view);
  require_device(argument(name), view, device);
}

void check_g_shape(const TensorView& g) {
  if (g.rank < 2) {
    fail_value("g", "rank 2..8, [...,H,D]", "rank " + std::to_string(g.rank) + ", " + format_shape(g.sizes()));
  }
  const auto H = g.shape[static_cast<std::size_t>(g.rank - 2)];
  const auto D = g.shape[static_cast<std::size_t>(g.rank - 1)];
  if (H < 1) fail_value("g", "H at least 1", "H = " + std::to_string(H));
  if (D < 1) fail_value("g", "D at least 1", "D = " + std::to_string(D));
}

void check_out_shape(const TensorView& out, const TensorView& g) {
  if (!std::equal(out.sizes().begin(), out.sizes().end(), g.sizes().begin(), g.sizes().end())) {
    fail_value("out", "shape of g = " + format_shape(g.sizes()), format_shape(out.sizes()));
  }
  require_own_elements(argument("out"), out);
}

GateAxis axis_of(const TensorView& g, const TensorView* out, int axis) {
  return {.extent = g.shape[static_cast<std::size_t>(axis)],
          .g = used_stride(g, axis),
          .out = out == nullptr ? 0 : used_stride(*out, axis)};
}

// Whether two neighbouring axes are one in memory.
bool joins(const GateAxis& outer, const GateAxis& inner) {
  return checked_mul(inner.g, inner.extent) == outer.g && checked_mul(inner.out, inner.extent) == outer.out;
}

void set_axes(KdaGateProblem& p, const TensorView& g, const TensorView* out) {
  p.head = axis_of(g, out, g.rank - 2);
  p.channel = axis_of(g, out, g.rank - 1);
  p.rows = 1;
  std::size_t count = 0;
  for (int i = 0; i < g.rank - 2; ++i) {
    const GateAxis axis = axis_of(g, out, i);
    p.rows = saturating_mul(p.rows, axis.extent);
    if (axis.extent == 1) continue;
    if (count > 0 && joins(p.lead[count - 1], axis)) {
      p.lead[count - 1] = {saturating_mul(p.lead[count - 1].extent, axis.extent), axis.g, axis.out};
    } else {
      p.lead[count++] = axis;
    }
  }
  p.lead_axes = std::max(1, static_cast<int>(count));
}

void set_A_log(KdaGateProblem& p, const TensorView& A_log) {
  p.has_A_log = is_given(A_log);
  if (!p.has_A_log) return;
  require_shape(argument("A_log"), A_log, {{"H", p.head.extent}});
  p.A_log_stride = used_stride(A_log, 0);
}

void set_dt_bias(KdaGateProblem& p, const TensorView& dt_bias) {
  p.has_dt_bias = is_given(dt_bias);
  if (!p.has_dt_bias) return;
  const std::int64_t H = p.head.extent;
  const std::int64_t D = p.channel.extent;
  if (Shape{{"H", H}, {"D", D}}.matches(dt_bias)) {
    p.dt_bias_head = used_stride(dt_bias, 0);
    p.dt_bias_channel = used_stride(dt_bias, 1);
  } else if (Shape{{"H*D", saturating_mul(H, D)}}.matches(dt_bias)) {
    p.dt_bias_channel = used_stride(dt_bias, 0);
    p.dt_bias_head = D * p.dt_bias_channel;
  } else {
    fail_value("dt_bias",
               "shape [H*D] = " + format_shape(std::array{saturating_mul(H, D)}) +
                   " or [H,D] = " + format_shape(std::array{H, D}),
               format_shape(dt_bias.sizes()));
  }
}

}  // namespace

double gate_rate(const KdaGateProblem& problem, const float* A_log, std::int64_t head) noexcept {
  if (!problem.has_A_log) return 1;
  const float exponent = A_log[head * problem.A_log_stride];
  const double rate = std::exp(static_cast<double>(exponent));
  if (rate == 0 && std::isfinite(exponent)) return std::numeric_limits<double>::denorm_min();
  return rate > FLT_MAX ? FLT_MAX : rate;
}

KdaGateProblem make_problem(const KdaGateInputs& inputs, const TensorView* out, const KdaGateAttributes& attributes) {
  check_given(inputs, out, attributes);
  if (attributes.lower_bound && !std::isfinite(*attributes.lower_bound)) {
    fail_value("lower_bound", "a finite number", format_number(*attributes.lower_bound));
  }
  check_dtypes(inputs, out);
  const Device& device = inputs.g.device;
  check_view("g", inputs.g, device);
  check_view("A_log", inputs.A_log, device);
  check_view("dt_bias", inputs.dt_bias, device);
  if (out != nullptr) check_view("out", *out, device);
  check_g_shape(inputs.g);
  if (out != nullptr) check_out_shape(*out, inputs.g);

  KdaGateProblem p;
  p.g_dtype = inputs.g.dtype;
  if (out != nullptr) p.out_dtype = out->dtype;
  p.device = device;
  p.lower_bound = attributes.lower_bound;
  set_axes(p, inputs.g, out);
  set_A_log(p, inputs.A_log);
  set_dt_bias(p, inputs.dt_bias);
  return p;
}

void check_pointers(const KdaGateInputs& inputs, const TensorView& out) {
  require_data(argument("g"), inputs.g);
  require_data(argument("A_log"), inputs.A_log);
  require_data(argument("dt_bias"), inputs.dt_bias);
  require_data(argument("out"), out);
  require_no_overlap(argument("out"), out, "g", inputs.g);
  require_no_overlap(argument("out"), out, "A_log", inputs.A_log);
  require_no_overlap(argument("out"), out, "dt_bias", inputs.dt_bias);
}

KdaGatePointers pointers_of(const KdaGateInputs& inputs, const TensorView& out) {
  const auto data = [](const TensorView& view) { return view.numel() == 0 ? nullptr : view.data; };
  return {.g = data(inputs.g),
          .A_log = static_cast<const float*>(data(inputs.A_log)),
          .dt_bias = static_cast<const float*>(data(inputs.dt_bias)),
          .out = data(out)};
}

}  // namespace kda
