// Vector types, elementary functions and number formats, once per instruction set. Include guard per target, as Highway
// asks for in every -inl.h file.
#if defined(KDA_SRC_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CPU_SIMD_INL_H_
#undef KDA_SRC_CPU_SIMD_INL_H_
#else
#define KDA_SRC_CPU_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, so that rows of a multiple of 16 elements need no remainder.
using D = HWY_CAPPED(float, 16);
using V = hn::Vec<D>;
inline constexpr std::size_t kLanes = hn::MaxLanes(D());

// 32 vector registers hold a block of 6 x 4 accumulators, 16 hold 6 x 2.
#if HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM
inline constexpr int kRegisters = 32;
#else
inline constexpr int kRegisters = 16;
#endif

HWY_INLINE V Broadcast(float x) { return hn::Set(D(), x); }

// e^x within 1 ulp for x in [-87.3, 88.3]; 0 below (where it is no normal number any more), infinity above; NaN stays.
HWY_INLINE V Exp(V x) {
  const D d;
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
  result = hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.3365448f)), result);
  return hn::IfThenElse(hn::Gt(x, hn::Set(d, 88.3762589f)), hn::Inf(d), result);
}

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

// log(1 + e^x) for every x, with relative accuracy down to where e^x vanishes.
HWY_INLINE V Softplus(V x) {
  const D d;
  const V log_part = Log1p(Exp(hn::Neg(hn::Abs(x))));
  return hn::IfThenElse(hn::Gt(x, hn::Zero(d)), hn::Add(x, log_part), log_part);
}

// 1 / (1 + e^-x) for every x.
HWY_INLINE V Sigmoid(V x) {
  const D d;
  const V t = Exp(hn::Neg(hn::Abs(x)));
  const V one = hn::Set(d, 1.0f);
  return hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), t, one), hn::Add(one, t));
}

// Number formats: Load widens kLanes elements to fp32, Store rounds them to nearest even.

struct Float32 {
  using Storage = float;
  static HWY_INLINE V Load(const float* p) { return hn::LoadU(D(), p); }
  static HWY_INLINE void Store(V x, float* p) { hn::StoreU(x, D(), p); }
};

struct BFloat16 {
  using Storage = std::uint16_t;
  static HWY_INLINE V Load(const std::uint16_t* p) {
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::RebindToUnsigned<D> d32;
    return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, p))));
  }
  static HWY_INLINE void Store(V x, std::uint16_t* p) {
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::RebindToUnsigned<D> d32;
    const auto bits = hn::BitCast(d32, x);
    const auto high = hn::ShiftRight<16>(bits);
    const auto odd = hn::And(high, hn::Set(d32, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7FFFu))));
    const auto quiet = hn::Or(high, hn::Set(d32, 0x40u));
    const auto is_nan = hn::RebindMask(d32, hn::IsNaN(x));
    hn::StoreU(hn::TruncateTo(d16, hn::IfThenElse(is_nan, quiet, rounded)), d16, p);
  }
};

// Highway's own conversions are exact where the hardware does them; below AVX2 they are spelled out here.
#if HWY_TARGET == HWY_SSE4
struct Float16 {
  using Storage = std::uint16_t;
  static HWY_INLINE V Load(const std::uint16_t* p) {
    const D d;
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::RebindToUnsigned<D> d32;
    const auto half = hn::PromoteTo(d32, hn::LoadU(d16, p));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(d32, 0x8000u)));
    const auto magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(d32, 0x7FFFu)));
    // The product by 2^112 moves the exponent to fp32's bias and normalises subnormals.
    const auto finite = hn::BitCast(d32, hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p112f)));
    const auto special = hn::Or(magnitude, hn::Set(d32, 0x7F800000u));
    const auto is_special = hn::Eq(hn::And(half, hn::Set(d32, 0x7C00u)), hn::Set(d32, 0x7C00u));
    return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(is_special, special, finite)));
  }
  static HWY_INLINE void Store(V x, std::uint16_t* p) {
    const D d;
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::RebindToUnsigned<D> d32;
    const V absolute = hn::Abs(x);
    const auto bits = hn::BitCast(d32, absolute);
    const auto sign = hn::ShiftRight<16>(hn::AndNot(bits, hn::BitCast(d32, x)));
    const auto odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(d32, 1u));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d32, 0xFFFu)));
    const auto normal = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(d32, 112u << 23)));
    // At 0.5 an fp32 ulp is fp16's smallest step, so the addition rounds to it.
    const auto magic = hn::BitCast(d32, hn::Add(absolute, hn::Set(d, 0.5f)));
    const auto subnormal = hn::Sub(magic, hn::BitCast(d32, hn::Set(d, 0.5f)));
    auto half = hn::IfThenElse(hn::RebindMask(d32, hn::Lt(absolute, hn::Set(d, 0x1p-14f))), subnormal, normal);
    half = hn::IfThenElse(hn::RebindMask(d32, hn::Ge(absolute, hn::Set(d, 65520.0f))), hn::Set(d32, 0x7C00u), half);
    half = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(x)), hn::Set(d32, 0x7E00u), half);
    hn::StoreU(hn::TruncateTo(d16, hn::Or(half, sign)), d16, p);
  }
};
#else
struct Float16 {
  using Storage = std::uint16_t;
  static HWY_INLINE V Load(const std::uint16_t* p) {
    const hn::Rebind<hwy::float16_t, D> d16;
    const hn::Rebind<std::uint16_t, D> du16;
    return hn::PromoteTo(D(), hn::BitCast(d16, hn::LoadU(du16, p)));
  }
  static HWY_INLINE void Store(V x, std::uint16_t* p) {
    const hn::Rebind<hwy::float16_t, D> d16;
    const hn::Rebind<std::uint16_t, D> du16;
    hn::StoreU(hn::BitCast(du16, hn::DemoteTo(d16, x)), du16, p);
  }
};
#endif

// One element at a time, for rows whose elements are not adjacent.
template <class Format>
HWY_INLINE float LoadOne(const typename Format::Storage* p) {
  if constexpr (sizeof(typename Format::Storage) == sizeof(float)) {
    return *p;
  } else {
    HWY_ALIGN typename Format::Storage padded[kLanes] = {*p};
    return hn::GetLane(Format::Load(padded));
  }
}

template <class Format>
HWY_INLINE void StoreOne(float x, typename Format::Storage* p) {
  if constexpr (sizeof(typename Format::Storage) == sizeof(float)) {
    *p = x;
  } else {
    HWY_ALIGN typename Format::Storage padded[kLanes];
    Format::Store(hn::Set(D(), x), padded);
    *p = padded[0];
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
