// kda_gate's kernel. A thread owns a few adjacent channels of a few rows, whose elements it asks for first and whose
// parameters it reads meanwhile. Many small blocks of threads, in the order of memory, one after the other: what is
// under way at any time is a narrow region, which the memory likes better than a few blocks of threads that stride
// through everything.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>

#include "core/checked.h"
#include "cuda/divisor.h"
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

  __device__ __forceinline__ void load(const std::byte* from) {
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

  __device__ __forceinline__ void store(std::byte* to) const {
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

// The largest magnitude of elements as they lie in memory; NaN when there is one. Signs may be left in between.
template <Dtype kDtype>
class Largest {
 public:
  template <int kWords>
  __device__ __forceinline__ void add(const std::uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) add(words[i]);
  }

  __device__ __forceinline__ float get() const {
    if constexpr (kDtype == Dtype::kFloat32) return fabsf(__uint_as_float(bits_));
    constexpr bool kIsBf16 = kDtype == Dtype::kBFloat16;
    return max_with_nan(fabsf(widen(static_cast<std::uint16_t>(bits_), kIsBf16)),
                        fabsf(widen(static_cast<std::uint16_t>(bits_ >> 16), kIsBf16)));
  }

 private:
  __device__ __forceinline__ void add(std::uint32_t word) {
    if constexpr (kDtype == Dtype::kFloat32) {
      bits_ = __float_as_uint(max_with_nan(fabsf(__uint_as_float(bits_)), fabsf(__uint_as_float(word))));
      return;
    }
#if __CUDA_ARCH__ >= 860  // one instruction
    if constexpr (kDtype == Dtype::kFloat16) {
      asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(bits_) : "r"(word));
    } else {
      asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(bits_) : "r"(word));
    }
#else
    if constexpr (kDtype == Dtype::kFloat16) {
      asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(bits_) : "r"(word & 0x7fff7fffu));
    } else {
      asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(bits_) : "r"(word & 0x7fff7fffu));
    }
#endif
  }

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
  const float A_log = task.at.A_log == nullptr ? 0.0f : task.at.A_log[place.head * p.A_log_stride];
  const double rate = exact_rate(A_log);
  const Gate gate(A_log, task.bound);
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
             Gate::exact(rate, p.lower_bound.value_or(0), static_cast<double>(g) + static_cast<double>(bias)));
    }
  }
}

// dt_bias of adjacent channels; 0 where there is none.
template <int kCount>
struct Bias {
  alignas(16) float x[kCount] = {};

  __device__ __forceinline__ Bias(bool is_there, const float* from) {
    if (!is_there) return;
    if constexpr (kCount == 1) {
      x[0] = *from;
    } else {
#pragma unroll
      for (int c = 0; c < kCount; c += 4) {
        reinterpret_cast<float4&>(x[c]) = *reinterpret_cast<const float4*>(from + c);
      }
    }
  }
};

// What a thread's elements have in common. In this order: bias is asked for before A_log has arrived.
template <class Gate, int kCount>
struct Parameters {
  float A_log;
  Bias<kCount> bias;
  Gate gate;

  __device__ __forceinline__ Parameters(const KdaGateTask& task, std::int64_t A_log_at, const float* bias_at)
      : A_log(task.at.A_log == nullptr ? 0.0f : task.at.A_log[A_log_at]),
        bias(task.at.dt_bias != nullptr, bias_at),
        gate(A_log, task.bound) {}

  template <bool kPrecise, class Out, class In>
  __device__ __forceinline__ Out gates_of(const In& in) const {
    Out out;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      out.set(c, gate.template fast<kPrecise>(with_bias<kPrecise>(in.get(c), bias.x[c])));
    }
    return out;
  }

  // Whether fast() is for all elements whose largest magnitude this is.
  __device__ __forceinline__ bool serve(float largest) const { return largest <= gate.farthest_before(bias.x); }
};

// A call whose elements are read and written as vectors, in numbers of 32 bits; strides of g and out in bytes.
struct VectorShape {
  static constexpr std::int64_t kMost = std::int64_t{1} << 30;  // of every number here

  std::uint32_t rows, columns;  // columns: vectors of a row
  Divisor by_groups;            // vectors of a head
  std::uint32_t g_row, g_head, out_row, out_head, dt_bias_head, A_log;

  [[nodiscard]] static std::optional<VectorShape> of(const KdaGateProblem& p, int count) {
    const auto g_bytes = static_cast<std::int64_t>(size_of(p.g_dtype));
    const auto out_bytes = static_cast<std::int64_t>(size_of(p.out_dtype));
    const std::int64_t groups = p.channel.extent / count;
    const std::int64_t numbers[] = {p.rows,
                                    saturating_mul(p.head.extent, groups),
                                    groups,
                                    saturating_mul(p.lead[0].g, g_bytes),
                                    saturating_mul(p.head.g, g_bytes),
                                    saturating_mul(p.lead[0].out, out_bytes),
                                    saturating_mul(p.head.out, out_bytes),
                                    p.dt_bias_head,
                                    p.A_log_stride};
    if (!std::all_of(std::begin(numbers), std::end(numbers), [](std::int64_t n) { return n >= 0 && n < kMost; })) {
      return std::nullopt;
    }
    const auto small = [&](int i) { return static_cast<std::uint32_t>(numbers[i]); };
    return VectorShape{small(0), small(1), divisor(groups), small(3), small(4), small(5), small(6), small(7), small(8)};
  }
};

__device__ __forceinline__ std::uint32_t block_row(int rows) {
  return (blockIdx.z * gridDim.y + blockIdx.y) * blockDim.y * static_cast<std::uint32_t>(rows) + threadIdx.y;
}

__device__ __forceinline__ std::uint64_t wide_product(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint64_t>(a) * b;
}

template <class Gate, Dtype kIn, Dtype kOut, int kCount>
__global__ void __launch_bounds__(kThreads, kBlocks)
    vector_kernel(const __grid_constant__ KdaGateTask task, const __grid_constant__ VectorShape shape) {
  using In = Elements<kIn, kCount>;
  using Out = Elements<kOut, kCount>;
  constexpr int kRows = rows_of(kIn, kCount);
  const std::uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
  const std::uint32_t head = divide(column, shape.by_groups);
  const std::uint32_t group = column - head * shape.by_groups.divisor;
  const std::uint32_t row = block_row(kRows);
  if (column >= shape.columns || row >= shape.rows) return;
  const auto for_rows = [&](const auto& f) {
    if (row + (kRows - 1) * blockDim.y < shape.rows) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) f(i);
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (row + i * blockDim.y < shape.rows) f(i);
      }
    }
  };
  const std::byte* g = static_cast<const std::byte*>(task.at.g) + wide_product(row, shape.g_row) +
                       wide_product(head, shape.g_head) + group * In::kBytes;
  const std::uint64_t g_step = wide_product(blockDim.y, shape.g_row);
  In in[kRows];
  for_rows([&](int i) { in[i].load(g + i * g_step); });

  const Parameters<Gate, kCount> parameters(
      task, wide_product(head, shape.A_log),
      task.at.dt_bias + (wide_product(head, shape.dt_bias_head) + group * kCount));
  std::byte* out = static_cast<std::byte*>(task.at.out) + wide_product(row, shape.out_row) +
                   wide_product(head, shape.out_head) + group * Out::kBytes;
  const std::uint64_t out_step = wide_product(blockDim.y, shape.out_row);
  Largest<kIn> largest;
  for_rows([&](int i) {
    largest.add(in[i].words);
    parameters.template gates_of<kOut != Dtype::kBFloat16, Out>(in[i]).store(out + i * out_step);
  });
  if (!parameters.serve(largest.get())) correct<Gate>(task, {row, head, group * kCount}, kCount, kRows);
}

// Any strides: a thread has one channel.
template <class Gate, Dtype kIn, Dtype kOut>
__global__ void __launch_bounds__(kThreads, kBlocks) element_kernel(const __grid_constant__ KdaGateTask task) {
  using In = Elements<kIn, 1>;
  using Out = Elements<kOut, 1>;
  constexpr int kRows = rows_of(kIn, 1);
  const KdaGateProblem& p = task.problem;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t head = column / p.channel.extent;
  const auto tile = static_cast<std::int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const Place place{tile * blockDim.y * kRows + threadIdx.y, head, column - head * p.channel.extent};
  if (head >= p.head.extent || place.first_row >= p.rows) return;
  const auto offset_of = [&](std::int64_t GateAxis::*stride, int i) {
    return head * p.head.*stride + place.channel * p.channel.*stride +
           row_offset(p, place.first_row + static_cast<std::int64_t>(i) * blockDim.y, stride);
  };
  const auto for_rows = [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (place.first_row + static_cast<std::int64_t>(i) * blockDim.y < p.rows) f(i);
    }
  };
  In in[kRows];
  for_rows(
      [&](int i) { in[i].load(static_cast<const std::byte*>(task.at.g) + offset_of(&GateAxis::g, i) * In::kBytes); });
  const Parameters<Gate, 1> parameters(task, head * p.A_log_stride,
                                       task.at.dt_bias + (head * p.dt_bias_head + place.channel * p.dt_bias_channel));
  Largest<kIn> largest;
  for_rows([&](int i) {
    largest.add(in[i].words);
    parameters.template gates_of<kOut != Dtype::kBFloat16, Out>(in[i]).store(
        static_cast<std::byte*>(task.at.out) + offset_of(&GateAxis::out, i) * Out::kBytes);
  });
  if (!parameters.serve(largest.get())) correct<Gate>(task, place, 1, kRows);
}

// Blocks of threads for so many columns and rows of a thread.
struct Launch {
  dim3 grid, threads;

  Launch(std::int64_t columns, std::int64_t all_rows, int rows) {
    const auto width = static_cast<unsigned>(std::min<std::int64_t>(columns, kThreads));
    threads = dim3(width, kThreads / width);
    // Every element of out has memory of its own: no columns are too many for the grid's first axis.
    const std::int64_t tiles = ceil_div(all_rows, std::int64_t{threads.y} * rows);
    const std::int64_t planes = ceil_div(tiles, kMostY);
    grid = dim3(static_cast<unsigned>(ceil_div(columns, width)), static_cast<unsigned>(ceil_div(tiles, planes)),
                static_cast<unsigned>(planes));
  }
};

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

template <class Gate, Dtype kIn, Dtype kOut>
bool launch(const KdaGateTask& task, cudaStream_t stream, Failure* failure) {
  constexpr int kVector = vector_of(kIn, kOut);
  const KdaGateProblem& p = task.problem;
  std::optional<VectorShape> shape;
  if (task.is_vector && is_aligned(task.at.g) && is_aligned(task.at.out) && is_aligned(task.at.dt_bias)) {
    shape = VectorShape::of(p, kVector);
  }
  if (shape) {
    const Launch l(shape->columns, p.rows, rows_of(kIn, kVector));
    vector_kernel<Gate, kIn, kOut, kVector><<<l.grid, l.threads, 0, stream>>>(task, *shape);
  } else {
    const Launch l(saturating_mul(p.head.extent, p.channel.extent), p.rows, rows_of(kIn, 1));
    element_kernel<Gate, kIn, kOut><<<l.grid, l.threads, 0, stream>>>(task);
  }
  return succeeded(cudaGetLastError(), "launch of the gates", failure);
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
