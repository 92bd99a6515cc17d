// chunk_kda_fwd's CPU kernels: this file is compiled once per instruction set, its stages lie in the -inl.h files
// beside it.

#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "chunk_kda_fwd/cpu/kernel.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <algorithm>

#include "chunk_kda_fwd/cpu/finalize-inl.h"
#include "chunk_kda_fwd/cpu/fwd_h-inl.h"
#include "chunk_kda_fwd/cpu/gate-inl.h"
#include "chunk_kda_fwd/cpu/kernel.h"
#include "chunk_kda_fwd/cpu/pairs-inl.h"
#include "chunk_kda_fwd/cpu/post_wu-inl.h"
#include "chunk_kda_fwd/cpu/prepare-inl.h"
#include "cpu/targets.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace {

// The tokens of a chunk, all channels.
RowRange ChunkRange(const ChunkShape& s, const Item& item, std::int64_t chunk) {
  const std::int64_t token = chunk * s.C;
  return {token, static_cast<int>(std::min<std::int64_t>(s.C, item.tokens - token)), 0, s.K};
}

// The tokens of block b of a chunk.
RowRange BlockRange(const RowRange& chunk, int b, int column, int cols) {
  return {chunk.token + b * kBlock, std::min(kBlock, chunk.rows - b * kBlock), column, cols};
}

void Prepare(const ChunkShape& s, const Item& item, std::int64_t chunk, const ChunkSlot& slot,
             const PrepareScratch& scratch) {
  const RowRange range = ChunkRange(s, item, chunk);
  LoadBias(s, item, scratch.bias);
  if (item.gk.present()) Fill(scratch.gk, s.K, 0.0f);
  for (int b = 0; b * kBlock < range.rows; ++b) {
    const RowRange block = BlockRange(range, b, 0, s.K);
    PrepareBlock(s, item, block, scratch, slot.blocks[b]);
    if (s.spans_blocks) PostBlock(s, item, {b, block}, scratch, slot.blocks[b]);
#if HWY_TARGET == HWY_AVX3
    if (s.products == StateProducts::kBFloat16) PairBlock(s, slot.blocks[b]);
#endif
  }
  if (item.kg.present()) StoreKg(s, item, range, scratch, slot);
  hwy::FlushStream();
}

template <int kVectors>
void AdvancePanel(const ChunkShape& s, const Item& item, std::int64_t chunk, const ChunkSlot& slot,
                  const Panel<kVectors>& panel, const StateScratch& scratch, ChunkPrefetch& prefetch) {
  const RowRange range = ChunkRange(s, item, chunk);
  if (item.h.present()) StorePanel(s, panel, item.h, chunk, scratch.rows);
  for (int b = 0; b * kBlock < range.rows; ++b) {
    const RowRange block = BlockRange(range, b, panel.column, Panel<kVectors>::kWidth);
    const BlockSlot& at = slot.blocks[b];
    SolveForVNew(item, block, at, RowsTimesState(at.k_decayed, s, panel), scratch.v_new);
    FinalizeBlock(s, item, block, at, RowsTimesState(at.q_decayed, s, panel), scratch.v_new, scratch.out);
    UpdateState(s, block.rows, at, panel, scratch.v_new, prefetch);
  }
}

#if HWY_TARGET == HWY_AVX3
// Rows times the state, computed before.
template <int kVectors>
struct ComputedRows {
  const float* rows;  // [16,width]

  template <int kRows>
  HWY_INLINE void operator()(int first, Accumulators<kRows, kVectors>& acc) const {
    ForEach(acc, [&](int r, int c, V) HWY_ATTR {
      return hn::Load(D(), rows + ((first + r) * kVectors + c) * static_cast<int>(kLanes));
    });
  }
};

// The same with bf16 products.
template <int kVectors>
void AdvancePanelByPairs(const ChunkShape& s, const Item& item, std::int64_t chunk, const ChunkSlot& slot,
                         const Panel<kVectors>& panel, const StateScratch& scratch, ChunkPrefetch& prefetch) {
  constexpr int kWidth = Panel<kVectors>::kWidth;
  const RowRange range = ChunkRange(s, item, chunk);
  if (item.h.present()) StorePanel(s, panel, item.h, chunk, scratch.rows);
  PairRows(s.K, kWidth, panel.state, scratch.state_pairs);
  for (int b = 0; b * kBlock < range.rows; ++b) {
    const RowRange block = BlockRange(range, b, panel.column, kWidth);
    const BlockSlot& at = slot.blocks[b];
    const ComputedRows<kVectors> product{scratch.out};
    TimesState<kVectors>(block.rows, s.K, at.k_decayed_pairs, scratch.state_pairs, scratch.out);
    SolveForVNew(item, block, at, product, scratch.v_new);
    TimesState<kVectors>(block.rows, s.K, at.q_decayed_pairs, scratch.state_pairs, scratch.out);
    FinalizeBlock(s, item, block, at, product, scratch.v_new, scratch.out);
    PairRows(block.rows, kWidth, scratch.v_new, scratch.v_new_pairs);
    UpdateStateAndPairs<kVectors>(s, block.rows, at, scratch.v_new_pairs, panel.state, scratch.state_pairs, prefetch);
  }
}
#endif

// f(panel) for every panel of the columns.
template <class F>
HWY_INLINE void ForStatePanels(const ChunkShape& s, float* state, Columns columns, const F& f) {
  ForPanels(columns.end - columns.begin, [&](int column, auto vectors) HWY_ATTR {
    const int at = columns.begin + column;
    f(Panel<vectors.value>{state + static_cast<std::ptrdiff_t>(at) * s.K, at});
  });
}

void Advance(const ChunkShape& s, const Item& item, std::int64_t chunk, const ChunkSlot& slot, float* state,
             Columns columns, const StateScratch& scratch, ChunkPrefetch& prefetch) {
  ForStatePanels(s, state, columns,
                 [&](const auto& panel) HWY_ATTR { AdvancePanel(s, item, chunk, slot, panel, scratch, prefetch); });
  hwy::FlushStream();
}

#if HWY_TARGET == HWY_AVX3
void AdvanceByPairs(const ChunkShape& s, const Item& item, std::int64_t chunk, const ChunkSlot& slot, float* state,
                    Columns columns, const StateScratch& scratch, ChunkPrefetch& prefetch) {
  ForStatePanels(s, state, columns, [&](const auto& panel) HWY_ATTR {
    AdvancePanelByPairs(s, item, chunk, slot, panel, scratch, prefetch);
  });
  hwy::FlushStream();
}
#endif

void LoadState(const ChunkShape& s, const Item& item, float* state, Columns columns, const StateScratch& scratch) {
  ForStatePanels(s, state, columns,
                 [&](const auto& panel) HWY_ATTR { LoadPanel(s, item.initial_state, panel, scratch.rows); });
}

void StoreState(const ChunkShape& s, const Item& item, const float* state, Columns columns,
                const StateScratch& scratch) {
  // A panel is written to elsewhere; StorePanel only reads it.
  ForStatePanels(s, const_cast<float*>(state), columns,
                 [&](const auto& panel) HWY_ATTR { StorePanel(s, panel, item.final_state, 0, scratch.rows); });
  hwy::FlushStream();
}

}  // namespace

const ChunkKernels& Kernels(StateProducts products) {
#if HWY_TARGET == HWY_AVX3
  static constexpr ChunkKernels kByPairs = {StateProducts::kBFloat16, kPanelColumns, &Prepare,
                                            &AdvanceByPairs,          &LoadState,    &StoreState};
  if (products == StateProducts::kBFloat16 && HasPairProducts()) return kByPairs;
#else
  static_cast<void>(products);
#endif
  static constexpr ChunkKernels kKernels = {
      StateProducts::kFloat32, kPanelColumns, &Prepare, &Advance, &LoadState, &StoreState};
  return kKernels;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {

const ChunkKernels& chunk_kernels(StateProducts products) {
  static const auto kernels = KDA_FOR_CHOSEN_TARGET(Kernels);
  return kernels(products);
}

}  // namespace kda::cpu
#endif  // HWY_ONCE
