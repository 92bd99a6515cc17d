// Register-blocked products of a few rows with a panel of a few vectors of columns.
#if defined(KDA_SRC_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CPU_GEMM_INL_H_
#undef KDA_SRC_CPU_GEMM_INL_H_
#else
#define KDA_SRC_CPU_GEMM_INL_H_
#endif

#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// Vectors in a full panel; a panel's rows are adjacent in memory.
inline constexpr int kPanelVectors = kRegisters == 32 ? 4 : 2;
inline constexpr int kPanelColumns = kPanelVectors * static_cast<int>(kLanes);

// Rows are worked on in groups of 6, 5 and 5 to every 16: the largest that leave registers for operands, and enough
// independent sums to hide the latency of a multiply-add.
inline constexpr int kGroupRows[3] = {6, 5, 5};

// Sums of Rows x Vectors.
template <int kRows, int kVectors>
struct Accumulators {
  V v[kRows][kVectors];
};

// f(r, c) for every accumulator, unrolled.
template <int kRows, int kVectors, class F>
HWY_INLINE void ForEach(Accumulators<kRows, kVectors>& acc, const F& f) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) acc.v[r][c] = f(r, c, acc.v[r][c]);
  }
}

// A row group's left operand: element (r, k) at data + r * row + k * step.
struct LeftOperand {
  const float* data;
  std::ptrdiff_t row;
  std::ptrdiff_t step;
};

// acc[r][:] += sum over k < count of left(r, k) * panel[k][:], in ascending k for each row, so that a row's bits do not
// depend on the rows beside it.
template <int kRows, int kVectors>
HWY_INLINE void MulAddPanel(Accumulators<kRows, kVectors>& acc, const LeftOperand& left,
                            const float* HWY_RESTRICT panel, std::ptrdiff_t panel_ld, int count) {
  const D d;
  const float* a = left.data;
  for (int k = 0; k < count; ++k) {
    V b[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) b[c] = hn::Load(d, panel + c * static_cast<int>(kLanes));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V x = hn::Set(d, a[r * left.row]);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) acc.v[r][c] = hn::MulAdd(x, b[c], acc.v[r][c]);
    }
    a += left.step;
    panel += panel_ld;
  }
}

// acc[r][:] += sum over k <= r of left(r, k) * panel[k][:]; columns beyond the diagonal are not read.
template <int kRows, int kVectors>
HWY_INLINE void MulAddTriangle(Accumulators<kRows, kVectors>& acc, const LeftOperand& left,
                               const float* HWY_RESTRICT panel, std::ptrdiff_t panel_ld) {
  const D d;
#pragma GCC unroll 8
  for (int k = 0; k < kRows; ++k) {
    V b[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) b[c] = hn::Load(d, panel + k * panel_ld + c * static_cast<int>(kLanes));
#pragma GCC unroll 8
    for (int r = k; r < kRows; ++r) {
      const V x = hn::Set(d, left.data[r * left.row + k * left.step]);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) acc.v[r][c] = hn::MulAdd(x, b[c], acc.v[r][c]);
    }
  }
}

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// f(first row, Constant<rows>) for the groups of 16 rows that begin below `rows`.
template <class F>
HWY_INLINE void ForRowGroups(int rows, const F& f) {
  f(0, Constant<kGroupRows[0]>());
  if (rows > kGroupRows[0]) f(kGroupRows[0], Constant<kGroupRows[1]>());
  if (rows > kGroupRows[0] + kGroupRows[1]) f(kGroupRows[0] + kGroupRows[1], Constant<kGroupRows[2]>());
}

// f(first column, Constant<vectors>) for panels that cover `columns`, a multiple of 16.
template <class F>
HWY_INLINE void ForPanels(int columns, const F& f) {
  int c = 0;
  for (; c + kPanelColumns <= columns; c += kPanelColumns) f(c, Constant<kPanelVectors>());
  // Only vectors of 16 lanes can leave a rest.
  if constexpr (kPanelColumns > 16) {
    const int rest = (columns - c) / static_cast<int>(kLanes);
    if (rest == 3) f(c, Constant<3>());
    if (rest == 2) f(c, Constant<2>());
    if (rest == 1) f(c, Constant<1>());
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
