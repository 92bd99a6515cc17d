#pragma once

// The state's way through the blocks of a sequence: each warp carries 16 columns of it, transposed, in the accumulators
// of its matrix products. With h the state before a block, row by row of the block's tokens:
//
//     v_new = solve (v - k_decayed h)
//     attn_out = scale (q_decayed h + qk v_new)
//     h = decay h + k_rest^T v_new

#include "chunk_kda_fwd/cuda/prepare.cuh"

namespace kda::cuda {

// A warp's own [16 tokens][16 columns] on their way between registers and memory.
struct Exchange {
  static constexpr int kPitch = 20;
  float rows[kBlock * kPitch];
};

// [16 columns of the state][16 tokens] of a warp: tile n holds tokens 8n to 8n + 7. With lane = 4 r + c: columns r (0,
// 1) and r + 8 (2, 3), tokens 8n + 2c and 8n + 2c + 1.
struct Tokens {
  float tile[2][4];
};

// Tokens from which on a lane's two columns are not finite; kBlock: none.
struct Limits {
  int low = kBlock;
  int high = kBlock;
};

template <int kTiles>
class Advancer {
 public:
  static constexpr int kWidth = 8 * kTiles;

  __device__ Advancer(const ChunkKdaFwdTask& task, const Item& item, Exchange& exchange, int column, int lane)
      : t_(task),
        item_(item),
        exchange_(exchange),
        column_(column),
        lane_(lane),
        r_(lane / 4),
        c_(lane % 4),
        reads_vectors_(task.vector_inputs && reinterpret_cast<std::uintptr_t>(task.at.v) % 16 == 0),
        writes_vectors_(task.vector_outputs && reinterpret_cast<std::uintptr_t>(task.at.attn_out) % 16 == 0) {}

  __device__ __forceinline__ void load_state() {
    const float* from = t_.at.initial_state;
    const StateStrides& s = t_.initial_state;
    if (from != nullptr) from += item_.n * s.seq + item_.head * s.head;
    for_state([&](float& h, int k, int v) { h = from == nullptr || k >= t_.K ? 0.0f : from[k * s.k + v * s.v]; });
  }

  __device__ __forceinline__ void store_state() {
    if (t_.at.final_state == nullptr) return;
    const StateStrides& s = t_.final_state;
    float* to = t_.at.final_state + item_.n * s.seq + item_.head * s.head;
    for_state([&](float h, int k, int v) {
      if (k < t_.K) to[k * s.k + v * s.v] = h;
    });
  }

  __device__ __forceinline__ void store_h(std::int64_t chunk) {
    const StateStrides& s = t_.h;
    auto* to = static_cast<std::uint16_t*>(t_.at.h) + item_.batch * s.seq + (item_.first_chunk + chunk) * s.chunk +
               item_.head * s.head;
    const bool is_bf16 = t_.dtype == Dtype::kBFloat16;
    for_state([&](float h, int k, int v) {
      if (k < t_.K) to[k * s.k + v * s.v] = narrow(h, is_bf16);
    });
  }

  // Starts the loads of a block's v: a lane has half a token's columns.
  __device__ __forceinline__ void fetch(std::int64_t token) {
    const std::int64_t row = token + lane_ / 2;
    v_ = {0, 0, 0, 0};
    if (row >= item_.tokens) return;
    const std::int64_t inner = t_.v.inner;
    const std::int64_t at = row_of(t_.v, item_, item_.head, row) + (column_ + 8 * (lane_ % 2)) * inner;
    if (reads_vectors_) {
      v_ = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(t_.at.v) + at);
    } else {
      const uint4 low = load4(t_.at.v, Dtype::kBFloat16, at, inner, false);
      const uint4 high = load4(t_.at.v, Dtype::kBFloat16, at + 4 * inner, inner, false);
      v_ = {low.x, low.y, high.x, high.y};
    }
  }

  // What fetch() brought.
  __device__ __forceinline__ Tokens values() {
    __syncwarp();
    float* row = exchange_.rows + lane_ / 2 * Exchange::kPitch + 8 * (lane_ % 2);
    at4(row) = widen4({v_.x, v_.y, 0, 0}, t_.dtype);
    at4(row + 4) = widen4({v_.z, v_.w, 0, 0}, t_.dtype);
    __syncwarp();
    Tokens v;
    for_tokens(v, [&](float& x, int token, int column) { x = exchange_.rows[token * Exchange::kPitch + column]; });
    return v;
  }

  __device__ __forceinline__ void store(void* data, const RowStrides& strides, bool is_vector, std::int64_t token,
                                        Tokens x) {
    __syncwarp();
    for_tokens(x, [&](float value, int at, int column) { exchange_.rows[at * Exchange::kPitch + column] = value; });
    __syncwarp();
    const std::int64_t row = token + lane_ / 2;
    if (row >= item_.tokens) return;
    const int half = 8 * (lane_ % 2);
    const float* from = exchange_.rows + lane_ / 2 * Exchange::kPitch + half;
    const bool is_bf16 = t_.dtype == Dtype::kBFloat16;
    auto* to =
        static_cast<std::uint16_t*>(data) + row_of(strides, item_, item_.head, row) + (column_ + half) * strides.inner;
    const float4 a = at4(from);
    const float4 b = at4(from + 4);
    const uint4 packed = {narrow2(a.x, a.y, is_bf16), narrow2(a.z, a.w, is_bf16), narrow2(b.x, b.y, is_bf16),
                          narrow2(b.z, b.w, is_bf16)};
    if (is_vector) {
      *reinterpret_cast<uint4*>(to) = packed;
      return;
    }
    const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i * strides.inner] = static_cast<std::uint16_t>(words[i]);
      to[(2 * i + 1) * strides.inner] = static_cast<std::uint16_t>(words[i] >> 16);
    }
  }

  // One block. fetch() has been called for it; the next one's loads start here.
  __device__ __forceinline__ void advance(const Slot<kWidth>& slot, std::int64_t token, bool has_next) {
    Tokens x = values();
    if (has_next) fetch(token + kBlock);
    Tokens out{};
    through_state(slot, x, out);
    const Limits limits = take_finite(x);
    Tokens v_new{};
    times_square(slot.solve, x, v_new);
    poison(v_new, limits);
    update(slot, v_new);
    if (t_.at.v_new != nullptr) store(t_.at.v_new, t_.v_new, false, token, v_new);
    const Limits new_limits = take_finite(v_new);
    times_square(slot.qk, v_new, out);
    poison(out, new_limits);
    for_tokens(out, [&](float& value, int, int) { value *= t_.scale; });
    store(t_.at.attn_out, t_.attn_out, writes_vectors_, token, out);
  }

 private:
  static constexpr int kSquare = Pitch<kWidth>::kSquare;

  // f(element, k, v) for the warp's part of the state.
  template <class F>
  __device__ __forceinline__ void for_state(const F& f) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(h_[tile][e], 8 * tile + 2 * c_ + e % 2, column_ + r_ + 8 * (e / 2));
    }
  }

  // f(element, token, column) with the column counted from the warp's first.
  template <class F>
  __device__ __forceinline__ void for_tokens(Tokens& x, const F& f) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(x.tile[n][e], 8 * n + 2 * c_ + e % 2, r_ + 8 * (e / 2));
    }
  }

  // An accumulator as the first operand of the next product: with its columns 2c and 2c + 1 in the places of c and c +
  // 4. The second operand is read in the same order.
  static __device__ __forceinline__ void as_operand(const float (&tile)[4], float (&a)[4]) {
    a[0] = to_tf32(tile[0]);
    a[1] = to_tf32(tile[2]);
    a[2] = to_tf32(tile[1]);
    a[3] = to_tf32(tile[3]);
  }

  static __device__ __forceinline__ float2 at2(const float* p) { return *reinterpret_cast<const float2*>(p); }

  // x -= k_decayed h, out = q_decayed h.
  __device__ __forceinline__ void through_state(const Slot<kWidth>& slot, Tokens& x, Tokens& out) {
    Tokens predicted{};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float a[4];
      as_operand(h_[tile], a);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int at = (8 * n + r_) * Pitch<kWidth>::kDecayed + 8 * tile + 2 * c_;
        const float2 k = at2(slot.k_decayed + at);
        const float2 q = at2(slot.q_decayed + at);
        mma_tf32(predicted.tile[n], a, k.x, k.y);
        mma_tf32(out.tile[n], a, q.x, q.y);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x.tile[n][e] -= predicted.tile[n][e];
    }
  }

  // sum += square x, square [16,16] lower triangular and x finite.
  __device__ __forceinline__ void times_square(const float* square, const Tokens& x, Tokens& sum) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float a[4];
      as_operand(x.tile[n], a);
#pragma unroll
      for (int m = n; m < 2; ++m) {
        const float2 b = at2(square + (8 * m + r_) * kSquare + 8 * n + 2 * c_);
        mma_tf32(sum.tile[m], a, b.x, b.y);
      }
    }
  }

  // h = decay h + k_rest^T v_new.
  __device__ __forceinline__ void update(const Slot<kWidth>& slot, const Tokens& v_new) {
    float a[2][4];
    as_operand(v_new.tile[0], a[0]);
    as_operand(v_new.tile[1], a[1]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float2 decay = at2(slot.decay + 8 * tile + 2 * c_);
      float(&h)[4] = h_[tile];
      h[0] *= decay.x;
      h[1] *= decay.y;
      h[2] *= decay.x;
      h[3] *= decay.y;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float* k = slot.k_rest + (8 * n + 2 * c_) * Pitch<kWidth>::kRows + 8 * tile + r_;
        mma_tf32(h, a[n], k[0], k[Pitch<kWidth>::kRows]);
      }
    }
  }

  // A product with a lower triangular matrix would let what is not finite reach earlier tokens, 0 times NaN being NaN.
  // So such numbers are left out of it, and poison() marks what follows them.
  __device__ __forceinline__ Limits take_finite(Tokens& x) {
    Limits limits;
    float zero = 0;
    for_tokens(x, [&](float value, int, int) { zero = fmaf(value, 0.0f, zero); });
    if (!__any_sync(0xffffffffu, zero != 0)) return limits;
    for_tokens(x, [&](float& value, int token, int column) {
      if (isfinite(value)) return;
      value = 0;
      int& limit = column < 8 ? limits.low : limits.high;
      limit = min(limit, token);
    });
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      limits.low = min(limits.low, __shfl_xor_sync(0xffffffffu, limits.low, step));
      limits.high = min(limits.high, __shfl_xor_sync(0xffffffffu, limits.high, step));
    }
    return limits;
  }

  __device__ __forceinline__ void poison(Tokens& x, const Limits& limits) {
    for_tokens(x, [&](float& value, int token, int column) {
      if (token >= (column < 8 ? limits.low : limits.high)) value = __uint_as_float(0x7fffffffu);
    });
  }

  const ChunkKdaFwdTask& t_;
  const Item& item_;
  Exchange& exchange_;
  const int column_;
  const int lane_;
  const int r_;
  const int c_;
  const bool reads_vectors_;
  const bool writes_vectors_;
  float h_[kTiles][4];
  uint4 v_;
};

}  // namespace kda::cuda
