// Stage 0's and stage 1's outputs that reach over a whole chunk: Aqk, Akk, w, u, qg and kg. Nothing else reads them.
//
// Between blocks, E_ij factors into the decay down to row i of its own block (in q_decayed, k_decayed) and the decay
// from column j to that block's first row (in k_rest_t), both at most 1.
#if defined(KDA_SRC_CHUNK_KDA_FWD_CPU_POST_WU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CHUNK_KDA_FWD_CPU_POST_WU_INL_H_
#undef KDA_SRC_CHUNK_KDA_FWD_CPU_POST_WU_INL_H_
#else
#define KDA_SRC_CHUNK_KDA_FWD_CPU_POST_WU_INL_H_
#endif

#include "chunk_kda_fwd/cpu/prepare-inl.h"
#include "chunk_kda_fwd/cpu/solve-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// One block of a chunk: `index` counts the blocks before it, `range` is its tokens.
struct BlockPosition {
  int index = 0;
  RowRange range;

  [[nodiscard]] int columns_before() const { return index * kBlock; }

  [[nodiscard]] RowRange with_columns(int cols) const { return {range.token, range.rows, 0, cols}; }
};

// dst [16][C], columns before the block: rows [16,K] times k_rest_t, each row times its factor.
HWY_INLINE void TimesEarlierKeys(const ChunkShape& s, const BlockPosition& block, const float* rows,
                                 const float* k_rest_t, const float* factors, float* dst) {
  ForPanels(block.columns_before(), [&](int column, auto vectors) HWY_ATTR {
    ForRowGroups(kBlock, [&](int first, auto count) HWY_ATTR {
      Accumulators<count.value, vectors.value> acc;
      ForEach(acc, [](int, int, V) HWY_ATTR { return hn::Zero(D()); });
      MulAddPanel(acc, {rows + first * s.K, s.K, 1}, k_rest_t + column, s.C, s.K);
      ForEach(acc, [&](int r, int c, V sum) HWY_ATTR {
        const V value = hn::Mul(sum, Broadcast(factors[first + r]));
        hn::Store(value, D(), dst + (first + r) * s.C + column + c * static_cast<int>(kLanes));
        return value;
      });
    });
  });
}

HWY_INLINE void StoreAqk(const ChunkShape& s, const Item& item, const BlockPosition& block,
                         const PrepareScratch& scratch, const BlockSlot& slot) {
  float scales[kBlock];
  for (float& scale : scales) scale = s.scale;
  TimesEarlierKeys(s, block, slot.q_decayed, scratch.k_rest_t, scales, scratch.rows);
  for (int r = 0; r < kBlock; ++r) {
    float* row = scratch.rows + r * s.C + block.columns_before();
    Fill(row, s.C - block.columns_before(), 0.0f);
    for (int j = 0; j <= r; ++j) row[j] = s.scale * slot.qk[r * kBlock + j];
  }
  RoundRows(scratch.rows, s.C, item.Aqk, block.with_columns(s.C));
}

// The solution of (I + A) x = seed over the chunk: rows [C][ld], of which `columns` are in use.
struct Solution {
  float* rows;
  int ld;
  int columns;
  bool triangular;  // column c is 0 above row c
};

// The block's rows of seed - A x, as far as x is of the blocks before it. seed(r, c) gives vectors of the block's rows.
template <class F>
HWY_INLINE void SubstituteEarlier(const ChunkShape& s, const BlockPosition& block, const float* akk_rows,
                                  const Solution& x, const F& seed) {
  const int before = block.columns_before();
  float* own = x.rows + before * x.ld;
  ForPanels(x.columns, [&](int column, auto vectors) HWY_ATTR {
    const int from = x.triangular ? column : 0;
    ForRowGroups(kBlock, [&](int first, auto count) HWY_ATTR {
      Accumulators<count.value, vectors.value> acc;
      ForEach(acc, [&](int r, int c, V) HWY_ATTR { return seed(first + r, column + c * static_cast<int>(kLanes)); });
      MulAddPanel(acc, {akk_rows + first * s.C + from, s.C, 1}, x.rows + from * x.ld + column, x.ld, before - from);
      ForEach(acc, [&](int r, int c, V sum) HWY_ATTR {
        hn::Store(sum, D(), own + (first + r) * x.ld + column + c * static_cast<int>(kLanes));
        return sum;
      });
    });
  });
}

// Akk: the seed is the identity.
HWY_INLINE void StoreAkk(const ChunkShape& s, const Item& item, const BlockPosition& block,
                         const PrepareScratch& scratch, const BlockSlot& slot) {
  const int before = block.columns_before();
  float* rows = scratch.akk + before * s.C;
  SubstituteEarlier(s, block, scratch.akk_rows, {scratch.akk, s.C, before, true},
                    [](int, int) HWY_ATTR { return hn::Zero(D()); });
  for (int r = 0; r < kBlock; ++r) {
    Fill(rows + r * s.C + before, s.C - before, 0.0f);
    rows[r * s.C + before + r] = 1.0f;
  }
  SolveBlock(slot.kk, rows, s.C, before + kBlock);
  RoundRows(rows, s.C, item.Akk, block.with_columns(s.C));
}

// Vectors of rows [16,K], each column times its factor [K].
struct TimesColumns {
  const float* rows;
  const float* factors;
  int K;

  HWY_INLINE V operator()(int r, int c) const {
    return hn::Mul(hn::Load(D(), rows + r * K + c), hn::Load(D(), factors + c));
  }
};

HWY_INLINE void StoreW(const ChunkShape& s, const Item& item, const BlockPosition& block, const PrepareScratch& scratch,
                       const BlockSlot& slot) {
  float* rows = scratch.w + block.columns_before() * s.K;
  const TimesColumns k_decayed{slot.k_decayed, scratch.prefix, s.K};
  SubstituteEarlier(s, block, scratch.akk_rows, {scratch.w, s.K, s.K, false},
                    [&](int r, int c) HWY_ATTR { return hn::Mul(Broadcast(slot.beta[r]), k_decayed(r, c)); });
  SolveBlock(slot.kk, rows, s.K, s.K);
  RoundRows(rows, s.K, item.w, block.with_columns(s.K));
}

HWY_INLINE void StoreU(const ChunkShape& s, const Item& item, const BlockPosition& block, const PrepareScratch& scratch,
                       const BlockSlot& slot) {
  float* rows = scratch.u + block.columns_before() * s.V;
  WidenRows(item.v, block.with_columns(s.V), rows, s.V);
  Fill(rows + block.range.rows * s.V, (kBlock - block.range.rows) * s.V, 0.0f);
  SubstituteEarlier(s, block, scratch.akk_rows, {scratch.u, s.V, s.V, false}, [&](int r, int c) HWY_ATTR {
    return hn::Mul(Broadcast(slot.beta[r]), hn::Load(D(), rows + r * s.V + c));
  });
  SolveBlock(slot.kk, rows, s.V, s.V);
  RoundRows(rows, s.V, item.u, block.with_columns(s.V));
}

// Moves prefix and k_rest_t past the block.
HWY_INLINE void PassBlock(const ChunkShape& s, const BlockPosition& block, const PrepareScratch& scratch,
                          const BlockSlot& slot) {
  const D d;
  for (int c = 0; c < s.K; c += static_cast<int>(kLanes)) {
    hn::Store(hn::Mul(hn::Load(d, scratch.prefix + c), hn::Load(d, slot.decay + c)), d, scratch.prefix + c);
  }
  for (int k = 0; k < s.K; ++k) {
    const V decay = Broadcast(slot.decay[k]);
    float* row = scratch.k_rest_t + k * s.C;
    for (int c = 0; c < block.columns_before(); c += static_cast<int>(kLanes)) {
      hn::Store(hn::Mul(decay, hn::Load(d, row + c)), d, row + c);
    }
  }
  Transpose(slot.k_rest, s.K, kBlock, s.K, scratch.k_rest_t + block.columns_before(), s.C);
}

// The outputs of one block that reach over the chunk, kg excepted.
HWY_INLINE void PostBlock(const ChunkShape& s, const Item& item, const BlockPosition& block,
                          const PrepareScratch& scratch, const BlockSlot& slot) {
  if (block.index == 0) Fill(scratch.prefix, s.K, 1.0f);
  if (item.qg.present()) {
    RoundValues(TimesColumns{slot.q_decayed, scratch.prefix, s.K}, item.qg, block.with_columns(s.K));
  }
  if (item.Aqk.present()) StoreAqk(s, item, block, scratch, slot);
  if (item.wants_akk()) {
    float minus_beta[kBlock];
    for (int r = 0; r < kBlock; ++r) minus_beta[r] = -slot.beta[r];
    TimesEarlierKeys(s, block, slot.k_decayed, scratch.k_rest_t, minus_beta, scratch.akk_rows);
    if (item.Akk.present()) StoreAkk(s, item, block, scratch, slot);
    if (item.w.present()) StoreW(s, item, block, scratch, slot);
    if (item.u.present()) StoreU(s, item, block, scratch, slot);
  }
  PassBlock(s, block, scratch, slot);
}

// kg of a whole chunk, last block first; prefix is free by now and carries the decay of the blocks behind.
HWY_INLINE void StoreKg(const ChunkShape& s, const Item& item, const RowRange& chunk, const PrepareScratch& scratch,
                        const ChunkSlot& slot) {
  float* suffix = scratch.prefix;
  Fill(suffix, s.K, 1.0f);
  for (int b = (chunk.rows - 1) / kBlock; b >= 0; --b) {
    const BlockSlot& block = slot.blocks[b];
    const int rows = chunk.rows - b * kBlock < kBlock ? chunk.rows - b * kBlock : kBlock;
    RoundValues(TimesColumns{block.k_rest, suffix, s.K}, item.kg, {chunk.token + b * kBlock, rows, 0, s.K});
    const D d;
    for (int c = 0; c < s.K; c += static_cast<int>(kLanes)) {
      hn::Store(hn::Mul(hn::Load(d, suffix + c), hn::Load(d, block.decay + c)), d, suffix + c);
    }
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
