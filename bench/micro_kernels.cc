// This file is compiled once per instruction set, like the kernels whose parts it calls.

#include "micro_kernels.h"

#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "micro_kernels.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "chunk_kda_fwd/cpu/finalize-inl.h"
#include "chunk_kda_fwd/cpu/fwd_h-inl.h"
#include "chunk_kda_fwd/cpu/prepare-inl.h"
#include "chunk_kda_fwd/cpu/solve-inl.h"
#include "cpu/gate-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/targets.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace {

double MultiplyAdd(std::int64_t rounds) {
  constexpr int kSums = 12;
  const V factor = Broadcast(0.999f);
  V sums[kSums];
  for (V& sum : sums) sum = Broadcast(1.0f);
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int s = 0; s < kSums; ++s) sums[s] = hn::MulAdd(sums[s], factor, factor);
  }
  V total = sums[0];
  for (int s = 1; s < kSums; ++s) total = hn::Add(total, sums[s]);
  volatile float result = hn::GetLane(total);
  static_cast<void>(result);
  return 2.0 * kSums * static_cast<double>(kLanes) * static_cast<double>(rounds);
}

void PanelProduct(int depth, int columns, const float* left, const float* right, float* out) {
  ForPanels(columns, [&](int column, auto vectors) HWY_ATTR {
    constexpr int kWidth = vectors.value * static_cast<int>(kLanes);
    ForRowGroups(kBlock, [&](int first, auto count) HWY_ATTR {
      Accumulators<count.value, vectors.value> acc;
      ForEach(acc, [](int, int, V) HWY_ATTR { return hn::Zero(D()); });
      MulAddPanel(acc, {left + first * depth, depth, 1}, right + column * depth, kWidth, depth);
      ForEach(acc, [&](int r, int c, V sum) HWY_ATTR {
        hn::Store(sum, D(), out + (first + r) * columns + column + c * static_cast<int>(kLanes));
        return sum;
      });
    });
  });
}

void Widen(const Rows& from, const RowRange& range, float* to, int ld) { WidenRows(from, range, to, ld); }

void Round(const float* from, int ld, const Rows& to, const RowRange& range) { RoundRows(from, ld, to, range); }

void Exponentials(int count, const float* from, float* to) {
  for (int i = 0; i < count; i += static_cast<int>(kLanes)) hn::Store(Exp(hn::Load(D(), from + i)), D(), to + i);
}

void Gate(GateMode mode, int rows, int cols, const float* bias, float* gate) {
  MakeGates(mode, 1.3f, -5.0f, rows, cols, bias, gate);
}

void Solve(const float* kk, int columns, float* x) { SolveBlock(kk, x, columns, columns); }

void Prepare(const ChunkShape& s, const Item& item, const PrepareScratch& scratch, const BlockSlot& slot) {
  PrepareBlock(s, item, {0, kBlock, 0, s.K}, scratch, slot);
}

// f(panel, range) for every panel of the state.
template <class F>
HWY_INLINE void ForStatePanels(const ChunkShape& s, float* state, const F& f) {
  ForPanels(s.V, [&](int column, auto vectors) HWY_ATTR {
    using StatePanel = Panel<vectors.value>;
    f(StatePanel{state + column * s.K, column}, RowRange{0, kBlock, column, StatePanel::kWidth});
  });
}

void Predict(const ChunkShape& s, const Item& item, const BlockSlot& slot, float* state, float* v_new) {
  ForStatePanels(s, state, [&](const auto& panel, const RowRange& range) HWY_ATTR {
    SolveForVNew(item, range, slot, RowsTimesState(slot.k_decayed, s, panel), v_new + panel.column * kBlock);
  });
}

void Finalize(const ChunkShape& s, const Item& item, const BlockSlot& slot, float* state, const float* v_new,
              float* out) {
  ForStatePanels(s, state, [&](const auto& panel, const RowRange& range) HWY_ATTR {
    FinalizeBlock(s, item, range, slot, RowsTimesState(slot.q_decayed, s, panel), v_new + panel.column * kBlock, out);
  });
}

void Update(const ChunkShape& s, const BlockSlot& slot, float* state, const float* v_new) {
  ChunkPrefetch none;
  ForStatePanels(s, state, [&](const auto& panel, const RowRange& range) HWY_ATTR {
    UpdateState(s, range.rows, slot, panel, v_new + panel.column * kBlock, none);
  });
}

}  // namespace

const bench::MicroKernels& MicroKernelTable() {
  static constexpr bench::MicroKernels kKernels = {static_cast<int>(kLanes),
                                                   kPanelColumns,
                                                   &MultiplyAdd,
                                                   &PanelProduct,
                                                   &Widen,
                                                   &Round,
                                                   &Exponentials,
                                                   &Gate,
                                                   &Solve,
                                                   &Prepare,
                                                   &Predict,
                                                   &Finalize,
                                                   &Update};
  return kKernels;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {
namespace {

const bench::MicroKernels& chosen() { return KDA_FOR_CHOSEN_TARGET(MicroKernelTable)(); }

}  // namespace
}  // namespace kda::cpu

const kda::bench::MicroKernels& kda::bench::micro_kernels() {
  static const MicroKernels& kernels = cpu::chosen();
  return kernels;
}
#endif  // HWY_ONCE
