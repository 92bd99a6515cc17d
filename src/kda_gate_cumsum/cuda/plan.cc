// kda_gate_cumsum on a CUDA device, the part that needs no CUDA.

#include "cuda/loader.h"
#include "kda_gate_cumsum/backend.h"
#include "kda_gate_cumsum/cuda/task.h"

namespace kda::cuda {
namespace {

KdaGateCumsumTask make_task(const KdaGateCumsumProblem& p) {
  constexpr std::int64_t kVector = 4;
  KdaGateCumsumTask t{};
  t.device = p.device.index;
  t.B = p.B;
  t.T = p.T;
  t.HV = p.HV;
  t.K = p.K;
  t.C = p.C;
  t.chunks = p.chunks();
  t.g_dtype = p.g_dtype;
  t.gate_mode = p.gate_mode;
  t.lower_bound = p.lower_bound;
  t.g = p.g;
  t.gk = p.gk;
  t.A_log_stride = p.A_log_stride;
  t.dt_bias_stride = p.dt_bias_stride;
  t.has_dt_bias = p.has_dt_bias;
  t.is_vector = p.K % kVector == 0 && steps_by(p.g, kVector) && steps_by(p.gk, kVector);
  t.sequences = p.sequences();
  return t;
}

class CudaKdaGateCumsum final : public KdaGateCumsumKernel {
 public:
  explicit CudaKdaGateCumsum(const KdaGateCumsumProblem& problem)
      : api_(&api(kKdaGateCumsumName)),
        task_(make_task(problem)),
        cu_seqlens_(problem.cu_seqlens),
        first_chunk_(problem.first_chunk) {}

  [[nodiscard]] int launches() const noexcept override { return 1; }
  [[nodiscard]] int num_threads() const noexcept override { return 1; }

  void run(const KdaGateCumsumPointers& pointers, Stream stream) const override {
    KdaGateCumsumTask task = task_;
    task.at = pointers;
    if (!cu_seqlens_.empty()) {
      task.cu_seqlens = cu_seqlens_.data();
      task.first_chunk = first_chunk_.data();
    }
    Failure failure;
    if (!api_->kda_gate_cumsum(task, stream, &failure)) fail(kKdaGateCumsumName, failure);
  }

 private:
  const Api* api_;
  KdaGateCumsumTask task_;
  std::vector<std::int64_t> cu_seqlens_;
  std::vector<std::int64_t> first_chunk_;
};

}  // namespace

std::unique_ptr<KdaGateCumsumKernel> make_kda_gate_cumsum(const KdaGateCumsumProblem& problem,
                                                          const PlanOptions& /*options*/) {
  require_device(kKdaGateCumsumName, problem.device);
  return std::make_unique<CudaKdaGateCumsum>(problem);
}

}  // namespace kda::cuda
