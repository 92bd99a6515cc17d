#pragma once

// Everything about a block of 16 tokens that does not depend on the state. A warp owns a block of one value head: with
// lane = 4 r + c, rows 2 r and 2 r + 1, channels 4 c to 4 c + 3 of every 16.
//
// Pairs of rows i > j meet in the product of the level where they part: neighbours, halves of four rows, of eight, of
// all. There E_ij is the decay from the first row of i's half through row i, which q_i and k_i carry, times the decay
// of the rows behind j in j's half, which k_j carries: two products of steps, each at most 1, whatever the gates are.
// Every level has eight upper and eight lower rows, one product of q and k of the upper with k of the lower ones.
// Rows beyond the last token are neutral: zero, and decay 1.

#include "chunk_kda_fwd/cuda/image.h"
#include "chunk_kda_fwd/cuda/item.cuh"
#include "chunk_kda_fwd/cuda/substitution.cuh"
#include "cuda/lanes.cuh"
#include "cuda/mma.cuh"

namespace kda::cuda {

inline constexpr int kPrepareWarps = 4;  // of a block of threads

// kMode: what turns g into gates. kIsVector: rows of q, k and g are adjacent, and aligned to 16 bytes.
template <Dtype kDtype, GateMode kMode, bool kIsVector>
class Preparer {
 public:
  struct Memory {  // of a warp
    static constexpr int kPitch = 20;
    float qk[kBlock * kPitch];
    float kk[kBlock * kPitch];  // row i, column j < i: beta_i sum_d k_i k_j E_ij
    float beta[kBlock];
  };

  __device__ Preparer(const ChunkKdaFwdTask& task, unsigned index, Memory& memory)
      : t_(task), memory_(memory), lane_(static_cast<int>(threadIdx.x) % 32), r_(lane_ / 4), c_(lane_ % 4) {
    const unsigned block = divide(index, task.by_heads);
    const unsigned head = index - block * task.by_heads.divisor;
    const std::int64_t n =
        task.is_packed ? sequence_at(task, &PackedSequence::first_block, block) : divide(block, task.by_blocks);
    item_ = item_of(task, n, head);
    token_ = (block - item_.first_block) * kBlock;
    image_ =
        reinterpret_cast<float*>(task.images + static_cast<std::uint64_t>(index) * Image{task.image_groups}.bytes());
    gate_ = gate_of(task, item_);
    // Rows beyond the last are read as that one, and count for nothing.
    const auto last = static_cast<int>(min(item_.tokens - token_, std::int64_t{kBlock})) - 1;
    const std::int64_t q = row_of(t_.q, item_, item_.key_head, token_) + 4 * c_ * t_.q.inner;
    const std::int64_t k = row_of(t_.k, item_, item_.key_head, token_) + 4 * c_ * t_.k.inner;
    const std::int64_t g = row_of(t_.g, item_, item_.head, token_) + 4 * c_ * t_.g.inner;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = min(2 * r_ + e, last);
      is_row_[e] = 2 * r_ + e <= last;
      q_at_[e] = static_cast<const std::uint16_t*>(t_.at.q) + q + row * t_.q.token;
      k_at_[e] = static_cast<const std::uint16_t*>(t_.at.k) + k + row * t_.k.token;
      g_at_[e] = static_cast<const std::byte*>(t_.at.g) + (g + row * t_.g.token) * gate_bytes();
    }
    if (t_.at.dt_bias != nullptr) bias_at_ = t_.at.dt_bias + (item_.head * t_.K + 4 * c_) * t_.dt_bias_stride;
  }

  __device__ __forceinline__ void run() {
    // Everything that takes long is under way before the first of it is needed.
    const float beta = lane_ < kBlock && token_ + lane_ < item_.tokens ? beta_of(t_, item_, token_ + lane_) : 0.0f;
    fetch();
    normalise();
    const int groups = t_.K / 16;
#pragma unroll 1
    for (int p = 0; p < groups; ++p) group(p);
#pragma unroll 1
    for (int p = groups; p < t_.image_groups; ++p) clear(p);
    store_beta(beta);
    store_pairs();
    __syncwarp();
    store_queries();
    invert();
  }

 private:
  static constexpr unsigned kWarp = 0xffffffffu;
  static constexpr int kLevels = 4;

  [[nodiscard]] __device__ __forceinline__ int gate_bytes() const { return t_.g_dtype == Dtype::kFloat32 ? 4 : 2; }

  // Starts the loads of the next group.
  __device__ __forceinline__ void fetch() {
    if ((kMode == GateMode::kSoftplus || kMode == GateMode::kBounded) && bias_at_ != nullptr) {
      const uint4 raw = load4(bias_at_, Dtype::kFloat32, 0, t_.dt_bias_stride, kIsVector);
      bias_ = widen4(raw, Dtype::kFloat32);
      bias_at_ += 16 * (kIsVector ? 1 : t_.dt_bias_stride);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      q_[e] = four_at(q_at_[e], t_.q.inner);
      k_[e] = four_at(k_at_[e], t_.k.inner);
      g_[e] = load4(g_at_[e], t_.g_dtype, 0, t_.g.inner, kIsVector);
      if (kMode == GateMode::kAccumulated && is_row_[e] && (token_ + 2 * r_ + e) % t_.C != 0) {
        before_[e] = load4(g_at_[e] - t_.g.token * gate_bytes(), t_.g_dtype, 0, t_.g.inner, kIsVector);
      }
      q_at_[e] += 16 * (kIsVector ? 1 : t_.q.inner);
      k_at_[e] += 16 * (kIsVector ? 1 : t_.k.inner);
      g_at_[e] += 16 * (kIsVector ? 1 : t_.g.inner) * gate_bytes();
    }
  }

  static __device__ __forceinline__ uint2 four_at(const std::uint16_t* from, std::int64_t inner) {
    const uint4 raw = load4(from, kDtype, 0, inner, kIsVector);
    return {raw.x, raw.y};
  }

  static __device__ __forceinline__ float4 widened(const uint2& raw) { return widen4({raw.x, raw.y, 0, 0}, kDtype); }

  __device__ __forceinline__ void store_beta(float beta) {
    if (lane_ >= kBlock) return;
    memory_.beta[lane_] = beta;
    image_[Image{t_.image_groups}.beta() / 4 + lane_ % 8 / 2 * 4 + lane_ / 8 * 2 + lane_ % 2] = beta;
  }

  // The rows' factors. fetch() has been called once.
  __device__ __forceinline__ void normalise() {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      q_factor_[e] = is_row_[e] ? t_.scale : 0.0f;
      k_factor_[e] = is_row_[e] ? 1.0f : 0.0f;
    }
    if (!t_.qk_l2norm) return;
    float squares[4] = {};  // of q, of k
    const int groups = t_.K / 16;
    const std::int64_t q_step = 16 * (kIsVector ? 1 : t_.q.inner);
    const std::int64_t k_step = 16 * (kIsVector ? 1 : t_.k.inner);
#pragma unroll 4
    for (int p = -1; p < groups - 1; ++p) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 q = widened(four_at(q_at_[e] + p * q_step, t_.q.inner));
        const float4 k = widened(four_at(k_at_[e] + p * k_step, t_.k.inner));
        squares[e] = dot4(q, q, squares[e]);
        squares[2 + e] = dot4(k, k, squares[2 + e]);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      q_factor_[e] /= sqrtf(over_channels(squares[e]) + 1e-6f);
      k_factor_[e] /= sqrtf(over_channels(squares[2 + e]) + 1e-6f);
    }
  }

  static __device__ __forceinline__ float over_channels(float x) {
    x += __shfl_xor_sync(kWarp, x, 1);
    return x + __shfl_xor_sync(kWarp, x, 2);
  }

  // Gates of row e in base 2.
  __device__ __forceinline__ float4 gates(int e) const {
    const float4 g = widen4(g_[e], t_.g_dtype);
    float4 gates;
    if constexpr (kMode == GateMode::kAccumulated) {
      const float4 before = widen4(before_[e], t_.g_dtype);
      const auto step = [](float now, float last) { return now == last ? 0.0f : now - last; };
      gates = {step(g.x, before.x), step(g.y, before.y), step(g.z, before.z), step(g.w, before.w)};
    } else {
      gates = {gate(g.x, bias_.x), gate(g.y, bias_.y), gate(g.z, bias_.z), gate(g.w, bias_.w)};
    }
    return {is_row_[e] ? gates.x : 0.0f, is_row_[e] ? gates.y : 0.0f, is_row_[e] ? gates.z : 0.0f,
            is_row_[e] ? gates.w : 0.0f};
  }

  __device__ __forceinline__ float gate(float g, float bias) const {
    if constexpr (kMode == GateMode::kSoftplus) return -kGkPerGate * (gate_.factor * softplus(g + bias));
    if constexpr (kMode == GateMode::kActivated) return kGkPerGate * g;
    // Where 2^x is infinite the gate is 0, which it then is to 2^-126.
    const float x = -kGkPerGate * (gate_.factor * (g + bias));
    return kGkPerGate * gate_.lower_bound * fast_reciprocal(1.0f + fast_exp2(x));
  }

  __device__ __forceinline__ void group(int p) {
    float q[2][4];  // P of these rows times q, level by level from the half's first row on
    float k[2][4];  // the same of k
    float rest[2][4];
    float sum[4];  // of gates of the rows of this half
    float step[2][4];
    {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 raw_q = times(widened(q_[e]), q_factor_[e]);
        const float4 raw_k = times(widened(k_[e]), k_factor_[e]);
        const float4 log2 = gates(e);
        diagonal_[e] = dot4(raw_q, raw_k, diagonal_[e]);
        put(raw_q, q[e]);
        put(raw_k, k[e]);
        put(raw_k, rest[e]);
        put({fast_exp2(log2.x), fast_exp2(log2.y), fast_exp2(log2.z), fast_exp2(log2.w)}, step[e]);
        sum[0] = e == 0 ? log2.x : sum[0] + log2.x;
        sum[1] = e == 0 ? log2.y : sum[1] + log2.y;
        sum[2] = e == 0 ? log2.z : sum[2] + log2.z;
        sum[3] = e == 0 ? log2.w : sum[3] + log2.w;
      }
    }
    if (p + 1 < t_.K / 16) fetch();

      // Neighbours.
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      q[1][d] *= step[1][d];
      k[1][d] *= step[1][d];
    }
    multiply(0, q[1], k[1], rest[0]);
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      q[0][d] *= step[0][d];
      k[0][d] *= step[0][d];
      q[1][d] *= step[0][d];
      k[1][d] *= step[0][d];
      rest[0][d] *= step[1][d];
    }
    // Halves of 4, 8, 16 rows.
#pragma unroll
    for (int level = 1; level < kLevels; ++level) {
      const int partner = 2 << level;  // of lanes
      const bool is_upper = (lane_ & partner) != 0;
      float upper_q[4];
      float upper_k[4];
      float lower_k[4];
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const float first = __shfl_xor_sync(kWarp, is_upper ? q[0][d] : rest[1][d], partner);
        const float second = __shfl_xor_sync(kWarp, k[0][d], partner);
        upper_q[d] = is_upper ? q[1][d] : first;
        upper_k[d] = is_upper ? k[1][d] : second;
        lower_k[d] = is_upper ? first : rest[0][d];
      }
      multiply(level, upper_q, upper_k, lower_k);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const float other = __shfl_xor_sync(kWarp, sum[d], partner);
        const float decay = fast_exp2(other);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (is_upper) {
            q[e][d] *= decay;
            k[e][d] *= decay;
          } else {
            rest[e][d] *= decay;
          }
        }
        sum[d] += other;
      }
    }
    store_group(p, q, k, rest, sum);
  }

  static __device__ __forceinline__ void put(const float4& from, float (&to)[4]) {
    to[0] = from.x;
    to[1] = from.y;
    to[2] = from.z;
    to[3] = from.w;
  }

  // What tf32 holds of x, and the rest.
  static __device__ __forceinline__ float high(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

  // Three products of halves: what is left out is about 2^-21 of each term.
  __device__ __forceinline__ void multiply(int level, const float (&upper_q)[4], const float (&upper_k)[4],
                                           const float (&lower_k)[4]) {
#pragma unroll
    for (int s = 0; s < 4; s += 2) {
      const float a[4] = {upper_q[s], upper_k[s], upper_q[s + 1], upper_k[s + 1]};
      float a_high[4];
      float a_low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a_high[i] = high(a[i]);
        a_low[i] = a[i] - a_high[i];
      }
      const float b_high[2] = {high(lower_k[s]), high(lower_k[s + 1])};
      mma_tf32(pairs_[level], a_low, b_high[0], b_high[1]);
      mma_tf32(pairs_[level], a_high, lower_k[s] - b_high[0], lower_k[s + 1] - b_high[1]);
      mma_tf32(pairs_[level], a_high, b_high[0], b_high[1]);
    }
  }

  __device__ __forceinline__ void store_group(int p, const float (&q)[2][4], const float (&k)[2][4],
                                              const float (&rest)[2][4], const float (&sum)[4]) {
    float* to = image_ + p * (Image::kGroupBytes / 4);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // Token 2 r + e.
      float* row = to + r_ / 4 * (Image::kLanesBytes / 4) + ((2 * r_ + e) % 8 * 4 + c_) * 4;
      *reinterpret_cast<float4*>(row + Image::kKeys / 4) = rounded(k[e]);
      *reinterpret_cast<float4*>(row + Image::kQueries / 4) = rounded(q[e]);
    }
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      float* column =
          to + Image::kRest / 4 + d / 2 * (Image::kLanesBytes / 4) + ((2 * c_ + d % 2) * 4 + r_ % 4) * 4 + r_ / 4 * 2;
      *reinterpret_cast<float2*>(column) = {to_tf32(rest[0][d]), to_tf32(rest[1][d])};
    }
    if (r_ == 0) {
      *reinterpret_cast<float4*>(image_ + Image{t_.image_groups}.decay() / 4 + 16 * p + 4 * c_) = {
          fast_exp2(sum[0]), fast_exp2(sum[1]), fast_exp2(sum[2]), fast_exp2(sum[3])};
    }
  }

  static __device__ __forceinline__ float4 rounded(const float (&x)[4]) {
    return {to_tf32(x[0]), to_tf32(x[1]), to_tf32(x[2]), to_tf32(x[3])};
  }

  // Channels beyond K.
  __device__ __forceinline__ void clear(int p) {
    constexpr int kPieces = Image::kGroupBytes / 16;
    auto* to = reinterpret_cast<float4*>(image_) + p * kPieces;
    for (int i = lane_; i < kPieces; i += 32) to[i] = {0, 0, 0, 0};
    if (lane_ < kBlock) image_[Image{t_.image_groups}.decay() / 4 + 16 * p + lane_] = 0;
  }

  // Pairs as the products of the levels left them: this lane has upper row r with lower rows 2 c and 2 c + 1.
  __device__ __forceinline__ void store_pairs() {
    constexpr int kPitch = Memory::kPitch;
    for (int i = lane_; i < kBlock * kPitch; i += 32) memory_.qk[i] = memory_.kk[i] = 0;
    __syncwarp();
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const int half = (1 << level) / 2;  // lanes' rows of a half, in r
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int lower = 2 * c_ + e;
        if (r_ >> level != lower >> level) continue;
        const int i = level == 0 || (r_ & half) != 0 ? 2 * r_ + 1 : 2 * (r_ ^ half);
        const int j = level != 0 && (lower & half) != 0 ? 2 * (lower ^ half) + 1 : 2 * lower;
        memory_.qk[i * kPitch + j] = pairs_[level][e];
        memory_.kk[i * kPitch + j] = memory_.beta[i] * pairs_[level][2 + e];
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = over_channels(diagonal_[e]);
      if (c_ == 0) memory_.qk[(2 * r_ + e) * (kPitch + 1)] = sum;
    }
  }

  __device__ __forceinline__ void store_queries() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float* from = memory_.qk + (8 * m + r_) * Memory::kPitch + 2 * c_;
      const float2 first = *reinterpret_cast<const float2*>(from);
      const float2 second = *reinterpret_cast<const float2*>(from + 8);
      reinterpret_cast<float4*>(image_ + Image{t_.image_groups}.qk() / 4)[32 * m + lane_] = {
          to_tf32(first.x), to_tf32(first.y), to_tf32(second.x), to_tf32(second.y)};
    }
  }

  // A lane has a column.
  __device__ __forceinline__ void invert() {
    const int column = lane_ % kBlock;
    float x[kBlock];
    substitute(
        column, [&](int i, int j) { return *reinterpret_cast<const float4*>(memory_.kk + i * Memory::kPitch + j); }, x);
    // Each half of the lanes stores half the rows.
    const int m = lane_ / kBlock;
    float* to = image_ + Image{t_.image_groups}.solve() / 4 + m * (Image::kLanesBytes / 4) + column % 8 / 2 * 4 +
                column / 8 * 2 + column % 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = m == 0 ? x[i] : x[8 + i];
      to[16 * i] = 8 * m + i <= column ? 0.0f : to_tf32(value);
    }
  }

  const ChunkKdaFwdTask& t_;
  Memory& memory_;
  const int lane_;
  const int r_;
  const int c_;
  Item item_;
  std::int64_t token_;  // the block's first
  float* image_;
  bool is_row_[2];
  const std::uint16_t* q_at_[2];  // this lane's part of its rows, of the group to be fetched
  const std::uint16_t* k_at_[2];
  const std::byte* g_at_[2];
  const float* bias_at_ = nullptr;
  float q_factor_[2];
  float k_factor_[2];
  Gate gate_;
  float4 bias_{};
  uint2 q_[2];
  uint2 k_[2];
  uint4 g_[2];
  uint4 before_[2] = {};          // the row before's gk, where that is of the same chunk
  float pairs_[kLevels][4] = {};  // of upper row r: q with two lower rows, then k with them
  float diagonal_[2] = {};
};

template <Dtype kDtype, GateMode kMode, bool kIsVector>
__global__ void __launch_bounds__(32 * kPrepareWarps, 4) prepare_kernel(const __grid_constant__ ChunkKdaFwdTask task) {
  using Kernel = Preparer<kDtype, kMode, kIsVector>;
  __shared__ __align__(16) typename Kernel::Memory memory[kPrepareWarps];
  const unsigned warp = threadIdx.x / 32;
  const unsigned index = kPrepareWarps * blockIdx.x + warp;
  // task.blocks may be more than there are.
  if (index < static_cast<unsigned>(blocks_of(task) * task.HV)) Kernel(task, index, memory[warp]).run();
}

}  // namespace kda::cuda
