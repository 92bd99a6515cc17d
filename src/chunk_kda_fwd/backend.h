#pragma once

// What a backend provides for chunk_kda_fwd, and all that the shared code knows of it.

#include <memory>
#include <span>

#include "chunk_kda_fwd/problem.h"
#include "kda/plan.h"

namespace kda {

// One planned call on one backend. run() allocates nothing and may be called from several threads at once.
class ChunkKdaFwdKernel {
 public:
  ChunkKdaFwdKernel() = default;
  virtual ~ChunkKdaFwdKernel() = default;
  ChunkKdaFwdKernel(const ChunkKdaFwdKernel&) = delete;
  ChunkKdaFwdKernel& operator=(const ChunkKdaFwdKernel&) = delete;

  // Parts of the workspace, ascending, each at a multiple of 512 bytes.
  [[nodiscard]] virtual std::span<const WorkspaceRegion> regions() const noexcept = 0;
  [[nodiscard]] virtual int launches() const noexcept = 0;
  [[nodiscard]] virtual int num_threads() const noexcept = 0;
  // What it multiplies; a backend without a choice says kFloat32.
  [[nodiscard]] virtual StateProducts state_products() const noexcept { return StateProducts::kFloat32; }

  // workspace is aligned to 512 bytes and holds every region.
  virtual void run(const ChunkKdaFwdPointers& pointers, std::byte* workspace, Stream stream) const = 0;
};

// The compile-time variant that serves a call: 2 for C = 64 and K = V = 128, else 1.
[[nodiscard]] inline int chunk_kda_fwd_variant(const ChunkKdaFwdDims& dims) noexcept {
  return dims.C == 64 && dims.K == 128 && dims.V == 128 ? 2 : 1;
}

namespace cpu {
[[nodiscard]] std::unique_ptr<ChunkKdaFwdKernel> make_chunk_kda_fwd(const ChunkKdaFwdProblem& problem,
                                                                    const PlanOptions& options);
}  // namespace cpu

namespace cuda {
[[nodiscard]] std::unique_ptr<ChunkKdaFwdKernel> make_chunk_kda_fwd(const ChunkKdaFwdProblem& problem,
                                                                    const PlanOptions& options);
}  // namespace cuda

}  // namespace kda
