#pragma once

// The two gates: within a few ulp of the formulas in exact arithmetic (kPrecise), or with errors of up to 2^-17, which
// rounding to bf16 all but hides, in half the instructions. Exponentials come from the special function unit,
// logarithms from a polynomial. What that cannot do, far from 0, is left to double precision: exact().

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cuda/numbers.cuh"
#include "kda_gate/cuda/task.h"

namespace kda::cuda {

// value + error, |error| at most half an ulp of value.
struct Pair {
  float value;
  float error;
};

// exp(A_log), at most FLT_MAX, and above 0 unless A_log is -inf.
__device__ __forceinline__ double exact_rate(float A_log) {
  constexpr double kSmallestDouble = 0x1p-1074;
  const double rate = exp(static_cast<double>(A_log));
  if (rate == 0 && A_log > -HUGE_VALF) return kSmallestDouble;
  return rate > FLT_MAX ? FLT_MAX : rate;
}

// Beyond these products lose bits, and exact() is for all elements.
inline constexpr float kLeastLog = -69.0f;
inline constexpr float kMostLog = 80.0f;

// exp(A_log) within 2^-36 for A_log between these. Every thread does this: the series on [-ln(2)/2, ln(2)/2], and a
// power of 2 put into the exponent.
__device__ __forceinline__ Pair rate_of(float A_log) {
  const int n = __float2int_rn(__fmul_rn(A_log, 1.44269502f));
  const double r = fma(static_cast<double>(n), -0.693147180559945309, static_cast<double>(A_log));
  double sum = fma(r, 1.0 / 362880, 1.0 / 40320);
  sum = fma(sum, r, 1.0 / 5040);
  sum = fma(sum, r, 1.0 / 720);
  sum = fma(sum, r, 1.0 / 120);
  sum = fma(sum, r, 1.0 / 24);
  sum = fma(sum, r, 1.0 / 6);
  sum = fma(sum, r, 0.5);
  sum = fma(sum, r, 1.0);
  sum = fma(sum, r, 1.0);
  sum = __hiloint2double(__double2hiint(sum) + n * (1 << 20), __double2loint(sum));
  const auto value = static_cast<float>(sum);
  return {value, static_cast<float>(sum - static_cast<double>(value))};
}

// Beyond this distance from 0 exponentials and their products leave the range of fp32.
inline constexpr float kFarthest = 80.0f;
// What makes up for rounding in limits on magnitudes.
inline constexpr float kMargin = 0.999f;
inline constexpr float kPerLn2 = 1.44269502f;
inline constexpr float kPerLn2Rest = 1.92596303e-8f;

// e^(x.value + x.error) for |x.value| <= kFarthest.
__device__ __forceinline__ float precise_exp(const Pair& x) {
  // Added, it leaves the integer next to a number in its lowest bits.
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23
  const float shifted = fmaf(x.value, kPerLn2, kToInteger);
  const float n = __fsub_rn(shifted, kToInteger);
  const float rest = fmaf(x.error, kPerLn2, fmaf(x.value, kPerLn2Rest, fmaf(x.value, kPerLn2, -n)));
  return __uint_as_float(__float_as_uint(fast_exp2(rest)) + (__float_as_uint(shifted) << 23));
}

// log(1 + t) on [0, 1]: t + t^2 w(t), minimax, 3.3e-8 (1.4e-6 if not precise) relative to the logarithm.
template <bool kPrecise>
__device__ __forceinline__ float log1p_of(float t) {
  float w;
  if constexpr (kPrecise) {
    w = fmaf(t, 5.36482269e-3f, -3.00657861e-2f);
    w = fmaf(w, t, 7.92045221e-2f);
    w = fmaf(w, t, -0.137538016f);
    w = fmaf(w, t, 0.191536546f);
    w = fmaf(w, t, -0.248571634f);
    w = fmaf(w, t, 0.33321324f);
    w = fmaf(w, t, -0.499996483f);
  } else {
    w = fmaf(t, 1.45883253e-2f, -6.78512231e-2f);
    w = fmaf(w, t, 0.151027709f);
    w = fmaf(w, t, -0.236113444f);
    w = fmaf(w, t, 0.331404269f);
    w = fmaf(w, t, -0.499907464f);
  }
  return fmaf(__fmul_rn(t, t), w, t);
}

// g + bias, and its error where that is wanted.
template <bool kPrecise>
__device__ __forceinline__ Pair with_bias(float g, float bias) {
  const float sum = __fadd_rn(g, bias);
  if constexpr (!kPrecise) return {sum, 0.0f};
  const float rounded = __fsub_rn(sum, g);
  return {sum, __fadd_rn(__fsub_rn(g, __fsub_rn(sum, rounded)), __fsub_rn(bias, rounded))};
}

// x where `sign` is negative, else -x.
__device__ __forceinline__ float against(float x, float sign) {
  return __uint_as_float(__float_as_uint(x) ^ (~__float_as_uint(sign) & 0x80000000u));
}

// The larger one, or NaN if there is one.
__device__ __forceinline__ float max_with_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// The largest magnitude, or NaN if there is one.
template <int kCount>
__device__ __forceinline__ float largest_of(const float (&x)[kCount]) {
  float largest = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < kCount; ++i) largest = max_with_nan(largest, fabsf(x[i]));
  return largest;
}

// Every path computes an element by the same operations, each of them spelled out: what the compiler may join to one
// could differ from one use to another.

// -exp(A_log) * softplus(x)
struct SoftplusGate {
  Pair rate;
  float farthest;  // fast() is for x whose magnitude() is at most this

  __device__ __forceinline__ SoftplusGate(float A_log, const GateBound& /*bound*/)
      : rate(rate_of(A_log)), farthest(A_log >= kLeastLog && A_log <= kMostLog ? kFarthest : -1.0f) {}

  __device__ __forceinline__ float magnitude(float x) const { return fabsf(x); }

  // No magnitude() is above `farthest` while no |g| is above this.
  template <int kCount>
  __device__ __forceinline__ float farthest_before(const float (&bias)[kCount]) const {
    return __fsub_rn(farthest * kMargin, largest_of(bias));
  }

  template <bool kPrecise>
  __device__ __forceinline__ float fast(const Pair& x) const {
    if constexpr (!kPrecise) {
      const float t = fast_exp2(__fmul_rn(fabsf(x.value), -kPerLn2));
      return __fmul_rn(-rate.value, __fadd_rn(fmaxf(x.value, 0.0f), log1p_of<false>(t)));
    } else {
      const float t = precise_exp({-fabsf(x.value), against(x.error, x.value)});
      const float sum = __fadd_rn(fmaxf(x.value, 0.0f), log1p_of<true>(t));
      return fmaf(-rate.value, sum, __fmul_rn(-rate.error, sum));
    }
  }

  static __device__ __forceinline__ float exact(double rate, double /*lower_bound*/, double x) {
    return static_cast<float>(-rate * ((x > 0 ? x : 0.0) + log1p(exp(-fabs(x)))));
  }
};

// lower_bound * sigmoid(exp(A_log) * x)
struct BoundedGate {
  Pair rate;
  GateBound bound;
  float farthest;

  __device__ __forceinline__ BoundedGate(float A_log, const GateBound& given_bound)
      : rate(rate_of(A_log)),
        bound(given_bound),
        farthest(bound.is_moderate && A_log >= kLeastLog && A_log <= kMostLog ? kFarthest : -1.0f) {}

  __device__ __forceinline__ float magnitude(float x) const { return fabsf(__fmul_rn(rate.value, x)); }

  template <int kCount>
  __device__ __forceinline__ float farthest_before(const float (&bias)[kCount]) const {
    if (farthest < 0) return farthest;
    const float sum = __fmul_rn(farthest * kMargin, fast_reciprocal(rate.value));
    return __fsub_rn(sum, largest_of(bias));
  }

  template <bool kPrecise>
  __device__ __forceinline__ float fast(const Pair& x) const {
    const float z = __fmul_rn(rate.value, x.value);
    if constexpr (!kPrecise) {
      const float t = fast_exp2(__fmul_rn(z, -kPerLn2));
      return __fmul_rn(bound.value, fast_reciprocal(__fadd_rn(1.0f, t)));
    } else {
      const float error = fmaf(rate.value, x.error, fmaf(rate.error, x.value, fmaf(rate.value, x.value, -z)));
      const float t = precise_exp({-z, -error});
      // bound / (1 + t), and one step of Newton's.
      const float divisor = __fadd_rn(1.0f, t);
      const float inverse = fast_reciprocal(divisor);
      const float quotient = __fmul_rn(bound.value, inverse);
      return fmaf(__fadd_rn(fmaf(-quotient, divisor, bound.value), bound.error), inverse, quotient);
    }
  }

  static __device__ __forceinline__ float exact(double rate, double lower_bound, double x) {
    const double z = rate * x;
    const double t = exp(-fabs(z));
    return static_cast<float>(lower_bound * ((z < 0 ? t : 1.0) / (1.0 + t)));
  }
};

}  // namespace kda::cuda
