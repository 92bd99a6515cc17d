// Stage 3, finalize: attn_out of a block, for one panel of columns.
#if defined(KDA_SRC_CHUNK_KDA_FWD_CPU_FINALIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CHUNK_KDA_FWD_CPU_FINALIZE_INL_H_
#undef KDA_SRC_CHUNK_KDA_FWD_CPU_FINALIZE_INL_H_
#else
#define KDA_SRC_CHUNK_KDA_FWD_CPU_FINALIZE_INL_H_
#endif

#include "chunk_kda_fwd/cpu/fwd_h-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// attn_out = scale (q_decayed h + qk v_new), with the state from before the block. A row reads no v_new behind it, so
// that a NaN among later tokens stays there. `from_state` gives rows of q_decayed h.
template <template <int> class Product, int kVectors>
HWY_INLINE void FinalizeBlock(const ChunkShape& s, const Item& item, const RowRange& range, const BlockSlot& slot,
                              const Product<kVectors>& from_state, const float* v_new, float* out) {
  constexpr int kWidth = Panel<kVectors>::kWidth;
  const V scale = Broadcast(s.scale);
  ForRowGroups(range.rows, [&](int first, auto count) HWY_ATTR {
    Accumulators<count.value, kVectors> acc;
    from_state(first, acc);
    MulAddPanel(acc, {slot.qk + first * kBlock, kBlock, 1}, v_new, kWidth, first);
    MulAddTriangle(acc, {slot.qk + first * kBlock + first, kBlock, 1}, v_new + first * kWidth, kWidth);
    ForEach(acc, [&](int r, int c, V sum) HWY_ATTR {
      const V value = hn::Mul(scale, sum);
      hn::Store(value, D(), out + (first + r) * kWidth + c * static_cast<int>(kLanes));
      return value;
    });
  });
  RoundRows(out, kWidth, item.attn_out, range);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
