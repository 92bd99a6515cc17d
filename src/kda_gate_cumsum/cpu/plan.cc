// kda_gate_cumsum on the CPU: every chunk of every head is a unit of work.

#include <algorithm>

#include "core/checked.h"
#include "cpu/thread_pool.h"
#include "kda_gate_cumsum/backend.h"
#include "kda_gate_cumsum/cpu/kernel.h"

namespace kda::cpu {
namespace {

class CpuKdaGateCumsum final : public KdaGateCumsumKernel {
 public:
  CpuKdaGateCumsum(const KdaGateCumsumProblem& problem, int threads)
      : problem_(problem),
        kernel_(gate_cumsum_kernel()),
        units_(problem.chunks() * problem.HV),
        threads_(static_cast<int>(std::min<std::int64_t>(threads, units_))) {
    ThreadPool::instance().reserve(threads_);
  }

  [[nodiscard]] int launches() const noexcept override { return 1; }
  [[nodiscard]] int num_threads() const noexcept override { return threads_; }

  void run(const KdaGateCumsumPointers& pointers, Stream /*stream*/) const override {
    ThreadPool::instance().for_each(units_, threads_,
                                    [&](std::int64_t unit, int /*thread*/) { kernel_(item_of(pointers, unit)); });
  }

 private:
  // Chunks of a head follow each other, as they do in memory.
  [[nodiscard]] GateCumsumItem item_of(const KdaGateCumsumPointers& at, std::int64_t unit) const {
    const KdaGateCumsumProblem& p = problem_;
    const std::int64_t head = unit / p.chunks();
    const GateChunk chunk = chunk_of(p, unit % p.chunks());
    GateCumsumItem item;
    item.g = rows_of(at.g, p.g_dtype, p.g, chunk.sequence, head);
    item.gk = rows_of(at.gk, Dtype::kFloat32, p.gk, chunk.sequence, head);
    item.gate_mode = p.gate_mode;
    if (p.gate_mode != GateMode::kActivated) item.exp_A_log = bounded_exp(at.A_log[head * p.A_log_stride]);
    item.lower_bound = p.lower_bound;
    if (p.has_dt_bias) {
      item.dt_bias = at.dt_bias + head * p.K * p.dt_bias_stride;
      item.dt_bias_stride = p.dt_bias_stride;
    }
    item.token = chunk.token;
    item.rows = chunk.rows;
    item.K = static_cast<int>(p.K);
    return item;
  }

  KdaGateCumsumProblem problem_;
  GateCumsumKernel* kernel_;
  std::int64_t units_;
  int threads_;
};

}  // namespace

std::unique_ptr<KdaGateCumsumKernel> make_kda_gate_cumsum(const KdaGateCumsumProblem& problem,
                                                          const PlanOptions& options) {
  return std::make_unique<CpuKdaGateCumsum>(problem, threads_for(options));
}

}  // namespace kda::cpu
