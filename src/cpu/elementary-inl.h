// Exponentials and logarithms, once per instruction set.
#if defined(KDA_SRC_CPU_ELEMENTARY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CPU_ELEMENTARY_INL_H_
#undef KDA_SRC_CPU_ELEMENTARY_INL_H_
#else
#define KDA_SRC_CPU_ELEMENTARY_INL_H_
#endif

#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// Operations on one vector that also exist for several (kda_gate/cpu/activation-inl.h).
namespace one {

HWY_INLINE V AddBits(V a, V b) {
  const hn::RebindToSigned<D> di;
  return hn::BitCast(D(), hn::Add(hn::BitCast(di, a), hn::BitCast(di, b)));
}

}  // namespace one

#if HWY_TARGET == HWY_AVX3
// Polynomials in pieces, whose coefficients are looked up: permutations leave the multipliers to others.

namespace one {

// table[i], where i is the low 4 bits of the index.
HWY_INLINE V Lookup(const float* table, V index) {
  return V{_mm512_permutexvar_ps(_mm512_castps_si512(index.raw), _mm512_load_ps(table))};
}

}  // namespace one

// 2^(i/16) and 2^(i/16) - 1 for i from -8.
alignas(64) inline constexpr float kPowers[16] = {
    0.707106769f, 0.738413095f, 0.771105409f, 0.805245161f, 0.840896428f, 0.878126085f, 0.917004049f, 0.957603276f,
    1.0f,         1.04427373f,  1.09050775f,  1.13878858f,  1.18920708f,  1.24185777f,  1.29683959f,  1.35425556f};
alignas(64) inline constexpr float kPowersLessOne[16] = {-0.292893231f, -0.261586934f, -0.228894591f,  -0.194754839f,
                                                         -0.159103587f, -0.121873923f, -0.0829959586f, -0.0423967205f,
                                                         0.0f,          0.0442737825f, 0.0905077308f,  0.13878864f,
                                                         0.189207122f,  0.241857812f,  0.296839565f,   0.354255557f};

// Added to kExpShift, a number becomes an integer m, and the low bits are those of m + 8.
inline constexpr float kExpShift = 0x1.8p23f + 8;

// floor((m + 8) / 16) as bits of an exponent.
HWY_INLINE V ExponentOfShifted(V shifted) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::ShiftLeft<19>(hn::BitCast(du, shifted));
  return hn::BitCast(D(), hn::And(bits, hn::Set(du, 0xFF800000u)));
}

// Added to kLog1pShift, t in [0, 1] is rounded to i/8. kLog1p has log(1 + t) / t - 0.75 on |t - i/8| <= 1/16, minimax:
// 6e-9 relative to log(1 + t) / t. Taken from 0.75, the result is small near t = 1, where its rounding errors weigh
// most.
inline constexpr float kLog1pShift = 0x1p20f;
alignas(64) inline constexpr float kLog1p[5][16] = {
    {0.25f, 0.249997839f, 0.249942452f, 0.249697283f, 0.249112159f, 0.248074755f, 0.246521577f, 0.244430885f,
     0.242489681f},
    {-0.499999851f, -0.499898225f, -0.498762459f, -0.495653629f, -0.490317583f, -0.482943416f, -0.473903149f,
     -0.463603377f, -0.45519352f},
    {0.333309531f, 0.331469268f, 0.322543681f, 0.307637155f, 0.289310545f, 0.269602895f, 0.249836579f, 0.230784833f,
     0.217115194f},
    {-0.248821467f, -0.233192444f, -0.201277405f, -0.16924037f, -0.141145349f, -0.117676064f, -0.0984345078f,
     -0.0827527121f, -0.0728726536f},
    {0.176758945f, 0.122760721f, 0.078936994f, 0.052898474f, 0.0366780981f, 0.0261702426f, 0.019134108f, 0.0142876692f,
     0.0116084795f}};

// log(1 + t) within 1 ulp for t in [0, 1].
HWY_INLINE V Log1p(V t) {
  const D d;
  const V shifted = hn::Add(hn::Set(d, kLog1pShift), t);
  V w = hn::MulAdd(one::Lookup(kLog1p[4], shifted), t, one::Lookup(kLog1p[3], shifted));
  w = hn::MulAdd(w, t, one::Lookup(kLog1p[2], shifted));
  w = hn::MulAdd(w, t, one::Lookup(kLog1p[1], shifted));
  w = hn::MulAdd(w, t, one::Lookup(kLog1p[0], shifted));
  return hn::MulAdd(t, w, hn::Mul(t, hn::Set(d, 0.75f)));
}
#else
// log(1 + t) within 1 ulp for t in [0, 1].
HWY_INLINE V Log1p(V t) {
  const D d;
  // With s = t / (2 + t): log(1 + t) = 2 atanh(s) = t - s (t - R), R = 2 s^2/3 + 2 s^4/5 + ..., minimax on s^2 <= 1/9.
  const V s = hn::Div(t, hn::Add(hn::Set(d, 2.0f), t));
  const V z = hn::Mul(s, s);
  V p = hn::Set(d, 0.242969377f);
  p = hn::MulAdd(p, z, hn::Set(d, 0.214289402f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.286167463f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.399988835f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.666666755f));
  return hn::NegMulAdd(s, hn::NegMulAdd(p, z, t), t);
}
#endif

// e^x within 1 ulp for x in [-87.3, 88.3]; 0 below (where it is no normal number any more), infinity above; NaN stays.
HWY_INLINE V Exp(V x) {
  const D d;
#if HWY_TARGET == HWY_AVX3
  const V shifted = hn::MulAdd(x, hn::Set(d, 23.0831203f), hn::Set(d, kExpShift));
  const V m = hn::Sub(shifted, hn::Set(d, kExpShift));
  const V r = hn::NegMulAdd(m, hn::Set(d, -1.19040888e-10f), hn::NegMulAdd(m, hn::Set(d, 0.0433216989f), x));
  // (e^r - 1 - r) / r^2 on |r| <= ln(2)/32, minimax: 2e-9 relative to e^r.
  const V q = hn::MulAdd(hn::Mul(r, r), hn::MulAdd(r, hn::Set(d, 0.166670352f), hn::Set(d, 0.50001651f)), r);
  const V p = hn::MulAdd(one::Lookup(kPowers, shifted), q, one::Lookup(kPowersLessOne, shifted));
  V result = one::AddBits(hn::Add(hn::Set(d, 1.0f), p), ExponentOfShifted(shifted));
#else
  const hn::RebindToSigned<D> di;
  const V n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
  // ln 2 in two parts, the first short enough for n * ln2_hi to be exact.
  const V r = hn::NegMulAdd(n, hn::Set(d, 1.42860677e-6f), hn::NegMulAdd(n, hn::Set(d, 0.693145752f), x));
  // (e^r - 1 - r) / r^2 on |r| <= ln(2)/2, minimax of degree 5: 5e-11 relative to e^r.
  V q = hn::Set(d, 1.9790299e-4f);
  q = hn::MulAdd(q, r, hn::Set(d, 1.39447047e-3f));
  q = hn::MulAdd(q, r, hn::Set(d, 8.33349735e-3f));
  q = hn::MulAdd(q, r, hn::Set(d, 4.16662944e-2f));
  q = hn::MulAdd(q, r, hn::Set(d, 1.66666659e-1f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.5f));
  const V p = hn::Add(hn::Set(d, 1.0f), hn::MulAdd(hn::Mul(r, r), q, r));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  V result = hn::Mul(p, hn::BitCast(d, exponent));
#endif
  result = hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.3365448f)), result);
  return hn::IfThenElse(hn::Le(x, hn::Set(d, 88.3762589f)), result, hn::Mul(x, hn::Inf(d)));
}

// log(1 + e^x) for every x, with relative accuracy down to where e^x vanishes.
HWY_INLINE V Softplus(V x) {
  // The maximum may be 0 for NaN; the logarithm is NaN then.
  return hn::Add(hn::Max(hn::Zero(D()), x), Log1p(Exp(hn::Neg(hn::Abs(x)))));
}

// 1 / (1 + e^-x) for every x.
HWY_INLINE V Sigmoid(V x) {
  const D d;
  const V t = Exp(hn::Neg(hn::Abs(x)));
  const V all = hn::Set(d, 1.0f);
  return hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), t, all), hn::Add(all, t));
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
