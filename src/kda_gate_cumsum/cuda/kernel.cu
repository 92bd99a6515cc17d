// kda_gate_cumsum's kernel: a thread owns one or four channels of one chunk and goes down its rows. Gates and sums are
// those of chunk_kda_fwd's gk, operation by operation.

#include <algorithm>
#include <cstdint>

#include "core/checked.h"
#include "cuda/numbers.cuh"
#include "cuda/runtime.cuh"
#include "kda_gate_cumsum/cuda/launch.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 128;

// Where packed sequences and their chunks begin, as a kernel's argument: nothing else outlives the launch in a captured
// graph.
struct Packed {
  static constexpr int kMost = 1024;
  std::int64_t cu_seqlens[kMost + 1];
  std::int64_t first_chunk[kMost + 1];
};
struct Dense {};

struct Place {
  std::int64_t batch;
  std::int64_t token;  // on the token axis
  int rows;
};

__device__ __forceinline__ Place place_of(const KdaGateCumsumTask& t, const Dense&, std::int64_t chunk) {
  const std::int64_t per_sequence = (t.T + t.C - 1) / t.C;
  const std::int64_t token = chunk % per_sequence * t.C;
  return {chunk / per_sequence, token, static_cast<int>(min(t.C, t.T - token))};
}

__device__ __forceinline__ Place place_of(const KdaGateCumsumTask& t, const Packed& packed, std::int64_t chunk) {
  // The last sequence that starts at or before the chunk; empty ones before it start there too.
  std::int64_t low = 0;
  std::int64_t high = t.sequences - 1;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (packed.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const std::int64_t token = packed.cu_seqlens[low] + (chunk - packed.first_chunk[low]) * t.C;
  return {0, token, static_cast<int>(min(t.C, packed.cu_seqlens[low + 1] - token))};
}

__device__ __forceinline__ std::int64_t offset_of(const RowStrides& s, const Place& place, std::int64_t head,
                                                  std::int64_t channel) {
  return place.batch * s.batch + place.token * s.token + head * s.head + channel * s.inner;
}

template <int kCount, class Sequences>
__global__ void __launch_bounds__(kThreads)
    kda_gate_cumsum_kernel(const __grid_constant__ KdaGateCumsumTask t, const __grid_constant__ Sequences sequences) {
  const std::int64_t groups = t.K / kCount;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= groups * t.chunks * t.HV) return;
  // Chunks of a head follow each other, as they do in memory.
  const std::int64_t channel = index % groups * kCount;
  const std::int64_t unit = index / groups;
  const std::int64_t head = unit / t.chunks;
  const Place place = place_of(t, sequences, unit % t.chunks);
  std::int64_t from = offset_of(t.g, place, head, channel);
  float* to = t.at.gk + offset_of(t.gk, place, head, channel);

  Gate gate{t.gate_mode, 1.0f, t.lower_bound};
  float bias[kCount] = {};
  if (t.gate_mode != GateMode::kActivated) {
    gate.factor = bounded_exp(t.at.A_log[head * t.A_log_stride]);
    if (t.has_dt_bias) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) bias[c] = t.at.dt_bias[(head * t.K + channel + c) * t.dt_bias_stride];
    }
  }

  float before[kCount] = {};
  for (int first = 0; first < place.rows; first += kSumRows) {
    float g[kSumRows][kCount];
#pragma unroll
    for (int r = 0; r < kSumRows; ++r, from += t.g.token) {
      if (first + r >= place.rows) break;
      if constexpr (kCount == 1) {
        g[r][0] = load1(t.at.g, t.g_dtype, from);
      } else {
        const float4 four = widen4(load4(t.at.g, t.g_dtype, from, 1, true), t.g_dtype);
        g[r][0] = four.x;
        g[r][1] = four.y;
        g[r][2] = four.z;
        g[r][3] = four.w;
      }
    }
    float sum[kCount] = {};
#pragma unroll
    for (int r = 0; r < kSumRows; ++r, to += t.gk.token) {
      if (first + r >= place.rows) break;
      float gk[kCount];
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        // Never one operation with the last of the gate.
        sum[c] = __fadd_rn(sum[c], gate(g[r][c], bias[c]));
        gk[c] = __fadd_rn(before[c], sum[c]) * kGkPerGate;
      }
      if constexpr (kCount == 1) {
        *to = gk[0];
      } else {
        *reinterpret_cast<float4*>(to) = {gk[0], gk[1], gk[2], gk[3]};
      }
    }
#pragma unroll
    for (int c = 0; c < kCount; ++c) before[c] = __fadd_rn(before[c], sum[c]);
  }
}

template <int kCount, class Sequences>
bool launch(const KdaGateCumsumTask& task, const Sequences& sequences, cudaStream_t stream, Failure* failure) {
  const std::int64_t threads = task.K / kCount * task.chunks * task.HV;
  const auto grid = static_cast<unsigned>(ceil_div(threads, kThreads));
  kda_gate_cumsum_kernel<kCount, Sequences><<<grid, kThreads, 0, stream>>>(task, sequences);
  return succeeded(cudaGetLastError(), "launch of the gate sums", failure);
}

template <class Sequences>
bool launch(const KdaGateCumsumTask& task, const Sequences& sequences, cudaStream_t stream, Failure* failure) {
  const bool is_aligned =
      (reinterpret_cast<std::uintptr_t>(task.at.g) | reinterpret_cast<std::uintptr_t>(task.at.gk)) % 16 == 0;
  return task.is_vector && is_aligned ? launch<4>(task, sequences, stream, failure)
                                      : launch<1>(task, sequences, stream, failure);
}

}  // namespace

bool launch_kda_gate_cumsum(const KdaGateCumsumTask& task, void* stream_, Failure* failure) {
  const DeviceGuard guard(task.device, failure);
  if (!guard.is_set()) return false;
  auto* stream = static_cast<cudaStream_t>(stream_);
  if (task.cu_seqlens == nullptr) return launch(task, Dense{}, stream, failure);
  Packed packed{};
  std::copy_n(task.cu_seqlens, task.sequences + 1, packed.cu_seqlens);
  std::copy_n(task.first_chunk, task.sequences + 1, packed.first_chunk);
  return launch(task, packed, stream, failure);
}

}  // namespace kda::cuda
