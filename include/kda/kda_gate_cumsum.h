#pragma once

// kda_gate_cumsum: the gate of chunk_kda_fwd and, within every chunk, its inclusive cumulative sum divided by ln 2:
//
//     gk_i = (sum over j <= i, same chunk, of gate_j) / ln 2
//
// bit for bit the gk of chunk_kda_fwd. Chunks never cross a sequence boundary.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "kda/export.h"
#include "kda/plan.h"
#include "kda/status.h"
#include "kda/tensor.h"

namespace kda {

struct KdaGateCumsumInputs {
  TensorView g{};        // [B,HV,T,K] or [HV,T,K], K in 1..256; fp32, fp16 or bf16
  TensorView A_log{};    // [HV] fp32; required when use_gate_in_kernel
  TensorView dt_bias{};  // [HV*K] fp32; optional
};

struct KdaGateCumsumAttributes {
  std::int64_t chunk_size = 64;  // 32, 64 or 128
  // As in ChunkKdaFwdAttributes.
  bool use_gate_in_kernel = false;
  bool safe_gate = false;
  double lower_bound = -5.0;
  std::optional<std::span<const std::int64_t>> cu_seqlens{};
};

// Shared between threads and moved as ChunkKdaFwdPlan is; needs no workspace.
class KDA_API KdaGateCumsumPlan {
 public:
  // `gk` is fp32 in g's shape. Throws Error.
  KdaGateCumsumPlan(const KdaGateCumsumInputs& inputs, const TensorView& gk, const KdaGateCumsumAttributes& attributes,
                    const PlanOptions& options = {});
  ~KdaGateCumsumPlan();
  KdaGateCumsumPlan(KdaGateCumsumPlan&&) noexcept;
  KdaGateCumsumPlan& operator=(KdaGateCumsumPlan&&) noexcept;
  KdaGateCumsumPlan(const KdaGateCumsumPlan&) = delete;
  KdaGateCumsumPlan& operator=(const KdaGateCumsumPlan&) = delete;

  // Allocates nothing. The views must be the planned ones but for their data pointers. Throws Error as
  // ChunkKdaFwdPlan::execute does.
  void execute(const KdaGateCumsumInputs& inputs, const TensorView& gk, Workspace workspace = {},
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
KDA_API void kda_gate_cumsum(const KdaGateCumsumInputs& inputs, const TensorView& gk,
                             const KdaGateCumsumAttributes& attributes, const PlanOptions& options = {});

}  // namespace kda
