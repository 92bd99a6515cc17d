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

#if HWY_TARGET == HWY_AVX3
// A cache line of 16-bit elements.
template <bool kStream>
HWY_INLINE void StoreLine(__m512i line, std::uint16_t* p) {
  if constexpr (kStream) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), line);
  } else {
    _mm512_storeu_si512(p, line);
  }
}
#endif

// Number formats: Load widens kLanes elements to fp32, Store rounds them to nearest even. StoreTwo does so to adjacent
// places; where it streams, past the caches to memory if the processor can, p is a multiple of 64 bytes.

struct Float32 {
  using Storage = float;
  static HWY_INLINE V Load(const float* p) { return hn::LoadU(D(), p); }
  static HWY_INLINE void Store(V x, float* p) { hn::StoreU(x, D(), p); }
  template <bool kStream>
  static HWY_INLINE void StoreTwo(V x, V y, float* p) {
    if constexpr (kStream) {
      hn::Stream(x, D(), p);
      hn::Stream(y, D(), p + kLanes);
    } else {
      Store(x, p);
      Store(y, p + kLanes);
    }
  }
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
    const auto quiet = hn::Or(hn::BitCast(d32, x), hn::Set(d32, 0x400000u));
    const auto is_nan = hn::RebindMask(d32, hn::IsNaN(x));
    hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, Rounded(x)))), d16, p);
  }

  template <bool kStream>
  static HWY_INLINE void StoreTwo(V x, V y, std::uint16_t* p) {
#if HWY_TARGET == HWY_AVX3
    if (HWY_LIKELY(_mm512_cmp_ps_mask(x.raw, y.raw, _CMP_UNORD_Q) == 0)) {
      alignas(64) static constexpr std::uint16_t kUpperHalves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                                     23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                                     45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
      const auto halves = _mm512_load_si512(kUpperHalves);
      return StoreLine<kStream>(_mm512_permutex2var_epi16(Rounded(x).raw, halves, Rounded(y).raw), p);
    }
#endif
    Store(x, p);
    Store(y, p + kLanes);
  }

 private:
  // The upper half of each lane is x rounded, unless x is NaN.
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> Rounded(V x) {
    const hn::RebindToUnsigned<D> d32;
    const auto bits = hn::BitCast(d32, x);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
    return hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7FFFu)));
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
  template <bool kStream>
  static HWY_INLINE void StoreTwo(V x, V y, std::uint16_t* p) {
    Store(x, p);
    Store(y, p + kLanes);
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
  template <bool kStream>
  static HWY_INLINE void StoreTwo(V x, V y, std::uint16_t* p) {
#if HWY_TARGET == HWY_AVX3
    const hn::Rebind<hwy::float16_t, D> d16;
    const __m512i lower = _mm512_castsi256_si512(hn::DemoteTo(d16, x).raw);
    StoreLine<kStream>(_mm512_inserti64x4(lower, hn::DemoteTo(d16, y).raw, 1), p);
#else
    Store(x, p);
    Store(y, p + kLanes);
#endif
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
