// kda_gate's kernel. A thread owns a few adjacent channels of a few rows, whose elements it asks for first and whose
// parameters it reads meanwhile. Many small blocks of threads, in the order of memory, one after the other: what is
// under way at any time is a narrow region, which the memory likes better than a few blocks of threads that stride
// through everything.

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
constexpr int kBlocks = 4;              // of threads on a multiprocessor
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

// The largest magnitude of elements as they lie in memory; NaN when there is one.
template <Dtype kDtype>
class Largest {
 public:
  template <int kWords>
  __device__ __forceinline__ void add(const std::uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kDtype == Dtype::kFloat32) {
        bits_ = __float_as_uint(max_with_nan(__uint_as_float(bits_), fabsf(__uint_as_float(words[i]))));
      } else if constexpr (kDtype == Dtype::kFloat16) {
        asm("{\n.reg .b32 x;\nabs.f16x2 x, %1;\nmax.NaN.f16x2 %0, %0, x;\n}" : "+r"(bits_) : "r"(words[i]));
      } else {
        asm("{\n.reg .b32 x;\nabs.bf16x2 x, %1;\nmax.NaN.bf16x2 %0, %0, x;\n}" : "+r"(bits_) : "r"(words[i]));
      }
    }
  }

  __device__ __forceinline__ float get() const {
    if constexpr (kDtype == Dtype::kFloat32) return __uint_as_float(bits_);
    constexpr bool kIsBf16 = kDtype == Dtype::kBFloat16;
    return max_with_nan(widen(static_cast<std::uint16_t>(bits_), kIsBf16),
                        widen(static_cast<std::uint16_t>(bits_ >> 16), kIsBf16));
  }

 private:
  std::uint32_t bits_ = 0;
};

// Where a row starts in g, or in out.
__device__ __forceinline__ std::int64_t row_offset(const KdaGateProblem& p, std::int64_t row,
                                                   std::int64_t GateAxis::*stride) {
  if (p.lead_axes == 1) return row * p.lead[0].*stride;
  std::int64_t offset = 0;
#pragma unroll 1
  for (int i = p.lead_axes; i-- > 0;) {
    const GateAxis& axis = p.lead[static_cast<std::size_t>(i)];
    offset += row % axis.extent * axis.*stride;
    row /= axis.extent;
  }
  return offset;
}

__device__ __forceinline__ std::int64_t quotient(std::int64_t a, std::int64_t b) {
  if (((a | b) >> 32) != 0) return a / b;
  return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
}

// Rows of a thread: 64 bytes of g, enough to make up for reading the parameters.
constexpr int rows_of(Dtype in, int count) { return count == 1 ? 4 : 64 / (count * (in == Dtype::kFloat32 ? 4 : 2)); }

// The place of a thread's elements: rows first_row, first_row + row_step, ..., and adjacent channels of one head.
struct Place {
  std::int64_t first_row;
  std::int64_t head;
  std::int64_t channel;
};

// Computes again, and exactly, those elements of a thread's that Gate::fast() is not for; the others keep their bits,
// whatever their neighbours are. Rare, and apart from the rest so that it costs the rest no registers.
template <class Gate>
__device__ __noinline__ void correct(const KdaGateTask& task, const Place& place, int count, int rows) {
  const KdaGateProblem& p = task.problem;
  const double lower_bound = p.lower_bound.value_or(0);
  const double A_log = task.at.A_log == nullptr ? 0.0 : task.at.A_log[place.head * p.A_log_stride];
  const double rate = gate_rate(A_log);
  const Gate gate(A_log, lower_bound);
#pragma unroll 1
  for (int i = 0; i < rows; ++i) {
    const std::int64_t row = place.first_row + static_cast<std::int64_t>(i) * blockDim.y;
    if (row >= p.rows) return;
#pragma unroll 1
    for (int c = 0; c < count; ++c) {
      const std::int64_t channel = place.channel + c;
      const auto offset_of = [&](std::int64_t GateAxis::*stride) {
        return row_offset(p, row, stride) + place.head * p.head.*stride + channel * p.channel.*stride;
      };
      const float g = load1(task.at.g, p.g_dtype, offset_of(&GateAxis::g));
      const float bias =
          p.has_dt_bias ? task.at.dt_bias[place.head * p.dt_bias_head + channel * p.dt_bias_channel] : 0.0f;
      if (gate.magnitude(__fadd_rn(g, bias)) <= gate.farthest) continue;
      store1(task.at.out, p.out_dtype, offset_of(&GateAxis::out),
             Gate::exact(rate, lower_bound, static_cast<double>(g) + static_cast<double>(bias)));
    }
  }
}

template <class Gate, Dtype kIn, Dtype kOut, int kCount>
__global__ void __launch_bounds__(kThreads, kBlocks) kda_gate_kernel(const __grid_constant__ KdaGateTask task) {
  using In = Elements<kIn, kCount>;
  using Out = Elements<kOut, kCount>;
  constexpr bool kIsVector = kCount > 1;
  constexpr int kRows = rows_of(kIn, kCount);
  constexpr bool kPrecise = kOut != Dtype::kBFloat16;
  const KdaGateProblem& p = task.problem;
  const std::int64_t groups = p.channel.extent / kCount;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t head = quotient(column, groups);
  const auto row_step = static_cast<std::int64_t>(blockDim.y);
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const Place place{tile * kRows * row_step + threadIdx.y, head, (column - head * groups) * kCount};
  if (head >= p.head.extent || place.first_row >= p.rows) return;

  // f(i, offset) for this thread's rows, with offsets into g or into out.
  const auto for_rows = [&](std::int64_t GateAxis::*stride, const auto& f) {
    const std::int64_t columns = head * p.head.*stride + place.channel * p.channel.*stride;
    if constexpr (kIsVector) {
      const std::int64_t step = row_step * p.lead[0].*stride;
      std::int64_t offset = columns + place.first_row * p.lead[0].*stride;
      if (place.first_row + (kRows - 1) * row_step < p.rows) {
#pragma unroll
        for (int i = 0; i < kRows; ++i, offset += step) f(i, offset);
      } else {
#pragma unroll
        for (int i = 0; i < kRows; ++i, offset += step) {
          if (place.first_row + i * row_step < p.rows) f(i, offset);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const std::int64_t row = place.first_row + i * row_step;
        if (row < p.rows) f(i, columns + row_offset(p, row, stride));
      }
    }
  };
  In in[kRows];
  for_rows(&GateAxis::g, [&](int i, std::int64_t offset) { in[i].load(task.at.g, offset); });

  alignas(16) float bias[kCount] = {};
  if (p.has_dt_bias) {
    const float* from = task.at.dt_bias + head * p.dt_bias_head + place.channel * p.dt_bias_channel;
    if constexpr (kIsVector) {
#pragma unroll
      for (int c = 0; c < kCount; c += 4) {
        reinterpret_cast<float4&>(bias[c]) = *reinterpret_cast<const float4*>(from + c);
      }
    } else {
      bias[0] = *from;
    }
  }
  const Gate gate(task.at.A_log == nullptr ? 0.0 : task.at.A_log[head * p.A_log_stride], p.lower_bound.value_or(0));
  Largest<kIn> largest;
  for_rows(&GateAxis::out, [&](int i, std::int64_t offset) {
    Out out;
    largest.add(in[i].words);
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      out.set(c, gate.template fast<kPrecise>(with_bias<kPrecise>(in[i].get(c), bias[c])));
    }
    out.store(task.at.out, offset);
  });
  if (!(largest.get() <= gate.farthest_before(bias))) correct<Gate>(task, place, kCount, kRows);
}

template <class Gate, Dtype kIn, Dtype kOut, int kCount>
bool launch(const KdaGateTask& task, cudaStream_t stream, Failure* failure) {
  const KdaGateProblem& p = task.problem;
  const std::int64_t columns = p.head.extent * (p.channel.extent / kCount);
  const auto width = static_cast<unsigned>(std::min<std::int64_t>(columns, kThreads));
  const dim3 threads(width, kThreads / width);
  // Every element of out has memory of its own: there are not so many columns that the grid's first axis is too short.
  const std::int64_t tiles = ceil_div(p.rows, std::int64_t{rows_of(kIn, kCount)} * threads.y);
  const std::int64_t planes = ceil_div(tiles, kMostY);
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, width)), static_cast<unsigned>(ceil_div(tiles, planes)),
                  static_cast<unsigned>(planes));
  kda_gate_kernel<Gate, kIn, kOut, kCount><<<grid, threads, 0, stream>>>(task);
  return succeeded(cudaGetLastError(), "launch of the gates", failure);
}

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

template <class Gate, Dtype kIn, Dtype kOut>
bool launch(const KdaGateTask& task, cudaStream_t stream, Failure* failure) {
  constexpr int kVector = vector_of(kIn, kOut);
  return task.is_vector && is_aligned(task.at.g) && is_aligned(task.at.out) && is_aligned(task.at.dt_bias)
             ? launch<Gate, kIn, kOut, kVector>(task, stream, failure)
             : launch<Gate, kIn, kOut, 1>(task, stream, failure);
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
