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

#include <utility>

#include "cpu/simd-inl.h"
#include "kda_gate/cpu/kernel.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// A gate is one long chain of dependent operations. Every operation below is done on four vectors before the next one:
// processors do not look far enough ahead to find that much independent work themselves.
inline constexpr int kGateVectors = 4;
inline constexpr int kGateBlock = kGateVectors * static_cast<int>(kLanes);
static_assert(kGateBlock <= kGatePadding);

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

// Highway's operations on several vectors; numbers stand for vectors of equal lanes.
#define KDA_FOR_EACH_VECTOR(Result, name)                                                           \
  template <class... Operands>                                                                      \
  HWY_INLINE Result name(const Operands&... operands) {                                             \
    Result result;                                                                                  \
    ForVectors([&](auto i) KDA_INLINE_LAMBDA { result.part[i] = hn::name(Part(operands, i)...); }); \
    return result;                                                                                  \
  }
KDA_FOR_EACH_VECTOR(Vs, Abs)
KDA_FOR_EACH_VECTOR(Vs, Add)
KDA_FOR_EACH_VECTOR(Vs, And)
KDA_FOR_EACH_VECTOR(Vs, ApproximateReciprocal)
KDA_FOR_EACH_VECTOR(Vs, Div)
KDA_FOR_EACH_VECTOR(Masks, Gt)
KDA_FOR_EACH_VECTOR(Vs, IfThenElse)
KDA_FOR_EACH_VECTOR(Vs, IfThenZeroElse)
KDA_FOR_EACH_VECTOR(Vs, Max)
KDA_FOR_EACH_VECTOR(Vs, Min)
KDA_FOR_EACH_VECTOR(Vs, Mul)
KDA_FOR_EACH_VECTOR(Vs, MulAdd)
KDA_FOR_EACH_VECTOR(Vs, MulSub)
KDA_FOR_EACH_VECTOR(Vs, NegMulAdd)
KDA_FOR_EACH_VECTOR(Vs, NegMulSub)
KDA_FOR_EACH_VECTOR(Vs, Round)
KDA_FOR_EACH_VECTOR(Vs, Sub)
KDA_FOR_EACH_VECTOR(Vs, Xor)
#undef KDA_FOR_EACH_VECTOR

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

HWY_INLINE Vs ScaleByPowerOf2(const Vs& x, const Vs& k) {
  Vs y;
  ForVectors([&](auto i) KDA_INLINE_LAMBDA { y.part[i] = ScaleByPowerOf2(x.part[i], k.part[i]); });
  return y;
}

HWY_INLINE Vs ScaleDown(const Vs& x, const Vs& k) {
  Vs y;
  ForVectors([&](auto i) KDA_INLINE_LAMBDA { y.part[i] = ScaleDown(x.part[i], k.part[i]); });
  return y;
}

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

// min(|x|, limit), where NaN stays, and the error with its sign; 0 where x is beyond the limit: there an error means
// nothing, and is NaN for infinite x.
HWY_INLINE Pair Magnitude(const Pair& x, float limit) {
  const Vs magnitude = Abs(x.value);
  const Vs error = IfThenZeroElse(Gt(magnitude, limit), x.error);
  // x86 returns the second operand when one is NaN; NEON returns NaN.
  return {Min(limit, magnitude), Xor(error, And(x.value, -0.0f))};
}

// f 2^n, where f = 1 + p; t is the same as one number, and 0 where that is no normal one.
struct Exponential {
  Vs p, f, n, t;
};

// e^-a for 0 <= a <= 1024, p within 1 ulp of 1; a.error is no larger than a rounding error of a.
template <bool kHasError>
HWY_INLINE Exponential ExpOfMinus(const Pair& a) {
  Exponential e;
  e.n = Round(Mul(a.value, -1.44269504f));
  // ln 2 in two parts, the first short enough for n * ln2_hi to be exact.
  Vs r = NegMulAdd(e.n, 1.42860677e-6f, NegMulSub(e.n, 0.693145752f, a.value));
  if constexpr (kHasError) r = Sub(r, a.error);
  // (e^r - 1 - r) / r^2 on |r| <= ln(2)/2, minimax: 3e-9 relative to e^r.
  const Vs square = Mul(r, r);
  const Vs low = MulAdd(r, 0.16666521f, 0.49999994f);
  const Vs high = MulAdd(square, 1.3820411e-3f, MulAdd(r, 8.368677e-3f, 4.166827e-2f));
  e.p = MulAdd(square, MulAdd(square, high, low), r);
  e.f = Add(1.0f, e.p);
  e.t = ScaleDown(e.f, e.n);
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

template <bool kBias>
HWY_INLINE Pair WithBias(const Vs& g, const float* bias) {
  if constexpr (kBias) return AddExactly(g, LoadVectors(bias));
  return {g, g};
}

// -exp(A_log) * softplus(g + dt_bias)
template <bool kBias, bool kGrouped>
struct SoftplusGate {
  HWY_INLINE Vs operator()(const GateColumns& columns, int first, const Vs& g) const {
    const Pair x = WithBias<kBias>(g, columns.bias + first);
    // Beyond the limit e^-|x| times FLT_MAX is nothing.
    const Pair a = kBias ? Magnitude(x, 256.0f) : Pair{Min(256.0f, Abs(g)), g};
    const Exponential e = ExpOfMinus<kBias>(a);
    const Vs w = Log1pRatio(e.t);

    // x <= 0.25: max(x, 0) + log(1 + t), which is max(x, 0) + (0.75 + 0.75 p + f w) 2^n, where n is 0 if x is positive;
    // above: x + 0.75 t + t w. Either is (c + 0.75 s + r) 2^k.
    const Masks is_large = Gt(x.value, 0.25f);
    const Vs c = IfThenElse(is_large, x.value, 0.75f);
    const Vs s = IfThenElse(is_large, e.t, e.p);
    const Vs k = IfThenZeroElse(is_large, e.n);
    const Vs positive = Max(0.0f, x.value);
    const Vs added =
        kBias ? IfThenElse(is_large, Xor(a.error, And(x.value, -0.0f)), positive) : IfThenZeroElse(is_large, positive);
    const Vs r = MulAdd(IfThenElse(is_large, e.t, e.f), w, added);

    // The product with hi alone, and from that what lo adds.
    const Vs hi = LoadRates<kGrouped>(columns.rate_hi, first);
    const Vs three_quarters = LoadRates<kGrouped>(columns.rate_three_quarters, first);
    const Vs smallest = Mul(hi, r);
    const Vs nearly = MulAdd(hi, c, MulAdd(three_quarters, s, smallest));
    const Vs corrected = MulAdd(LoadRates<kGrouped>(columns.rate_lo, first), nearly, smallest);
    const Vs product = MulAdd(hi, c, MulAdd(three_quarters, s, corrected));
    return ScaleByPowerOf2(product, Add(LoadRates<kGrouped>(columns.rate_exponent, first), k));
  }
};

// n / d for d in [1, 2].
HWY_INLINE Vs Divide(const Pair& n, const Pair& d) {
  const Vs inverse = ApproximateReciprocal(d.value);
#if HWY_TARGET == HWY_AVX3
  // 14 bits, squared by the correction.
  const Vs quotient = Mul(n.value, inverse);
  const Vs rest = NegMulAdd(quotient, d.value, n.value);
#else
  const Vs quotient = Div(n.value, d.value);
  const Vs rest = HWY_NATIVE_FMA ? NegMulAdd(quotient, d.value, n.value) : Mul(quotient, 0.0f);
#endif
  return MulAdd(Add(rest, NegMulAdd(quotient, d.error, n.error)), inverse, quotient);
}

// lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
template <bool kBias, bool kGrouped>
struct BoundedGate {
  HWY_INLINE Vs operator()(const GateColumns& columns, int first, const Vs& g) const {
    const Pair x = WithBias<kBias>(g, columns.bias + first);
    const Vs rate = LoadRates<kGrouped>(columns.rate_hi, first);
    Pair z = MultiplyExactly(rate, x.value);
    z.error = MulAdd(LoadRates<kGrouped>(columns.rate_lo, first), x.value, z.error);
    if constexpr (kBias) z.error = MulAdd(rate, x.error, z.error);
    // Beyond the limit e^-|z| times the largest double is nothing.
    const Exponential e = ExpOfMinus<true>(Magnitude(z, 1024.0f));

    // z <= 0: t / (1 + t) with t = (1 + p) 2^n; above: 1 / (1 + t).
    const Masks is_positive = Gt(z.value, 0.0f);
    const Vs k = IfThenZeroElse(is_positive, e.n);
    const ScaledNumber& bound = columns.lower_bound;
    const Vs rest = MulAdd(bound.hi, IfThenZeroElse(is_positive, e.p), bound.lo);
    const Vs quotient = Divide(AddSmaller(bound.hi, rest), AddSmaller(1.0f, e.t));
    return ScaleByPowerOf2(quotient, Add(bound.exponent, k));
  }
};

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
