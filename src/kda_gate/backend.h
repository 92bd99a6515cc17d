#pragma once

// What a backend provides for kda_gate, and all that the shared code knows of it.

#include <memory>

#include "kda/plan.h"
#include "kda_gate/problem.h"

namespace kda {

// One planned call on one backend. It needs no workspace. run() allocates nothing and may be called from several
// threads at once.
class KdaGateKernel {
 public:
  KdaGateKernel() = default;
  virtual ~KdaGateKernel() = default;
  KdaGateKernel(const KdaGateKernel&) = delete;
  KdaGateKernel& operator=(const KdaGateKernel&) = delete;

  [[nodiscard]] virtual int launches() const noexcept = 0;
  [[nodiscard]] virtual int num_threads() const noexcept = 0;

  virtual void run(const KdaGatePointers& pointers, Stream stream) const = 0;
};

namespace cpu {
[[nodiscard]] std::unique_ptr<KdaGateKernel> make_kda_gate(const KdaGateProblem& problem, const PlanOptions& options);
}  // namespace cpu

namespace cuda {
[[nodiscard]] std::unique_ptr<KdaGateKernel> make_kda_gate(const KdaGateProblem& problem, const PlanOptions& options);
}  // namespace cuda

}  // namespace kda
