#pragma once

// The two gates: within a few ulp of the formulas in exact arithmetic (kPrecise), or with errors of up to 2^-17, which
// rounding to bf16 all but hides, in half the instructions. Exponentials come from the special function unit, logarithms
// from a polynomial. What that cannot do, far from 0, is left to double precision.

#include <cfloat>
#include <cmath>
#include <cstdint>

namespace kda::cuda {

// value + error, |error| at most half an ulp of value.
struct Pair {
  float value;
  float error;
};

__device__ __forceinline__ Pair pair_of(double x) {
  const auto value = static_cast<float>(x);
  return {value, static_cast<float>(x - value)};
}

// exp(A_log) within 2^-36, at most FLT_MAX.
__device__ __forceinline__ double gate_rate(double A_log) {
  if (!(fabs(A_log) < 80)) {
    const double rate = exp(A_log);
    return rate > FLT_MAX ? FLT_MAX : rate;
  }
  // Every thread does this: the series on [-ln(2)/2, ln(2)/2], and a power of 2 put into the exponent.
  const int n = __float2int_rn(static_cast<float>(A_log) * 1.44269502f);
  const double r = fma(static_cast<double>(n), -0.693147180559945309, A_log);
  double sum = fma(r, 1.0 / 362880, 1.0 / 40320);
  sum = fma(sum, r, 1.0 / 5040);
  sum = fma(sum, r, 1.0 / 720);
  sum = fma(sum, r, 1.0 / 120);
  sum = fma(sum, r, 1.0 / 24);
  sum = fma(sum, r, 1.0 / 6);
  sum = fma(sum, r, 0.5);
  sum = fma(sum, r, 1.0);
  sum = fma(sum, r, 1.0);
  return __hiloint2double(__double2hiint(sum) + n * (1 << 20), __double2loint(sum));
}

// Beyond this distance from 0 exponentials and their products leave the range of fp32.
inline constexpr float kFarthest = 80.0f;
// Factors between these keep all their bits in products.
inline constexpr double kSmallest = 0x1p-100;
inline constexpr double kLargest = 0x1p126;

inline constexpr float kPerLn2 = 1.44269502f;
inline constexpr float kPerLn2Rest = 1.92596303e-8f;

__device__ __forceinline__ float approximate_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float approximate_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^(x.value + x.error) for |x.value| <= kFarthest.
template <bool kHasError>
__device__ __forceinline__ float precise_exp(const Pair& x) {
  // Added, it leaves the integer next to a number in its lowest bits.
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23
  const float shifted = fmaf(x.value, kPerLn2, kToInteger);
  const float n = __fsub_rn(shifted, kToInteger);
  float rest = fmaf(x.value, kPerLn2Rest, fmaf(x.value, kPerLn2, -n));
  if constexpr (kHasError) rest = fmaf(x.error, kPerLn2, rest);
  return __uint_as_float(__float_as_uint(approximate_exp2(rest)) + (__float_as_uint(shifted) << 23));
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

// g + bias; its error where that is wanted and there is a bias.
template <bool kHasBias, bool kPrecise>
__device__ __forceinline__ Pair with_bias(float g, float bias) {
  if constexpr (!kHasBias) return {g, 0.0f};
  const float sum = __fadd_rn(g, bias);
  if constexpr (!kPrecise) return {sum, 0.0f};
  const float rounded = __fsub_rn(sum, g);
  return {sum, __fadd_rn(__fsub_rn(g, __fsub_rn(sum, rounded)), __fsub_rn(bias, rounded))};
}

// -exp(A_log) * softplus(x)
struct SoftplusGate {
  double exact_rate;
  Pair rate;
  float farthest;  // fast() is for x whose magnitude() is at most this

  __device__ __forceinline__ SoftplusGate(double A_log, double /*lower_bound*/)
      : exact_rate(gate_rate(A_log)),
        rate(pair_of(exact_rate)),
        farthest(exact_rate >= kSmallest ? kFarthest : -1.0f) {}

  __device__ __forceinline__ float magnitude(float x) const { return fabsf(x); }

  template <bool kHasError, bool kPrecise>
  __device__ __forceinline__ float fast(const Pair& x) const {
    if constexpr (!kPrecise) {
      const float t = approximate_exp2(fabsf(x.value) * -kPerLn2);
      return -rate.value * (fmaxf(x.value, 0.0f) + log1p_of<false>(t));
    } else {
      const float t = precise_exp<kHasError>({-fabsf(x.value), -copysignf(1.0f, x.value) * x.error});
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
  double exact_rate;
  Pair rate;
  Pair bound;
  float farthest;

  __device__ __forceinline__ BoundedGate(double A_log, double lower_bound)
      : exact_rate(gate_rate(A_log)),
        rate(pair_of(exact_rate)),
        bound(pair_of(lower_bound)),
        farthest(fabs(lower_bound) >= kSmallest && fabs(lower_bound) <= kLargest ? kFarthest : -1.0f) {}

  __device__ __forceinline__ float magnitude(float x) const { return fabsf(rate.value * x); }

  template <bool kHasError, bool kPrecise>
  __device__ __forceinline__ float fast(const Pair& x) const {
    Pair z{rate.value * x.value, 0.0f};
    if constexpr (!kPrecise) {
      return bound.value * approximate_inverse(1.0f + approximate_exp2(z.value * -kPerLn2));
    } else {
      z.error = fmaf(rate.error, x.value, fmaf(rate.value, x.value, -z.value));
      if constexpr (kHasError) z.error = fmaf(rate.value, x.error, z.error);
      const float t = precise_exp<true>({-z.value, -z.error});
      // bound / (1 + t), and one step of Newton's.
      const float divisor = __fadd_rn(1.0f, t);
      const float inverse = approximate_inverse(divisor);
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
