#pragma once

// The first kernel of the Hopper path: everything about a block of 16 tokens that does not depend on the state. A warp
// owns a block of one value head, a lane four of its 128 channels.
//
// With P_i the decay from the block's first row through row i, E_ij = P_i / P_j: one matrix product of (q P) with (k /
// P) gives all pairs, as long as 1 / P and k / P are numbers that bf16 can hold. Whether they are is decided row by
// row, from rows up to that one; from the first row on where they are not, pairs are computed one by one with running
// products, which are at most 1.

#include "chunk_kda_fwd/cuda/hopper_image.h"
#include "chunk_kda_fwd/cuda/prepare.cuh"
#include "cuda/async.cuh"

namespace kda::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ float low_bf16(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Floats between rows of A in shared memory.
inline constexpr int kPairPitch = 20;

// Element (i, j) of the scaled q k^T and of A = beta k k^T; 0 where they are.
__device__ __forceinline__ void store_pair(std::uint32_t image, std::uint32_t pairs, int i, int j, float qk, float kk,
                                           float beta) {
  const float a = j < i ? beta * kk : 0.0f;
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(pairs + static_cast<std::uint32_t>((i * kPairPitch + j) * 4)), "f"(a)
               : "memory");
  asm volatile(
      "st.shared.u16 [%0], %1;" ::"r"(image + static_cast<std::uint32_t>(BlockImage::kQk + BlockImage::square(i, j))),
      "h"(narrow(j <= i ? qk : 0.0f, true))
      : "memory");
}

__device__ __forceinline__ float4 widen_bf16(const uint2& pair) {
  return {low_bf16(pair.x), high_bf16(pair.x), low_bf16(pair.y), high_bf16(pair.y)};
}

// Rows of pairs from `first` on, each key carried down the rows. Apart from the kernel, and from memory again, so that
// what is rare costs the rest no registers.
template <class Preparer>
__device__ __noinline__ void pair_by_pair(const ChunkKdaFwdTask& t, const Item& item, std::int64_t token,
                                          std::uint32_t image, std::uint32_t pairs, float factor, float beta,
                                          int first) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int j = 0; j < kBlock; ++j) {
    float4 key = times(widen_bf16(Preparer::load_row(t, item, t.at.k, t.k, item.key_head, token + j)),
                       __shfl_sync(kAll, factor, kBlock + j));
    for (int i = j; i < kBlock; ++i) {
      if (i > j) key = times(key, Preparer::load_step(t, item, token + i));
      if (i < first) continue;
      const float4 q = widen_bf16(Preparer::load_row(t, item, t.at.q, t.q, item.key_head, token + i));
      const float4 k = widen_bf16(Preparer::load_row(t, item, t.at.k, t.k, item.key_head, token + i));
      const float qk = warp_sum(dot4(key, times(q, __shfl_sync(kAll, factor, i)), 0));
      const float kk = warp_sum(dot4(key, times(k, __shfl_sync(kAll, factor, kBlock + i)), 0));
      const float row_beta = __shfl_sync(kAll, beta, i);
      if (lane == 0) store_pair(image, pairs, i, j, qk, kk, row_beta);
    }
  }
  __syncwarp();
}

// kMode: what turns g into gates. kGateDtype: fp32 or bf16. kIsVector: rows of q, k and g are adjacent and aligned.
template <GateMode kMode, Dtype kGateDtype, bool kIsVector>
class HopperPreparer {
 public:
  static constexpr int kWarps = 4;
  static constexpr int kBytes = BlockImage::kBytes + kBlock * kPairPitch * 4;  // of shared memory, per warp

  __device__ HopperPreparer(const ChunkKdaFwdTask& task, const Item& item, std::int64_t block, std::uint32_t memory)
      : t_(task),
        item_(item),
        token_(block * kBlock),
        rows_(static_cast<int>(min(static_cast<std::int64_t>(kBlock), item.tokens - token_))),
        image_(memory),
        pairs_(memory + BlockImage::kBytes),
        lane_(static_cast<int>(threadIdx.x) % 32),
        channel_(4 * lane_) {}

  // This lane's channels of a row of q or k, and of a token's decay; neutral beyond the last token.
  static __device__ __forceinline__ uint2 load_row(const ChunkKdaFwdTask& t, const Item& item, const void* data,
                                                   const RowStrides& strides, std::int64_t head, std::int64_t token) {
    if (token >= item.tokens) return {0, 0};
    const std::int64_t at = row_of(strides, item, head, token) + lane_channel() * strides.inner;
    const uint4 raw = load4(data, Dtype::kBFloat16, at, strides.inner, kIsVector);
    return {raw.x, raw.y};
  }
  static __device__ __forceinline__ float4 load_step(const ChunkKdaFwdTask& t, const Item& item, std::int64_t token) {
    if (token >= item.tokens) return {1, 1, 1, 1};
    const int c = lane_channel();
    const std::int64_t at = row_of(t.g, item, item.head, token) + c * t.g.inner;
    const float4 g = widen4(load4(t.at.g, kGateDtype, at, t.g.inner, kIsVector), kGateDtype);
    const Gate gate = gate_of(t, item);
    return {fast_exp2(log2_gate(gate, g.x, bias_of(t, item, c))),
            fast_exp2(log2_gate(gate, g.y, bias_of(t, item, c + 1))),
            fast_exp2(log2_gate(gate, g.z, bias_of(t, item, c + 2))),
            fast_exp2(log2_gate(gate, g.w, bias_of(t, item, c + 3)))};
  }

  __device__ __forceinline__ void run(std::byte* to) {
    load();
    normalise();
    const int good_rows = decay_rows();
    multiply();
    __syncwarp();
    if (good_rows < rows_) pair_by_pair<HopperPreparer>(t_, item_, token_, image_, pairs_, factor_, beta_, good_rows);
    rest_rows();
    __syncwarp();
    invert();
    async_proxy_fence();
    __syncwarp();
    if (lane_ == 0) {
      bulk_store(to, image_, BlockImage::kBytes);
      bulk_store_wait();
    }
  }

 private:
  static __device__ __forceinline__ int lane_channel() { return static_cast<int>(threadIdx.x) % 32 * 4; }

  // Byte offset of a row's four channels of this lane.
  __device__ __forceinline__ int at(int row, int panel_bytes) const {
    return BlockImage::row(row, lane_ / 2, panel_bytes) + lane_ % 2 * 8;
  }

  // q_, k_, beta_; step_ = exp(gate); the block's decay = exp(sum of the gates). What the gates are made from is asked
  // for first, as it is needed first.
  __device__ __forceinline__ void load() {
    constexpr int kHeld = kGateDtype == Dtype::kFloat32 ? 8 : 16;  // rows of g
    const std::int64_t g = row_of(t_.g, item_, item_.head, token_) + channel_ * t_.g.inner;
    uint4 raw[kHeld];
    load_gates(g, 0, raw);
    const Gate gate = gate_of(t_, item_);
    const float4 bias = {bias_of(t_, item_, channel_), bias_of(t_, item_, channel_ + 1),
                         bias_of(t_, item_, channel_ + 2), bias_of(t_, item_, channel_ + 3)};
    load_rows();
    beta_ = lane_ < rows_ ? beta_of(t_, item_, token_ + lane_) : 0.0f;
    float4 sum{0, 0, 0, 0};
#pragma unroll
    for (int first = 0; first < kBlock; first += kHeld) {
      if (first > 0) load_gates(g, first, raw);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const float4 x = widen4(raw[i], kGateDtype);
        float4 log2_step{0, 0, 0, 0};
        if (first + i < rows_) {
          log2_step = {log2_gate(gate, x.x, bias.x), log2_gate(gate, x.y, bias.y), log2_gate(gate, x.z, bias.z),
                       log2_gate(gate, x.w, bias.w)};
        }
        sum = {sum.x + log2_step.x, sum.y + log2_step.y, sum.z + log2_step.z, sum.w + log2_step.w};
        step_[first + i] = {fast_exp2(log2_step.x), fast_exp2(log2_step.y), fast_exp2(log2_step.z),
                            fast_exp2(log2_step.w)};
      }
    }
    const float4 decay = {fast_exp2(sum.x), fast_exp2(sum.y), fast_exp2(sum.z), fast_exp2(sum.w)};
    store_shared(image_ + BlockImage::kDecay + 16 * lane_, __float_as_uint(decay.x), __float_as_uint(decay.y));
    store_shared(image_ + BlockImage::kDecay + 16 * lane_ + 8, __float_as_uint(decay.z), __float_as_uint(decay.w));
  }

  template <int kHeld>
  __device__ __forceinline__ void load_gates(std::int64_t g, int first, uint4 (&raw)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      raw[i] = {0, 0, 0, 0};
      if (first + i < rows_) raw[i] = load4(t_.at.g, kGateDtype, g + (first + i) * t_.g.token, t_.g.inner, kIsVector);
    }
  }

  __device__ __forceinline__ void load_rows() {
    const std::int64_t q = row_of(t_.q, item_, item_.key_head, token_) + channel_ * t_.q.inner;
    const std::int64_t k = row_of(t_.k, item_, item_.key_head, token_) + channel_ * t_.k.inner;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      q_[i] = k_[i] = {0, 0};
      if (i >= rows_) continue;
      const uint4 q_raw = load4(t_.at.q, Dtype::kBFloat16, q + i * t_.q.token, t_.q.inner, kIsVector);
      const uint4 k_raw = load4(t_.at.k, Dtype::kBFloat16, k + i * t_.k.token, t_.k.inner, kIsVector);
      q_[i] = {q_raw.x, q_raw.y};
      k_[i] = {k_raw.x, k_raw.y};
    }
  }

  // The gate in base 2.
  static __device__ __forceinline__ float log2_gate(const Gate& gate, float g, float bias) {
    if constexpr (kMode == GateMode::kBounded) {
      const float x = gate.factor * (g + bias);
      return gate.lower_bound * kLog2E * fast_reciprocal(1.0f + fast_exp2(-kLog2E * x));
    } else if constexpr (kMode == GateMode::kSoftplus) {
      return -gate.factor * log2_softplus(g + bias);
    } else {
      return kLog2E * g;
    }
  }

  // log2(1 + e^x), with relative accuracy down to where e^x vanishes.
  static __device__ __forceinline__ float log2_softplus(float x) {
    const float t = fast_exp2(-kLog2E * fabsf(x));
    float log2;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(1.0f + t));
    const float series = kLog2E * t * fmaf(-t, fmaf(-t, fmaf(-t, 0.25f, 0.333333333f), 0.5f), 1.0f);
    const float log_part = t < 0.03125f ? series : log2;
    return x > 0 ? fmaf(kLog2E, x, log_part) : log_part;
  }

  // Factors of the rows of q and k; lane l holds q's of row l in l < 16, else k's of row l - 16.
  __device__ __forceinline__ void normalise() {
    factor_ = lane_ < kBlock ? t_.scale : 1.0f;
    if (!t_.qk_l2norm) return;
    float squares[32];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      squares[i] = dot4(widen_bf16(q_[i]), widen_bf16(q_[i]), 0);
      squares[kBlock + i] = dot4(widen_bf16(k_[i]), widen_bf16(k_[i]), 0);
    }
    factor_ *= 1.0f / sqrtf(transposed_sum<16>(squares, lane_) + 1e-6f);
  }

  __device__ __forceinline__ float q_factor(int row) const { return __shfl_sync(0xffffffffu, factor_, row); }
  __device__ __forceinline__ float k_factor(int row) const { return __shfl_sync(0xffffffffu, factor_, kBlock + row); }

  template <int kOffset>
  __device__ __forceinline__ void store_row(int row, const float4& x) const {
    constexpr int kPanel = kOffset == BlockImage::kRest ? BlockImage::kRestPanel : BlockImage::kPairPanel;
    store_shared(image_ + kOffset + at(row, kPanel), pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
  }

  // NaN counts.
  static __device__ __forceinline__ bool is_large(const float4& x) {
    constexpr float kLargest = 0x1p120f;
    return !(fabsf(x.x) < kLargest && fabsf(x.y) < kLargest && fabsf(x.z) < kLargest && fabsf(x.w) < kLargest);
  }

  // q P, k P and, where k_rest will be, k / P. Returns the number of rows before the first one that the latter cannot
  // serve.
  __device__ __forceinline__ int decay_rows() {
    float4 product{1, 1, 1, 1};
    int good = kBlock;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      product = times(product, step_[i]);
      const float4 k = times(widen_bf16(k_[i]), k_factor(i));
      store_row<BlockImage::kQueries>(i, times(times(widen_bf16(q_[i]), q_factor(i)), product));
      store_row<BlockImage::kKeys>(i, times(k, product));
      const float4 inverse = {fast_reciprocal(product.x), fast_reciprocal(product.y), fast_reciprocal(product.z),
                              fast_reciprocal(product.w)};
      const float4 quotient = times(k, inverse);
      if (is_large(quotient) || is_large(inverse)) good = min(good, i);
      const bool is_good = i < good;
      store_row<BlockImage::kRest>(i, is_good ? quotient : float4{0, 0, 0, 0});
    }
    __syncwarp();
    return __reduce_min_sync(0xffffffffu, good);
  }

  __device__ __forceinline__ void multiply() const {
    float qk[2][4] = {};
    float kk[2][4] = {};
    const int a_row = lane_ % 16;
    const int b_row = lane_ % 8 + lane_ / 16 * 8;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      std::uint32_t q[4];
      std::uint32_t k[4];
      std::uint32_t b[4];
      const int a_at = BlockImage::row(a_row, 2 * step + lane_ / 16, BlockImage::kPairPanel);
      ldmatrix4(image_ + BlockImage::kQueries + a_at, q);
      ldmatrix4(image_ + BlockImage::kKeys + a_at, k);
      ldmatrix4(image_ + BlockImage::kRest + BlockImage::row(b_row, 2 * step + lane_ / 8 % 2, BlockImage::kRestPanel),
                b);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_bf16(qk[n], q, b[2 * n], b[2 * n + 1]);
        mma_bf16(kk[n], k, b[2 * n], b[2 * n + 1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = lane_ / 4 + 8 * half;
      const float beta = __shfl_sync(0xffffffffu, beta_, i);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          store_pair(image_, pairs_, i, 8 * n + 2 * (lane_ % 4) + e, qk[n][2 * half + e], kk[n][2 * half + e], beta);
        }
      }
    }
  }

  __device__ __forceinline__ void rest_rows() const {
    float4 product{1, 1, 1, 1};
#pragma unroll
    for (int i = kBlock - 1; i >= 0; --i) {
      store_row<BlockImage::kRest>(i, times(times(widen_bf16(k_[i]), k_factor(i)), product));
      product = times(product, step_[i]);
    }
  }

  // Forward substitution; a lane has a column.
  __device__ __forceinline__ void invert() const {
    const int column = lane_ % kBlock;
    const float beta = __shfl_sync(0xffffffffu, beta_, column);
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      float even = i == column ? 1.0f : 0.0f;
      float odd = 0;
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 a = load_shared<float4>(pairs_ + (i * kPairPitch + j) * 4);
        even = fmaf(-a.x, x[j], even);
        if (j + 1 < i) odd = fmaf(-a.y, x[j + 1], odd);
        if (j + 2 < i) even = fmaf(-a.z, x[j + 2], even);
        if (j + 3 < i) odd = fmaf(-a.w, x[j + 3], odd);
      }
      x[i] = even + odd;
    }
    if (lane_ >= kBlock) return;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(image_ + BlockImage::kSolve + BlockImage::square(i, column)),
                   "h"(narrow(i < column ? 0.0f : x[i] * beta, true))
                   : "memory");
    }
  }

  const ChunkKdaFwdTask& t_;
  const Item& item_;
  const std::int64_t token_;
  const int rows_;
  const std::uint32_t image_;
  const std::uint32_t pairs_;  // [16][kPairPitch] A
  const int lane_;
  const int channel_;
  uint2 q_[kBlock];
  uint2 k_[kBlock];
  float4 step_[kBlock];
  float beta_ = 0;  // of row `lane`
  float factor_ = 1;
};

template <class Preparer>
__global__ void __launch_bounds__(32 * Preparer::kWarps, 3)
    hopper_prepare_kernel(const __grid_constant__ ChunkKdaFwdTask task) {
  extern __shared__ __align__(1024) std::byte prepare_memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * Preparer::kWarps + warp;
  if (index >= task.blocks * task.HV) return;
  const std::int64_t block = index / task.HV;
  const std::int64_t blocks_per_sequence = (task.T + kBlock - 1) / kBlock;
  const std::int64_t n =
      task.is_packed ? sequence_at(task, &PackedSequence::first_block, block) : block / blocks_per_sequence;
  const Item item = item_of(task, n, index % task.HV);
  Preparer preparer(task, item, block - item.first_block,
                    shared_address(prepare_memory) + static_cast<std::uint32_t>(warp * Preparer::kBytes));
  preparer.run(task.images + index * BlockImage::kBytes);
}

}  // namespace kda::cuda
