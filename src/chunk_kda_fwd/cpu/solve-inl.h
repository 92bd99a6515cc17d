// The unit lower triangular system of one block, by forward substitution: the one way that stays exact when keys are
// alike.
#if defined(KDA_SRC_CHUNK_KDA_FWD_CPU_SOLVE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CHUNK_KDA_FWD_CPU_SOLVE_INL_H_
#undef KDA_SRC_CHUNK_KDA_FWD_CPU_SOLVE_INL_H_
#else
#define KDA_SRC_CHUNK_KDA_FWD_CPU_SOLVE_INL_H_
#endif

#include "chunk_kda_fwd/cpu/kernel.h"
#include "cpu/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// One vector of columns: x[i] += sum over j < i of kk[i,j] x[j], i ascending, in place.
HWY_INLINE void SolveColumns(const float* HWY_RESTRICT kk, float* HWY_RESTRICT x, int ld) {
  const D d;
  constexpr int kRows = kRegisters == 32 ? 16 : 8;
#pragma GCC unroll 1
  for (int first = 0; first < kBlock; first += kRows) {
    V rows[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) rows[r] = hn::Load(d, x + (first + r) * ld);
#pragma GCC unroll 1
    for (int j = 0; j < first; ++j) {
      const V solved = hn::Load(d, x + j * ld);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        rows[r] = hn::MulAdd(hn::Set(d, kk[(first + r) * kBlock + j]), solved, rows[r]);
      }
    }
#pragma GCC unroll 16
    for (int j = 0; j < kRows; ++j) {
#pragma GCC unroll 16
      for (int r = j + 1; r < kRows; ++r) {
        rows[r] = hn::MulAdd(hn::Set(d, kk[(first + r) * kBlock + first + j]), rows[j], rows[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) hn::Store(rows[r], d, x + (first + r) * ld);
  }
}

// x [16][ld], `columns` of it: x = (I + A)^{-1} x, with kk = -A of the block.
HWY_INLINE void SolveBlock(const float* kk, float* x, int ld, int columns) {
#pragma GCC unroll 1
  for (int c = 0; c < columns; c += static_cast<int>(kLanes)) SolveColumns(kk, x + c, ld);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
