#include "chunk_kda_fwd/cuda/extras.cuh"

#include <cstddef>

#include "chunk_kda_fwd/cuda/launch.h"
#include "chunk_kda_fwd/cuda/tensor_extras.cuh"
#include "cuda/runtime.cuh"

namespace kda::cuda {
namespace {

bool allow_shared_memory(const void* kernel, int bytes, Failure* failure) {
  return succeeded(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                   "cudaFuncSetAttribute", failure);
}

// Whether rows can be written in pieces of 16 bytes, from whatever multiple of eight elements on.
bool is_vector(const void* data, const RowStrides& s) {
  const auto steps_by_8 = [](std::int64_t stride) { return stride % 8 == 0; };
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && s.inner == 1 && steps_by_8(s.batch) &&
         steps_by_8(s.token) && steps_by_8(s.head);
}

bool reads_vectors(const ChunkKdaFwdTask& task) {
  const auto bits = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data); };
  return task.vector_inputs && (bits(task.at.q) | bits(task.at.k) | bits(task.at.v) | bits(task.at.g)) % 16 == 0;
}

template <bool kIsBf16, int kBlocks, bool kIsPlain>
bool launch_tensor(const ChunkKdaFwdTask& task, const ExtrasVectors& vectors, unsigned units, cudaStream_t stream,
                   Failure* failure) {
  using Kernel = TensorExtras<kIsBf16, kBlocks, kIsPlain>;
  const auto kernel = tensor_extras_kernel<kIsBf16, kBlocks, kIsPlain>;
  constexpr int kBytes = Kernel::Memory::kBytes;
  if (!allow_shared_memory(reinterpret_cast<const void*>(kernel), kBytes, failure)) return false;
  kernel<<<units, Kernel::kThreads, kBytes, stream>>>(task, vectors);
  return succeeded(cudaGetLastError(), "launch of the intermediates", failure);
}

template <bool kIsBf16>
bool launch_tensor(const ChunkKdaFwdTask& task, unsigned units, cudaStream_t stream, Failure* failure) {
  const auto& at = task.at;
  const ExtrasVectors vectors{is_vector(at.gk, task.gk), is_vector(at.Aqk, task.Aqk), is_vector(at.Akk, task.Akk),
                              is_vector(at.w, task.w),   is_vector(at.u, task.u),     is_vector(at.qg, task.qg),
                              is_vector(at.kg, task.kg)};
  if (task.C == 128) return launch_tensor<kIsBf16, 8, false>(task, vectors, units, stream, failure);
  const auto fits = [](const void* data, bool is_vector) { return data == nullptr || is_vector; };
  const auto is_dense = [](const void* data, const RowStrides& s, int width) {
    return data == nullptr || s.token == width;
  };
  const bool is_plain = task.K == 128 && is_dense(at.gk, task.gk, 128) && is_dense(at.qg, task.qg, 128) &&
                        is_dense(at.kg, task.kg, 128) && is_dense(at.Aqk, task.Aqk, 64) &&
                        is_dense(at.Akk, task.Akk, 64) && reads_vectors(task) && fits(at.gk, vectors.gk) &&
                        fits(at.Aqk, vectors.Aqk) && fits(at.Akk, vectors.Akk) && fits(at.w, vectors.w) &&
                        fits(at.u, vectors.u) && fits(at.qg, vectors.qg) && fits(at.kg, vectors.kg);
  return is_plain ? launch_tensor<kIsBf16, 4, true>(task, vectors, units, stream, failure)
                  : launch_tensor<kIsBf16, 4, false>(task, vectors, units, stream, failure);
}

}  // namespace

bool launch_extras(const ChunkKdaFwdTask& task, void* stream_, Failure* failure) {
  auto* stream = static_cast<cudaStream_t>(stream_);
  const bool has_queries =
      task.at.gk != nullptr || task.at.Aqk != nullptr || task.at.qg != nullptr || task.at.kg != nullptr;
  const bool has_keys = task.at.Akk != nullptr || task.at.w != nullptr || task.at.u != nullptr;
  const std::int64_t chunks = task.is_packed ? task.NC : task.NC * task.N;
  if ((!has_queries && !has_keys) || chunks == 0) return true;
  const auto units = static_cast<unsigned>(chunks * task.HV);
  if (task.has_tensor_extras) {
    return task.dtype == Dtype::kBFloat16 ? launch_tensor<true>(task, units, stream, failure)
                                          : launch_tensor<false>(task, units, stream, failure);
  }
  const int bytes = Extras::floats(task.C) * static_cast<int>(sizeof(float));
  if (!allow_shared_memory(reinterpret_cast<const void*>(extras_kernel), bytes, failure)) return false;
  extras_kernel<<<dim3(units, has_keys ? 2 : 1), kExtrasThreads, static_cast<std::size_t>(bytes), stream>>>(task);
  return succeeded(cudaGetLastError(), "launch of the intermediates", failure);
}

}  // namespace kda::cuda
