// kda_gate on a CUDA device, the part that needs no CUDA.

#include <cmath>

#include "cuda/loader.h"
#include "kda_gate/backend.h"
#include "kda_gate/cuda/task.h"

namespace kda::cuda {
namespace {

bool steps_by(const GateAxis& axis, std::int64_t elements) {
  return axis.g % elements == 0 && axis.out % elements == 0;
}

bool has_vectors(const KdaGateProblem& p) {
  constexpr std::int64_t kVector = 8;
  return p.channel.g == 1 && p.channel.out == 1 && p.channel.extent % kVector == 0 && steps_by(p.head, kVector) &&
         p.lead_axes == 1 && steps_by(p.lead[0], kVector) &&
         (!p.has_dt_bias || (p.dt_bias_channel == 1 && p.dt_bias_head % kVector == 0));
}

GateBound bound_of(const KdaGateProblem& p) {
  if (!p.lower_bound) return {};
  const double bound = *p.lower_bound;
  const auto value = static_cast<float>(bound);
  const double magnitude = std::abs(bound);
  return {value, static_cast<float>(bound - static_cast<double>(value)), magnitude >= 0x1p-100 && magnitude <= 0x1p126};
}

class CudaKdaGate final : public KdaGateKernel {
 public:
  explicit CudaKdaGate(const KdaGateProblem& problem)
      : api_(&api(kKdaGateName)),
        task_{.problem = problem, .at = {}, .is_vector = has_vectors(problem), .bound = bound_of(problem)} {}

  [[nodiscard]] int launches() const noexcept override { return 1; }
  [[nodiscard]] int num_threads() const noexcept override { return 1; }

  void run(const KdaGatePointers& pointers, Stream stream) const override {
    KdaGateTask task = task_;
    task.at = pointers;
    Failure failure;
    if (!api_->kda_gate(task, stream, &failure)) fail(kKdaGateName, failure);
  }

 private:
  const Api* api_;
  KdaGateTask task_;
};

}  // namespace

std::unique_ptr<KdaGateKernel> make_kda_gate(const KdaGateProblem& problem, const PlanOptions& /*options*/) {
  require_device(kKdaGateName, problem.device);
  return std::make_unique<CudaKdaGate>(problem);
}

}  // namespace kda::cuda
