// The path for K = 128 in bf16 on Hopper; compiled for sm_90a only.

#include <cuda.h>

#include <algorithm>

#include "chunk_kda_fwd/cuda/hopper_chain.cuh"
#include "chunk_kda_fwd/cuda/hopper_prepare.cuh"
#include "chunk_kda_fwd/cuda/launch.h"
#include "core/sequences.h"
#include "cuda/runtime.cuh"

namespace kda::cuda {
namespace {

template <class... Parameters>
bool allow_shared_memory(void (*kernel)(Parameters...), int bytes, Failure* failure) {
  return succeeded(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      "cudaFuncSetAttribute", failure);
}

// The driver's function, which the runtime finds; null where the driver has none.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)
               : nullptr;
  }();
  return function;
}

// v as the chain's loads see it; not valid where its strides or its address are not a tensor map's.
HopperValues describe_values(const ChunkKdaFwdTask& task) {
  const RowStrides& v = task.v;
  const auto encode = tensor_map_encoder();
  const std::int64_t batches = task.is_packed ? 1 : task.N;
  const auto fits = [](std::int64_t stride, std::int64_t extent) {
    return extent == 1 || (stride > 0 && stride % 8 == 0 && stride < (std::int64_t{1} << 38));
  };
  HopperValues values{};
  if (encode == nullptr || task.T == 0 || v.inner != 1 || !fits(v.token, task.T) || !fits(v.head, task.HV) ||
      !fits(v.batch, batches) || reinterpret_cast<std::uintptr_t>(task.at.v) % 16 != 0) {
    return values;
  }
  const auto bytes = [](std::int64_t stride, std::int64_t extent) {
    return static_cast<cuuint64_t>(extent == 1 ? 16 : 2 * stride);
  };
  const cuuint64_t extents[4] = {static_cast<cuuint64_t>(task.V), static_cast<cuuint64_t>(task.T),
                                 static_cast<cuuint64_t>(task.HV), static_cast<cuuint64_t>(batches)};
  const cuuint64_t strides[3] = {bytes(v.token, task.T), bytes(v.head, task.HV), bytes(v.batch, batches)};
  const cuuint32_t box[4] = {HopperChainShape::kColumns, kBlock, 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  values.is_valid = encode(&values.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(task.at.v), extents,
                           strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  return values;
}

HopperOutputs describe_outputs(const ChunkKdaFwdTask& task) {
  const auto is_aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  const auto is_vector = [&](std::int64_t inner, std::int64_t outer) {
    const StateStrides& h = task.h;
    return inner == 1 && outer % 8 == 0 && h.seq % 8 == 0 && h.chunk % 8 == 0 && h.head % 8 == 0;
  };
  HopperOutputs outputs{};
  outputs.attn_out_in_vectors = steps_by(task.attn_out, 8) && is_aligned(task.at.attn_out);
  outputs.v_new_in_vectors = steps_by(task.v_new, 8) && is_aligned(task.at.v_new);
  outputs.h_is_v_first = is_vector(task.h.k, task.h.v) && is_aligned(task.at.h);
  outputs.h_in_vectors = outputs.h_is_v_first || (is_vector(task.h.v, task.h.k) && is_aligned(task.at.h));
  return outputs;
}

// Whether there are only attn_out and final_state to write, the former in vectors.
bool is_plain(const ChunkKdaFwdTask& task, const HopperOutputs& outputs) {
  return task.at.h == nullptr && task.at.v_new == nullptr && outputs.attn_out_in_vectors;
}

template <bool kIsPlain>
bool launch_chain(const ChunkKdaFwdTask& task, const HopperOutputs& outputs, cudaStream_t stream, Failure* failure) {
  constexpr int kBytes = kIsPlain ? HopperChainShape::kPlainBytes : HopperChainShape::kBytes;
  const auto kernel = hopper_chain_kernel<kIsPlain>;
  if (!allow_shared_memory(kernel, kBytes, failure)) return false;
  const auto grid = static_cast<unsigned>(HopperChainShape::parts(task.V) * task.N * task.HV);
  kernel<<<grid, HopperChainShape::kThreads, kBytes, stream>>>(task, describe_values(task), outputs);
  return succeeded(cudaGetLastError(), "launch of the chain", failure);
}

bool launch_chain(const ChunkKdaFwdTask& task, const HopperOutputs& outputs, cudaStream_t stream, Failure* failure) {
  return is_plain(task, outputs) ? launch_chain<true>(task, outputs, stream, failure)
                                 : launch_chain<false>(task, outputs, stream, failure);
}

template <class Preparer>
bool launch_overlap(const ChunkKdaFwdTask& task, const HopperOutputs& outputs, cudaStream_t stream, Failure* failure) {
  using Shape = HopperOverlapShape;
  constexpr int kBytes = std::max(2 * Shape::kStagesBytes, Shape::kPreparingWarps * Preparer::kBytes);
  const auto kernel = hopper_overlap_kernel<Preparer>;
  if (!allow_shared_memory(kernel, kBytes, failure)) return false;
  const std::int64_t states = HopperChainShape::parts(task.V) * task.N * task.HV;
  const auto grid = static_cast<unsigned>(task.preparers + (states + task.groups - 1) / task.groups);
  kernel<<<grid, Shape::kThreads, kBytes, stream>>>(task, describe_values(task), outputs);
  return succeeded(cudaGetLastError(), "launch of images and states", failure);
}

template <class Preparer, Images kImages>
bool launch_prepare(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  constexpr int kBytes = Preparer::kWarps * Preparer::kBytes;
  const auto kernel = hopper_prepare_kernel<Preparer, kImages>;
  if (!allow_shared_memory(kernel, kBytes, failure)) return false;
  const std::int64_t blocks = kImages == Images::kEarly ? task.head_blocks * task.N : task.blocks;
  const std::int64_t wanted = (blocks * task.HV + Preparer::kWarps - 1) / Preparer::kWarps;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(Preparer::kBlocks * task.multiprocessors, wanted));
  kernel<<<grid, 32 * Preparer::kWarps, kBytes, stream>>>(task);
  return succeeded(cudaGetLastError(), "launch of prepare", failure);
}

template <GateMode kMode, Dtype kGateDtype>
bool launch(const ChunkKdaFwdTask& task, bool is_vector, cudaStream_t stream, Failure* failure) {
  using Vectors = HopperPreparer<kMode, kGateDtype, true>;
  const HopperOutputs outputs = describe_outputs(task);
  if (is_vector && task.preparers > 0 && is_plain(task, outputs)) {
    return launch_prepare<Vectors, Images::kEarly>(task, stream, failure) &&
           launch_overlap<Vectors>(task, outputs, stream, failure);
  }
  ChunkKdaFwdTask apart = task;
  apart.preparers = 0;
  const bool is_prepared =
      is_vector ? launch_prepare<Vectors, Images::kAll>(apart, stream, failure)
                : launch_prepare<HopperPreparer<kMode, kGateDtype, false>, Images::kAll>(apart, stream, failure);
  return is_prepared && launch_chain(apart, outputs, stream, failure);
}

template <GateMode kMode>
bool launch(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  const bool is_float = task.g_dtype == Dtype::kFloat32;
  const bool is_aligned = (reinterpret_cast<std::uintptr_t>(task.at.q) | reinterpret_cast<std::uintptr_t>(task.at.k) |
                           reinterpret_cast<std::uintptr_t>(task.at.g)) %
                              16 ==
                          0;
  const bool is_vector = task.vector_inputs && is_aligned;
  return is_float ? launch<kMode, Dtype::kFloat32>(task, is_vector, stream, failure)
                  : launch<kMode, Dtype::kBFloat16>(task, is_vector, stream, failure);
}

}  // namespace

bool launch_hopper(const ChunkKdaFwdTask& task, void* stream_, Failure* failure) {
  auto* stream = static_cast<cudaStream_t>(stream_);
  if (task.blocks == 0) return launch_chain(task, describe_outputs(task), stream, failure);
  if (task.gate_mode == GateMode::kSoftplus) return launch<GateMode::kSoftplus>(task, stream, failure);
  if (task.gate_mode == GateMode::kBounded) return launch<GateMode::kBounded>(task, stream, failure);
  return launch<GateMode::kActivated>(task, stream, failure);
}

}  // namespace kda::cuda
