#pragma once

// What a backend provides for kda_gate_cumsum, and all that the shared code knows of it.

#include <memory>

#include "kda/plan.h"
#include "kda_gate_cumsum/problem.h"

namespace kda {

// One planned call on one backend. It needs no workspace. run() allocates nothing and may be called from several
// threads at once.
class KdaGateCumsumKernel {
 public:
  KdaGateCumsumKernel() = default;
  virtual ~KdaGateCumsumKernel() = default;
  KdaGateCumsumKernel(const KdaGateCumsumKernel&) = delete;
  KdaGateCumsumKernel& operator=(const KdaGateCumsumKernel&) = delete;

  [[nodiscard]] virtual int launches() const noexcept = 0;
  [[nodiscard]] virtual int num_threads() const noexcept = 0;

  virtual void run(const KdaGateCumsumPointers& pointers, Stream stream) const = 0;
};

namespace cpu {
[[nodiscard]] std::unique_ptr<KdaGateCumsumKernel> make_kda_gate_cumsum(const KdaGateCumsumProblem& problem,
                                                                        const PlanOptions& options);
}  // namespace cpu

namespace cuda {
[[nodiscard]] std::unique_ptr<KdaGateCumsumKernel> make_kda_gate_cumsum(const KdaGateCumsumProblem& problem,
                                                                        const PlanOptions& options);
}  // namespace cuda

}  // namespace kda
