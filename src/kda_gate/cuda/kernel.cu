// kda_gate's kernel. A thread owns a few adjacent channels, whose parameters it reads once, and goes down the rows; the
// next ones are on their way while it makes gates.

#include <algorithm>
#include <cstdint>

#include "core/checked.h"
#include "cuda/numbers.cuh"
#include "cuda/runtime.cuh"
#include "kda_gate/cuda/activation.cuh"
#include "kda_gate/cuda/launch.h"

namespace kda::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 3;  // of threads on a multiprocessor
constexpr int kGates = 16;  // of a thread at a time
// Multiprocessors do not all reach memory equally fast: many blocks of threads, each with enough to do to make up for
// its start, keep them busy to the end.
constexpr std::int64_t kMostWaves = 8;
constexpr std::int64_t kFewestSteps = 8;
constexpr std::int64_t kMostY = 65535;  // blocks of threads on a grid's second axis

// Adjacent channels of a thread: 16 bytes of the wider side, so that a warp's accesses have no gaps.
constexpr int vector_of(Dtype in, Dtype out) { return in == Dtype::kFloat32 || out == Dtype::kFloat32 ? 4 : 8; }

// kCount adjacent elements as they lie in memory.
template <Dtype kDtype, int kCount_>
struct Elements {
  static constexpr int kCount = kCount_;
  static constexpr int kBytes = kCount * (kDtype == Dtype::kFloat32 ? 4 : 2);
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  alignas(kBytes < 4 ? 4 : kBytes < 16 ? kBytes : 16) std::uint32_t words[kWords];

  __device__ __forceinline__ void load(const void* data, std::int64_t at) {
    const auto* from = static_cast<const std::byte*>(data) + at * (kBytes / kCount);
    if constexpr (kBytes == 2) {
      words[0] = *reinterpret_cast<const std::uint16_t*>(from);
    } else if constexpr (kBytes == 4) {
      words[0] = *reinterpret_cast<const std::uint32_t*>(from);
    } else if constexpr (kBytes == 8) {
      reinterpret_cast<uint2&>(words) = *reinterpret_cast<const uint2*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        reinterpret_cast<uint4&>(words[4 * i]) = reinterpret_cast<const uint4*>(from)[i];
      }
    }
  }

  __device__ __forceinline__ void store(void* data, std::int64_t at) const {
    auto* to = static_cast<std::byte*>(data) + at * (kBytes / kCount);
    if constexpr (kBytes == 2) {
      *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(words[0]);
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<std::uint32_t*>(to) = words[0];
    } else if constexpr (kBytes == 8) {
      *reinterpret_cast<uint2*>(to) = reinterpret_cast<const uint2&>(words);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4&>(words[4 * i]);
      }
    }
  }

  __device__ __forceinline__ float get(int i) const {
    if constexpr (kDtype == Dtype::kFloat32) return __uint_as_float(words[i]);
    return widen(static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2))), kDtype == Dtype::kBFloat16);
  }

  __device__ __forceinline__ void set(int i, float x) {
    if constexpr (kDtype == Dtype::kFloat32) {
      words[i] = __float_as_uint(x);
    } else {
      const std::uint32_t bits = narrow(x, kDtype == Dtype::kBFloat16);
      words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
    }
  }
};

// Where a row starts in g and in out.
struct RowOffsets {
  std::int64_t g;
  std::int64_t out;
};

template <bool kIsVector>
__device__ __forceinline__ RowOffsets offsets_of(const KdaGateProblem& p, std::int64_t row) {
  if (kIsVector || p.lead_axes == 1) return {row * p.lead[0].g, row * p.lead[0].out};
  RowOffsets offsets{0, 0};
#pragma unroll 1
  for (int i = p.lead_axes; i-- > 0;) {
    const GateAxis& axis = p.lead[static_cast<std::size_t>(i)];
    const std::int64_t index = row % axis.extent;
    offsets.g += index * axis.g;
    offsets.out += index * axis.out;
    row /= axis.extent;
  }
  return offsets;
}

__device__ __forceinline__ std::int64_t quotient(std::int64_t a, std::int64_t b) {
  if (((a | b) >> 32) != 0) return a / b;
  return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
}

// The parameters of adjacent channels of one head.
struct BiasRow {
  const float* data;  // null: absent
  std::int64_t step;

  __device__ __forceinline__ float operator[](int i) const { return data == nullptr ? 0.0f : data[i * step]; }
};

template <class Gate, class In, class Out>
__device__ __noinline__ Out exact_gates(double rate, double bound, In in, BiasRow bias) {
  Out out;
#pragma unroll 1
  for (int i = 0; i < In::kCount; ++i) {
    out.set(i, Gate::exact(rate, bound, static_cast<double>(in.get(i)) + static_cast<double>(bias[i])));
  }
  return out;
}

// Rows that a thread works on at a time.
constexpr int rows_of(int count) { return count == 1 ? 4 : kGates / count; }

template <class Gate, Dtype kIn, Dtype kOut, bool kHasBias, int kCount>
__global__ void __launch_bounds__(kThreads, kBlocks) kda_gate_kernel(const __grid_constant__ KdaGateTask task) {
  using In = Elements<kIn, kCount>;
  using Out = Elements<kOut, kCount>;
  constexpr bool kIsVector = kCount > 1;
  constexpr int kRows = rows_of(kCount);
  constexpr bool kPrecise = kOut != Dtype::kBFloat16;
  const KdaGateProblem& p = task.problem;
  const std::int64_t groups = p.channel.extent / kCount;
  const std::int64_t row_step = blockDim.y;
  const std::int64_t step = row_step * kRows * gridDim.x;
  for (std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
       column < p.head.extent * groups; column += static_cast<std::int64_t>(gridDim.y) * blockDim.x) {
    const std::int64_t head = quotient(column, groups);
    const std::int64_t channel = (column - head * groups) * kCount;
    const std::int64_t g_column = head * p.head.g + channel * p.channel.g;
    const std::int64_t out_column = head * p.head.out + channel * p.channel.out;
    const auto load = [&](In(&to)[kRows], std::int64_t first_row) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const std::int64_t row = first_row + i * row_step;
        if (row < p.rows) to[i].load(task.at.g, offsets_of<kIsVector>(p, row).g + g_column);
      }
    };
    std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * row_step * kRows + threadIdx.y;
    In in[kRows];
    load(in, first_row);

    BiasRow bias_row{nullptr, kIsVector ? 1 : p.dt_bias_channel};
    if constexpr (kHasBias) {
      bias_row.data = task.at.dt_bias + head * p.dt_bias_head + channel * p.dt_bias_channel;
    }
    float bias[kCount] = {};
    if constexpr (kHasBias) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) bias[c] = bias_row.data[c * bias_row.step];
    }
    const double lower_bound = p.lower_bound.value_or(0);
    const Gate gate(task.at.A_log == nullptr ? 0.0 : task.at.A_log[head * p.A_log_stride], lower_bound);

    for (; first_row < p.rows; first_row += step) {
      In next[kRows];
      load(next, first_row + step);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const std::int64_t row = first_row + i * row_step;
        if (row >= p.rows) continue;
        bool is_far = false;
        Out out;
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          const Pair x = with_bias<kHasBias, kPrecise>(in[i].get(c), bias[c]);
          is_far = is_far || !(gate.magnitude(x.value) <= gate.farthest);  // NaN is, too
          out.set(c, gate.template fast<kHasBias, kPrecise>(x));
        }
        if (is_far) out = exact_gates<Gate, In, Out>(gate.exact_rate, lower_bound, in[i], bias_row);
        out.store(task.at.out, offsets_of<kIsVector>(p, row).out + out_column);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) in[i] = next[i];
    }
    if constexpr (kIsVector) return;  // the grid has all columns
  }
}

template <class Gate, Dtype kIn, Dtype kOut, bool kHasBias, int kCount>
bool launch(const KdaGateTask& task, cudaStream_t stream, Failure* failure) {
  const KdaGateProblem& p = task.problem;
  const std::int64_t columns = p.head.extent * (p.channel.extent / kCount);
  const auto width = static_cast<unsigned>(std::min<std::int64_t>(columns, kThreads));
  const dim3 threads(width, kThreads / width);
  const std::int64_t across = std::min(ceil_div(columns, width), kMostY);
  const std::int64_t steps = ceil_div(p.rows, std::int64_t{rows_of(kCount)} * threads.y);
  const std::int64_t resident = std::max<std::int64_t>(1, std::int64_t{task.multiprocessors} * kBlocks / across);
  const std::int64_t waves = std::clamp<std::int64_t>(steps / (resident * kFewestSteps), 1, kMostWaves);
  const std::int64_t down = std::min(steps, resident * waves);
  const dim3 grid(static_cast<unsigned>(down), static_cast<unsigned>(across));
  kda_gate_kernel<Gate, kIn, kOut, kHasBias, kCount><<<grid, threads, 0, stream>>>(task);
  return succeeded(cudaGetLastError(), "launch of the gate", failure);
}

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

template <class Gate, Dtype kIn, Dtype kOut, bool kHasBias>
bool launch(const KdaGateTask& task, cudaStream_t stream, Failure* failure) {
  constexpr int kVector = vector_of(kIn, kOut);
  const KdaGateProblem& p = task.problem;
  const bool is_vector = task.is_vector && is_aligned(task.at.g) && is_aligned(task.at.out) &&
                         p.head.extent * (p.channel.extent / kVector) <= kMostY * kThreads;
  return is_vector ? launch<Gate, kIn, kOut, kHasBias, kVector>(task, stream, failure)
                   : launch<Gate, kIn, kOut, kHasBias, 1>(task, stream, failure);
}

template <class Gate, Dtype kIn, Dtype kOut>
bool launch(const KdaGateTask& task, cudaStream_t stream, Failure* failure) {
  return task.problem.has_dt_bias ? launch<Gate, kIn, kOut, true>(task, stream, failure)
                                  : launch<Gate, kIn, kOut, false>(task, stream, failure);
}

template <class Gate, Dtype kIn>
bool launch(const KdaGateTask& task, cudaStream_t stream, Failure* failure) {
  switch (task.problem.out_dtype) {
    case Dtype::kFloat16:
      return launch<Gate, kIn, Dtype::kFloat16>(task, stream, failure);
    case Dtype::kBFloat16:
      return launch<Gate, kIn, Dtype::kBFloat16>(task, stream, failure);
    default:
      return launch<Gate, kIn, Dtype::kFloat32>(task, stream, failure);
  }
}

template <class Gate>
bool launch(const KdaGateTask& task, cudaStream_t stream, Failure* failure) {
  switch (task.problem.g_dtype) {
    case Dtype::kFloat16:
      return launch<Gate, Dtype::kFloat16>(task, stream, failure);
    case Dtype::kBFloat16:
      return launch<Gate, Dtype::kBFloat16>(task, stream, failure);
    default:
      return launch<Gate, Dtype::kFloat32>(task, stream, failure);
  }
}

}  // namespace

bool launch_kda_gate(const KdaGateTask& task, void* stream_, Failure* failure) {
  const DeviceGuard guard(task.problem.device.index, failure);
  if (!guard.is_set()) return false;
  auto* stream = static_cast<cudaStream_t>(stream_);
  return task.problem.lower_bound ? launch<BoundedGate>(task, stream, failure)
                                  : launch<SoftplusGate>(task, stream, failure);
}

}  // namespace kda::cuda
