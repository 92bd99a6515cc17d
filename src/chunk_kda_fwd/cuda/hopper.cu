// The path for K = V = 128 in bf16 on Hopper; compiled for sm_90a only.

#include "chunk_kda_fwd/cuda/hopper_chain.cuh"
#include "chunk_kda_fwd/cuda/hopper_prepare.cuh"
#include "chunk_kda_fwd/cuda/launch.h"
#include "cuda/runtime.cuh"

namespace kda::cuda {
namespace {

bool allow_shared_memory(const void* kernel, int bytes, Failure* failure) {
  return succeeded(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                   "cudaFuncSetAttribute", failure);
}

template <class Shape>
bool launch_chain(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  const auto kernel = hopper_chain_kernel<Shape>;
  if (!allow_shared_memory(reinterpret_cast<const void*>(kernel), Shape::kBytes, failure)) return false;
  const auto grid = static_cast<unsigned>(task.N * task.HV * (128 / Shape::kColumns));
  kernel<<<grid, Shape::kThreads, Shape::kBytes, stream>>>(task);
  return succeeded(cudaGetLastError(), "launch of the chain", failure);
}

template <GateMode kMode, Dtype kGateDtype, bool kIsVector>
bool launch_prepare(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  using Preparer = HopperPreparer<kMode, kGateDtype, kIsVector>;
  constexpr int kBytes = Preparer::kWarps * Preparer::kBytes;
  const auto kernel = hopper_prepare_kernel<Preparer>;
  if (!allow_shared_memory(reinterpret_cast<const void*>(kernel), kBytes, failure)) return false;
  const auto grid = static_cast<unsigned>((task.blocks * task.HV + Preparer::kWarps - 1) / Preparer::kWarps);
  kernel<<<grid, 32 * Preparer::kWarps, kBytes, stream>>>(task);
  return succeeded(cudaGetLastError(), "launch of prepare", failure);
}

template <GateMode kMode>
bool launch_prepare(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  const bool is_float = task.g_dtype == Dtype::kFloat32;
  const bool is_aligned = (reinterpret_cast<std::uintptr_t>(task.at.q) | reinterpret_cast<std::uintptr_t>(task.at.k) |
                           reinterpret_cast<std::uintptr_t>(task.at.g)) %
                              16 ==
                          0;
  if (task.vector_inputs && is_aligned) {
    return is_float ? launch_prepare<kMode, Dtype::kFloat32, true>(task, stream, failure)
                    : launch_prepare<kMode, Dtype::kBFloat16, true>(task, stream, failure);
  }
  return is_float ? launch_prepare<kMode, Dtype::kFloat32, false>(task, stream, failure)
                  : launch_prepare<kMode, Dtype::kBFloat16, false>(task, stream, failure);
}

bool launch_prepare(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  if (task.blocks == 0) return true;
  if (task.gate_mode == GateMode::kSoftplus) return launch_prepare<GateMode::kSoftplus>(task, stream, failure);
  if (task.gate_mode == GateMode::kBounded) return launch_prepare<GateMode::kBounded>(task, stream, failure);
  return launch_prepare<GateMode::kActivated>(task, stream, failure);
}

// Whether the blocks of threads have only attn_out and final_state to write, the former in vectors.
bool is_plain(const ChunkKdaFwdTask& task) {
  return task.at.h == nullptr && task.at.v_new == nullptr && task.vector_outputs &&
         reinterpret_cast<std::uintptr_t>(task.at.attn_out) % 16 == 0;
}

}  // namespace

bool launch_hopper(const ChunkKdaFwdTask& task, void* stream_, Failure* failure) {
  auto* stream = static_cast<cudaStream_t>(stream_);
  if (!launch_prepare(task, stream, failure)) return false;
  return is_plain(task) ? launch_chain<HopperChainShape<true>>(task, stream, failure)
                        : launch_chain<HopperChainShape<false>>(task, stream, failure);
}

}  // namespace kda::cuda
