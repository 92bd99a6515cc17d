#pragma once

// Everything about a block of 16 tokens that does not depend on the state. A warp owns a block of one value head: lanes
// 0 to 15 its first eight rows, the others the rest, each lane eight adjacent channels. While it multiplies what it has
// in shared memory, the next block is on its way to registers.
//
// With P_i the decay from the block's first row through row i, E_ij = P_i / P_j: products of q P and k P with k / P
// give all pairs, as long as 1 / P and k / P are numbers that bf16 can hold. Whether they are is decided row by row,
// from rows up to that one. From the first row on where they are not, E_ij is the product of two decays, from j to a
// row between j and i and from there to i: the rows behind the middle of the block with those before it, then the same
// within each half, quarter and eighth. No factor is above 1 and no quotient is needed, so that every gate is exact.

#include "chunk_kda_fwd/cuda/hopper_image.h"
#include "chunk_kda_fwd/cuda/prepare.cuh"
#include "chunk_kda_fwd/cuda/substitution.cuh"
#include "cuda/async.cuh"
#include "cuda/mma.cuh"

namespace kda::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr float kLargestKey = 64;  // for k / P to be a number of bf16

__device__ __forceinline__ float fast_reciprocal_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ float low_bf16(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// low_bf16() and high_bf16() by other instructions: else the assembler takes them for one and keeps their results in
// registers, which are short, from one use to the next.
__device__ __forceinline__ float low_bf16_again(std::uint32_t pair) {
  std::uint32_t r;
  asm volatile("prmt.b32 %0, %1, 0, 0x1044;" : "=r"(r) : "r"(pair));
  return __uint_as_float(r);
}
__device__ __forceinline__ float high_bf16_again(std::uint32_t pair) {
  std::uint32_t r;
  asm volatile("prmt.b32 %0, %1, 0, 0x3244;" : "=r"(r) : "r"(pair));
  return __uint_as_float(r);
}

// Eight adjacent channels.
struct Eight {
  float x[8];

  static __device__ __forceinline__ Eight of(const uint4& raw) {
    return {low_bf16(raw.x), high_bf16(raw.x), low_bf16(raw.y), high_bf16(raw.y),
            low_bf16(raw.z), high_bf16(raw.z), low_bf16(raw.w), high_bf16(raw.w)};
  }
  static __device__ __forceinline__ Eight again_of(const uint4& raw) {
    return {low_bf16_again(raw.x), high_bf16_again(raw.x), low_bf16_again(raw.y), high_bf16_again(raw.y),
            low_bf16_again(raw.z), high_bf16_again(raw.z), low_bf16_again(raw.w), high_bf16_again(raw.w)};
  }
  static __device__ __forceinline__ Eight all(float value) {
    return {value, value, value, value, value, value, value, value};
  }
  __device__ __forceinline__ uint4 pack() const {
    return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
  }
};

__device__ __forceinline__ Eight times(const Eight& a, const Eight& b) {
  Eight r;
#pragma unroll
  for (int c = 0; c < 8; ++c) r.x[c] = a.x[c] * b.x[c];
  return r;
}

__device__ __forceinline__ Eight times(const Eight& a, float b) { return times(a, Eight::all(b)); }

// Of eight bf16 numbers each.
__device__ __forceinline__ uint4 times(const uint4& a, const uint4& b) {
  const auto times2 = [](std::uint32_t x, std::uint32_t y) {
    std::uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
  };
  return {times2(a.x, b.x), times2(a.y, b.y), times2(a.z, b.z), times2(a.w, b.w)};
}

// log2(1 + e^x), with relative accuracy down to where e^x vanishes.
__device__ __forceinline__ float log2_softplus(float x) {
  const float t = fast_exp2(-kLog2E * fabsf(x));
  float log2;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(1.0f + t));
  const float series = kLog2E * t * fmaf(-t, fmaf(-t, fmaf(-t, 0.25f, 0.333333333f), 0.5f), 1.0f);
  const float log_part = t < 0.03125f ? series : log2;
  return x > 0 ? fmaf(kLog2E, x, log_part) : log_part;
}

// Floats between rows of A in shared memory.
inline constexpr int kPairPitch = 20;

// A warp's part of shared memory, and what a lane has of it: lanes 0 to 15 the block's first eight rows, the others the
// rest, each lane eight adjacent channels.
struct PrepareMemory {
  static constexpr int kFactor = BlockImage::kBytes;  // [32] fp32: of rows of q, then of k
  static constexpr int kScratch = 14592;              // k / P, then A
  static_assert(kFactor + 128 <= kScratch);
  static constexpr int kBytes = kScratch + 4096;

  static __device__ __forceinline__ int half(int lane) { return lane / 16; }

  // Where a lane's piece of its row i lies in an image's array of the given panels.
  static __device__ __forceinline__ std::uint32_t at(std::uint32_t image, int lane, int i, int panel_bytes) {
    const int piece = lane % 16;
    return image + static_cast<std::uint32_t>(piece / 8 * panel_bytes + half(lane) * 1024 + i * 128 +
                                              ((piece % 8 * 16) ^ (i * 16)));
  }

  // Steps of a lane's eight rows on their way to SplitBlock, where k_rest and k / P will be.
  static __device__ __forceinline__ std::uint32_t step_at(std::uint32_t image, int lane, int i) {
    const int to = i < 4 ? BlockImage::kRest + i * 1024 : kScratch + (i - 4) * 1024;
    return image + static_cast<std::uint32_t>(to + lane * 16);
  }
  // Two parts, 512 bytes apart.
  static __device__ __forceinline__ void store(std::uint32_t to, const Eight& a) {
    store_shared(
        to, uint4{__float_as_uint(a.x[0]), __float_as_uint(a.x[1]), __float_as_uint(a.x[2]), __float_as_uint(a.x[3])});
    store_shared(to + 512, uint4{__float_as_uint(a.x[4]), __float_as_uint(a.x[5]), __float_as_uint(a.x[6]),
                                 __float_as_uint(a.x[7])});
  }
  static __device__ __forceinline__ Eight load(std::uint32_t from) {
    const float4 low = load_shared<float4>(from);
    const float4 high = load_shared<float4>(from + 512);
    return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  }
};

// A block where k / P cannot serve all rows. Finds steps where PrepareMemory puts them, rows of q and k where q P and
// k P will be, factors and beta; leaves what HopperPreparer::settle() else does, and pairs where the inverse will be,
// q's transposed: [16,16] fp32, A_ij in j < i and qk_ji in j >= i. The first row whose pairs shall be taken from there
// lies where factors were. Out of line: what is rare shall cost the rest no registers.
class SplitBlock {
 public:
  __device__ __forceinline__ explicit SplitBlock(std::uint32_t image) : image_(image) {
    // Not %laneid, which the assembler would read again for every use.
    std::uint32_t below;
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
    lane_ = __popc(below);
  }

  // kHasGrowth: whether gates above 0 are possible.
  template <bool kHasGrowth>
  __device__ __forceinline__ void run(bool has_bounded_keys) {
#pragma unroll
    for (int i = 0; i < 8; ++i) step_[i] = PrepareMemory::load(PrepareMemory::step_at(image_, lane_, i));
    forget();
    split_in_halves();
    forget();
    split_at<4>();
    forget();
    split_at<2>();
    forget();
    split_at<1>();
    forget();
    pair_each_with_itself();
    forget();
    const unsigned first = settle<kHasGrowth>(has_bounded_keys);
    __syncwarp();
    if (lane_ == 0) store_shared(image_ + PrepareMemory::kFactor, first);
  }

 private:
  static constexpr int kScratch = PrepareMemory::kScratch;

  // Products of steps, and addresses, shall not be made or kept for a later use: registers are short.
  __device__ __forceinline__ void forget() {
    asm volatile("" : "+r"(lane_), "+r"(image_));
    __builtin_assume(lane_ >= 0 && lane_ < 32);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < 8; ++c) asm volatile("" : "+f"(step_[i].x[c]));
    }
  }

  __device__ __forceinline__ int half() const { return PrepareMemory::half(lane_); }

  // Where this lane's pieces of its row i of q and k lie, but for their arrays' places.
  __device__ __forceinline__ std::uint32_t pair_at(int i) const {
    return PrepareMemory::at(image_, lane_, i, BlockImage::kPairPanel);
  }
  static __device__ __forceinline__ uint4 query(std::uint32_t at) {
    return load_shared<uint4>(at + BlockImage::kQueries);
  }
  static __device__ __forceinline__ uint4 key(std::uint32_t at) { return load_shared<uint4>(at + BlockImage::kKeys); }

  // The operands of a split: at kScratch eight rows of q and then of k, at kRest eight keys; 64 channels a panel.
  static constexpr int kEighthPanel = 2048;
  __device__ __forceinline__ std::uint32_t eighth_at(int n) const {
    return image_ + static_cast<std::uint32_t>(lane_ % 16 / 8 * kEighthPanel + ((lane_ % 8 * 16) ^ (n * 144)));
  }

  // As HopperPreparer::settle(), with the same bits, but for k_rest. Returns the first row that k / P cannot serve,
  // with room for another rounding than when its need was noticed.
  template <bool kHasGrowth>
  __device__ __forceinline__ unsigned settle(bool has_bounded_keys) {
    Eight other = step_[0];  // decay of this half, then of the other
#pragma unroll
    for (int i = 1; i < 8; ++i) other = times(other, step_[i]);
#pragma unroll
    for (int c = 0; c < 8; ++c) other.x[c] = __shfl_xor_sync(kAllLanes, other.x[c], 16);
    forget();
    Eight decay = half() == 0 ? other : Eight::all(1);
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      const Eight k = times(Eight::of(key(pair_at(i))), factor(kBlock + 8 * half() + i));
      store_shared(PrepareMemory::at(image_, lane_, i, BlockImage::kRestPanel) + BlockImage::kRest,
                   times(k, decay).pack());
      if (i > 0) decay = times(decay, step_[i]);
    }
    forget();
    Eight product = half() == 0 ? Eight::all(1) : other;
    int first = kBlock;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      product = times(product, step_[i]);
      const std::uint32_t at = pair_at(i);
      const Eight raw = Eight::of(key(at));
      bool is_good = true;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        is_good = is_good & (product.x[c] > 0x1.ffp-121f);
        if (kHasGrowth) is_good = is_good & (product.x[c] < 0x1p120f);
      }
      if (!has_bounded_keys) {
#pragma unroll
        for (int c = 0; c < 8; ++c) is_good = is_good & (fabsf(raw.x[c]) <= kLargestKey);
      }
      first = min(first, is_good ? kBlock : 8 * half() + i);
      const Eight k = times(raw, factor(kBlock + 8 * half() + i));
      const Eight q = times(Eight::of(query(at)), factor(8 * half() + i));
      store_shared(at + BlockImage::kQueries, times(q, product).pack());
      store_shared(at + BlockImage::kKeys, times(k, product).pack());
      Eight quotient;
#pragma unroll
      for (int c = 0; c < 8; ++c) quotient.x[c] = k.x[c] * fast_reciprocal(product.x[c]);
      store_shared(PrepareMemory::at(image_, lane_, i, BlockImage::kRestPanel) + kScratch, quotient.pack());
    }
    return __reduce_min_sync(kAllLanes, static_cast<unsigned>(first));
  }

  // Pairs of the second half's rows with the first half's keys, across the middle of the block: the former times the
  // decay from there on, the latter times the decay up to there. Away from the middle, that is down the rows in one
  // half and up in the other.
  __device__ __forceinline__ void split_in_halves() const {
    const bool is_row = half() == 1;
    const int mirror = is_row ? 0 : 7;
    const auto to = static_cast<std::uint32_t>(is_row ? kScratch + 1024 : BlockImage::kRest);
    Eight decay;
    __syncwarp();
#pragma unroll
    for (int part = 0; part < 8; part += 2) {
      uint4 q[2];
      uint4 k[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const std::uint32_t from = pair_at((part + n) ^ mirror);
        q[n] = query(from);
        k[n] = key(from);
      }
#pragma unroll
      for (int n = part; n < part + 2; ++n) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float step = is_row ? step_[n].x[c] : (n == 0 ? 1.0f : step_[(8 - n) % 8].x[c]);
          decay.x[c] = n == 0 ? step : decay.x[c] * step;
        }
        const uint4 factor = decay.pack();
        const std::uint32_t at = eighth_at(n ^ mirror);
        store_shared(at + to, times(k[n - part], factor));
        const uint4 x = times(q[n - part], factor);
        if (is_row) store_shared(at + kScratch, x);
      }
    }
    multiply<8>();
  }

  // The same within each 2 kLevel rows, across their middle. Eight rows and eight keys in all.
  template <int kLevel>
  __device__ __forceinline__ void split_at() const {
    const auto n_of = [&](int i) { return 4 * half() + i / (2 * kLevel) * kLevel + i % kLevel; };
    uint4 q[8];
    uint4 k[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t from = pair_at(i);
      if ((i & kLevel) == 0) continue;
      q[i] = query(from);
      k[i] = key(from);
    }
    Eight decay;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & kLevel) == 0) continue;
      decay = i % kLevel == 0 ? step_[i] : times(decay, step_[i]);
      const uint4 factor = decay.pack();
      const std::uint32_t to = eighth_at(n_of(i)) + kScratch;
      store_shared(to, times(q[i], factor));
      store_shared(to + 1024, times(k[i], factor));
    }
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      if ((i & kLevel) != 0) continue;
      k[i] = key(pair_at(i));
      if (i % kLevel < kLevel - 1) {
        decay = i % kLevel == kLevel - 2 ? step_[i + 1] : times(decay, step_[i + 1]);
        k[i] = times(k[i], decay.pack());
      }
      store_shared(eighth_at(n_of(i)) + BlockImage::kRest, k[i]);
    }
    multiply<kLevel>();
  }

  // Puts aside what is wanted of the operands' product: pairs within the same 2 kLevel rows.
  template <int kLevel>
  __device__ __forceinline__ void multiply() const {
    __syncwarp();
    float pairs[4] = {};  // of q, then of k
    const int row = lane_ % 8;
    const std::uint32_t a_at = image_ + static_cast<std::uint32_t>(kScratch + lane_ / 8 % 2 * 1024 + row * 128);
    const std::uint32_t b_at = image_ + static_cast<std::uint32_t>(BlockImage::kRest + row * 128);
    const int a_piece = (lane_ / 16) ^ row;
    const int b_piece = (lane_ / 8) ^ row;
#pragma unroll
    for (int step = 0; step < 8; step += 2) {
      std::uint32_t a[4];
      std::uint32_t a_next[4];
      std::uint32_t b[4];
      const auto a_step = static_cast<std::uint32_t>(step / 4 * kEighthPanel);
      ldmatrix4(b_at + static_cast<std::uint32_t>(step / 4 * kEighthPanel + ((b_piece ^ (step % 4 * 2)) * 16)), b);
      ldmatrix4(a_at + a_step + static_cast<std::uint32_t>((a_piece ^ (step % 4 * 2)) * 16), a);
      ldmatrix4(a_at + a_step + static_cast<std::uint32_t>((a_piece ^ (step % 4 * 2 + 2)) * 16), a_next);
      mma_bf16(pairs, a, b[0], b[1]);
      mma_bf16(pairs, a_next, b[2], b[3]);
    }
    const int n = lane_ / 4;
    const int i = n + n / kLevel * kLevel + kLevel;
    const int m = lane_ % 4 * 2;
    const int j = m + m / kLevel * kLevel;
    constexpr int kNext = kLevel == 1 ? 2 : 1;  // from this key to the next
    const float q_factor = factor(i);
    const float k_factor =
        factor(kBlock + i) * load_shared<float>(image_ + static_cast<std::uint32_t>(BlockImage::kBeta + 4 * i));
    const float factor_j = factor(kBlock + j);
    const float factor_next = factor(kBlock + j + kNext);
    if (m / kLevel == n / kLevel) {
      put_aside(j, i, pairs[0] * factor_j * q_factor);
      put_aside(i, j, pairs[2] * factor_j * k_factor);
    }
    if ((m + 1) / kLevel == n / kLevel) {
      put_aside(j + kNext, i, pairs[1] * factor_next * q_factor);
      put_aside(i, j + kNext, pairs[3] * factor_next * k_factor);
    }
  }

  // q_i k_i.
  __device__ __forceinline__ void pair_each_with_itself() const {
    float pairs[2][4] = {};  // of rows 0 to 7, and the rest; other pairs are not wanted
    const int row = lane_ % 8;
    const std::uint32_t a_at =
        image_ + static_cast<std::uint32_t>(BlockImage::kQueries + (row + lane_ / 8 % 2 * 8) * 128);
    const std::uint32_t b_at = image_ + static_cast<std::uint32_t>(BlockImage::kKeys + (row + lane_ / 16 * 8) * 128);
    const int a_piece = (lane_ / 16) ^ row;
    const int b_piece = (lane_ / 8 % 2) ^ row;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      std::uint32_t a[4];
      std::uint32_t b[4];
      ldmatrix4(
          a_at + static_cast<std::uint32_t>(step / 4 * BlockImage::kPairPanel + ((a_piece ^ (step % 4 * 2)) * 16)), a);
      ldmatrix4(
          b_at + static_cast<std::uint32_t>(step / 4 * BlockImage::kPairPanel + ((b_piece ^ (step % 4 * 2)) * 16)), b);
      mma_bf16(pairs[0], a, b[0], b[1]);
      mma_bf16(pairs[1], a, b[2], b[3]);
    }
    const int i = lane_ / 4;
    const bool is_even = i % 2 == 0;
    if (lane_ % 4 == i / 2) {
      put_aside(i, i, (is_even ? pairs[0][0] : pairs[0][1]) * factor(i) * factor(kBlock + i));
      put_aside(8 + i, 8 + i, (is_even ? pairs[1][2] : pairs[1][3]) * factor(8 + i) * factor(kBlock + 8 + i));
    }
    __syncwarp();
  }

  __device__ __forceinline__ float factor(int row) const {
    return load_shared<float>(image_ + static_cast<std::uint32_t>(PrepareMemory::kFactor + 4 * row));
  }

  __device__ __forceinline__ void put_aside(int i, int j, float x) const {
    store_shared(image_ + static_cast<std::uint32_t>(BlockImage::kSolve + (i * kBlock + j) * 4), __float_as_uint(x));
  }

  std::uint32_t image_;
  int lane_;
  Eight step_[8];
};

template <bool kHasGrowth>
__device__ __noinline__ void split_block(std::uint32_t image, bool has_bounded_keys) {
  SplitBlock(image).run<kHasGrowth>(has_bounded_keys);
}

// Which images: all, or those that are made before states advance, or those that are made meanwhile, each of which is
// announced.
enum class Images { kAll, kEarly, kLate };

// Of all sequences and heads together.
__device__ __forceinline__ unsigned all_images(const ChunkKdaFwdTask& t) {
  return static_cast<unsigned>(blocks_of(t) * t.HV);
}
__device__ __forceinline__ unsigned early_images(const ChunkKdaFwdTask& t) {
  return min(static_cast<unsigned>(t.head_blocks * t.N * t.HV), all_images(t));
}

// A warp that makes images. kMode: what turns g into gates. kGateDtype: fp32 or bf16. kIsVector: rows of q, k and g are
// adjacent, and aligned to 16 bytes.
template <GateMode kMode, Dtype kGateDtype, bool kIsVector>
class HopperPreparer {
 public:
  static constexpr int kFactor = PrepareMemory::kFactor;
  static constexpr int kScratch = PrepareMemory::kScratch;
  static constexpr int kBytes = PrepareMemory::kBytes;  // of shared memory, per warp
  static constexpr int kWarps = 4;
  static constexpr int kBlocks = 3;  // of threads on a multiprocessor

  __device__ HopperPreparer(const ChunkKdaFwdTask& task, std::uint32_t memory)
      : t_(task), image_(memory), lane_(static_cast<int>(threadIdx.x % 32)) {}

  // Blocks `first`, `first + step`, ... below `end` of all sequences and heads together.
  template <Images kImages>
  __device__ void run(unsigned first, unsigned step, unsigned end) {
    constexpr bool kIsByTime = kImages != Images::kAll;
    if (first >= end) return;
    fetch<kIsByTime>(first);
    unsigned index = first;
    for (; index < end; index += step) {
      forget();
      load_small();
      activate();
      copies_wait();
      forget();
      normalise();
      forget();
      const bool is_good = settle();
      forget();
      if (kImages == Images::kLate && index != first) announce(index - step);
      if (index + step < end) fetch<kIsByTime>(index + step);
      forget();
      __syncwarp();
      multiply();
      forget();
      if (!is_good) take_split();
      __syncwarp();
      invert();
      async_proxy_fence();
      __syncwarp();
      if (lane_ == 0) {
        bulk_store(t_.images + image_of<kIsByTime>(index) * BlockImage::kBytes, image_, BlockImage::kBytes);
        bulk_store_commit();
      }
    }
    if (kImages == Images::kLate) {
      announce(index - step);
    } else if (lane_ == 0) {
      bulk_store_wait();
    }
  }

 private:
  __device__ __forceinline__ int half() const { return PrepareMemory::half(lane_); }
  __device__ __forceinline__ int channel() const { return lane_ % 16 * 8; }  // first of eight

  // Pieces of 16 bytes in a lane's gates of a row.
  static constexpr int kGateWords = kGateDtype == Dtype::kFloat32 ? 2 : 1;

  // The image of a block, whose copy to memory is the only one under way.
  __device__ __forceinline__ void announce(unsigned index) const {
    if (lane_ != 0) return;
    bulk_store_wait();
    store_release(t_.made + image_of</*kIsByTime=*/true>(index), 1);
  }

  struct Block {
    Item item;
    std::int64_t token;  // its first
  };

  // Blocks are in the order of memory, or where images are made while states advance, in the order of time: block by
  // block of a sequence, all sequences and heads.
  template <bool kIsByTime>
  __device__ __forceinline__ std::uint64_t image_of(unsigned index) const {
    if (!kIsByTime) return index;
    const unsigned block = divide(index, t_.by_heads);
    const unsigned local = divide(block, t_.by_sequences);
    const unsigned n = block - local * t_.by_sequences.divisor;
    return (n * t_.by_blocks.divisor + local) * t_.by_heads.divisor + (index - block * t_.by_heads.divisor);
  }

  template <bool kIsByTime>
  static __device__ __forceinline__ Block block_of(const ChunkKdaFwdTask& t, unsigned index) {
    const unsigned block = divide(index, t.by_heads);
    const unsigned head = index - block * t.by_heads.divisor;
    if (kIsByTime) {
      const unsigned local = divide(block, t.by_sequences);
      const Item item = item_of(t, block - local * t.by_sequences.divisor, head);
      return {item, static_cast<std::int64_t>(local) * kBlock};
    }
    const std::int64_t n =
        t.is_packed ? sequence_at(t, &PackedSequence::first_block, block) : divide(block, t.by_blocks);
    const Item item = item_of(t, n, head);
    return {item, (block - item.first_block) * kBlock};
  }

  // Starts the loads of a block.
  template <bool kIsByTime>
  __device__ __forceinline__ void fetch(unsigned index) {
    const Block block = block_of<kIsByTime>(t_, index);
    load(block.item, block.token);
  }

  __device__ __forceinline__ void load(const Item& item, std::int64_t token) {
    rows_ = static_cast<int>(min(static_cast<std::int64_t>(kBlock), item.tokens - token)) - 8 * half();
    const std::int64_t first = token + 8 * half();
    const std::int64_t g = row_of(t_.g, item, item.head, first) + channel() * t_.g.inner;
    const std::int64_t k = row_of(t_.k, item, item.key_head, first) + channel() * t_.k.inner;
    queries_ =
        static_cast<const std::uint16_t*>(t_.at.q) + row_of(t_.q, item, item.key_head, first) + channel() * t_.q.inner;
    load_rows<kGateWords>(t_.at.g, g, t_.g, g_);
    load_rows<1>(t_.at.k, k, t_.k, k_);
    item_head_ = static_cast<int>(item.head);
    beta_at_ = row_of(t_.beta, item, item.head, token + lane_ % kBlock);
  }

  // What is small is loaded when it is needed: registers to hold it meanwhile would be short.
  __device__ __forceinline__ void load_small() {
    A_log_ = t_.at.A_log == nullptr ? 0.0f : t_.at.A_log[item_head_ * t_.A_log_stride];
    if (t_.at.dt_bias != nullptr) {
      const float* bias = t_.at.dt_bias + (item_head_ * 128 + channel()) * t_.dt_bias_stride;
#pragma unroll
      for (int c = 0; c < 8; ++c) bias_[c] = bias[c * t_.dt_bias_stride];
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c) bias_[c] = 0;
    }
    raw_beta_ = 0;
    if (lane_ < kBlock && lane_ < rows_) {
      if (t_.beta_dtype == Dtype::kFloat32) {
        raw_beta_ = static_cast<const std::uint32_t*>(t_.at.beta)[beta_at_];
      } else {
        raw_beta_ = static_cast<const std::uint16_t*>(t_.at.beta)[beta_at_];
      }
    }
  }

  // This lane's part of eight rows, kWords pieces of 16 bytes each; zero beyond the last token.
  template <int kWords>
  __device__ __forceinline__ void load_rows(const void* data, std::int64_t first, const RowStrides& strides,
                                            uint4 (&raw)[8 * kWords]) const {
    constexpr int kElementBytes = 2 * kWords;
    const auto* from = static_cast<const std::byte*>(data) + first * kElementBytes;
    const std::int64_t step = strides.token * kElementBytes;
    if (kIsVector && rows_ >= 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i, from += step) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) raw[i * kWords + w] = __ldg(reinterpret_cast<const uint4*>(from) + w);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i, from += step) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint4& to = raw[i * kWords + w];
        to = {0, 0, 0, 0};
        if (i >= rows_) continue;
        if constexpr (kWords == 1) {
          to = gather(reinterpret_cast<const std::uint16_t*>(from), strides.inner);
        } else {
          const auto* words = reinterpret_cast<const std::uint32_t*>(from) + 4 * w * strides.inner;
          to = {words[0], words[strides.inner], words[2 * strides.inner], words[3 * strides.inner]};
        }
      }
    }
  }

  // Eight 16-bit elements, `step` apart.
  static __device__ __forceinline__ uint4 gather(const std::uint16_t* from, std::int64_t step) {
    std::uint32_t words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      words[n] = from[2 * n * step] | static_cast<std::uint32_t>(from[(2 * n + 1) * step]) << 16;
    }
    return {words[0], words[1], words[2], words[3]};
  }

  // Copies q to where q P will be; each lane what it will read itself.
  __device__ __forceinline__ void load_queries() const {
    if (lane_ == 0) bulk_store_wait_read();
    __syncwarp();
    const std::uint16_t* from = queries_;
#pragma unroll
    for (int i = 0; i < 8; ++i, from += t_.q.token) {
      const std::uint32_t to = at(i, BlockImage::kPairPanel) + BlockImage::kQueries;
      if (kIsVector && i < rows_) {
        copy_async16(to, from);
      } else {
        store_shared(to, i < rows_ ? gather(from, t_.q.inner) : uint4{0, 0, 0, 0});
      }
    }
  }

  __device__ __forceinline__ Eight gates_of(int i) const {
    if constexpr (kGateWords == 1) {
      return Eight::of(g_[i]);
    } else {
      const uint4 a = g_[2 * i];
      const uint4 b = g_[2 * i + 1];
      return {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w),
              __uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w)};
    }
  }

  // step_ = exp(gate); decay_ of the block. gate(g, bias): the gate in base 2 over `scale`. Asks for q meanwhile.
  template <class F>
  __device__ __forceinline__ void activate(float scale, const F& gate) {
    Eight sum = Eight::all(0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i == 1) load_queries();
      const Eight g = gates_of(i);
      const float factor = i < rows_ ? scale : 0.0f;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float log2 = factor * gate(g.x[c], bias_[c]);
        sum.x[c] += log2;
        step_[i].x[c] = fast_exp2(log2);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float low = sum.x[c];
      const float high = sum.x[4 + c];
      decay_[c] = fast_exp2((half() == 0 ? low : high) + __shfl_xor_sync(kAllLanes, half() == 0 ? high : low, 16));
    }
  }

  __device__ __forceinline__ void activate() {
    const float factor = t_.at.A_log == nullptr ? 1.0f : bounded_exp(A_log_);
    is_good_ = true;
    if constexpr (kMode == GateMode::kBounded) {
      constexpr float kTame = 0x1p32f;  // so that factor * g + factor * bias is factor * (g + bias)
      bool is_tame = factor < kTame;
#pragma unroll
      for (int c = 0; c < 8; ++c) is_tame = is_tame && fabsf(bias_[c]) < kTame;
      if (__all_sync(kAllLanes, is_tame)) {
        const float rate = -kLog2E * factor;
#pragma unroll
        for (int c = 0; c < 8; ++c) bias_[c] *= rate;
        activate(t_.lower_bound * kLog2E,
                 [&](float g, float bias) { return fast_reciprocal(1.0f + fast_exp2(fmaf(g, rate, bias))); });
      } else {
        activate(t_.lower_bound * kLog2E, [&](float g, float bias) {
          return fast_reciprocal(1.0f + fast_exp2(-kLog2E * (factor * (g + bias))));
        });
      }
    } else if constexpr (kMode == GateMode::kSoftplus) {
      activate(-factor, [&](float g, float bias) { return log2_softplus(g + bias); });
    } else {
      float most = 0;
      activate(kLog2E, [&](float g, float) {
        most = fmaxf(most, g);
        return g;
      });
      is_good_ = most <= 0;
    }
    const float beta = __uint_as_float(t_.beta_dtype == Dtype::kFloat32 ? raw_beta_ : raw_beta_ << 16);
    beta_ = beta;
    if (t_.beta_activation != BetaActivation::kNone && lane_ < kBlock) {
      const float t = fast_exp2(-kLog2E * fabsf(beta));
      const float whole = t_.beta_activation == BetaActivation::kSigmoid ? 1.0f : 2.0f;
      beta_ = whole * (beta < 0 ? t : 1.0f) * fast_reciprocal(1.0f + t);
    }
  }

  // Factors of the rows of q and k: of its half's rows, lane 16 h + l holds q's of row l in l < 8, else k's of row
  // l - 8.
  __device__ __forceinline__ void normalise() {
    factor_ = lane_ % 16 < 8 ? t_.scale : 1.0f;
    if (!t_.qk_l2norm) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const Eight k = Eight::of(k_[i]);
#pragma unroll
        for (int c = 0; c < 8; ++c) most = fmaxf(most, fabsf(k.x[c]));
      }
      is_good_ = is_good_ && most <= kLargestKey;
      return;
    }
    float squares[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Eight q = query(i);
      const Eight k = Eight::of(k_[i]);
      squares[i] = squares[8 + i] = 0;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        squares[i] = fmaf(q.x[c], q.x[c], squares[i]);
        squares[8 + i] = fmaf(k.x[c], k.x[c], squares[8 + i]);
      }
    }
    factor_ *= fast_reciprocal_root(transposed_sum<8>(squares, lane_) + 1e-6f);
  }

  // Registers are short: between stages the compiler shall forget what it can compute again, such as addresses. What
  // it puts into local memory instead comes back behind the loads that are under way.
  __device__ __forceinline__ void forget() {
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_));
    asm volatile("" : "+r"(image_));
  }

  __device__ __forceinline__ Eight query(int i) const {
    return Eight::of(load_shared<uint4>(at(i, BlockImage::kPairPanel) + BlockImage::kQueries));
  }

  __device__ __forceinline__ float q_factor(int i) const { return __shfl_sync(kAllLanes, factor_, i, 16); }
  __device__ __forceinline__ float k_factor(int i) const { return __shfl_sync(kAllLanes, factor_, 8 + i, 16); }

  __device__ __forceinline__ std::uint32_t at(int i, int panel_bytes) const {
    return PrepareMemory::at(image_, lane_, i, panel_bytes);
  }

  // Stores everything but pairs: q P, k P, k / P, k_rest, the decay. Returns whether k / P can serve all rows; if not,
  // SplitBlock has put aside the pairs of all rows.
  __device__ __forceinline__ bool settle() const {
    if (lane_ < kBlock) {
      store_shared(image_ + static_cast<std::uint32_t>(BlockImage::kBeta + 4 * lane_), __float_as_uint(beta_));
    }
    const std::uint32_t decay_at =
        image_ + static_cast<std::uint32_t>(BlockImage::kDecay + 2 * half() * BlockImage::kDecayPitch + channel());
    store_shared(decay_at, __float_as_uint(decay_[0]), __float_as_uint(decay_[1]));
    store_shared(decay_at + BlockImage::kDecayPitch, __float_as_uint(decay_[2]), __float_as_uint(decay_[3]));
    Eight total = step_[0];  // of this half, then of the block
#pragma unroll
    for (int i = 1; i < 8; ++i) total = times(total, step_[i]);
    Eight product;  // from the block's first row on
    bool is_good = is_good_;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float other = __shfl_xor_sync(kAllLanes, total.x[c], 16);
      product.x[c] = half() == 0 ? 1.0f : other;
      total.x[c] *= other;
      is_good = is_good && total.x[c] > 0x1p-120f;
    }
    if (__builtin_expect(!__all_sync(kAllLanes, is_good), 0)) {
      split();
      return false;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      product = times(product, step_[i]);
      const std::uint32_t pair_at = at(i, BlockImage::kPairPanel);
      const std::uint32_t rest_at = at(i, BlockImage::kRestPanel);
      store_shared(pair_at + BlockImage::kQueries, times(times(query(i), q_factor(i)), product).pack());
      const Eight k = times(Eight::again_of(k_[i]), k_factor(i));
      store_shared(pair_at + BlockImage::kKeys, times(k, product).pack());
      Eight quotient;
#pragma unroll
      for (int c = 0; c < 8; ++c) quotient.x[c] = k.x[c] * fast_reciprocal(product.x[c]);
      store_shared(rest_at + kScratch, quotient.pack());
      store_shared(rest_at + BlockImage::kRest, times(quotient, total).pack());
    }
    return true;
  }

  // Hands the block to SplitBlock.
  __device__ __forceinline__ void split() const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      store_shared(at(i, BlockImage::kPairPanel) + BlockImage::kKeys, k_[i]);
      PrepareMemory::store(PrepareMemory::step_at(image_, lane_, i), step_[i]);
    }
    // Lane 16 h + l holds the factor of row 8 h + l of q in l < 8, else of row 8 h + l - 8 of k.
    store_shared(image_ + static_cast<std::uint32_t>(kFactor + lane_ / 8 % 2 * 64 + half() * 32 + lane_ % 8 * 4),
                 __float_as_uint(factor_));
    split_block<kMode == GateMode::kActivated>(image_, t_.qk_l2norm);
  }

  // Puts the pairs that SplitBlock put aside where multiply() has put its own. Half a row per lane.
  __device__ __forceinline__ void take_split() const {
    __syncwarp();
    const int i = lane_ / 2;
    const int j = lane_ % 2 * 8;
    if (i < static_cast<int>(load_shared<std::uint32_t>(image_ + kFactor))) return;
    const std::uint32_t from = image_ + BlockImage::kSolve;
    Eight queries;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float x = load_shared<float>(from + static_cast<std::uint32_t>(((j + e) * kBlock + i) * 4));
      queries.x[e] = j + e <= i ? x : 0.0f;
    }
    store_shared(image_ + static_cast<std::uint32_t>(BlockImage::kQk + BlockImage::square(i, j)), queries.pack());
#pragma unroll
    for (int e = 0; e < 8; e += 4) {
      store_shared(image_ + static_cast<std::uint32_t>(kScratch + (i * kPairPitch + j + e) * 4),
                   load_shared<uint4>(from + static_cast<std::uint32_t>((i * kBlock + j + e) * 4)));
    }
  }

  // Rows of q and of k share a product: rows 0 to 7 or 8 to 15 of q, then the same rows of k.
  __device__ __forceinline__ void multiply() const {
    float upper[4] = {};     // rows 0 to 7, keys 0 to 7
    float lower[2][4] = {};  // rows 8 to 15, all keys
    const int row = lane_ % 8;
    const std::uint32_t a_at =
        image_ +
        static_cast<std::uint32_t>((lane_ / 8 % 2 == 0 ? BlockImage::kQueries : BlockImage::kKeys) + row * 128);
    const std::uint32_t b_at = image_ + static_cast<std::uint32_t>(kScratch + (row + lane_ / 16 * 8) * 128);
    const int a_piece = (lane_ / 16) ^ row;
    const int b_piece = (lane_ / 8 % 2) ^ row;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      std::uint32_t a[4];
      std::uint32_t a_next[4];
      std::uint32_t b[4];
      const auto a_step =
          static_cast<std::uint32_t>(step / 4 * BlockImage::kPairPanel + ((a_piece ^ (step % 4 * 2)) * 16));
      const auto b_step =
          static_cast<std::uint32_t>(step / 4 * BlockImage::kRestPanel + ((b_piece ^ (step % 4 * 2)) * 16));
      ldmatrix4(a_at + a_step, a);
      ldmatrix4(a_at + a_step + 1024, a_next);
      ldmatrix4(b_at + b_step, b);
      mma_bf16(upper, a, b[0], b[1]);
      mma_bf16(lower[0], a_next, b[0], b[1]);
      mma_bf16(lower[1], a_next, b[2], b[3]);
    }
    __syncwarp();
    const int i = lane_ / 4;
    const int j = lane_ % 4 * 2;
    const float beta_upper = load_shared<float>(image_ + static_cast<std::uint32_t>(BlockImage::kBeta + 4 * i));
    const float beta_lower = load_shared<float>(image_ + static_cast<std::uint32_t>(BlockImage::kBeta + 32 + 4 * i));
    store_queries(i, j, j <= i ? upper[0] : 0.0f, j < i ? upper[1] : 0.0f);
    store_queries(i, 8 + j, 0, 0);
    store_queries(8 + i, j, lower[0][0], lower[0][1]);
    store_queries(8 + i, 8 + j, j <= i ? lower[1][0] : 0.0f, j < i ? lower[1][1] : 0.0f);
    store_keys(i, j, beta_upper, j < i ? upper[2] : 0.0f, j + 1 < i ? upper[3] : 0.0f);
    store_keys(8 + i, j, beta_lower, lower[0][2], lower[0][3]);
    store_keys(8 + i, 8 + j, beta_lower, j < i ? lower[1][2] : 0.0f, j + 1 < i ? lower[1][3] : 0.0f);
  }

  __device__ __forceinline__ void store_queries(int i, int j, float x, float next) const {
    store_shared(image_ + static_cast<std::uint32_t>(BlockImage::kQk + BlockImage::square(i, j)), pack_bf16(x, next));
  }
  __device__ __forceinline__ void store_keys(int i, int j, float beta, float x, float next) const {
    store_shared(image_ + static_cast<std::uint32_t>(kScratch + (i * kPairPitch + j) * 4), __float_as_uint(beta * x),
                 __float_as_uint(beta * next));
  }

  // A lane has a column.
  __device__ __forceinline__ void invert() const {
    const int column = lane_ % kBlock;
    const std::uint32_t pairs = image_ + kScratch;
    float x[kBlock];
    substitute(
        column,
        [&](int i, int j) { return load_shared<float4>(pairs + static_cast<std::uint32_t>((i * kPairPitch + j) * 4)); },
        x);
    // Each half of the lanes stores half the rows.
    const int first = 8 * half();
    const int column_at = BlockImage::solve(0, column);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = half() == 0 ? x[i] : x[8 + i];
      store_shared(image_ + static_cast<std::uint32_t>(BlockImage::kSolve + 64 * first) +
                       static_cast<std::uint32_t>(i * 64 + (column_at ^ i / 2 * 16)),
                   __float_as_uint(first + i <= column ? 0.0f : to_tf32(value)));
    }
  }

  const ChunkKdaFwdTask& t_;
  std::uint32_t image_;
  int lane_;

  // Of the block that is on its way, then of the block in hand.
  int rows_ = 0;  // valid rows of this lane's eight: not above 0 if none is
  const std::uint16_t* queries_ = nullptr;
  uint4 k_[8];
  uint4 g_[8 * kGateWords];
  float bias_[8];
  std::int64_t beta_at_ = 0;
  int item_head_ = 0;
  float A_log_ = 0;
  std::uint32_t raw_beta_ = 0;

  Eight step_[8];
  float decay_[4];  // of the channels that this lane stores
  float beta_ = 0;  // of row `lane`
  float factor_ = 1;
  bool is_good_ = true;
};

template <class Preparer, Images kImages>
__global__ void __launch_bounds__(32 * Preparer::kWarps, Preparer::kBlocks)
    hopper_prepare_kernel(const __grid_constant__ ChunkKdaFwdTask task) {
  extern __shared__ __align__(1024) std::byte prepare_memory[];
  if (kImages == Images::kEarly) {
    const auto count = static_cast<unsigned>(task.blocks * task.HV);
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) task.made[i] = 0;
  }
  const unsigned warp = threadIdx.x / 32;
  Preparer(task, shared_address(prepare_memory) + warp * Preparer::kBytes)
      .template run<kImages>(Preparer::kWarps * blockIdx.x + warp, Preparer::kWarps * gridDim.x,
                             kImages == Images::kAll ? all_images(task) : early_images(task));
}

}  // namespace kda::cuda
