#include <array>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "core/checks.h"
#include "core/planning.h"
#include "cpu/float_environment.h"
#include "kda/reference.h"
#include "kda_gate/problem.h"
#include "kda_gate_cumsum/problem.h"
#include "reference/numbers.h"
#include "reference/parallel.h"

namespace kda::reference {
namespace {

void require_cpu(std::string_view op, const Device& device) {
  if (device.type == DeviceType::kCpu) return;
  throw Error(ErrorKind::kUnavailable, std::string(op) + ": the float64 reference reads CPU memory only");
}

// Of element (index...) of a view, whose last `dropped` axes are left at 0.
std::int64_t row_offset(const TensorView& view, int dropped, std::int64_t row) {
  std::int64_t offset = 0;
  for (int axis = view.rank - dropped; axis-- > 0;) {
    const auto extent = view.shape[static_cast<std::size_t>(axis)];
    offset += row % extent * used_stride(view, axis);
    row /= extent;
  }
  return offset;
}

double gate(const KdaGateProblem& p, double rate, double x) {
  return p.lower_bound ? *p.lower_bound * sigmoid(rate * x) : -rate * softplus(x);
}

double gate(const KdaGateCumsumProblem& p, double rate, double x) {
  if (p.gate_mode == GateMode::kActivated) return x;
  return p.gate_mode == GateMode::kBounded ? p.lower_bound * sigmoid(rate * x) : -rate * softplus(x);
}

std::vector<double> compute(const KdaGateInputs& inputs, const KdaGateAttributes& attributes) {
  const cpu::DefaultFloatEnvironment environment;
  const KdaGateProblem p = make_problem(inputs, nullptr, attributes);
  require_cpu(kKdaGateName, p.device);
  check_pointers(inputs, {});
  const KdaGatePointers at = pointers_of(inputs, {});
  const std::int64_t D = p.channel.extent;
  std::vector<double> result(static_cast<std::size_t>(inputs.g.numel()));
  for_each(inputs.g.numel() / D, [&](std::int64_t row) {
    const std::int64_t head = row % p.head.extent;
    const double rate = p.has_A_log ? gate_rate(at.A_log[head * p.A_log_stride]) : 1;
    const std::int64_t offset = row_offset(inputs.g, 1, row);
    for (std::int64_t d = 0; d < D; ++d) {
      const double bias = p.has_dt_bias ? at.dt_bias[head * p.dt_bias_head + d * p.dt_bias_channel] : 0.0f;
      result[static_cast<std::size_t>(row * D + d)] =
          gate(p, rate, load(at.g, p.g_dtype, offset + d * p.channel.g) + bias);
    }
  });
  return result;
}

std::vector<double> compute(const KdaGateCumsumInputs& given_inputs, const KdaGateCumsumAttributes& attributes) {
  const cpu::DefaultFloatEnvironment environment;
  const KdaGateCumsumProblem p = make_problem(given_inputs, nullptr, attributes);
  require_cpu(kKdaGateCumsumName, p.device);
  const KdaGateCumsumInputs inputs = inputs_read(given_inputs, p.gate_mode);
  check_pointers(inputs, {});
  const KdaGateCumsumPointers at = pointers_of(inputs, {});
  std::vector<double> result(static_cast<std::size_t>(inputs.g.numel()));
  if (result.empty()) return result;
  for_each(p.chunks() * p.HV, [&](std::int64_t index) {
    const std::int64_t head = index % p.HV;
    const GateChunk chunk = chunk_of(p, index / p.HV);
    const double rate = is_given(inputs.A_log) ? gate_rate(at.A_log[head * p.A_log_stride]) : 1;
    for (std::int64_t k = 0; k < p.K; ++k) {
      const double bias = p.has_dt_bias ? at.dt_bias[(head * p.K + k) * p.dt_bias_stride] : 0.0f;
      double sum = 0;
      for (int row = 0; row < chunk.rows; ++row) {
        const std::int64_t token = chunk.sequence.first_token + chunk.token + row;
        const std::int64_t offset = p.g.offset(chunk.sequence.batch, token, head) + k * p.g.inner;
        sum += gate(p, rate, load(at.g, p.g_dtype, offset) + bias);
        const std::int64_t to = ((chunk.sequence.batch * p.HV + head) * p.T + token) * p.K + k;
        result[static_cast<std::size_t>(to)] = sum / std::numbers::ln2;
      }
    }
  });
  return result;
}

}  // namespace

std::vector<double> kda_gate(const KdaGateInputs& inputs, const KdaGateAttributes& attributes) {
  return guard_memory(kKdaGateName, kMemory, [&] { return compute(inputs, attributes); });
}

std::vector<double> kda_gate_cumsum(const KdaGateCumsumInputs& inputs, const KdaGateCumsumAttributes& attributes) {
  return guard_memory(kKdaGateCumsumName, kMemory, [&] { return compute(inputs, attributes); });
}

}  // namespace kda::reference
