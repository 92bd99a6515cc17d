#pragma once

// The second kernel of the Hopper path: the state's way through the blocks of a sequence. A group of four warps owns 64
// of the 128 columns of the state of one value head: transposed, [64,128], as the sums of its matrix products, and
// rounded to bf16 as their first operand, so that the state never passes through shared memory. Row by row of a block's
// tokens, h the state before it:
//
//     x = v - keys h
//     v_new = solve x
//     attn_out = queries h + qk v_new
//     h = decay h + rest^T v_new
//
// One more warp keeps the blocks' images and v coming.

#include "chunk_kda_fwd/cuda/hopper_image.h"
#include "chunk_kda_fwd/cuda/hopper_prepare.cuh"
#include "chunk_kda_fwd/cuda/item.cuh"
#include "cuda/async.cuh"
#include "cuda/wgmma.cuh"

namespace kda::cuda {

// kIsPlain: attn_out is written in vectors, and neither v_new nor h is asked for. A block of threads has one group, and
// a multiprocessor two blocks.
template <bool kIsPlain_>
struct HopperChainShape {
  static constexpr bool kIsPlain = kIsPlain_;
  static constexpr int kThreads = 128 + 32;
  static constexpr int kColumns = 64;
  static constexpr int kStages = 4;

  // A stage: the image, then v, whose rows are padded so that no two of them meet in a bank.
  static constexpr int kValues = BlockImage::kBytes;
  static constexpr int kValuePitch = 2 * kColumns + 16;  // bytes
  static constexpr int kStageBytes = (kValues + kBlock * kValuePitch + 1023) / 1024 * 1024;
  static constexpr int kExchangeBytes = kBlock * 32;  // of one warp: [16 tokens][16 columns] 16-bit

  static constexpr int kExchanges = kStages * kStageBytes;
  static constexpr int kBarriers = kExchanges + 4 * kExchangeBytes;
  static constexpr int kBytes = kBarriers + 2 * kStages * 8;
};

// Loads what the groups read, `kStages` blocks ahead. To be called for one block after the other.
template <class Shape>
class HopperLoader {
 public:
  static constexpr int kArrivals = 33;  // of a full barrier: the image, and each lane's part of v

  __device__ HopperLoader(const ChunkKdaFwdTask& task, const Item& item, std::uint32_t memory, int column)
      : t_(task),
        item_(item),
        memory_(memory),
        column_(column),
        lane_(static_cast<int>(threadIdx.x) % 32),
        is_vector_(task.vector_inputs && reinterpret_cast<std::uintptr_t>(task.at.v) % 16 == 0),
        image_(task.images + (item.first_block * task.HV + item.head) * BlockImage::kBytes),
        values_(static_cast<const std::uint16_t*>(task.at.v) + row_of(task.v, item, item.head, lane_ / kPieces) +
                column + 8 * (lane_ % kPieces)) {}

  __device__ __forceinline__ void load(int block, int stage, std::uint32_t full) {
    const std::uint32_t to = memory_ + static_cast<std::uint32_t>(stage * Shape::kStageBytes);
    if (lane_ == 0) {
      mbarrier_arrive_expect(full, BlockImage::kBytes);
      bulk_load(to, image_, BlockImage::kBytes, full);
    }
    const std::int64_t left = item_.tokens - static_cast<std::int64_t>(block) * kBlock;
    if (is_vector_ && left >= kBlock) {
#pragma unroll
      for (int i = 0; i < kBlock; i += kRows) {
        copy_async16(row(to, lane_ / kPieces + i) + static_cast<std::uint32_t>(16 * (lane_ % kPieces)),
                     values_ + i * t_.v.token);
      }
      mbarrier_arrive_after_copies(full);
    } else {
      fill(block, left, to);
      mbarrier_arrive(full);
    }
    image_ += t_.HV * BlockImage::kBytes;
    values_ += kBlock * t_.v.token;
  }

 private:
  static constexpr int kPieces = Shape::kColumns / 8;  // of 16 bytes in a row
  static constexpr int kRows = 32 / kPieces;           // that all lanes together copy

  static __device__ __forceinline__ std::uint32_t row(std::uint32_t stage, int token) {
    return stage + Shape::kValues + static_cast<std::uint32_t>(token * Shape::kValuePitch);
  }

  // A block that is not complete or whose elements are not adjacent; zeros beyond the last token.
  __device__ __forceinline__ void fill(int block, std::int64_t rows, std::uint32_t stage) const {
    for (int token = 0; token < kBlock; ++token) {
      for (int c = 2 * lane_; c < Shape::kColumns; c += 64) {
        std::uint32_t pair = 0;
        if (token < rows) {
          const auto* from = static_cast<const std::uint16_t*>(t_.at.v) +
                             row_of(t_.v, item_, item_.head, static_cast<std::int64_t>(block) * kBlock + token) +
                             (column_ + c) * t_.v.inner;
          pair = from[0] | static_cast<std::uint32_t>(from[t_.v.inner]) << 16;
        }
        store_shared(row(stage, token) + static_cast<std::uint32_t>(2 * c), pair);
      }
    }
  }

  const ChunkKdaFwdTask& t_;
  const Item& item_;
  const std::uint32_t memory_;
  const int column_;
  const int lane_;
  const bool is_vector_;
  const std::byte* image_;       // of the next block
  const std::uint16_t* values_;  // this lane's first piece of it
};

// A group's share of the work. Names as in advance.cuh: a lane has columns r and r + 8 of its warp's 16, and tokens 2c
// and 2c + 1 of every eight.
template <class Shape>
class HopperAdvancer {
 public:
  __device__ HopperAdvancer(const ChunkKdaFwdTask& task, const Item& item, std::uint32_t memory, int first_column,
                            int warp)
      : t_(task),
        item_(item),
        lane_(static_cast<int>(threadIdx.x) % 32),
        r_(lane_ / 4),
        c_(lane_ % 4),
        local_column_(16 * warp),
        column_(first_column + 16 * warp),
        memory_(memory),
        exchange_(memory + Shape::kExchanges + static_cast<std::uint32_t>(warp * Shape::kExchangeBytes)),
        out_at_(static_cast<std::uint16_t*>(task.at.attn_out) + row_of(task.attn_out, item, item.head, lane_ / 2) +
                (column_ + 8 * (lane_ % 2)) * task.attn_out.inner),
        out_step_(kBlock * task.attn_out.token),
        rows_left_(item.tokens),
        pairs_(operand(memory + BlockImage::kKeys, 16, 1024, Swizzle::k128)),
        rest_(operand(memory + BlockImage::kRest, BlockImage::kRestPanel, 1024, Swizzle::k128)),
        qk_(operand(memory + BlockImage::kQk, 16, 256, Swizzle::k32)),
        solve_(operand(memory + BlockImage::kSolve, 16, 256, Swizzle::k32)) {}

  __device__ __forceinline__ void load_state() {
    const float* from = t_.at.initial_state;
    const StateStrides& s = t_.initial_state;
    if (from != nullptr) from += item_.n * s.seq + item_.head * s.head;
    for_state([&](float& h, int k, int v) { h = from == nullptr ? 0.0f : from[k * s.k + v * s.v]; });
    round_state();
  }

  __device__ __forceinline__ void store_state() {
    if (t_.at.final_state == nullptr) return;
    const StateStrides& s = t_.final_state;
    float* to = t_.at.final_state + item_.n * s.seq + item_.head * s.head;
    for_state([&](float h, int k, int v) { to[k * s.k + v * s.v] = h; });
  }

  __device__ __forceinline__ void store_h(std::int64_t chunk) {
    const StateStrides& s = t_.h;
    auto* to = static_cast<std::uint16_t*>(t_.at.h) + item_.batch * s.seq + (item_.first_chunk + chunk) * s.chunk +
               item_.head * s.head;
    for_state([&](float h, int k, int v) { to[k * s.k + v * s.v] = narrow(h, true); });
  }

  // x = v of the stage's block.
  __device__ __forceinline__ void load_values(int stage) {
    const std::uint32_t v = memory_ + static_cast<std::uint32_t>(stage * Shape::kStageBytes) + Shape::kValues;
    const int token = lane_ / 16 * 8 + lane_ % 8;
    std::uint32_t pairs[4];
    ldmatrix4_transposed(
        v + static_cast<std::uint32_t>(token * Shape::kValuePitch + 2 * (local_column_ + lane_ / 8 % 2 * 8)), pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x_[2 * i] = low_bf16(pairs[i]);
      x_[2 * i + 1] = high_bf16(pairs[i]);
    }
  }

  // The block that lies in `stage`; load_values() has been called for it. Between its products, writes the attn_out of
  // the block before.
  __device__ __forceinline__ void advance(int stage, std::int64_t token) {
    const auto offset = static_cast<std::uint32_t>(stage * Shape::kStageBytes);
    const std::uint64_t at = offset >> 4;
    float through_state[16];  // keys h, then queries h
    pin(through_state);
    pin(rounded_);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) wgmma_n32(through_state, rounded_ + 4 * k, pairs_ + at + step(k), k > 0);
    wgmma_commit();
    if (token > 0) store_out();
    wgmma_wait<1>();
    pin(h_);
    decay_state(memory_ + offset + BlockImage::kDecay);
    wgmma_wait<0>();
    pin(through_state);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x_[i] -= through_state[i];
      out_of_state_[i] = through_state[8 + i];
    }

    std::uint32_t operand[4];
    pack(x_, operand);
    const Limits limits = take_finite(operand);
    float v_new[8];
    pin(v_new);
    pin(operand);
    wgmma_fence();
    wgmma_n16(v_new, operand, solve_ + at, 0);
    std::uint32_t rest[4];  // of x, what bf16 does not hold
    pack_rest(x_, operand, rest);
    if (limits.is_any) keep_finite(rest);
    pin(rest);
    wgmma_fence();
    wgmma_n16(v_new, rest, solve_ + at, 1);
    wgmma_commit();
    wgmma_wait<0>();
    pin(v_new);

    poison(v_new, limits);
    std::uint32_t update[4];
    pack(v_new, update);
    if (!Shape::kIsPlain && t_.at.v_new != nullptr) store_v_new(token, v_new);
#pragma unroll
    for (int i = 0; i < 4; ++i) operand[i] = update[i];
    out_limits_ = take_finite(operand);
    pin(h_);
    pin(out_);
    pin(update);
    pin(operand);
    wgmma_fence();
    wgmma_n128(h_, update, rest_ + at);
    wgmma_commit();
    wgmma_n16(out_, operand, qk_ + at, 0);
    wgmma_commit();
  }

  // Ends the products that advance() left under way.
  __device__ __forceinline__ void finish() {
    wgmma_wait<1>();
    pin(h_);
    round_state();
    wgmma_wait<0>();
    pin(out_);
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = out_[i] + out_of_state_[i];
    poison(sum, out_limits_);
    pack(sum, packed_out_);
  }

  // attn_out of the last finished block.
  __device__ __forceinline__ void store_out() {
    __syncwarp();
    const int at = lane_ / 16 * 8 + lane_ % 8;
    const int half = (lane_ / 8 % 2) ^ (at / 4 % 2);
    stmatrix4_transposed(exchange_ + static_cast<std::uint32_t>(at * 32 + half * 16), packed_out_);
    __syncwarp();
    const int row = lane_ / 2;
    const uint4 pairs =
        load_shared<uint4>(exchange_ + static_cast<std::uint32_t>(row * 32 + ((lane_ % 2) ^ (row / 4 % 2)) * 16));
    if (row < rows_left_) store_row(pairs);
    out_at_ += out_step_;
    rows_left_ -= kBlock;
  }

 private:
  struct Limits {
    int low = kBlock;
    int high = kBlock;
    bool is_any = false;  // in the warp
  };

  // Descriptor units of 16 bytes to step k of the keys' and queries' 128 channels.
  static constexpr std::uint64_t step(int k) { return (k / 4 * BlockImage::kPairPanel + k % 4 * 32) >> 4; }

  __device__ __forceinline__ void store_row(const uint4& pairs) const {
    if (Shape::kIsPlain) {
      *reinterpret_cast<uint4*>(out_at_) = pairs;
      return;
    }
    const std::int64_t inner = t_.attn_out.inner;
    const std::uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out_at_[2 * i * inner] = static_cast<std::uint16_t>(words[i]);
      out_at_[(2 * i + 1) * inner] = static_cast<std::uint16_t>(words[i] >> 16);
    }
  }

  template <class F>
  __device__ __forceinline__ void for_state(const F& f) {
#pragma unroll
    for (int i = 0; i < 64; ++i) f(h_[i], i / 4 * 8 + 2 * c_ + i % 2, column_ + r_ + i / 2 % 2 * 8);
  }

  // f(element, token, column): the column within the warp's 16.
  template <class F>
  __device__ __forceinline__ void for_tokens(float (&x)[8], const F& f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) f(x[i], i / 4 * 8 + 2 * c_ + i % 2, r_ + i / 2 % 2 * 8);
  }

  static __device__ __forceinline__ void pack(const float (&x)[8], std::uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
  }

  static __device__ __forceinline__ void pack_rest(const float (&x)[8], const std::uint32_t (&pairs)[4],
                                                   std::uint32_t (&rest)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) rest[i] = pack_bf16(x[2 * i] - low_bf16(pairs[i]), x[2 * i + 1] - high_bf16(pairs[i]));
  }

  static constexpr std::uint32_t kExponent = 0x7f80u;

  static __device__ __forceinline__ void keep_finite(std::uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int shift = i % 2 * 16;
      if ((pairs[i / 2] >> shift & kExponent) == kExponent) pairs[i / 2] &= ~(0xffffu << shift);
    }
  }

  __device__ __forceinline__ void round_state() {
#pragma unroll
    for (int i = 0; i < 32; ++i) rounded_[i] = pack_bf16(h_[2 * i], h_[2 * i + 1]);
  }

  __device__ __forceinline__ void decay_state(std::uint32_t decay) {
#pragma unroll
    for (int tile = 0; tile < 16; ++tile) {
      const float2 d = load_shared<float2>(decay + static_cast<std::uint32_t>((8 * tile + 2 * c_) * 4));
      h_[4 * tile] *= d.x;
      h_[4 * tile + 1] *= d.y;
      h_[4 * tile + 2] *= d.x;
      h_[4 * tile + 3] *= d.y;
    }
  }

  // As in advance.cuh, but on what pack() made: sums of products under way may not be touched in a branch.
  __device__ __forceinline__ Limits take_finite(std::uint32_t (&pairs)[4]) const {
    Limits limits;
    // 0 times a finite number is 0 of either sign.
    const std::uint32_t even = times_zero(pairs[0], times_zero(pairs[1], 0));
    const std::uint32_t odd = times_zero(pairs[2], times_zero(pairs[3], 0));
    if (!__any_sync(0xffffffffu, ((even | odd) & 0x7fff7fffu) != 0)) return limits;
    limits.is_any = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int shift = i % 2 * 16;
      if ((pairs[i / 2] >> shift & kExponent) != kExponent) continue;
      pairs[i / 2] &= ~(0xffffu << shift);
      int& limit = i / 2 % 2 == 0 ? limits.low : limits.high;
      limit = min(limit, i / 4 * 8 + 2 * c_ + i % 2);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      limits.low = min(limits.low, __shfl_xor_sync(0xffffffffu, limits.low, step));
      limits.high = min(limits.high, __shfl_xor_sync(0xffffffffu, limits.high, step));
    }
    return limits;
  }

  static __device__ __forceinline__ std::uint32_t times_zero(std::uint32_t pair, std::uint32_t sum) {
    std::uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(0u), "r"(sum));
    return r;
  }

  __device__ __forceinline__ void poison(float (&x)[8], const Limits& limits) {
    if (!limits.is_any) return;
    for_tokens(x, [&](float& value, int token, int column) {
      if (token >= (column < 8 ? limits.low : limits.high)) value = __uint_as_float(0x7fffffffu);
    });
  }

  __device__ __forceinline__ void store_v_new(std::int64_t token, float (&x)[8]) {
    const RowStrides& s = t_.v_new;
    auto* to = static_cast<std::uint16_t*>(t_.at.v_new);
    for_tokens(x, [&](float value, int at, int column) {
      if (token + at >= item_.tokens) return;
      to[row_of(s, item_, item_.head, token + at) + (column_ + column) * s.inner] = narrow(value, true);
    });
  }

  const ChunkKdaFwdTask& t_;
  const Item& item_;
  const int lane_;
  const int r_;
  const int c_;
  const int local_column_;  // the warp's first, within the block of threads
  const int column_;        // the same within the state
  const std::uint32_t memory_;
  const std::uint32_t exchange_;
  std::uint16_t* out_at_;  // of this lane's part of the next block to be written
  const std::int64_t out_step_;
  std::int64_t rows_left_;
  const std::uint64_t pairs_, rest_, qk_, solve_;
  float h_[64];
  float x_[8];
  float out_[8];  // of the block's own tokens
  float out_of_state_[8];
  std::uint32_t rounded_[32];
  std::uint32_t packed_out_[4];
  Limits out_limits_;
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    hopper_chain_kernel(const __grid_constant__ ChunkKdaFwdTask task) {
  extern __shared__ __align__(1024) std::byte chain_memory[];
  const std::uint32_t memory = shared_address(chain_memory);
  const auto full = [=](int stage) { return memory + Shape::kBarriers + 8u * static_cast<std::uint32_t>(stage); };
  const auto empty = [=](int stage) { return full(Shape::kStages + stage); };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      mbarrier_init(full(stage), HopperLoader<Shape>::kArrivals);
      mbarrier_init(empty(stage), 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  constexpr int kPanels = 128 / Shape::kColumns;
  const std::int64_t index = blockIdx.x / kPanels;
  const int first_column = static_cast<int>(blockIdx.x % kPanels) * Shape::kColumns;
  const std::int64_t place = index / task.HV;
  const std::int64_t n = task.is_packed ? task.sequences[place].longest : place;
  const Item item = item_of(task, n, index % task.HV);
  const int blocks = static_cast<int>((item.tokens + kBlock - 1) / kBlock);
  const int warp = static_cast<int>(threadIdx.x) / 32;

  if (warp == 4) {
    HopperLoader<Shape> loader(task, item, memory, first_column);
    int stage = 0;
    std::uint32_t parity = 1;
    for (int b = 0; b < blocks; ++b) {
      if (b >= Shape::kStages) mbarrier_wait(empty(stage), parity);
      loader.load(b, stage, full(stage));
      if (++stage == Shape::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    return;
  }

  HopperAdvancer<Shape> advancer(task, item, memory, first_column, warp);
  advancer.load_state();
  const int blocks_per_chunk = task.C / kBlock;
  int stage = 0;
  std::uint32_t parity = 0;
  if (blocks > 0) {
    mbarrier_wait(full(0), 0);
    advancer.load_values(0);
  }
  for (int b = 0; b < blocks; ++b) {
    if (!Shape::kIsPlain && task.at.h != nullptr && b % blocks_per_chunk == 0) advancer.store_h(b / blocks_per_chunk);
    advancer.advance(stage, static_cast<std::int64_t>(b) * kBlock);
    int next = stage + 1;
    if (next == Shape::kStages) {
      next = 0;
      parity ^= 1;
    }
    if (b + 1 < blocks) {
      mbarrier_wait(full(next), parity);
      advancer.load_values(next);
    }
    advancer.finish();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(stage));
    stage = next;
  }
  if (blocks > 0) advancer.store_out();
  advancer.store_state();
}

}  // namespace kda::cuda
