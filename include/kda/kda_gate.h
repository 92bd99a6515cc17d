#pragma once

// kda_gate: turns raw gates into gates (natural logarithm of the decay per step), elementwise, with x = g + dt_bias:
//
//     without lower_bound: -exp(A_log[h]) * softplus(x)
//     with lower_bound:    lower_bound * sigmoid(exp(A_log[h]) * x)
//
// in fp32, rounded once at the end. exp(A_log) is bounded by FLT_MAX.

#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "kda/export.h"
#include "kda/plan.h"
#include "kda/status.h"
#include "kda/tensor.h"

namespace kda {

struct KdaGateInputs {
  TensorView g{};        // [..., H, D], rank 2 to 8, H and D at least 1; fp32, fp16 or bf16
  TensorView A_log{};    // [H] fp32; optional (0) when lower_bound is given
  TensorView dt_bias{};  // [H*D] or [H, D] fp32; optional
};

struct KdaGateAttributes {
  std::optional<double> lower_bound{};  // any finite number
};

// Any strides for inputs, any non-overlapping strides for the output; no limit on sizes but 64-bit addresses. Shared
// between threads and moved as ChunkKdaFwdPlan is; needs no workspace.
class KDA_API KdaGatePlan {
 public:
  // `out` [..., H, D] is fp32, fp16 or bf16. Throws Error.
  KdaGatePlan(const KdaGateInputs& inputs, const TensorView& out, const KdaGateAttributes& attributes,
              const PlanOptions& options = {});
  ~KdaGatePlan();
  KdaGatePlan(KdaGatePlan&&) noexcept;
  KdaGatePlan& operator=(KdaGatePlan&&) noexcept;
  KdaGatePlan(const KdaGatePlan&) = delete;
  KdaGatePlan& operator=(const KdaGatePlan&) = delete;

  // Allocates nothing. The views must be the planned ones but for their data pointers. Throws Error as
  // ChunkKdaFwdPlan::execute does.
  void execute(const KdaGateInputs& inputs, const TensorView& out, Workspace workspace = {},
               Stream stream = nullptr) const;

  [[nodiscard]] std::size_t workspace_bytes() const noexcept;
  [[nodiscard]] std::span<const WorkspaceRegion> workspace_regions() const noexcept;
  [[nodiscard]] int launches() const;
  [[nodiscard]] std::string_view backend() const;
  [[nodiscard]] int num_threads() const;

 private:
  struct Impl;
  [[nodiscard]] const Impl& held() const;
  std::unique_ptr<Impl> impl_;
};

// Plans and executes.
KDA_API void kda_gate(const KdaGateInputs& inputs, const TensorView& out, const KdaGateAttributes& attributes,
                      const PlanOptions& options = {});

}  // namespace kda
