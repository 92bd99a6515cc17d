#pragma once

// Everything about a block of 16 tokens that does not depend on the state, by the preparing warps of a block of
// threads. Rows beyond the last token are neutral: zero, or decay 1; so are channels between K and the kernel's own
// width.

#include "chunk_kda_fwd/cuda/item.cuh"
#include "cuda/mma.cuh"

namespace kda::cuda {

// Leading dimensions in floats, chosen so that no two lanes of a fragment load meet in a bank.
template <int kWidth>
struct Pitch {
  static constexpr int kRows = kWidth + 4;     // staged rows, and k_rest
  static constexpr int kDecayed = kWidth + 8;  // q_decayed and k_decayed
  static constexpr int kSquare = 24;           // [16,16] matrices
};

// What the state's way through a block needs, in shared memory; all but `decay` rounded to tf32. `channels` below is
// kWidth.
template <int kWidth>
struct Slot {
  float q_decayed[kBlock * Pitch<kWidth>::kDecayed];  // q * decay from the block's first row on
  float k_decayed[kBlock * Pitch<kWidth>::kDecayed];  // k * the same
  float k_rest[kBlock * Pitch<kWidth>::kRows];        // k * decay of the rows that follow in the block
  float decay[kWidth];                                // of the whole block
  float qk[kBlock * Pitch<kWidth>::kSquare];          // row i, column j <= i: sum_d q_i k_j E_ij, else 0
  float solve[kBlock * Pitch<kWidth>::kSquare];       // (I + A)^-1 diag(beta)
};

// The preparing warps' own part of shared memory.
template <int kWidth>
struct Staging {
  float q[kBlock * Pitch<kWidth>::kRows];
  float k[kBlock * Pitch<kWidth>::kRows];
  float gate[kBlock * Pitch<kWidth>::kRows];  // natural logarithm
  float step[kBlock * Pitch<kWidth>::kRows];  // decay per step
  float beta[kBlock];
  float kk[kBlock * kBlock];  // row i, column j < i: beta_i sum_d k_i k_j E_ij
};

// Lane l gets the sum over all lanes of v[l].
template <int kHalf = 16>
__device__ __forceinline__ float transposed_sum(float (&v)[2 * kHalf], int lane) {
  const bool is_upper = (lane & kHalf) != 0;
  float sums[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = is_upper ? v[i] : v[i + kHalf];
    const float keep = is_upper ? v[i + kHalf] : v[i];
    sums[i] = keep + __shfl_xor_sync(0xffffffffu, send, kHalf);
  }
  if constexpr (kHalf == 1) {
    return sums[0];
  } else {
    return transposed_sum<kHalf / 2>(sums, lane);
  }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) x += __shfl_xor_sync(0xffffffffu, x, half);
  return x;
}

__device__ __forceinline__ float dot4(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

__device__ __forceinline__ float4 times(const float4& a, const float4& b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}

__device__ __forceinline__ float4 times(const float4& a, float b) { return {a.x * b, a.y * b, a.z * b, a.w * b}; }

__device__ __forceinline__ float4 rounded(const float4& a) {
  return {to_tf32(a.x), to_tf32(a.y), to_tf32(a.z), to_tf32(a.w)};
}

__device__ __forceinline__ float4& at4(float* row) { return *reinterpret_cast<float4*>(row); }
__device__ __forceinline__ const float4& at4(const float* row) { return *reinterpret_cast<const float4*>(row); }

template <int kWidth, int kWarps>
class Preparer {
 public:
  static constexpr int kThreads = kWarps * 32;

  __device__ Preparer(const ChunkKdaFwdTask& task, const Item& item, Staging<kWidth>& staging, int thread, int barrier)
      : t_(task),
        item_(item),
        staging_(staging),
        thread_(thread),
        warp_(thread / 32),
        lane_(thread % 32),
        barrier_(barrier),
        gate_(gate_of(task, item)),
        is_vector_(task.vector_inputs && aligned(task)) {
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      const int c = channel(m);
      bias_[m] = {0, 0, 0, 0};
      if (c < t_.K) {
        bias_[m] = {bias_of(task, item, c), bias_of(task, item, c + 1), bias_of(task, item, c + 2),
                    bias_of(task, item, c + 3)};
      }
    }
  }

  // Starts the loads of a block.
  __device__ __forceinline__ void fetch(std::int64_t token) {
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const std::int64_t row = token + row_of_warp(r);
      const bool is_row = row < item_.tokens;
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        const int c = channel(m);
        if (!is_row || c >= t_.K) continue;
        q_[r][m] = pair_at(t_.at.q, t_.q, item_.key_head, row, c);
        k_[r][m] = pair_at(t_.at.k, t_.k, item_.key_head, row, c);
        g_[r][m] =
            load4(t_.at.g, t_.g_dtype, row_of(t_.g, item_, item_.head, row) + c * t_.g.inner, t_.g.inner, is_vector_);
      }
    }
    if (thread_ < kBlock) beta_ = token + thread_ < item_.tokens ? beta_of(t_, item_, token + thread_) : 0.0f;
  }

  // Neutral padding channels, once.
  __device__ __forceinline__ void clear_staging() {
    for (int i = thread_; i < kBlock * kPitch; i += kThreads) {
      staging_.q[i] = staging_.k[i] = staging_.gate[i] = 0.0f;
      staging_.step[i] = 1.0f;
    }
    barrier_sync(barrier_, kThreads);
  }

  // What fetch() brought, widened, normalised, gates applied.
  __device__ __forceinline__ void stage(std::int64_t token) {
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const int row = row_of_warp(r);
      stage_row(row, token + row, q_[r], k_[r], g_[r]);
    }
    if (thread_ < kBlock) staging_.beta[thread_] = beta_;
    barrier_sync(barrier_, kThreads);
  }

  __device__ __forceinline__ void fill(Slot<kWidth>& slot) {
    decay_rows(slot);
    for (int pair = warp_; pair < kBlock / 2; pair += 2 * kWarps) {
      pair_of_columns(slot, pair);
      if (kWarps < kBlock / 2) pair_of_columns(slot, kBlock / 2 - 1 - pair);
    }
    // Read now: the next block's beta may be staged while the last warp, which had the least to do, inverts.
    const float beta = staging_.beta[lane_ % kBlock];
    barrier_sync(barrier_, kThreads);
    if (warp_ == kWarps - 1) {
      invert(slot, beta);
      // The arrival that follows orders these writes; compute-sanitizer wants to see the warp wait.
      barrier_sync(kOwnBarrier, 32);
    }
  }

 private:
  static_assert(kWarps == 4 || kWarps == 8);
  static constexpr int kOwnBarrier = 15;  // of the inverting warp
  static constexpr int kPitch = Pitch<kWidth>::kRows;
  static constexpr int kRowsPerWarp = kBlock / kWarps;
  static constexpr int kGroups = (kWidth + 127) / 128;  // of four channels, of one lane
  static constexpr bool kAllLanes = kWidth % 128 == 0;

  __device__ __forceinline__ int channel(int m) const { return 4 * lane_ + 128 * m; }
  __device__ __forceinline__ int row_of_warp(int r) const { return warp_ + r * kWarps; }

  static __device__ __forceinline__ bool aligned(const ChunkKdaFwdTask& t) {
    return (reinterpret_cast<std::uintptr_t>(t.at.q) | reinterpret_cast<std::uintptr_t>(t.at.k) |
            reinterpret_cast<std::uintptr_t>(t.at.g)) %
               16 ==
           0;
  }

  __device__ __forceinline__ uint2 pair_at(const void* data, const RowStrides& strides, std::int64_t head,
                                           std::int64_t row, int c) const {
    const uint4 raw =
        load4(data, Dtype::kBFloat16, row_of(strides, item_, head, row) + c * strides.inner, strides.inner, is_vector_);
    return {raw.x, raw.y};
  }

  __device__ __forceinline__ void stage_row(int row, std::int64_t token, const uint2 (&q_raw)[kGroups],
                                            const uint2 (&k_raw)[kGroups], const uint4 (&g_raw)[kGroups]) {
    const bool is_row = token < item_.tokens;
    float4 q[kGroups];
    float4 k[kGroups];
    float q_squares = 0;
    float k_squares = 0;
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      const bool is_in = is_row && channel(m) < t_.K;
      q[m] = is_in ? widen4({q_raw[m].x, q_raw[m].y, 0, 0}, t_.dtype) : float4{0, 0, 0, 0};
      k[m] = is_in ? widen4({k_raw[m].x, k_raw[m].y, 0, 0}, t_.dtype) : float4{0, 0, 0, 0};
      q_squares = dot4(q[m], q[m], q_squares);
      k_squares = dot4(k[m], k[m], k_squares);
    }
    float q_factor = 1;
    float k_factor = 1;
    if (t_.qk_l2norm) {
      q_factor = 1.0f / sqrtf(warp_sum(q_squares) + 1e-6f);
      k_factor = 1.0f / sqrtf(warp_sum(k_squares) + 1e-6f);
    }
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      const int c = channel(m);
      if (c >= t_.K) continue;
      float4 gate{0, 0, 0, 0};
      if (is_row) gate = gates(token, c, bias_[m], widen4(g_raw[m], t_.g_dtype));
      const int at = row * kPitch + c;
      at4(staging_.q + at) = times(q[m], q_factor);
      at4(staging_.k + at) = times(k[m], k_factor);
      at4(staging_.gate + at) = gate;
      at4(staging_.step + at) = {expf(gate.x), expf(gate.y), expf(gate.z), expf(gate.w)};
    }
  }

  __device__ __forceinline__ float4 gates(std::int64_t token, int c, const float4& bias, const float4& g) const {
    if (t_.gate_mode != GateMode::kAccumulated) {
      return {gate_(g.x, bias.x), gate_(g.y, bias.y), gate_(g.z, bias.z), gate_(g.w, bias.w)};
    }
    float4 before{0, 0, 0, 0};
    if (token % t_.C != 0) {
      const std::int64_t row = row_of(t_.g, item_, item_.head, token - 1) + c * t_.g.inner;
      before = widen4(load4(t_.at.g, t_.g_dtype, row, t_.g.inner, is_vector_), t_.g_dtype);
    }
    return {step_of_gk(g.x, before.x), step_of_gk(g.y, before.y), step_of_gk(g.z, before.z), step_of_gk(g.w, before.w)};
  }

  // The block's decay comes from the sum of its gates with one rounding: a product of 16 rounded factors near 1 would
  // drift over a long sequence.
  __device__ __forceinline__ void decay_rows(Slot<kWidth>& slot) {
    for (int i = thread_; i < 2 * kWidth; i += kThreads) {
      const bool is_q = i < kWidth;
      const int c = is_q ? i : i - kWidth;
      const float* from = is_q ? staging_.q : staging_.k;
      float* to = is_q ? slot.q_decayed : slot.k_decayed;
      float product = 1;
      float sum = 0;
#pragma unroll
      for (int r = 0; r < kBlock; ++r) {
        product *= staging_.step[r * kPitch + c];
        sum += staging_.gate[r * kPitch + c];
        to[r * Pitch<kWidth>::kDecayed + c] = to_tf32(product * from[r * kPitch + c]);
      }
      if (is_q) slot.decay[c] = expf(sum);
    }
  }

  __device__ __forceinline__ float4 staged(const float* rows, int row, int m) const {
    if (!kAllLanes && channel(m) >= kWidth) return {0, 0, 0, 0};
    return at4(rows + row * kPitch + channel(m));
  }

  // Carries keys 2 pair and 2 pair + 1 down the rows, multiplied by each row's decay: their products with q_i and k_i
  // on the way, k_rest what is left after the last row.
  __device__ __forceinline__ void pair_of_columns(Slot<kWidth>& slot, int pair) {
    const int j0 = 2 * pair;
    const int j1 = j0 + 1;
    float4 k0[kGroups];
    float4 k1[kGroups];
    float s0[32];  // qk of rows 0..15, then kk
    float s1[32];
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      k0[m] = staged(staging_.k, j0, m);
      k1[m] = staged(staging_.k, j1, m);
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      s0[i] = s0[16 + i] = s1[i] = s1[16 + i] = 0;
      if (i < j0) continue;
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        const float4 q = staged(staging_.q, i, m);
        const float4 k = staged(staging_.k, i, m);
        const float4 step = staged(staging_.step, i, m);
        if (i > j0) k0[m] = times(k0[m], step);
        s0[i] = dot4(k0[m], q, s0[i]);
        s0[16 + i] = dot4(k0[m], k, s0[16 + i]);
        if (i > j1) k1[m] = times(k1[m], step);
        if (i >= j1) {
          s1[i] = dot4(k1[m], q, s1[i]);
          s1[16 + i] = dot4(k1[m], k, s1[16 + i]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      if (!kAllLanes && channel(m) >= kWidth) continue;
      at4(slot.k_rest + j0 * kPitch + channel(m)) = rounded(k0[m]);
      at4(slot.k_rest + j1 * kPitch + channel(m)) = rounded(k1[m]);
    }
    finish_column(slot, j0, transposed_sum(s0, lane_));
    finish_column(slot, j1, transposed_sum(s1, lane_));
  }

  __device__ __forceinline__ void finish_column(Slot<kWidth>& slot, int j, float sum) {
    const int i = lane_ % kBlock;
    if (lane_ < kBlock) {
      slot.qk[i * Pitch<kWidth>::kSquare + j] = to_tf32(sum);
    } else {
      staging_.kk[i * kBlock + j] = staging_.beta[i] * sum;
    }
  }

  // Forward substitution, the one way that stays exact when keys are alike; a lane has a column.
  __device__ __forceinline__ void invert(Slot<kWidth>& slot, float beta) {
    const int column = lane_ % kBlock;
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      float even = i == column ? 1.0f : 0.0f;
      float odd = 0;
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 a = at4(staging_.kk + i * kBlock + j);
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
      slot.solve[i * Pitch<kWidth>::kSquare + column] = i < column ? 0.0f : to_tf32(x[i] * beta);
    }
  }

  const ChunkKdaFwdTask& t_;
  const Item& item_;
  Staging<kWidth>& staging_;
  const int thread_;
  const int warp_;
  const int lane_;
  const int barrier_;
  const Gate gate_;
  const bool is_vector_;
  float4 bias_[kGroups];
  uint2 q_[kRowsPerWarp][kGroups];
  uint2 k_[kRowsPerWarp][kGroups];
  uint4 g_[kRowsPerWarp][kGroups];
  float beta_ = 0;
};

}  // namespace kda::cuda
