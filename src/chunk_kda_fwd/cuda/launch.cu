#include "chunk_kda_fwd/cuda/launch.h"

#include <algorithm>
#include <cstddef>

#include "chunk_kda_fwd/cuda/chain.cuh"
#include "chunk_kda_fwd/cuda/extras.cuh"
#include "cuda/runtime.cuh"

namespace kda::cuda {
namespace {

// Entries of the table of packed sequences on their way to the device, as a kernel's argument: a copy from the host's
// memory would have to outlive a captured graph.
struct Entries {
  static constexpr int kMost = 64;
  PackedSequence entry[kMost];
  int count;
};

__global__ void upload_kernel(const __grid_constant__ Entries entries, PackedSequence* to) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < entries.count) to[i] = entries.entry[i];
}

bool upload_sequences(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  for (std::int64_t first = 0; first < task.N; first += Entries::kMost) {
    Entries entries;
    entries.count = static_cast<int>(std::min<std::int64_t>(Entries::kMost, task.N - first));
    std::copy_n(task.host_sequences + first, entries.count, entries.entry);
    upload_kernel<<<1, Entries::kMost, 0, stream>>>(entries, task.sequences + first);
    if (!succeeded(cudaGetLastError(), "upload of cu_seqlens", failure)) return false;
  }
  return true;
}

bool allow_shared_memory(const void* kernel, int bytes, Failure* failure) {
  return succeeded(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                   "cudaFuncSetAttribute", failure);
}

template <class Shape>
bool launch_chain(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  int most = 0;
  if (!succeeded(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, task.device),
                 "cudaDeviceGetAttribute", failure)) {
    return false;
  }
  const int slots = Shape::kFixedBytes + 2 * Shape::kSlotBytes <= most ? 2 : 1;
  const int bytes = Shape::kFixedBytes + slots * Shape::kSlotBytes;
  const auto kernel = chain_kernel<Shape>;
  if (!allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes, failure)) return false;
  const auto grid = static_cast<unsigned>(task.N * task.HV * task.panels);
  kernel<<<grid, Shape::kThreads, static_cast<std::size_t>(bytes), stream>>>(task, slots);
  return succeeded(cudaGetLastError(), "launch of the chain", failure);
}

// A state's columns are split into panels of 64 or 128.
bool launch_chain(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  const bool is_wide = task.panels * 64 < task.V;
  if (task.K > 128) return launch_chain<ChainShape<32, 4, 4>>(task, stream, failure);
  return is_wide ? launch_chain<ChainShape<16, 8, 8>>(task, stream, failure)
                 : launch_chain<ChainShape<16, 4, 8>>(task, stream, failure);
}

bool launch_extras(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  const bool has_queries =
      task.at.gk != nullptr || task.at.Aqk != nullptr || task.at.qg != nullptr || task.at.kg != nullptr;
  const bool has_keys = task.at.Akk != nullptr || task.at.w != nullptr || task.at.u != nullptr;
  const std::int64_t chunks = task.is_packed ? task.NC : task.NC * task.N;
  if ((!has_queries && !has_keys) || chunks == 0) return true;
  const int bytes = Extras::floats(task.C) * static_cast<int>(sizeof(float));
  if (!allow_shared_memory(reinterpret_cast<const void*>(extras_kernel), bytes, failure)) return false;
  const dim3 grid(static_cast<unsigned>(chunks * task.HV), has_keys ? 2 : 1);
  extras_kernel<<<grid, kExtrasThreads, static_cast<std::size_t>(bytes), stream>>>(task);
  return succeeded(cudaGetLastError(), "launch of the intermediates", failure);
}

}  // namespace

bool launch_chunk_kda_fwd(const ChunkKdaFwdTask& task, void* stream_, Failure* failure) {
  const DeviceGuard guard(task.device, failure);
  if (!guard.is_set()) return false;
  auto* stream = static_cast<cudaStream_t>(stream_);
  if (task.is_packed && !upload_sequences(task, stream, failure)) return false;
  const bool is_launched = task.is_hopper ? launch_hopper(task, stream_, failure) : launch_chain(task, stream, failure);
  return is_launched && launch_extras(task, stream, failure);
}

}  // namespace kda::cuda
