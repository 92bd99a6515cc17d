// The products with the state on bf16 numbers with fp32 sums, where AVX-512 has the instruction. Factors are held in
// pairs, as vdpbf16ps wants them: two neighbours of the axis that is summed over. It takes subnormal factors and sums
// for zero.
#if defined(KDA_SRC_CHUNK_KDA_FWD_CPU_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CHUNK_KDA_FWD_CPU_PAIRS_INL_H_
#undef KDA_SRC_CHUNK_KDA_FWD_CPU_PAIRS_INL_H_
#else
#define KDA_SRC_CHUNK_KDA_FWD_CPU_PAIRS_INL_H_
#endif

#include "chunk_kda_fwd/cpu/kernel.h"
#include "chunk_kda_fwd/cpu/prefetch.h"
#include "cpu/gemm-inl.h"

#if HWY_TARGET == HWY_AVX3
// Highway's lambdas (HWY_ATTR) know nothing of this instruction set, so there are none here.
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16")
namespace kda::cpu::HWY_NAMESPACE {

// Whether this CPU has what the functions below need.
inline bool HasPairProducts() { return __builtin_cpu_supports("avx512bf16") != 0; }

// Pairs of adjacent elements of two vectors, to nearest even.
HWY_INLINE __m512i PairsWithin(V low, V high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.raw, low.raw));
}

// Pairs (even[c], odd[c]).
HWY_INLINE __m512i PairsAcross(V even, V odd) {
  alignas(64) static constexpr std::uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), PairsWithin(even, odd));
}

// dst [16][K/2] = src [16][K].
inline void PairChannels(int K, const float* HWY_RESTRICT src, Pair* HWY_RESTRICT dst) {
  const D d;
  const int count = kBlock * K;
  for (int c = 0; c < count; c += 32) {
    _mm512_store_si512(dst + c / 2, PairsWithin(hn::Load(d, src + c), hn::Load(d, src + c + 16)));
  }
}

// dst [rows/2][cols] = pairs of rows of src [rows][cols], rounded up; the row behind an odd last one counts as 0.
inline void PairRows(int rows, int cols, const float* HWY_RESTRICT src, Pair* HWY_RESTRICT dst) {
  const D d;
  for (int r = 0; r < rows; r += 2) {
    for (int c = 0; c < cols; c += 16) {
      const V even = hn::Load(d, src + r * cols + c);
      const V odd = r + 1 < rows ? hn::Load(d, src + (r + 1) * cols + c) : hn::Zero(d);
      _mm512_store_si512(dst + r / 2 * cols + c, PairsAcross(even, odd));
    }
  }
}

inline void PairBlock(const ChunkShape& s, const BlockSlot& slot) {
  PairChannels(s.K, slot.q_decayed, slot.q_decayed_pairs);
  PairChannels(s.K, slot.k_decayed, slot.k_decayed_pairs);
  PairRows(kBlock, s.K, slot.k_rest, slot.k_rest_pairs);
}

// A row group's left operand: pair (r, i) at data + r * row + i * step.
struct LeftPairs {
  const Pair* data;
  std::ptrdiff_t row;
  std::ptrdiff_t step;
};

// acc[r][:] += sum over i < count of left(r, i) . panel[i][:], in ascending i for each row.
template <int kRows, int kVectors>
HWY_INLINE void MulAddPairs(Accumulators<kRows, kVectors>& acc, const LeftPairs& left, const Pair* HWY_RESTRICT panel,
                            int count) {
  const Pair* a = left.data;
  for (int i = 0; i < count; ++i) {
    __m512bh b[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) b[c] = reinterpret_cast<__m512bh>(_mm512_load_si512(panel + c * 16));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[r * left.row])));
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) acc.v[r][c] = V{_mm512_dpbf16_ps(acc.v[r][c].raw, x, b[c])};
    }
    a += left.step;
    panel += kVectors * 16;
  }
}

// dst [kRows][width] = rows [kRows][K/2] times the state [K/2][width].
template <int kRows, int kVectors>
HWY_INLINE void GroupTimesState(int K, const Pair* rows, const Pair* state, float* dst) {
  const D d;
  Accumulators<kRows, kVectors> acc;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) acc.v[r][c] = hn::Zero(d);
  }
  MulAddPairs(acc, {rows, K / 2, 1}, state, K / 2);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) hn::Store(acc.v[r][c], d, dst + (r * kVectors + c) * 16);
  }
}

// dst [16][width] = rows [16][K/2] times the state [K/2][width], for the row groups that begin below `count`.
template <int kVectors>
void TimesState(int count, int K, const Pair* rows, const Pair* state, float* dst) {
  constexpr int kWidth = kVectors * 16;
  constexpr int kSecond = kGroupRows[0];
  constexpr int kThird = kGroupRows[0] + kGroupRows[1];
  GroupTimesState<kGroupRows[0], kVectors>(K, rows, state, dst);
  if (count > kSecond) {
    GroupTimesState<kGroupRows[1], kVectors>(K, rows + kSecond * (K / 2), state, dst + kSecond * kWidth);
  }
  if (count > kThird) {
    GroupTimesState<kGroupRows[2], kVectors>(K, rows + kThird * (K / 2), state, dst + kThird * kWidth);
  }
}

// Rows [first, first + kRows) of the state and of its pairs: decay * state + k_rest^T v_new.
template <int kRows, int kVectors>
HWY_INLINE void UpdateGroup(int first, int K, int pairs, const BlockSlot& slot, const Pair* v_new, float* state,
                            Pair* state_pairs) {
  static_assert(kRows % 2 == 0);
  const D d;
  constexpr int kWidth = kVectors * 16;
  Accumulators<kRows, kVectors> acc;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const V decay = Broadcast(slot.decay[first + r]);
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) acc.v[r][c] = hn::Mul(decay, hn::Load(d, state + (first + r) * kWidth + c * 16));
  }
  MulAddPairs(acc, {slot.k_rest_pairs + first, 1, K}, v_new, pairs);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r += 2) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      hn::Store(acc.v[r][c], d, state + (first + r) * kWidth + c * 16);
      hn::Store(acc.v[r + 1][c], d, state + (first + r + 1) * kWidth + c * 16);
      _mm512_store_si512(state_pairs + (first + r) / 2 * kWidth + c * 16, PairsAcross(acc.v[r][c], acc.v[r + 1][c]));
    }
  }
}

// state [K][width] = decay * state + k_rest^T v_new over the first `rows` tokens, and its pairs [K/2][width] anew.
template <int kVectors>
void UpdateStateAndPairs(const ChunkShape& s, int rows, const BlockSlot& slot, const Pair* v_new, float* state,
                         Pair* state_pairs, ChunkPrefetch& prefetch) {
  const int pairs = (rows + 1) / 2;
  for (int k = 0; k < s.K; k += kBlock) {
    prefetch.step();
    UpdateGroup<6, kVectors>(k, s.K, pairs, slot, v_new, state, state_pairs);
    prefetch.step();
    UpdateGroup<6, kVectors>(k + 6, s.K, pairs, slot, v_new, state, state_pairs);
    prefetch.step();
    UpdateGroup<4, kVectors>(k + 12, s.K, pairs, slot, v_new, state, state_pairs);
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_POP_ATTRIBUTES
#endif  // HWY_AVX3

#endif  // per-target include guard
