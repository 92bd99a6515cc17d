#include "chunk_kda_fwd/cuda/launch.h"

#include <algorithm>
#include <cstddef>

#include "chunk_kda_fwd/cuda/chain.cuh"
#include "chunk_kda_fwd/cuda/prepare.cuh"
#include "cuda/runtime.cuh"

namespace kda::cuda {
namespace {

// Entries of the table of packed sequences on their way to the device, as a kernel's argument: a copy from the host's
// memory would have to outlive a captured graph.
constexpr int kMostSequences = 1024;

struct Entries {
  static constexpr int kMost = 64;
  PackedSequence entry[kMost];
  int count;
};

__global__ void upload_kernel(const __grid_constant__ Entries entries, PackedSequence* to) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < entries.count) to[i] = entries.entry[i];
}

// Makes the table from cu_seqlens on the device, a thread per sequence. Whatever the numbers are, sequences follow each
// other within [0, T] and have no more chunks in all than NC.
__global__ void __launch_bounds__(kMostSequences) table_kernel(const __grid_constant__ ChunkKdaFwdTask task) {
  __shared__ std::int64_t scanned[kMostSequences];
  __shared__ std::int64_t tokens_of[kMostSequences];
  const int n = static_cast<int>(threadIdx.x);
  const int N = static_cast<int>(task.N);
  const auto number = [&](int i) -> std::int64_t {
    if (task.cu_seqlens_dtype == Dtype::kInt32) {
      return static_cast<const std::int32_t*>(task.at.cu_seqlens)[i * task.cu_seqlens_stride];
    }
    return static_cast<const std::int64_t*>(task.at.cu_seqlens)[i * task.cu_seqlens_stride];
  };
  // This thread's x combined with those of all threads before it.
  const auto scan = [&](std::int64_t x, const auto& combine) {
    scanned[n] = x;
    __syncthreads();
    for (int distance = 1; distance < N; distance *= 2) {
      if (n >= distance) x = combine(x, scanned[n - distance]);
      __syncthreads();
      scanned[n] = x;
      __syncthreads();
    }
    return x;
  };
  const auto sum = [&](std::int64_t x) { return scan(x, [](std::int64_t a, std::int64_t b) { return a + b; }) - x; };

  const std::int64_t begin = scan(n < N ? min(max(number(n), std::int64_t{0}), task.T) : 0,
                                  [](std::int64_t a, std::int64_t b) { return max(a, b); });
  const std::int64_t end = n < N ? max(begin, min(number(n + 1), task.T)) : begin;
  const std::int64_t chunks = (end - begin + task.C - 1) / task.C;
  const std::int64_t first_chunk = min(sum(chunks), task.NC);
  const std::int64_t tokens = min(end - begin, (task.NC - first_chunk) * task.C);
  const std::int64_t first_block = sum((tokens + kBlock - 1) / kBlock);
  tokens_of[n] = tokens;
  __syncthreads();
  if (n >= N) return;
  int rank = 0;
  for (int m = 0; m < N; ++m) rank += tokens_of[m] > tokens || (tokens_of[m] == tokens && m < n) ? 1 : 0;
  PackedSequence& entry = task.sequences[n];
  entry.first_token = begin;
  entry.tokens = tokens;
  entry.first_chunk = first_chunk;
  entry.first_block = first_block;
  task.sequences[rank].longest = n;
}

bool make_sequences(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  const auto threads = static_cast<unsigned>((task.N + 31) / 32 * 32);
  table_kernel<<<1, threads, 0, stream>>>(task);
  return succeeded(cudaGetLastError(), "launch of the table of sequences", failure);
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

template <Dtype kDtype, GateMode kMode, bool kIsVector>
bool launch_prepare(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  const auto grid = static_cast<unsigned>((task.blocks * task.HV + kPrepareWarps - 1) / kPrepareWarps);
  prepare_kernel<kDtype, kMode, kIsVector><<<grid, 32 * kPrepareWarps, 0, stream>>>(task);
  return succeeded(cudaGetLastError(), "launch of prepare", failure);
}

template <Dtype kDtype, GateMode kMode>
bool launch_prepare(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  const auto bits = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data); };
  const bool is_aligned = (bits(task.at.q) | bits(task.at.k) | bits(task.at.g) | bits(task.at.dt_bias)) % 16 == 0 &&
                          (task.at.dt_bias == nullptr || task.dt_bias_stride == 1);
  return task.vector_inputs && is_aligned ? launch_prepare<kDtype, kMode, true>(task, stream, failure)
                                          : launch_prepare<kDtype, kMode, false>(task, stream, failure);
}

template <Dtype kDtype>
bool launch_prepare(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  switch (task.gate_mode) {
    case GateMode::kSoftplus:
      return launch_prepare<kDtype, GateMode::kSoftplus>(task, stream, failure);
    case GateMode::kBounded:
      return launch_prepare<kDtype, GateMode::kBounded>(task, stream, failure);
    case GateMode::kAccumulated:
      return launch_prepare<kDtype, GateMode::kAccumulated, false>(task, stream, failure);
    default:
      return launch_prepare<kDtype, GateMode::kActivated>(task, stream, failure);
  }
}

bool launch_prepare(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  if (task.blocks == 0) return true;
  return task.dtype == Dtype::kBFloat16 ? launch_prepare<Dtype::kBFloat16>(task, stream, failure)
                                        : launch_prepare<Dtype::kFloat16>(task, stream, failure);
}

// Whether rows can be read or written four elements at a time.
bool is_vector(const void* data, const RowStrides& strides) {
  return steps_by(strides, 4) && reinterpret_cast<std::uintptr_t>(data) % 8 == 0;
}

template <int kGroups, bool kIsBf16>
bool launch_chain(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  constexpr int kMostStages = 4;
  const auto attribute = [&](int* value, cudaDeviceAttr which) {
    return succeeded(cudaDeviceGetAttribute(value, which, task.device), "cudaDeviceGetAttribute", failure);
  };
  int most = 0;
  int on_multiprocessor = 0;
  if (!attribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin) ||
      !attribute(&on_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor)) {
    return false;
  }
  const int warps = (task.V / 16 + task.panels - 1) / task.panels;
  const std::int64_t grid = task.N * task.HV * task.panels;
  // Two blocks of threads share a multiprocessor where there are many.
  constexpr int kReserved = 1024;
  if (grid > task.multiprocessors) most = std::min(most, on_multiprocessor / 2 - kReserved);
  const int stage_bytes = Image{kGroups}.bytes() + warps * kChainValueBytes;
  const int stages = std::max(1, std::min(kMostStages, most / stage_bytes));
  const int bytes = stages * stage_bytes;
  const ChainVectors vectors{is_vector(task.at.v, task.v), is_vector(task.at.attn_out, task.attn_out),
                             is_vector(task.at.v_new, task.v_new)};
  const auto kernel = chain_kernel<kGroups, kIsBf16>;
  if (!allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes, failure)) return false;
  kernel<<<static_cast<unsigned>(grid), static_cast<unsigned>(32 * (warps + 1)), static_cast<std::size_t>(bytes),
           stream>>>(task, vectors, stages);
  return succeeded(cudaGetLastError(), "launch of the chain", failure);
}

template <int kGroups>
bool launch_chain(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  return task.dtype == Dtype::kBFloat16 ? launch_chain<kGroups, true>(task, stream, failure)
                                        : launch_chain<kGroups, false>(task, stream, failure);
}

bool launch_chain(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  switch (task.image_groups) {
    case 2:
      return launch_chain<2>(task, stream, failure);
    case 4:
      return launch_chain<4>(task, stream, failure);
    case 6:
      return launch_chain<6>(task, stream, failure);
    case 8:
      return launch_chain<8>(task, stream, failure);
    case 12:
      return launch_chain<12>(task, stream, failure);
    default:
      return launch_chain<16>(task, stream, failure);
  }
}

bool launch_generic(const ChunkKdaFwdTask& task, cudaStream_t stream, Failure* failure) {
  return launch_prepare(task, stream, failure) && launch_chain(task, stream, failure);
}

}  // namespace

bool launch_chunk_kda_fwd(const ChunkKdaFwdTask& task, void* stream_, Failure* failure) {
  const DeviceGuard guard(task.device, failure);
  if (!guard.is_set()) return false;
  auto* stream = static_cast<cudaStream_t>(stream_);
  if (task.is_packed) {
    const bool is_there = task.host_sequences != nullptr ? upload_sequences(task, stream, failure)
                                                         : make_sequences(task, stream, failure);
    if (!is_there) return false;
  }
  const bool is_launched =
      task.is_hopper ? launch_hopper(task, stream_, failure) : launch_generic(task, stream, failure);
  return is_launched && launch_extras(task, stream_, failure);
}

}  // namespace kda::cuda
