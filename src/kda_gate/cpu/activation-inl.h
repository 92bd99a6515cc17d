// The two gates, several vectors at a time, within 2 ulp of the formulas in exact arithmetic (3 ulp without fused
// multiply-add).
//
// Errors of x = g + dt_bias and of exp(A_log) * x are absolute and would grow to many ulp of an exponential, so they
// are kept and added to its reduced argument. Powers of 2 are applied last: neither a large factor nor a result below
// FLT_MIN costs accuracy.
#if defined(KDA_SRC_KDA_GATE_CPU_ACTIVATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_KDA_GATE_CPU_ACTIVATION_INL_H_
#undef KDA_SRC_KDA_GATE_CPU_ACTIVATION_INL_H_
#else
#define KDA_SRC_KDA_GATE_CPU_ACTIVATION_INL_H_
#endif

#include <bit>
#include <cfloat>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "cpu/elementary-inl.h"
#include "kda_gate/cpu/kernel.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// A gate is one long chain of dependent operations. Every operation below is done on four vectors before the next one:
// processors do not look far enough ahead to find that much independent work themselves.
inline constexpr int kGateVectors = 4;
inline constexpr int kGateBlock = kGateVectors * static_cast<int>(kLanes);

// A call, even one, would move all vectors to the stack.
#define KDA_INLINE_LAMBDA HWY_ATTR __attribute__((always_inline))

// Not templates: argument-dependent lookup would find Highway's own functions for them.
struct Vs {
  V part[kGateVectors];
};
struct Masks {
  hn::Mask<D> part[kGateVectors];
};

template <int kIndex>
HWY_INLINE V Part(const Vs& x, std::integral_constant<int, kIndex>) {
  return x.part[kIndex];
}
template <int kIndex>
HWY_INLINE hn::Mask<D> Part(const Masks& x, std::integral_constant<int, kIndex>) {
  return x.part[kIndex];
}
template <int kIndex>
HWY_INLINE V Part(float x, std::integral_constant<int, kIndex>) {
  return hn::Set(D(), x);
}

// f(i) for i = 0, 1, 2, 3, known at compile time.
template <class F>
HWY_INLINE void ForVectors(const F& f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) KDA_INLINE_LAMBDA {
    (f(std::integral_constant<int, kIndex>()), ...);
  }
  (std::make_integer_sequence<int, kGateVectors>());
}

// Operations on one vector, done on several; numbers stand for vectors of equal lanes.
#define KDA_FOR_EACH_VECTOR(Result, scope, name)                                                       \
  HWY_INLINE Result name(const auto&... operands) {                                                    \
    Result result;                                                                                     \
    ForVectors([&](auto i) KDA_INLINE_LAMBDA { result.part[i] = scope::name(Part(operands, i)...); }); \
    return result;                                                                                     \
  }
KDA_FOR_EACH_VECTOR(Vs, hn, Abs)
KDA_FOR_EACH_VECTOR(Vs, hn, Add)
KDA_FOR_EACH_VECTOR(Vs, hn, And)
KDA_FOR_EACH_VECTOR(Vs, hn, ApproximateReciprocal)
KDA_FOR_EACH_VECTOR(Vs, hn, Div)
KDA_FOR_EACH_VECTOR(Masks, hn, Gt)
KDA_FOR_EACH_VECTOR(Vs, hn, IfThenElse)
KDA_FOR_EACH_VECTOR(Vs, hn, IfThenElseZero)
KDA_FOR_EACH_VECTOR(Vs, hn, IfThenZeroElse)
KDA_FOR_EACH_VECTOR(Vs, hn, Max)
KDA_FOR_EACH_VECTOR(Vs, hn, Min)
KDA_FOR_EACH_VECTOR(Vs, hn, Mul)
KDA_FOR_EACH_VECTOR(Vs, hn, MulAdd)
KDA_FOR_EACH_VECTOR(Vs, hn, MulSub)
KDA_FOR_EACH_VECTOR(Vs, hn, NegMulAdd)
KDA_FOR_EACH_VECTOR(Vs, hn, NegMulSub)
KDA_FOR_EACH_VECTOR(Vs, hn, Round)
KDA_FOR_EACH_VECTOR(Vs, hn, Sub)
KDA_FOR_EACH_VECTOR(Vs, hn, Xor)

HWY_INLINE Vs LoadVectors(const float* p) {
  Vs x;
  ForVectors([&](auto i) KDA_INLINE_LAMBDA { x.part[i] = hn::LoadU(D(), p + i * kLanes); });
  return x;
}

// From a table with one entry per column, or per group of columns.
template <bool kGrouped>
HWY_INLINE Vs LoadRates(const float* table, int first) {
  if constexpr (!kGrouped) return LoadVectors(table + first);
  static_assert(kGateGroup % kLanes == 0);
  const float* entries = table + first / kGateGroup;
  Vs x;
  ForVectors([&](auto i) KDA_INLINE_LAMBDA { x.part[i] = hn::Set(D(), entries[i * kLanes / kGateGroup]); });
  return x;
}

namespace one {

// x * 2^k for integers k; |x| at most 2^127 and, unless it is 0, at least 2^-5. Rounds once.
HWY_INLINE V ScaleByPowerOf2(V x, V k) {
#if HWY_TARGET == HWY_AVX3
  return V{_mm512_scalef_ps(x.raw, k.raw)};
#else
  const D d;
  const hn::RebindToSigned<D> di;
  // Two factors, because the exponent alone may leave fp32's range.
  const auto all = hn::ConvertTo(di, hn::Min(hn::Set(d, 252.0f), hn::Max(hn::Set(d, -252.0f), k)));
  const auto half = hn::ShiftRight<1>(all);
  const auto bias = hn::Set(di, 127);
  const V first = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const V second = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(all, half), bias)));
  return hn::Mul(hn::Mul(x, first), second);
#endif
}

// x * 2^k for integers k <= 0 and x about 1, or 0 where that is no normal number.
HWY_INLINE V ScaleDown(V x, V k) {
#if HWY_TARGET == HWY_AVX3
  return V{_mm512_scalef_ps(x.raw, k.raw)};
#else
  const D d;
  const hn::RebindToSigned<D> di;
  const auto exponent = hn::ConvertTo(di, hn::Max(hn::Set(d, -127.0f), k));
  return hn::Mul(x, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(exponent, hn::Set(di, 127)))));
#endif
}

// What an integer is as a change of fp32's exponent, by bits.
HWY_INLINE V ExponentBits(V k) {
  return hn::BitCast(D(), hn::ShiftLeft<23>(hn::ConvertTo(hn::RebindToSigned<D>(), k)));
}

}  // namespace one

KDA_FOR_EACH_VECTOR(Vs, one, AddBits)
KDA_FOR_EACH_VECTOR(Vs, one, ExponentBits)
KDA_FOR_EACH_VECTOR(Vs, one, ScaleByPowerOf2)
KDA_FOR_EACH_VECTOR(Vs, one, ScaleDown)
#undef KDA_FOR_EACH_VECTOR

// value + error, exactly.
struct Pair {
  Vs value, error;
};

HWY_INLINE Pair AddExactly(const Vs& a, const Vs& b) {
  const Vs sum = Add(a, b);
  const Vs rounded = Sub(sum, a);
  return {sum, Add(Sub(a, Sub(sum, rounded)), Sub(b, rounded))};
}

// Needs |a| >= |b|, or a = 0.
HWY_INLINE Pair AddSmaller(float a, const Vs& b) {
  const Vs sum = Add(a, b);
  return {sum, Sub(b, Sub(sum, a))};
}

// Exact unless the error underflows.
HWY_INLINE Pair MultiplyExactly(const Vs& a, const Vs& b) {
  const Vs product = Mul(a, b);
#if HWY_NATIVE_FMA
  return {product, MulSub(a, b, product)};
#else
  // Halves of 12 bits, cut off by mask so that nothing overflows; their products are exact.
  Vs mask;
  ForVectors([&](auto i) KDA_INLINE_LAMBDA {
    mask.part[i] = hn::BitCast(D(), hn::Set(hn::RebindToUnsigned<D>(), 0xFFFFF000u));
  });
  const Vs a_hi = And(a, mask), a_lo = Sub(a, a_hi);
  const Vs b_hi = And(b, mask), b_lo = Sub(b, b_hi);
  const Vs outer = Add(Sub(Mul(a_hi, b_hi), product), Mul(a_hi, b_lo));
  return {product, Add(Add(outer, Mul(a_lo, b_hi)), Mul(a_lo, b_lo))};
#endif
}

// A gate is computed in one of two ways with the same bits. In the common range the argument of the exponential is at
// most kCommonArgument and the factors are moderate, so that no number is 0, infinite or below FLT_MIN, and a power of
// 2 is an addition to an exponent.

// Whether no magnitude of a block is above the limit, which has the format of g; NaN is.
template <class Storage>
HWY_INLINE bool IsWithin(const Storage* g, Storage limit) {
  using Integer = std::conditional_t<sizeof(Storage) == 2, std::int16_t, std::int32_t>;
  const hn::Repartition<Integer, D> d;
  const auto magnitude = hn::Set(d, std::numeric_limits<Integer>::max());
  auto largest = hn::Zero(d);
  for (std::size_t i = 0; i < kGateBlock; i += hn::Lanes(d)) {
    largest = hn::Max(largest, hn::And(magnitude, hn::LoadU(d, reinterpret_cast<const Integer*>(g + i))));
  }
  return hn::AllFalse(d, hn::Gt(largest, hn::Set(d, std::bit_cast<Integer>(limit))));
}

// |x|
HWY_INLINE Pair Magnitude(const Pair& x) { return {Abs(x.value), Xor(x.error, And(x.value, -0.0f))}; }

// min(x, limit) for x >= 0, where NaN stays. Without an error where x is beyond the limit: there it means nothing, and
// is NaN for infinite x.
template <bool kCommon>
HWY_INLINE Pair Limited(const Pair& x, float limit) {
  if constexpr (kCommon) {
    return x;
  } else {
    // A minimum of the hardware's would be the limit for NaN on ARM.
    const Masks is_beyond = Gt(x.value, limit);
    return {IfThenElse(is_beyond, limit, x.value), IfThenZeroElse(is_beyond, x.error)};
  }
}

// f 2^n, where f = 1 + p; t is the same as one number, and 0 where that is no normal one. The power is n: in the common
// range as bits of an exponent, else as a number.
struct Exponential {
  Vs p, f, t, power;
};

#if HWY_TARGET == HWY_AVX3
HWY_INLINE Vs Lookup(const float* table, const Vs& index) {
  Vs y;
  ForVectors([&](auto i) KDA_INLINE_LAMBDA { y.part[i] = one::Lookup(table, index.part[i]); });
  return y;
}

// Of kExpShift + m: floor((m + 8) / 16), as Exponential has it.
template <bool kCommon>
HWY_INLINE V PowerOf(V shifted) {
  if constexpr (kCommon) return ExponentOfShifted(shifted);
  const D d;
  return hn::Floor(hn::Mul(hn::Sub(shifted, hn::Set(d, kExpShift - 8)), hn::Set(d, 0.0625f)));
}

// e^-a for 0 <= a <= 1024, p within 1 ulp of 1; a.error is no larger than a rounding error of a.
template <bool kCommon, bool kHasError>
HWY_INLINE Exponential ExpOfMinus(const Pair& a) {
  const Vs shifted = MulAdd(a.value, -23.0831203f, kExpShift);
  const Vs m = Sub(shifted, kExpShift);
  Vs r = NegMulAdd(m, -1.19040888e-10f, NegMulSub(m, 0.0433216989f, a.value));
  if constexpr (kHasError) r = Sub(r, a.error);
  // (e^r - 1 - r) / r^2 on |r| <= ln(2)/32, minimax: 2e-9 relative to e^r.
  const Vs q = MulAdd(Mul(r, r), MulAdd(r, 0.166670352f, 0.50001651f), r);
  Exponential e;
  e.p = MulAdd(Lookup(kPowers, shifted), q, Lookup(kPowersLessOne, shifted));
  e.f = Add(1.0f, e.p);
  ForVectors([&](auto i) KDA_INLINE_LAMBDA { e.power.part[i] = PowerOf<kCommon>(shifted.part[i]); });
  e.t = kCommon ? AddBits(e.f, e.power) : ScaleDown(e.f, e.power);
  return e;
}

// log(1 + t) / t - 0.75 on [0, 1].
HWY_INLINE Vs Log1pRatio(const Vs& t) {
  const Vs shifted = Add(kLog1pShift, t);
  Vs w = MulAdd(Lookup(kLog1p[4], shifted), t, Lookup(kLog1p[3], shifted));
  w = MulAdd(w, t, Lookup(kLog1p[2], shifted));
  w = MulAdd(w, t, Lookup(kLog1p[1], shifted));
  return MulAdd(w, t, Lookup(kLog1p[0], shifted));
}
#else
// e^-a for 0 <= a <= 1024, p within 1 ulp of 1; a.error is no larger than a rounding error of a.
template <bool kCommon, bool kHasError>
HWY_INLINE Exponential ExpOfMinus(const Pair& a) {
  const Vs n = Round(Mul(a.value, -1.44269504f));
  // ln 2 in two parts, the first short enough for n * ln2_hi to be exact.
  Vs r = NegMulAdd(n, 1.42860677e-6f, NegMulSub(n, 0.693145752f, a.value));
  if constexpr (kHasError) r = Sub(r, a.error);
  // (e^r - 1 - r) / r^2 on |r| <= ln(2)/2, minimax: 3e-9 relative to e^r.
  const Vs square = Mul(r, r);
  const Vs low = MulAdd(r, 0.16666521f, 0.49999994f);
  const Vs high = MulAdd(square, 1.3820411e-3f, MulAdd(r, 8.368677e-3f, 4.166827e-2f));
  Exponential e;
  e.p = MulAdd(square, MulAdd(square, high, low), r);
  e.f = Add(1.0f, e.p);
  e.power = kCommon ? ExponentBits(n) : n;
  e.t = kCommon ? AddBits(e.f, e.power) : ScaleDown(e.f, e.power);
  return e;
}

// log(1 + t) / t - 0.75 on [0, 1], minimax: 4e-9 relative to log(1 + t) / t. Taken from 0.75, the result is small near
// t = 1, where its rounding errors weigh most.
HWY_INLINE Vs Log1pRatio(const Vs& t) {
  Vs w = MulAdd(t, -3.4102488e-3f, 2.0614207e-2f);
  w = MulAdd(w, t, -5.8424562e-2f);
  w = MulAdd(w, t, 0.10756377f);
  w = MulAdd(w, t, -0.15399258f);
  w = MulAdd(w, t, 0.19710182f);
  w = MulAdd(w, t, -0.24961342f);
  w = MulAdd(w, t, 0.3333076f);
  w = MulAdd(w, t, -0.4999994f);
  return MulAdd(w, t, 0.25f);
}
#endif

// -exp(A_log) * softplus(x), x = g + dt_bias
template <bool kBias, bool kGrouped>
struct SoftplusGate {
  template <bool kCommon>
  static HWY_INLINE Vs Gate(const GateColumns& columns, int first, const Vs& g) {
    Pair x = {g, g};
    Pair magnitude = {Abs(g), g};
    if constexpr (kBias) {
      x = AddExactly(g, LoadVectors(columns.bias + first));
      magnitude = Magnitude(x);
    }
    // Beyond the limit e^-|x| times FLT_MAX is nothing.
    const Exponential e = ExpOfMinus<kCommon, kBias>(Limited<kCommon>(magnitude, 256.0f));
    const Vs w = Log1pRatio(e.t);

    // log(1 + t) = (0.75 + 0.75 p + f w) 2^n. Up to 0.25, where n is 0 if x is positive, max(x, 0) is a part of the
    // sum; a larger x is added to it.
    const Masks is_large = Gt(x.value, 0.25f);
    const Vs added = IfThenZeroElse(is_large, Max(0.0f, x.value));
    const Vs sum = MulAdd(e.p, 0.75f, MulAdd(e.f, w, LoadRates<kGrouped>(columns.rate_lo, first)));
    const Vs hi = LoadRates<kGrouped>(columns.rate_hi, first);
    const Vs product = MulAdd(hi, Add(sum, added), LoadRates<kGrouped>(columns.rate_three_quarters, first));
    const Vs large = IfThenElseZero(is_large, x.value);
    Vs y = kCommon ? AddBits(product, e.power) : ScaleByPowerOf2(product, IfThenElseZero(is_large, e.power));
    // What is added to the product of an infinite gate must not be NaN, nor infinite of the other sign.
    const Vs finite = kCommon ? large : Min(FLT_MAX, large);
    const Vs error = kCommon ? x.error : IfThenZeroElse(Gt(x.value, FLT_MAX), x.error);
    if constexpr (kBias) y = MulAdd(hi, IfThenElseZero(is_large, error), y);
    y = MulAdd(LoadRates<kGrouped>(columns.rate_hi_lo, first), finite, y);
    y = MulAdd(hi, large, y);
    if constexpr (kCommon) {
      return y;
    } else {
      const Vs k = IfThenZeroElse(is_large, e.power);
      return ScaleByPowerOf2(y, Add(LoadRates<kGrouped>(columns.rate_exponent, first), k));
    }
  }
};

// n / (1 + t) for t in [0, 1].
HWY_INLINE Vs Divide(const Pair& n, const Vs& t) {
  const Vs d = Add(1.0f, t);
  const Vs inverse = ApproximateReciprocal(d);
#if HWY_TARGET == HWY_AVX3
  // 14 bits, squared by the correction.
  const Vs quotient = Mul(n.value, inverse);
#else
  const Vs quotient = Div(n.value, d);
#endif
#if HWY_NATIVE_FMA
  // The difference is exact, as quotient is n / 2 or more.
  const Vs rest = NegMulAdd(quotient, t, Sub(n.value, quotient));
#else
  // Only what rounding 1 + t did to a quotient that is rounded itself.
  const Vs rest = NegMulAdd(quotient, Sub(t, Sub(d, 1.0f)), 0.0f);
#endif
  return MulAdd(Add(rest, n.error), inverse, quotient);
}

// lower_bound * sigmoid(z), z = exp(A_log) * (g + dt_bias)
template <bool kBias, bool kGrouped>
struct BoundedGate {
  template <bool kCommon>
  static HWY_INLINE Vs Gate(const GateColumns& columns, int first, const Vs& g) {
    Pair x = {g, g};
    Pair magnitude = {Abs(g), g};
    if constexpr (kBias) {
      x = AddExactly(g, LoadVectors(columns.bias + first));
      magnitude = Magnitude(x);
    }
    const Vs hi = LoadRates<kGrouped>(columns.rate_hi, first);
    Pair z = MultiplyExactly(hi, magnitude.value);
    z.error = MulAdd(LoadRates<kGrouped>(columns.rate_lo, first), magnitude.value, z.error);
    if constexpr (kBias) z.error = MulAdd(hi, magnitude.error, z.error);
    // Beyond the limit e^-|z| times the largest double is nothing.
    const Exponential e = ExpOfMinus<kCommon, true>(Limited<kCommon>(z, 1024.0f));

    // z <= 0: t / (1 + t) with t = (1 + p) 2^n; above: 1 / (1 + t).
    const Masks is_positive = Gt(x.value, 0.0f);
    const Vs k = IfThenZeroElse(is_positive, e.power);
    const ScaledNumber& bound = columns.lower_bound;
    const Vs rest = MulAdd(bound.hi, IfThenZeroElse(is_positive, e.p), bound.lo);
    const Vs quotient = Divide(AddSmaller(bound.hi, rest), e.t);
    return kCommon ? AddBits(quotient, k) : ScaleByPowerOf2(quotient, Add(bound.exponent, k));
  }
};

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
