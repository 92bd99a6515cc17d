// Moves rows between tensors of any dtype and stride and dense fp32 scratch.
#if defined(KDA_SRC_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CPU_ROWS_INL_H_
#undef KDA_SRC_CPU_ROWS_INL_H_
#else
#define KDA_SRC_CPU_ROWS_INL_H_
#endif

#include "cpu/rows.h"
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

template <class Format>
HWY_INLINE void WidenRow(const typename Format::Storage* src, std::int64_t inner, int cols, float* HWY_RESTRICT dst) {
  if (HWY_LIKELY(inner == 1)) {
    for (int c = 0; c < cols; c += static_cast<int>(kLanes)) hn::Store(Format::Load(src + c), D(), dst + c);
  } else {
    for (int c = 0; c < cols; ++c) dst[c] = LoadOne<Format>(src + c * inner);
  }
}

// `values` gives the vector from column c on.
template <class Format, bool kStream, class F>
HWY_INLINE void RoundDenseRow(const F& values, int cols, typename Format::Storage* dst) {
  constexpr int kStep = static_cast<int>(kLanes);
  int c = 0;
  for (; c + 2 * kStep <= cols; c += 2 * kStep) {
    Format::template StoreTwo<kStream>(values(c), values(c + kStep), dst + c);
  }
  if (c < cols) Format::Store(values(c), dst + c);
}

template <class Format, class F>
HWY_INLINE void RoundRow(const F& values, int cols, typename Format::Storage* dst, std::int64_t inner, bool streams) {
  if (HWY_UNLIKELY(inner != 1)) {
    HWY_ALIGN float lanes[kLanes];
    for (int c = 0; c < cols; ++c) {
      const int lane = c % static_cast<int>(kLanes);
      if (lane == 0) hn::Store(values(c), D(), lanes);
      StoreOne<Format>(lanes[lane], dst + c * inner);
    }
  } else if (streams && reinterpret_cast<std::uintptr_t>(dst) % 64 == 0) {
    RoundDenseRow<Format, true>(values, cols, dst);
  } else {
    RoundDenseRow<Format, false>(values, cols, dst);
  }
}

// Calls f with the format of `dtype` as a value.
template <class F>
HWY_INLINE void WithFormat(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kBFloat16:
      return f(BFloat16());
    case Dtype::kFloat16:
      return f(Float16());
    default:
      return f(Float32());
  }
}

// The same for a dtype of 16 bits.
template <class F>
HWY_INLINE void WithHalfFormat(Dtype dtype, const F& f) {
  if (dtype == Dtype::kBFloat16) return f(BFloat16());
  return f(Float16());
}

// dst [range.rows][ld] = the range of src in fp32. dst is aligned to a vector, ld a multiple of one.
HWY_INLINE void WidenRows(const Rows& src, const RowRange& range, float* HWY_RESTRICT dst, int ld) {
  WithFormat(src.dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    for (int r = 0; r < range.rows; ++r) {
      const auto* row = src.at<typename Format::Storage>(range.token + r, range.column);
      WidenRow<Format>(row, src.inner, range.cols, dst + r * ld);
    }
  });
}

// The range of dst = values(r, c), vectors from row r and column c of the range on, rounded to dst's dtype. What is
// streamed is there for other threads after hwy::FlushStream.
template <class F>
HWY_INLINE void RoundValues(const F& values, const Rows& dst, const RowRange& range) {
  WithFormat(dst.dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    for (int r = 0; r < range.rows; ++r) {
      auto* row = dst.at<typename Format::Storage>(range.token + r, range.column);
      RoundRow<Format>([&](int c) HWY_ATTR { return values(r, c); }, range.cols, row, dst.inner, dst.streams);
    }
  });
}

// The same from src [range.rows][ld].
HWY_INLINE void RoundRows(const float* HWY_RESTRICT src, int ld, const Rows& dst, const RowRange& range) {
  RoundValues([&](int r, int c) HWY_ATTR { return hn::Load(D(), src + r * ld + c); }, dst, range);
}

#if HWY_TARGET == HWY_AVX3
// dst [16][dst_ld] = transpose of src [16][src_ld], in registers.
HWY_INLINE void TransposeSquare(const float* HWY_RESTRICT src, int src_ld, float* HWY_RESTRICT dst, int dst_ld) {
  const D d;
  const hn::Repartition<double, D> pairs;
  __m512 quads[4][4];  // [i][j]: block b has rows 4 i to 4 i + 3 of column 4 b + j
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const float* from = src + 4 * i * src_ld;
    const V r0 = hn::Load(d, from);
    const V r1 = hn::Load(d, from + src_ld);
    const V r2 = hn::Load(d, from + 2 * src_ld);
    const V r3 = hn::Load(d, from + 3 * src_ld);
    const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, r0, r1));
    const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, r2, r3));
    const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, r0, r1));
    const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, r2, r3));
    quads[i][0] = hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)).raw;
    quads[i][1] = hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)).raw;
    quads[i][2] = hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)).raw;
    quads[i][3] = hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)).raw;
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 even01 = _mm512_shuffle_f32x4(quads[0][j], quads[1][j], 0x88);
    const __m512 even23 = _mm512_shuffle_f32x4(quads[2][j], quads[3][j], 0x88);
    const __m512 odd01 = _mm512_shuffle_f32x4(quads[0][j], quads[1][j], 0xDD);
    const __m512 odd23 = _mm512_shuffle_f32x4(quads[2][j], quads[3][j], 0xDD);
    hn::Store(V{_mm512_shuffle_f32x4(even01, even23, 0x88)}, d, dst + j * dst_ld);
    hn::Store(V{_mm512_shuffle_f32x4(odd01, odd23, 0x88)}, d, dst + (4 + j) * dst_ld);
    hn::Store(V{_mm512_shuffle_f32x4(even01, even23, 0xDD)}, d, dst + (8 + j) * dst_ld);
    hn::Store(V{_mm512_shuffle_f32x4(odd01, odd23, 0xDD)}, d, dst + (12 + j) * dst_ld);
  }
}

// dst [cols][dst_ld] = transpose of src [rows][src_ld]; rows and cols multiples of 16, and everything aligned.
HWY_INLINE void Transpose(const float* HWY_RESTRICT src, int src_ld, int rows, int cols, float* HWY_RESTRICT dst,
                          int dst_ld) {
  for (int r = 0; r < rows; r += 16) {
    for (int c = 0; c < cols; c += 16) TransposeSquare(src + r * src_ld + c, src_ld, dst + c * dst_ld + r, dst_ld);
  }
}
#else
// dst [cols][dst_ld] = transpose of src [rows][src_ld]; rows a multiple of 4, cols of kLanes.
HWY_INLINE void Transpose(const float* HWY_RESTRICT src, int src_ld, int rows, int cols, float* HWY_RESTRICT dst,
                          int dst_ld) {
  const D d;
  const hn::Repartition<double, D> pairs;
  const hn::FixedTag<float, 4> d4;
  HWY_ALIGN float quads[4 * kLanes];
  for (int r = 0; r < rows; r += 4) {
    for (int c = 0; c < cols; c += static_cast<int>(kLanes)) {
      const float* from = src + r * src_ld + c;
      const V r0 = hn::LoadU(d, from);
      const V r1 = hn::LoadU(d, from + src_ld);
      const V r2 = hn::LoadU(d, from + 2 * src_ld);
      const V r3 = hn::LoadU(d, from + 3 * src_ld);
      const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, r0, r1));
      const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, r2, r3));
      const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, r0, r1));
      const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, r2, r3));
      // Each 128-bit block b of vector i now gets the four rows of column 4 b + i.
      hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, quads);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, quads + kLanes);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d, quads + 2 * kLanes);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d, quads + 3 * kLanes);
      for (std::size_t b = 0; b < kLanes / 4; ++b) {
        for (std::size_t i = 0; i < 4; ++i) {
          float* to = dst + (c + static_cast<int>(4 * b + i)) * dst_ld + r;
          hn::StoreU(hn::Load(d4, quads + i * kLanes + 4 * b), d4, to);
        }
      }
    }
  }
}
#endif

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
