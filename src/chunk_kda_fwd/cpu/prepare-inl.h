// Stage 0, prepare: everything about a block that does not depend on the state.
#if defined(KDA_SRC_CHUNK_KDA_FWD_CPU_PREPARE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CHUNK_KDA_FWD_CPU_PREPARE_INL_H_
#undef KDA_SRC_CHUNK_KDA_FWD_CPU_PREPARE_INL_H_
#else
#define KDA_SRC_CHUNK_KDA_FWD_CPU_PREPARE_INL_H_
#endif

#include "chunk_kda_fwd/cpu/gate-inl.h"
#include "cpu/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

HWY_INLINE void Fill(float* HWY_RESTRICT dst, int count, float value) {
  for (int c = 0; c < count; c += static_cast<int>(kLanes)) hn::Store(Broadcast(value), D(), dst + c);
}

// beta [16] of the range's tokens, activated; 0 beyond.
HWY_INLINE void LoadBeta(const ChunkShape& s, const Item& item, const RowRange& range, float* beta) {
  WithFormat(item.beta.dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    for (int r = 0; r < range.rows; ++r) {
      beta[r] = LoadOne<Format>(item.beta.at<typename Format::Storage>(range.token + r, 0));
    }
  });
  for (int r = range.rows; r < kBlock; ++r) beta[r] = 0.0f;
  if (s.beta_activation == BetaActivation::kNone) return;
  const V factor = Broadcast(s.beta_activation == BetaActivation::kSigmoid ? 1.0f : 2.0f);
  for (int r = 0; r < kBlock; r += static_cast<int>(kLanes)) {
    hn::Store(hn::Mul(factor, Sigmoid(hn::Load(D(), beta + r))), D(), beta + r);
  }
  for (int r = range.rows; r < kBlock; ++r) beta[r] = 0.0f;
}

// Each row divided by sqrt(sum of its squares + 1e-6).
HWY_INLINE void NormalizeRows(int rows, int K, float* HWY_RESTRICT x) {
  const D d;
  for (int r = 0; r < rows; ++r) {
    float* row = x + r * K;
    V squares = hn::Zero(d);
    for (int c = 0; c < K; c += static_cast<int>(kLanes)) {
      const V value = hn::Load(d, row + c);
      squares = hn::MulAdd(value, value, squares);
    }
    const V norm = hn::Sqrt(hn::Add(hn::SumOfLanes(d, squares), hn::Set(d, 1e-6f)));
    for (int c = 0; c < K; c += static_cast<int>(kLanes)) hn::Store(hn::Div(hn::Load(d, row + c), norm), d, row + c);
  }
}

// gate [16,K] from gk: the steps of the accumulated gate, in natural logarithm. A chunk's first row stands by itself.
HWY_INLINE void LoadStepsOfGk(const ChunkShape& s, const Item& item, const RowRange& range,
                              float* HWY_RESTRICT previous, float* HWY_RESTRICT gate) {
  const D d;
  const V ln2 = Broadcast(0.693147181f);
  WidenRows(item.g, range, gate, s.K);
  if (range.token % s.C == 0) {
    for (int c = 0; c < s.K; c += static_cast<int>(kLanes)) hn::Store(hn::Zero(d), d, previous + c);
  }
  for (int r = 0; r < range.rows; ++r) {
    for (int c = 0; c < s.K; c += static_cast<int>(kLanes)) {
      const V now = hn::Load(d, gate + r * s.K + c);
      const V before = hn::Load(d, previous + c);
      hn::Store(now, d, previous + c);
      // Equal rows, both -inf too, are a step of 0.
      const V step = hn::IfThenZeroElse(hn::Eq(now, before), hn::Sub(now, before));
      hn::Store(hn::Mul(ln2, step), d, gate + r * s.K + c);
    }
  }
}

// f(first channel, Constant<vectors>) for parts of K, as many channels at a time as registers hold twice.
template <class F>
HWY_INLINE void ForChannels(int K, const F& f) {
  constexpr int kStep = static_cast<int>(kLanes);
  constexpr int kMost = kRegisters == 32 ? 8 : 4;
  int channel = 0;
  for (; channel + kMost * kStep <= K; channel += kMost * kStep) f(channel, Constant<kMost>());
  if constexpr (kMost > 4) {
    if (channel + 4 * kStep <= K) {
      f(channel, Constant<4>());
      channel += 4 * kStep;
    }
  }
  if (channel + 2 * kStep <= K) {
    f(channel, Constant<2>());
    channel += 2 * kStep;
  }
  if (channel < K) f(channel, Constant<1>());
}

// Rows whose elements are adjacent.
template <class Element>
struct DenseRows {
  const Element* data;
  std::ptrdiff_t ld;
};

// A block's q and k in their format, and its gates.
template <class Format>
struct BlockSource {
  int rows;
  DenseRows<typename Format::Storage> q;
  DenseRows<typename Format::Storage> k;
  DenseRows<float> gates;
};

// Turns gates into decays, and q and k into their decayed forms. The block's decay comes from the sum of its gates with
// one rounding: a product of 16 rounded factors near 1 would drift over a long sequence.
template <class Format, int kVectors>
HWY_INLINE void DecayColumns(const BlockSource<Format>& from, int channel, int K, const PrepareScratch& scratch,
                             const BlockSlot& slot) {
  const D d;
  constexpr int kStep = static_cast<int>(kLanes);
  V sums[kVectors];
  V products[kVectors];
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) {
    sums[c] = hn::Zero(d);
    products[c] = hn::Set(d, 1.0f);
  }
  const float* gates = from.gates.data + channel;
  const auto* q = from.q.data + channel;
  const auto* k = from.k.data + channel;
  for (int r = 0; r < from.rows; ++r) {
    const int row = r * K + channel;
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) {
      const int at = row + c * kStep;
      const V gate = hn::LoadU(d, gates + c * kStep);
      const V step = Exp(gate);
      sums[c] = hn::Add(sums[c], gate);
      products[c] = hn::Mul(products[c], step);
      hn::Store(step, d, scratch.gate + at);
      const V q_widened = Format::Load(q + c * kStep);
      const V k_widened = Format::Load(k + c * kStep);
      hn::Store(q_widened, d, scratch.q + at);
      hn::Store(k_widened, d, scratch.k + at);
      hn::Store(hn::Mul(products[c], q_widened), d, slot.q_decayed + at);
      hn::Store(hn::Mul(products[c], k_widened), d, slot.k_decayed + at);
    }
    gates += from.gates.ld;
    q += from.q.ld;
    k += from.k.ld;
  }
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) hn::Store(Exp(sums[c]), d, slot.decay + channel + c * kStep);
}

template <class Format>
HWY_INLINE void DecayRows(const BlockSource<Format>& from, int K, const PrepareScratch& scratch,
                          const BlockSlot& slot) {
  ForChannels(K, [&](int channel, auto vectors)
                     HWY_ATTR { DecayColumns<Format, vectors.value>(from, channel, K, scratch, slot); });
}

// The rows beyond the last token: neutral.
HWY_INLINE void PadRows(const ChunkShape& s, int rows, const PrepareScratch& scratch, const BlockSlot& slot) {
  const int from = rows * s.K;
  const int count = (kBlock - rows) * s.K;
  Fill(scratch.q + from, count, 0.0f);
  Fill(scratch.k + from, count, 0.0f);
  Fill(scratch.gate + from, count, 1.0f);
  Fill(slot.q_decayed + from, count, 0.0f);
  Fill(slot.k_decayed + from, count, 0.0f);
  Fill(slot.k_rest + from, count, 0.0f);
}

// Sums of four vectors, interleaved: each 128-bit block gets that block's partial sums of a, b, c and d.
HWY_INLINE V SumsOf4(V a, V b, V c, V d) {
  const D df;
  const hn::Repartition<double, D> pairs;
  const V ab = hn::Add(hn::InterleaveLower(df, a, b), hn::InterleaveUpper(df, a, b));
  const V cd = hn::Add(hn::InterleaveLower(df, c, d), hn::InterleaveUpper(df, c, d));
  const auto ab2 = hn::BitCast(pairs, ab);
  const auto cd2 = hn::BitCast(pairs, cd);
  return hn::Add(hn::BitCast(df, hn::InterleaveLower(pairs, ab2, cd2)),
                 hn::BitCast(df, hn::InterleaveUpper(pairs, ab2, cd2)));
}

// Adds x to a partial sum, or begins it.
template <bool kFirst>
HWY_INLINE void Accumulate(V x, float* partial) {
  const D d;
  if constexpr (!kFirst) x = hn::Add(hn::Load(d, partial), x);
  hn::Store(x, d, partial);
}

// For columns j0 = 2 pair and j1 = j0 + 1, kVectors vectors of channels from `channel` on: carries k_j down the rows,
// multiplied by each row's decay, and adds its products with q_i and k_i to partial[i][pair] (interleaved: qk of j0, of
// j1, kk of j0, of j1). What is left after the last row is k_rest.
template <int kVectors, bool kFirst>
HWY_INLINE void PairOfColumns(const ChunkShape& s, int pair, int channel, int rows, const PrepareScratch& scratch,
                              const BlockSlot& slot) {
  const D d;
  const V zero = hn::Zero(d);
  constexpr int kStep = static_cast<int>(kLanes);
  const auto at = [&](int row, int c) HWY_ATTR { return row * s.K + channel + c * kStep; };
  const auto partial = [&](int row) HWY_ATTR { return scratch.partial + (row * 8 + pair) * kStep; };
  const int j0 = 2 * pair;
  const int j1 = j0 + 1;
  V k0[kVectors];
  V k1[kVectors];
  V qk0 = zero;
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) {
    k0[c] = hn::Load(d, scratch.k + at(j0, c));
    k1[c] = hn::Load(d, scratch.k + at(j1, c));
    qk0 = hn::MulAdd(k0[c], hn::Load(d, scratch.q + at(j0, c)), qk0);
  }
  Accumulate<kFirst>(SumsOf4(qk0, zero, zero, zero), partial(j0));

  qk0 = zero;
  V qk1 = zero;
  V kk0 = zero;
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) {
    k0[c] = hn::Mul(k0[c], hn::Load(d, scratch.gate + at(j1, c)));
    const V q = hn::Load(d, scratch.q + at(j1, c));
    qk0 = hn::MulAdd(k0[c], q, qk0);
    qk1 = hn::MulAdd(k1[c], q, qk1);
    kk0 = hn::MulAdd(k0[c], k1[c], kk0);
  }
  Accumulate<kFirst>(SumsOf4(qk0, qk1, kk0, zero), partial(j1));

  for (int i = j1 + 1; i < rows; ++i) {
    qk0 = zero;
    qk1 = zero;
    kk0 = zero;
    V kk1 = zero;
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) {
      const V decay = hn::Load(d, scratch.gate + at(i, c));
      const V q = hn::Load(d, scratch.q + at(i, c));
      const V k = hn::Load(d, scratch.k + at(i, c));
      k0[c] = hn::Mul(k0[c], decay);
      k1[c] = hn::Mul(k1[c], decay);
      qk0 = hn::MulAdd(k0[c], q, qk0);
      qk1 = hn::MulAdd(k1[c], q, qk1);
      kk0 = hn::MulAdd(k0[c], k, kk0);
      kk1 = hn::MulAdd(k1[c], k, kk1);
    }
    Accumulate<kFirst>(SumsOf4(qk0, qk1, kk0, kk1), partial(i));
  }
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) {
    hn::Store(k0[c], d, slot.k_rest + at(j0, c));
    hn::Store(k1[c], d, slot.k_rest + at(j1, c));
  }
}

template <int kVectors>
HWY_INLINE void PairsOfColumns(const ChunkShape& s, int channel, int rows, const PrepareScratch& scratch,
                               const BlockSlot& slot) {
  const int pairs = (rows + 1) / 2;
  for (int pair = 0; pair < pairs; ++pair) {
    if (channel == 0) {
      PairOfColumns<kVectors, true>(s, pair, channel, rows, scratch, slot);
    } else {
      PairOfColumns<kVectors, false>(s, pair, channel, rows, scratch, slot);
    }
  }
}

// Partial sums of all pairs of a block's rows.
HWY_INLINE void AllPairs(const ChunkShape& s, int rows, const PrepareScratch& scratch, const BlockSlot& slot) {
  ForChannels(
      s.K, [&](int channel, auto vectors) HWY_ATTR { PairsOfColumns<vectors.value>(s, channel, rows, scratch, slot); });
}

// The sum of a vector's 128-bit blocks. A template, so that branches for other vector lengths are not compiled.
template <class Tag>
HWY_INLINE hn::Vec<hn::FixedTag<float, 4>> SumOfBlocks(Tag tag, hn::Vec<Tag> x) {
  if constexpr (hn::MaxLanes(Tag()) > 4) {
    const hn::Half<Tag> half;
    return SumOfBlocks(half, hn::Add(hn::LowerHalf(half, x), hn::UpperHalf(half, x)));
  } else {
    static_cast<void>(tag);
    return x;
  }
}

// qk and kk from the partial sums. Entries above the diagonal are never read; rows beyond the last token become 0.
HWY_INLINE void FinishPairs(int rows, const PrepareScratch& scratch, const BlockSlot& slot) {
  const hn::FixedTag<float, 4> d4;
  const hn::Half<decltype(d4)> d2;
  for (int i = 0; i < rows; ++i) {
    const auto minus_beta = hn::Set(d2, -slot.beta[i]);
    for (int pair = 0; 2 * pair <= i; ++pair) {
      const auto sums = SumOfBlocks(D(), hn::Load(D(), scratch.partial + (i * 8 + pair) * static_cast<int>(kLanes)));
      hn::StoreU(hn::LowerHalf(d2, sums), d2, slot.qk + i * kBlock + 2 * pair);
      hn::StoreU(hn::Mul(minus_beta, hn::UpperHalf(d2, sums)), d2, slot.kk + i * kBlock + 2 * pair);
    }
  }
  Fill(slot.qk + rows * kBlock, (kBlock - rows) * kBlock, 0.0f);
  Fill(slot.kk + rows * kBlock, (kBlock - rows) * kBlock, 0.0f);
}

// One block: gates to decays, q and k to their decayed forms, the block's own part of Aqk and A. `range` covers all
// channels.
HWY_INLINE void PrepareBlock(const ChunkShape& s, const Item& item, const RowRange& range,
                             const PrepareScratch& scratch, const BlockSlot& slot) {
  DenseRows<float> gates{scratch.gate, s.K};
  if (s.gate_mode == GateMode::kActivated && item.g.dtype == Dtype::kFloat32 && item.g.inner == 1 &&
      !item.gk.present()) {
    gates = {item.g.at<float>(range.token, 0), item.g.token};
  } else if (s.gate_mode == GateMode::kAccumulated) {
    LoadStepsOfGk(s, item, range, scratch.bias, scratch.gate);
  } else {
    LoadGates(s, item, range, scratch.bias, scratch.gate);
  }
  if (item.gk.present()) StoreGk(s, item, range, scratch.gate, scratch.gk, scratch.rows);
  LoadBeta(s, item, range, slot.beta);
  if (s.qk_l2norm || item.q.inner != 1 || item.k.inner != 1) {
    WidenRows(item.q, range, scratch.q, s.K);
    WidenRows(item.k, range, scratch.k, s.K);
    if (s.qk_l2norm) {
      NormalizeRows(range.rows, s.K, scratch.q);
      NormalizeRows(range.rows, s.K, scratch.k);
    }
    DecayRows<Float32>({range.rows, {scratch.q, s.K}, {scratch.k, s.K}, gates}, s.K, scratch, slot);
  } else {
    WithHalfFormat(item.q.dtype, [&](auto format) HWY_ATTR {
      using Format = decltype(format);
      using Storage = typename Format::Storage;
      DecayRows<Format>({range.rows,
                         {item.q.at<Storage>(range.token, 0), item.q.token},
                         {item.k.at<Storage>(range.token, 0), item.k.token},
                         gates},
                        s.K, scratch, slot);
    });
  }
  PadRows(s, range.rows, scratch, slot);
  AllPairs(s, range.rows, scratch, slot);
  FinishPairs(range.rows, scratch, slot);
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
