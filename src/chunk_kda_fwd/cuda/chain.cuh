#pragma once

// The state's way through the blocks of a sequence. A warp carries 16 columns of it, transposed, in the accumulators of
// its matrix products; the warps of a block of threads share images of blocks of 16 tokens, which one more warp brings
// to shared memory. With h the state before a block, row by row of the block's tokens:
//
//     x = beta (v - keys h)
//     v_new = (I + A)^-1 x
//     attn_out = queries h + qk v_new
//     h = decay h + rest^T v_new
//
// Lane 4 r + c has columns 4 (r / 2) + r % 2 and that + 2 of the warp's 16, channels 4 c to 4 c + 3 of every 16, tokens
// 2 c, 2 c + 1, 8 + 2 c and 9 + 2 c. Which row or column of an accumulator is which channel, column or token is free,
// as long as both operands of a product agree; so a lane's operands, its values and its results are four adjacent
// elements everywhere.

#include "chunk_kda_fwd/cuda/image.h"
#include "chunk_kda_fwd/cuda/item.cuh"
#include "cuda/async.cuh"
#include "cuda/mma.cuh"

namespace kda::cuda {

// [16 columns of the state][16 tokens]: tile m holds tokens 8 m to 8 m + 7; of a lane's first column two tokens, then
// of its second.
struct Tokens {
  float tile[2][4];
};

// Tokens from which on a lane's two columns are not finite; kBlock: none.
struct Limits {
  int low = kBlock;
  int high = kBlock;
};

// Whether tensors can be read or written four elements at a time.
struct ChainVectors {
  bool v, attn_out, v_new;
};

inline constexpr int kChainValueBytes = 512;  // of v, per advancing warp and stage

// A ring of stages in shared memory: an image and the advancing warps' parts of v each. While one is worked on the
// others are on their way; a stage alone is filled and worked on by turns.
template <int kGroups>
class ChainStages {
 public:
  static constexpr Image kImage{kGroups};

  __device__ ChainStages(std::byte* memory, int count, int warps)
      : memory_(memory), bytes_(kImage.bytes() + warps * kChainValueBytes), count_(count) {}

  [[nodiscard]] __device__ __forceinline__ int ahead() const { return count_ - 1; }
  [[nodiscard]] __device__ __forceinline__ std::byte* here() const { return memory_ + at_ * bytes_; }
  __device__ __forceinline__ void step() { at_ = at_ + 1 == count_ ? 0 : at_ + 1; }

  // What lane `lane` of a warp has of v in a stage: [2] of columns 4 c to 4 c + 3 of token 8 m + r, 32 apart.
  [[nodiscard]] static __device__ __forceinline__ uint2* values(std::byte* stage, int warp, int lane) {
    return reinterpret_cast<uint2*>(stage + kImage.bytes() + warp * kChainValueBytes) + lane;
  }

 private:
  std::byte* memory_;
  int bytes_;
  int count_;
  int at_ = 0;
};

// The warp that fills the stages.
template <int kGroups>
class ChainLoader {
 public:
  using Stages = ChainStages<kGroups>;

  __device__ ChainLoader(const ChunkKdaFwdTask& task, bool is_vector, const Stages& stages, const Item& item,
                         int first_column, int warps)
      : t_(task),
        stages_(stages),
        is_vector_(is_vector),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warps_(min(warps, (task.V - first_column) / 16)),
        tokens_(static_cast<int>(item.tokens)),
        image_(task.images + (item.first_block * task.HV + item.head) * Stages::kImage.bytes() + 16 * lane_),
        values_(static_cast<const std::uint16_t*>(task.at.v) + row_of(task.v, item, item.head, lane_ / 4) +
                (first_column + lane_ % 4 * 4) * task.v.inner) {}

  __device__ __forceinline__ void run(int blocks) {
    const int ahead = stages_.ahead();
    for (int b = 0; b < ahead; ++b) fetch(b < blocks);
    for (int b = 0; b < blocks; ++b) {
      if (ahead == 0) fetch(true);
      wait(ahead - 1);
      __syncthreads();
      if (ahead == 0) {
        __syncthreads();
      } else {
        fetch(b + ahead < blocks);
      }
    }
  }

 private:
  // Starts the copies of the next block, if there is one: a group of copies in any case.
  __device__ __forceinline__ void fetch(bool is_block) {
    if (is_block) {
      std::byte* stage = stages_.here();
      stages_.step();
      const std::uint32_t to = shared_address(stage) + static_cast<std::uint32_t>(16 * lane_);
      constexpr int kPieces = Stages::kImage.bytes() / 16;
#pragma unroll 8
      for (int i = 0; i < kPieces / 32; ++i) copy_async16(to + static_cast<std::uint32_t>(512 * i), image_ + 512 * i);
      if (lane_ < kPieces % 32) copy_async16(to + kPieces / 32 * 512, image_ + kPieces / 32 * 512);
      image_ += t_.HV * Stages::kImage.bytes();
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const std::uint16_t* from = values_ + 8 * m * t_.v.token;
        const bool is_row = token_ + 8 * m + lane_ / 4 < tokens_;
        for (int warp = 0; warp < warps_; ++warp, from += 16 * t_.v.inner) {
          uint2* values = Stages::values(stage, warp, lane_) + 32 * m;
          if (!is_row) {
            *values = {0, 0};
          } else if (is_vector_) {
            copy_async8(shared_address(values), from);
          } else {
            const uint4 raw = load4(from, Dtype::kBFloat16, 0, t_.v.inner, false);
            *values = {raw.x, raw.y};
          }
        }
      }
      values_ += kBlock * t_.v.token;
      token_ += kBlock;
    }
    copies_commit();
  }

  // Until all but the last `most` groups of copies have arrived.
  static __device__ __forceinline__ void wait(int most) {
    if (most >= 2) {
      copies_wait_but<2>();
    } else if (most == 1) {
      copies_wait_but<1>();
    } else {
      copies_wait_but<0>();
    }
  }

  const ChunkKdaFwdTask& t_;
  Stages stages_;
  const bool is_vector_;
  const int lane_;
  const int warps_;  // with columns
  const int tokens_;
  int token_ = 0;
  const std::byte* image_;       // this lane's part of the next block's
  const std::uint16_t* values_;  // the same of row r of v
};

template <int kGroups, bool kIsBf16>
class Advancer {
 public:
  using Stages = ChainStages<kGroups>;

  __device__ Advancer(const ChunkKdaFwdTask& task, const ChainVectors& vectors, const Stages& stages, const Item& item,
                      int column)
      : t_(task),
        vectors_(vectors),
        stages_(stages),
        item_(item),
        column_(column),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        r_(lane_ / 4),
        c_(lane_ % 4) {}

  __device__ __forceinline__ void run(int blocks) {
    if (column_ >= t_.V) {
      for (int b = 0; b < blocks; ++b) {
        __syncthreads();
        if (stages_.ahead() == 0) __syncthreads();
      }
      return;
    }
    load_state();
    out_at_ = row_at(t_.at.attn_out, t_.attn_out);
    const int blocks_per_chunk = t_.C / kBlock;
    for (int b = 0; b < blocks; ++b) {
      if (t_.at.h != nullptr && b % blocks_per_chunk == 0) store_h(b / blocks_per_chunk);
      __syncthreads();
      advance(stages_.here(), b * kBlock);
      stages_.step();
      if (stages_.ahead() == 0) __syncthreads();
    }
    store_state();
  }

 private:
  static constexpr unsigned kWarp = 0xffffffffu;
  static constexpr int kTiles = 2 * kGroups;
  static constexpr Dtype kDtype = kIsBf16 ? Dtype::kBFloat16 : Dtype::kFloat16;
  static constexpr Image kImage{kGroups};

  // This lane's part of row r.
  __device__ __forceinline__ std::uint16_t* row_at(void* data, const RowStrides& strides) const {
    return static_cast<std::uint16_t*>(data) + row_of(strides, item_, item_.head, r_) +
           (column_ + 4 * c_) * strides.inner;
  }

  // f(element, channel, column) for the warp's part of the state; channels beyond K are there and 0.
  template <class F>
  __device__ __forceinline__ void for_state(const F& f) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        f(h_[tile][e], tile / 2 * 16 + 4 * c_ + tile % 2 * 2 + e % 2, column_ + column_of(e / 2));
      }
    }
  }

  // Of the warp's 16.
  __device__ __forceinline__ int column_of(int side) const { return r_ / 2 * 4 + 2 * side + r_ % 2; }

  // f(element, token, side) with the lane's columns as sides 0 and 1.
  template <class F>
  __device__ __forceinline__ void for_tokens(Tokens& x, const F& f) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(x.tile[m][e], 8 * m + 2 * c_ + e % 2, e / 2);
    }
  }

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

  static __device__ __forceinline__ std::uint32_t pack(float first, float second) {
    return narrow2(first, second, kIsBf16);
  }

  // Four adjacent elements, or `inner` apart.
  static __device__ __forceinline__ void store4(std::uint16_t* to, std::int64_t inner, bool is_vector, const uint2& x) {
    if (is_vector) {
      *reinterpret_cast<uint2*>(to) = x;
      return;
    }
    to[0] = static_cast<std::uint16_t>(x.x);
    to[inner] = static_cast<std::uint16_t>(x.x >> 16);
    to[2 * inner] = static_cast<std::uint16_t>(x.y);
    to[3 * inner] = static_cast<std::uint16_t>(x.y >> 16);
  }

  __device__ __forceinline__ void store_h(int chunk) {
    const StateStrides& s = t_.h;
    auto* to = static_cast<std::uint16_t*>(t_.at.h) + item_.batch * s.seq + (item_.first_chunk + chunk) * s.chunk +
               item_.head * s.head;
    const bool is_aligned =
        reinterpret_cast<std::uintptr_t>(t_.at.h) % 8 == 0 && s.seq % 4 == 0 && s.chunk % 4 == 0 && s.head % 4 == 0;
    if (s.k == 1) {
      const bool is_vector = is_aligned && s.v % 4 == 0;
#pragma unroll
      for (int p = 0; p < kGroups; ++p) {
        if (16 * p >= t_.K) break;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          store4(to + 16 * p + 4 * c_ + (column_ + column_of(side)) * s.v, 1, is_vector,
                 {pack(h_[2 * p][2 * side], h_[2 * p][2 * side + 1]),
                  pack(h_[2 * p + 1][2 * side], h_[2 * p + 1][2 * side + 1])});
        }
      }
      return;
    }
    const bool is_vector = is_aligned && s.v == 1 && s.k % 4 == 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile / 2 * 16 >= t_.K) break;
      const int channel = tile / 2 * 16 + tile % 2 * 2 + column_of(0);
      const uint2 four = {transposed8x8(pack(h_[tile][0], h_[tile][1])), transposed8x8(pack(h_[tile][2], h_[tile][3]))};
      store4(to + channel * s.k + (column_ + 4 * c_) * s.v, s.v, is_vector, four);
    }
  }

  __device__ __forceinline__ Tokens values(std::byte* stage) const {
    Tokens v;
    const uint2* from = Stages::values(stage, warp_, lane_);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint2 four = from[32 * m];
      const float4 wide = widen4({transposed8x8(four.x), transposed8x8(four.y), 0, 0}, kDtype);
      v.tile[m][0] = wide.x;
      v.tile[m][1] = wide.y;
      v.tile[m][2] = wide.z;
      v.tile[m][3] = wide.w;
    }
    return v;
  }

  // Rows `first` and on, given where this lane's part of row `first` + r is.
  __device__ __forceinline__ void store(std::uint16_t* to, const RowStrides& strides, bool is_vector, int first,
                                        const Tokens& x) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint2 four = {transposed8x8(pack(x.tile[m][0], x.tile[m][1])),
                          transposed8x8(pack(x.tile[m][2], x.tile[m][3]))};
      if (first + 8 * m + r_ < item_.tokens) store4(to + 8 * m * strides.token, strides.inner, is_vector, four);
    }
  }

  __device__ __forceinline__ void advance(std::byte* stage, int token) {
    const float4 beta = reinterpret_cast<const float4*>(stage + kImage.beta())[c_];
    Tokens x = values(stage);
    Tokens out{};
    through_state(stage, x, out);
    decay(stage);
#pragma unroll
    for (int side = 0; side < 4; side += 2) {
      x.tile[0][side] *= beta.x;
      x.tile[0][side + 1] *= beta.y;
      x.tile[1][side] *= beta.z;
      x.tile[1][side + 1] *= beta.w;
    }
    const Tokens v_new = times_triangle(stage + kImage.solve(), x, x);
    update(stage, v_new);
    if (t_.at.v_new != nullptr) {
      store(row_at(t_.at.v_new, t_.v_new) + token * t_.v_new.token, t_.v_new, vectors_.v_new, token, v_new);
    }
    out = times_triangle(stage + kImage.qk(), v_new, out);
    store(out_at_, t_.attn_out, vectors_.attn_out, token, out);
    out_at_ += kBlock * t_.attn_out.token;
  }

  // An accumulator as the first operand of the next product: with its columns 2c and 2c + 1 in the places of c and c +
  // 4. The second operand is read in the same order.
  static __device__ __forceinline__ void as_operand(const float (&tile)[4], float (&a)[4]) {
    a[0] = to_tf32(tile[0]);
    a[1] = to_tf32(tile[2]);
    a[2] = to_tf32(tile[1]);
    a[3] = to_tf32(tile[3]);
  }

  // x -= keys h, out = queries h.
  __device__ __forceinline__ void through_state(const std::byte* stage, Tokens& x, Tokens& out) const {
    Tokens predicted[2] = {};
#pragma unroll
    for (int p = 0; p < kGroups; ++p) {
      const auto* lanes = reinterpret_cast<const float4*>(stage + p * Image::kGroupBytes) + lane_;
      float a[2][4];
      as_operand(h_[2 * p], a[0]);
      as_operand(h_[2 * p + 1], a[1]);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float4 k = lanes[Image::kKeys / 16 + 32 * m];
        const float4 q = lanes[Image::kQueries / 16 + 32 * m];
        mma_tf32(predicted[0].tile[m], a[0], k.x, k.y);
        mma_tf32(predicted[1].tile[m], a[1], k.z, k.w);
        mma_tf32(out.tile[m], a[0], q.x, q.y);
        mma_tf32(out.tile[m], a[1], q.z, q.w);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x.tile[m][e] -= predicted[0].tile[m][e] + predicted[1].tile[m][e];
    }
  }

  // sum + square x, square [16,16] lower triangular. What is not finite would reach earlier tokens through its zeros, 0
  // times NaN being NaN: then the product is repeated without, and what follows is set to NaN.
  __device__ __forceinline__ Tokens times_triangle(const std::byte* square, const Tokens& x, const Tokens& sum) {
    const auto* lanes = reinterpret_cast<const float4*>(square) + lane_;
    const float4 upper = lanes[0];
    const float4 lower = lanes[32];
    const auto multiply = [&](const Tokens& from) {
      Tokens to = sum;
      float a[2][4];
      as_operand(from.tile[0], a[0]);
      as_operand(from.tile[1], a[1]);
      mma_tf32(to.tile[0], a[0], upper.x, upper.y);
      mma_tf32(to.tile[1], a[0], lower.x, lower.y);
      mma_tf32(to.tile[1], a[1], lower.z, lower.w);
      return to;
    };
    Tokens product = multiply(x);
    float zero[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float(&tile)[4] = x.tile[m];
      zero[m] = fmaf(tile[0], 0.0f, tile[1] * 0.0f) + fmaf(tile[2], 0.0f, tile[3] * 0.0f);
    }
    if (__builtin_expect(__any_sync(kWarp, zero[0] + zero[1] != 0), 0)) {
      Tokens finite = x;
      const Limits limits = take_finite(finite);
      product = multiply(finite);
      for_tokens(product, [&](float& value, int token, int side) {
        if (token >= (side == 0 ? limits.low : limits.high)) value = __uint_as_float(0x7fffffffu);
      });
    }
    return product;
  }

  __device__ __forceinline__ Limits take_finite(Tokens& x) {
    Limits limits;
    for_tokens(x, [&](float& value, int token, int side) {
      if (isfinite(value)) return;
      value = 0;
      int& limit = side == 0 ? limits.low : limits.high;
      limit = min(limit, token);
    });
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      limits.low = min(limits.low, __shfl_xor_sync(kWarp, limits.low, step));
      limits.high = min(limits.high, __shfl_xor_sync(kWarp, limits.high, step));
    }
    return limits;
  }

  // h = decay h.
  __device__ __forceinline__ void decay(const std::byte* stage) {
#pragma unroll
    for (int p = 0; p < kGroups; ++p) {
      const float4 decay = reinterpret_cast<const float4*>(stage + kImage.decay() + 64 * p)[c_];
#pragma unroll
      for (int side = 0; side < 4; side += 2) {
        h_[2 * p][side] *= decay.x;
        h_[2 * p][side + 1] *= decay.y;
        h_[2 * p + 1][side] *= decay.z;
        h_[2 * p + 1][side + 1] *= decay.w;
      }
    }
  }

  // h += rest^T v_new.
  __device__ __forceinline__ void update(const std::byte* stage, const Tokens& v_new) {
    float a[2][4];
    as_operand(v_new.tile[0], a[0]);
    as_operand(v_new.tile[1], a[1]);
#pragma unroll
    for (int p = 0; p < kGroups; ++p) {
      const auto* lanes = reinterpret_cast<const float4*>(stage + p * Image::kGroupBytes + Image::kRest) + lane_;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float4 k = lanes[32 * t];
        mma_tf32(h_[2 * p + t], a[0], k.x, k.y);
        mma_tf32(h_[2 * p + t], a[1], k.z, k.w);
      }
    }
  }

  const ChunkKdaFwdTask& t_;
  const ChainVectors& vectors_;
  Stages stages_;
  const Item& item_;
  const int column_;  // the warp's first
  const int warp_;
  const int lane_;
  const int r_;
  const int c_;
  std::uint16_t* out_at_ = nullptr;  // this lane's part of row r of the block in hand
  float h_[kTiles][4];
};

// Advancing warps of a block of threads, at most; one more loads.
template <int kGroups>
inline constexpr int kChainMostWarps = kGroups > 8 ? 4 : 8;

template <int kGroups, bool kIsBf16>
__global__ void __launch_bounds__(32 * (kChainMostWarps<kGroups> + 1), 1)
    chain_kernel(const __grid_constant__ ChunkKdaFwdTask task, const __grid_constant__ ChainVectors vectors,
                 const int stages) {
  extern __shared__ __align__(16) std::byte chain_memory[];
  const int warps = static_cast<int>(blockDim.x) / 32 - 1;
  const unsigned index = blockIdx.x / static_cast<unsigned>(task.panels);
  const int panel = static_cast<int>(blockIdx.x % static_cast<unsigned>(task.panels));
  const unsigned place = index / static_cast<unsigned>(task.HV);
  const unsigned head = index - place * static_cast<unsigned>(task.HV);
  const Item item = item_of(task, task.is_packed ? task.sequences[place].longest : place, head);
  const ChainStages<kGroups> ring(chain_memory, stages, warps);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first_column = 16 * panel * warps;
  const int blocks = blocks_of(item);
  if (warp == warps) {
    ChainLoader<kGroups>(task, vectors.v, ring, item, first_column, warps).run(blocks);
  } else {
    Advancer<kGroups, kIsBf16>(task, vectors, ring, item, first_column + 16 * warp).run(blocks);
  }
}

}  // namespace kda::cuda
