// Stage 0, gate: what a step's decay is, and gk.
#if defined(KDA_SRC_CHUNK_KDA_FWD_CPU_GATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CHUNK_KDA_FWD_CPU_GATE_INL_H_
#undef KDA_SRC_CHUNK_KDA_FWD_CPU_GATE_INL_H_
#else
#define KDA_SRC_CHUNK_KDA_FWD_CPU_GATE_INL_H_
#endif

#include "chunk_kda_fwd/cpu/kernel.h"
#include "cpu/gate-inl.h"
#include "cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// gate [16,K] = the natural-log gates of the range's tokens.
HWY_INLINE void LoadGates(const ChunkShape& s, const Item& item, const RowRange& range, const float* bias,
                          float* gate) {
  WidenRows(item.g, range, gate, s.K);
  MakeGates(s.gate_mode, item.gate_factor, s.lower_bound, range.rows, s.K, bias, gate);
}

// bias [K] = dt_bias of the item's head, or 0.
HWY_INLINE void LoadBias(const ChunkShape& s, const Item& item, float* bias) {
  for (int c = 0; c < s.K; ++c) bias[c] = item.dt_bias == nullptr ? 0.0f : item.dt_bias[c * item.dt_bias_stride];
}

// gk of the range's tokens; `sum` carries the chunk's cumulative gate from block to block.
HWY_INLINE void StoreGk(const ChunkShape& s, const Item& item, const RowRange& range, const float* HWY_RESTRICT gate,
                        float* HWY_RESTRICT sum, float* HWY_RESTRICT rows) {
  AccumulateGates(range.rows, s.K, gate, sum, rows);
  RoundRows(rows, s.K, item.gk, range);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
