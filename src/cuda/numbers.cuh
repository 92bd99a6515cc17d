#pragma once

// Number formats on the device: 16-bit elements travel as raw bits and are widened to fp32 where they are used.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "core/gate_mode.h"
#include "kda/tensor.h"

namespace kda::cuda {

inline constexpr float kGkPerGate = 1.44269504f;

// Every kernel that makes gk sums the gates of this many rows from zero, and adds that to the sum of what comes before
// them in the chunk.
inline constexpr int kSumRows = 8;

__device__ __forceinline__ float widen(std::uint16_t bits, bool is_bf16) {
  return is_bf16 ? __uint_as_float(static_cast<std::uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ std::uint16_t narrow(float x, bool is_bf16) {
  return is_bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}

__device__ __forceinline__ std::uint32_t narrow2(float low, float high, bool is_bf16) {
  std::uint32_t r;  // one instruction, unlike two conversions and what joins them
  if (is_bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

// Four elements as they lie in memory: 16-bit ones in x and y, fp32 in x to w.
__device__ __forceinline__ float4 widen4(const uint4& raw, Dtype dtype) {
  if (dtype == Dtype::kFloat32) {
    return {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w)};
  }
  const bool is_bf16 = dtype == Dtype::kBFloat16;
  return {widen(static_cast<std::uint16_t>(raw.x), is_bf16), widen(static_cast<std::uint16_t>(raw.x >> 16), is_bf16),
          widen(static_cast<std::uint16_t>(raw.y), is_bf16), widen(static_cast<std::uint16_t>(raw.y >> 16), is_bf16)};
}

// Elements at `offset`, `offset + inner`, ...; adjacent and aligned when is_vector.
__device__ __forceinline__ uint4 load4(const void* data, Dtype dtype, std::int64_t offset, std::int64_t inner,
                                       bool is_vector) {
  uint4 raw{};
  if (dtype == Dtype::kFloat32) {
    const auto* from = static_cast<const std::uint32_t*>(data) + offset;
    if (is_vector) return *reinterpret_cast<const uint4*>(from);
    raw.x = from[0];
    raw.y = from[inner];
    raw.z = from[2 * inner];
    raw.w = from[3 * inner];
    return raw;
  }
  const auto* from = static_cast<const std::uint16_t*>(data) + offset;
  if (is_vector) {
    const uint2 pair = *reinterpret_cast<const uint2*>(from);
    raw.x = pair.x;
    raw.y = pair.y;
    return raw;
  }
  raw.x = from[0] | static_cast<std::uint32_t>(from[inner]) << 16;
  raw.y = from[2 * inner] | static_cast<std::uint32_t>(from[3 * inner]) << 16;
  return raw;
}

__device__ __forceinline__ float load1(const void* data, Dtype dtype, std::int64_t offset) {
  if (dtype == Dtype::kFloat32) return static_cast<const float*>(data)[offset];
  return widen(static_cast<const std::uint16_t*>(data)[offset], dtype == Dtype::kBFloat16);
}

__device__ __forceinline__ void store1(void* data, Dtype dtype, std::int64_t offset, float x) {
  if (dtype == Dtype::kFloat32) {
    static_cast<float*>(data)[offset] = x;
  } else {
    static_cast<std::uint16_t*>(data)[offset] = narrow(x, dtype == Dtype::kBFloat16);
  }
}

// One instruction of the special function unit each, to about 2^-22; what is below FLT_MIN counts as 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^-|x|, to 2^-21 of itself, and 0 below about 2^-126.
__device__ __forceinline__ float exp_of_minus_abs(float x) {
  // Far enough; unlike fminf, it keeps NaN.
  float magnitude;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(magnitude) : "f"(fabsf(x)), "f"(128.0f));
  // The exponent in base 2 and what its rounding leaves.
  const float log2 = -1.44269504f * magnitude;
  const float rest = fmaf(-1.92596303e-8f, magnitude, fmaf(-1.44269502f, magnitude, -log2));
  const float power = fast_exp2(log2);
  return fmaf(power * 0.693147181f, rest, power);
}

// 1 / (1 + e^-x) for every x.
__device__ __forceinline__ float sigmoid(float x) {
  const float t = exp_of_minus_abs(x);
  return (x < 0 ? t : 1.0f) * fast_reciprocal(1.0f + t);
}

// log(1 + e^x) for every x, with relative accuracy down to where e^x vanishes: log(1 + t) = 2 artanh(t / (2 + t)).
__device__ __forceinline__ float softplus(float x) {
  const float t = exp_of_minus_abs(x);
  const float s = t * fast_reciprocal(2.0f + t);
  const float square = s * s;
  float series = fmaf(square, 2.0f / 13, 2.0f / 11);
  series = fmaf(series, square, 2.0f / 9);
  series = fmaf(series, square, 2.0f / 7);
  series = fmaf(series, square, 2.0f / 5);
  series = fmaf(series, square, 2.0f / 3);
  const float log_part = fmaf(series * square, s, 2.0f * s);
  return x > 0 ? x + log_part : log_part;
}

// exp(A_log), kept finite so that its product with 0 is 0, and, unless A_log is -inf, above 0 so that its product with
// infinity is infinity. fminf would turn NaN into FLT_MAX.
__device__ __forceinline__ float bounded_exp(float A_log) {
  const float factor = expf(A_log);
  if (factor == 0 && A_log > -HUGE_VALF) return FLT_TRUE_MIN;
  return factor > FLT_MAX ? FLT_MAX : factor;
}

// What turns a raw gate into one.
struct Gate {
  GateMode mode;
  float factor;  // exp(A_log)
  float lower_bound;

  __device__ __forceinline__ float operator()(float g, float bias) const {
    if (mode == GateMode::kSoftplus) return -factor * softplus(g + bias);
    if (mode == GateMode::kBounded) return lower_bound * sigmoid(factor * (g + bias));
    return g;
  }
};

}  // namespace kda::cuda
