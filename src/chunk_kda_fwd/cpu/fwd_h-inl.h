// Stage 2, fwd_h: v_new of a block and the state behind it, for one panel of columns.
#if defined(KDA_SRC_CHUNK_KDA_FWD_CPU_FWD_H_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CHUNK_KDA_FWD_CPU_FWD_H_INL_H_
#undef KDA_SRC_CHUNK_KDA_FWD_CPU_FWD_H_INL_H_
#else
#define KDA_SRC_CHUNK_KDA_FWD_CPU_FWD_H_INL_H_
#endif

#include "chunk_kda_fwd/cpu/prefetch.h"
#include "chunk_kda_fwd/cpu/prepare-inl.h"
#include "chunk_kda_fwd/cpu/solve-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// A panel of the state: K rows of kVectors vectors, adjacent.
template <int kVectors>
struct Panel {
  float* state;
  int column;  // first of the state's columns

  static constexpr int kWidth = kVectors * static_cast<int>(kLanes);
  // Columns that are transposed at a time on the way to and from tensors whose K is adjacent.
  static constexpr int kTransposed = kWidth < kBlock ? kWidth : kBlock;
};

// Rows [16,K] times the state, group of rows by group of rows.
template <int kVectors>
struct RowsTimesState {
  const float* rows;
  int K;
  Panel<kVectors> panel;

  HWY_INLINE RowsTimesState(const float* its_rows, const ChunkShape& s, const Panel<kVectors>& its_panel)
      : rows(its_rows), K(s.K), panel(its_panel) {}

  template <int kRows>
  HWY_INLINE void operator()(int first, Accumulators<kRows, kVectors>& acc) const {
    ForEach(acc, [](int, int, V) HWY_ATTR { return hn::Zero(D()); });
    MulAddPanel(acc, {rows + first * K, K, 1}, panel.state, Panel<kVectors>::kWidth, K);
  }
};

// v_new [16][width] of a block: solves (I + A) v_new = beta (v - k_decayed h). `predicted` gives rows of k_decayed h.
template <template <int> class Product, int kVectors>
HWY_INLINE void SolveForVNew(const Item& item, const RowRange& range, const BlockSlot& slot,
                             const Product<kVectors>& predicted, float* v_new) {
  constexpr int kWidth = Panel<kVectors>::kWidth;
  WidenRows(item.v, range, v_new, kWidth);
  Fill(v_new + range.rows * kWidth, (kBlock - range.rows) * kWidth, 0.0f);
  ForRowGroups(range.rows, [&](int first, auto count) HWY_ATTR {
    Accumulators<count.value, kVectors> acc;
    predicted(first, acc);
    ForEach(acc, [&](int r, int c, V sum) HWY_ATTR {
      float* at = v_new + (first + r) * kWidth + c * static_cast<int>(kLanes);
      const V value = hn::Mul(Broadcast(slot.beta[first + r]), hn::Sub(hn::Load(D(), at), sum));
      hn::Store(value, D(), at);
      return value;
    });
  });
  SolveBlock(slot.kk, v_new, kWidth, kWidth);
  if (item.v_new.present()) RoundRows(v_new, kWidth, item.v_new, range);
}

// state = decay * state + k_rest^T v_new.
template <int kVectors>
HWY_INLINE void UpdateState(const ChunkShape& s, int rows, const BlockSlot& slot, const Panel<kVectors>& panel,
                            const float* v_new, ChunkPrefetch& prefetch) {
  constexpr int kWidth = Panel<kVectors>::kWidth;
  for (int k = 0; k < s.K; k += kBlock) {
    ForRowGroups(kBlock, [&](int group, auto count) HWY_ATTR {
      prefetch.step();
      const int first = k + group;
      const auto at = [&](int r, int c)
                          HWY_ATTR { return panel.state + (first + r) * kWidth + c * static_cast<int>(kLanes); };
      Accumulators<count.value, kVectors> acc;
      ForEach(acc, [&](int r, int c, V)
                       HWY_ATTR { return hn::Mul(Broadcast(slot.decay[first + r]), hn::Load(D(), at(r, c))); });
      MulAddPanel(acc, {slot.k_rest + first, 1, s.K}, v_new, kWidth, rows);
      ForEach(acc, [&](int r, int c, V sum) HWY_ATTR {
        hn::Store(sum, D(), at(r, c));
        return sum;
      });
    });
  }
}

// The panel's K x width numbers between the state and initial_state, final_state or h, whichever axis of those is
// adjacent.
template <int kVectors>
HWY_INLINE void StorePanel(const ChunkShape& s, const Panel<kVectors>& panel, const StateView& to, std::int64_t chunk,
                           float* rows) {
  constexpr int kWidth = Panel<kVectors>::kWidth;
  constexpr int kCols = Panel<kVectors>::kTransposed;
  std::byte* data = to.data + chunk * to.chunk * static_cast<std::int64_t>(size_of(to.dtype));
  if (to.k != 1) {
    return RoundRows(panel.state, kWidth, {data, to.k, to.v, to.dtype, to.streams}, {0, s.K, panel.column, kWidth});
  }
  for (int c = 0; c < kWidth; c += kCols) {
    Transpose(panel.state + c, kWidth, s.K, kCols, rows, s.K);
    RoundRows(rows, s.K, {data, to.v, to.k, to.dtype, to.streams}, {panel.column + c, kCols, 0, s.K});
  }
}

template <int kVectors>
HWY_INLINE void LoadPanel(const ChunkShape& s, const StateView& from, const Panel<kVectors>& panel, float* rows) {
  constexpr int kWidth = Panel<kVectors>::kWidth;
  constexpr int kCols = Panel<kVectors>::kTransposed;
  if (!from.present()) return Fill(panel.state, s.K * kWidth, 0.0f);
  if (from.k != 1) {
    return WidenRows({from.data, from.k, from.v, from.dtype}, {0, s.K, panel.column, kWidth}, panel.state, kWidth);
  }
  for (int c = 0; c < kWidth; c += kCols) {
    WidenRows({from.data, from.v, from.k, from.dtype}, {panel.column + c, kCols, 0, s.K}, rows, s.K);
    Transpose(rows, s.K, kCols, s.K, panel.state + c, kWidth);
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
