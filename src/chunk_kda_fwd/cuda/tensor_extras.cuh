#pragma once

// The kernel that makes gk, Aqk, Akk, w, u, qg and kg for K up to 128, on the tensor cores: products of numbers split
// in two bf16 each. A block of threads owns a chunk of one value head, a warp eight of its tokens, a lane four adjacent
// channels; channels from K on are neutral.
//
// Within a block of 16 tokens, with P_i the decay from its first row through row i, E_ij = P_i / P_j, as long as 1 / P
// is a number to multiply with; rows from the first one on where it is not are computed pair by pair. Between blocks
// E_ij is P_i times the decay of the blocks between times the decay of the rows behind j in its block, all at most 1.

#include "chunk_kda_fwd/cuda/item.cuh"
#include "chunk_kda_fwd/cuda/substitution.cuh"
#include "cuda/async.cuh"
#include "cuda/lanes.cuh"
#include "cuda/split.cuh"

namespace kda::cuda {

// Which outputs can be written 16 bytes at a time.
struct ExtrasVectors {
  bool gk, Aqk, Akk, w, u, qg, kg;
};

// Predicated, where the compiler would branch; what is stored is not read here again.
__device__ __forceinline__ void store_if(bool is_there, void* to, const uint4& x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.cs.v4.u32 [%1], {%2,%3,%4,%5};\n}\n" ::"r"(
                   static_cast<int>(is_there)),
               "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ void store_if(bool is_there, void* to, const uint2& x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.cs.v2.u32 [%1], {%2,%3};\n}\n" ::"r"(
                   static_cast<int>(is_there)),
               "l"(to), "r"(x.x), "r"(x.y)
               : "memory");
}

// Zeros where nothing is to be loaded.
__device__ __forceinline__ uint4 load4_if(bool is_there, const void* from) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %4, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%5];\n}\n"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "r"(static_cast<int>(is_there)), "l"(from));
  return x;
}

__device__ __forceinline__ uint2 load2_if(bool is_there, const void* from) {
  uint2 x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n@p ld.global.nc.v2.u32 {%0,%1}, "
      "[%3];\n}\n"
      : "=&r"(x.x), "=&r"(x.y)
      : "r"(static_cast<int>(is_there)), "l"(from));
  return x;
}

__device__ __forceinline__ void store_shared_half(std::uint32_t address, std::uint16_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

// 16 bytes, or zeros.
__device__ __forceinline__ void copy_async16_if(bool is_there, std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

// Marks `index` at an address in shared memory, where the least one stays. It is rare.
static __device__ __noinline__ void mark_shared(std::uint32_t address, int index) {
  asm volatile("red.shared.min.s32 [%0], %1;" ::"r"(address), "r"(index) : "memory");
}

template <int kBlocks>
struct TensorExtrasMemory {
  static constexpr int kC = kBlock * kBlocks;

  // Rows of a block in a panel of 64 channels: high parts [16][64] bf16 in 128-byte swizzle, then low parts.
  static constexpr int kLowRows = 2048;
  static constexpr int kRows = 2 * kLowRows;
  static __device__ __forceinline__ std::uint32_t piece(int row, int piece) {
    return static_cast<std::uint32_t>(row * 128 + ((piece ^ (row & 7)) << 4));
  }

  // The lower triangle of [C,C] in squares of [16,16] bf16, 32-byte swizzle: high parts, then low parts, then the rest.
  static constexpr int kLowSquare = 512;
  static constexpr int kRestSquare = 1024;
  static constexpr int kSquare = 1536;
  static constexpr int kTriangle = kBlocks * (kBlocks + 1) / 2 * kSquare;
  static __device__ __forceinline__ std::uint32_t square(int row_block, int column_block) {
    return static_cast<std::uint32_t>((row_block * (row_block + 1) / 2 + column_block) * kSquare);
  }
  static __device__ __forceinline__ std::uint32_t element(int row, int column) {
    return static_cast<std::uint32_t>((row * 32 + column * 2) ^ ((row & 4) << 2));
  }

  static constexpr int most(int a, int b) { return a > b ? a : b; }

  // Bytes between rows of w and u as they lie before they leave.
  static constexpr int kStagePitch = 272;

  // Byte offsets. Scaled: by kScale, or, rows of large numbers, not at all.
  static constexpr int kPanel = kBlocks * kRows;        // 64 channels of all blocks
  static constexpr int kKeys = 0;                       // [2 panels][blocks] k P, scaled
  static constexpr int kQueries = kKeys + 2 * kPanel;   // [2 panels][blocks] q P, scaled
  static constexpr int kRight = kQueries + 2 * kPanel;  // [2 panels][blocks] k / P over kScale, then k R
  static constexpr int kFactors = kRight + 2 * kPanel;  // [pairs][128] fp32: decay of the blocks between two
  static constexpr int kFactorPairs = (kBlocks - 3) * (kBlocks - 2) / 2;
  // After the pairs.
  static constexpr int kSolve = kQueries;              // A, then Akk diag(kSeeds)
  static constexpr int kInverse = kSolve + kTriangle;  // Akk, then u on its way out, as w in kStage
  static constexpr int kStage = kInverse + most(kC * kStagePitch, kTriangle);  // [C][kStagePitch] w on its way out
  static constexpr int kOwn = kStage;  // [blocks][16][kOwnPitch] fp32: A within blocks
  static constexpr int kOwnPitch = 20;
  static constexpr int kNarrow = kOwn + kBlocks * kBlock * kOwnPitch * 4;  // Aqk, then Akk, high parts of the squares
  static constexpr int kAfterPairs = most(kStage + kC * kStagePitch, kNarrow + kTriangle / 3);
  // v [C][128] in 128-byte swizzle: where there is room, else where Akk was.
  static constexpr bool kHasRoomForValues = kBlocks == 4;
  static constexpr int kValues = kHasRoomForValues ? kAfterPairs : kInverse;
  static constexpr int kTotals =  // [2 blocks][128] fp32: sums of gates
      most(kFactors + kFactorPairs * 512, kAfterPairs + (kHasRoomForValues ? kC * 256 : 0));
  static constexpr int kDecays = kTotals + kBlocks * 1024;     // [blocks - 1][128] fp32: decay of a block
  static constexpr int kBeta = kDecays + (kBlocks - 1) * 512;  // [C] fp32
  static constexpr int kSeeds = kBeta + kC * 4;                // [C] fp32: beta, in kScale where k's row is large
  static constexpr int kUnscale = kSeeds + kC * 4;             // [2][C] fp32: 1 / scale of q's rows, of k's rows
  static constexpr int kNorms = kUnscale + 2 * kC * 4;         // [C][2] fp32: factors of q's row, of k's row
  static constexpr int kKeyNorms = kNorms + 2 * kC * 4;        // [C] fp32: factor of k's row, never with a scale
  static constexpr int kLimits = kKeyNorms + kC * 4;           // [128] int: first token that is not finite
  static constexpr int kFlags = kLimits + 512;                 // [warps] of WarpFlags
  static constexpr int kFirstBad = kFlags + 8 * kBlocks;       // int: first row of A that is not finite
  static constexpr int kBytes = kFirstBad + 16;
  static_assert(kBytes <= 232448, "more than a block of threads can have");
  static __device__ __forceinline__ std::uint32_t narrow_square(int row_block, int column_block) {
    return kNarrow + square(row_block, column_block) / 3;
  }
};

// What a warp says of its eight rows.
enum WarpFlags : unsigned {
  kIsSlow = 1,        // products do not serve all pairs within the block
  kHasWild = 2,       // k P may be not finite
  kHasLargeKeys = 4,  // a row of k carries no scale
};

// Pairs within a block from the first row on that products cannot serve: each key carried down the rows. Apart from the
// rest, and from memory again, so that what is rare costs the rest no registers.
template <bool kIsBf16, int kBlocks>
class ExtrasPairByPair {
 public:
  using Memory = TensorExtrasMemory<kBlocks>;

  __device__ ExtrasPairByPair(const ChunkKdaFwdTask& task, const Item& item, std::int64_t chunk)
      : t_(task),
        item_(item),
        chunk_row_(static_cast<int>(threadIdx.x) / 64 * kBlock),
        token_(chunk * Memory::kC + chunk_row_),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run(std::uint32_t memory) const {
    float4 steps[kBlock];
    load_steps(steps);
    float squares[32];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float4 q = row(t_.at.q, t_.q, i);
      const float4 k = row(t_.at.k, t_.k, i);
      squares[i] = dot4(q, q, 0);
      squares[kBlock + i] = dot4(k, k, 0);
    }
    const float square = transposed_sum<16>(squares, lane_);
    const float norm = t_.qk_l2norm ? 1.0f / sqrtf(square + 1e-6f) : 1.0f;
    const int first = first_row(steps, square);
    const int block = chunk_row_ / kBlock;
    const std::uint32_t queries = memory + Memory::narrow_square(block, block);
    const std::uint32_t keys =
        memory + Memory::kOwn + static_cast<std::uint32_t>(block * kBlock * Memory::kOwnPitch * 4);
    const int i = lane_ % kBlock;
    const float beta = load_shared<float>(memory + Memory::kBeta + static_cast<std::uint32_t>(4 * (chunk_row_ + i)));
    const bool is_slow = i >= first;
#pragma unroll 1
    for (int j = 0; j < kBlock; ++j) {
      float4 key = times(row(t_.at.k, t_.k, j), __shfl_sync(0xffffffffu, norm, kBlock + j));
      float sums[32];
#pragma unroll
      for (int row_index = 0; row_index < kBlock; ++row_index) {
        sums[row_index] = sums[kBlock + row_index] = 0;
        if (row_index < j) continue;
        if (row_index > j) key = times(key, steps[row_index]);
        sums[row_index] = dot4(key, row(t_.at.q, t_.q, row_index), 0);
        sums[kBlock + row_index] = dot4(key, row(t_.at.k, t_.k, row_index), 0);
      }
      const float sum = norm * transposed_sum<16>(sums, lane_);
      if (!is_slow) continue;
      if (lane_ < kBlock) {
        if (j <= i) store_shared_half(queries + Memory::element(i, j), narrow(t_.scale * sum, kIsBf16));
      } else if (j < i) {
        store_shared(keys + static_cast<std::uint32_t>((i * Memory::kOwnPitch + j) * 4), __float_as_uint(beta * sum));
      }
    }
    __syncwarp();
  }

 private:
  // With room for another rounding than when its need was noticed.
  __device__ int first_row(const float4 (&steps)[kBlock], float square) const {
    float4 product{1, 1, 1, 1};
    int first = kBlock;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      product = times(product, steps[i]);
      const auto in_range = [](float p) { return p > 0x1.ffp-121f && p < 0x1p100f; };
      bool is_good = in_range(product.x) && in_range(product.y) && in_range(product.z) && in_range(product.w);
      if (!t_.qk_l2norm && !(__shfl_sync(0xffffffffu, square, kBlock + i) < 4100.0f)) is_good = false;
      if (__any_sync(0xffffffffu, !is_good)) first = min(first, i);
    }
    return first;
  }

  __device__ float4 row(const void* data, const RowStrides& strides, int i) const {
    if (token_ + i >= item_.tokens || 4 * lane_ >= t_.K) return {0, 0, 0, 0};
    const Dtype dtype = kIsBf16 ? Dtype::kBFloat16 : Dtype::kFloat16;
    const std::int64_t at = row_of(strides, item_, item_.key_head, token_ + i) + 4 * lane_ * strides.inner;
    return widen4(load4(data, dtype, at, strides.inner, false), dtype);
  }

  __device__ float4 gates(int i) const {
    const std::int64_t at = row_of(t_.g, item_, item_.head, token_ + i) + 4 * lane_ * t_.g.inner;
    return widen4(load4(t_.at.g, t_.g_dtype, at, t_.g.inner, false), t_.g_dtype);
  }

  __device__ void load_steps(float4 (&steps)[kBlock]) const {
    const Gate gate = gate_of(t_, item_);
    const int c = 4 * lane_;
    if (c >= t_.K) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) steps[i] = {1, 1, 1, 1};
      return;
    }
    const float4 bias{bias_of(t_, item_, c), bias_of(t_, item_, c + 1), bias_of(t_, item_, c + 2),
                      bias_of(t_, item_, c + 3)};
    float4 before{0, 0, 0, 0};
    if (t_.gate_mode == GateMode::kAccumulated && chunk_row_ > 0 && token_ < item_.tokens) before = gates(-1);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      steps[i] = {1, 1, 1, 1};
      if (token_ + i >= item_.tokens) continue;
      const float4 g = gates(i);
      float4 natural;
      if (t_.gate_mode == GateMode::kAccumulated) {
        natural = {step_of_gk(g.x, before.x), step_of_gk(g.y, before.y), step_of_gk(g.z, before.z),
                   step_of_gk(g.w, before.w)};
        before = g;
      } else {
        natural = {gate(g.x, bias.x), gate(g.y, bias.y), gate(g.z, bias.z), gate(g.w, bias.w)};
      }
      steps[i] = {expf(natural.x), expf(natural.y), expf(natural.z), expf(natural.w)};
    }
  }

  const ChunkKdaFwdTask& t_;
  const Item item_;
  const int chunk_row_;
  const std::int64_t token_;
  const int lane_;
};

// Where a block of threads works.
struct ChunkPlace {
  Item item;
  std::int64_t chunk;  // of the sequence

  static __device__ __forceinline__ ChunkPlace of(const ChunkKdaFwdTask& t, unsigned index) {
    const unsigned chunk = divide(index, t.by_heads);
    const unsigned head = index - chunk * t.by_heads.divisor;
    if (t.is_packed) {
      const Item item = item_of(t, sequence_at(t, &PackedSequence::first_chunk, chunk), head);
      return {item, chunk - item.first_chunk};
    }
    const auto per_sequence = static_cast<unsigned>(t.NC);
    const unsigned n = t.N == 1 ? 0 : chunk / per_sequence;
    return {item_of(t, n, head), chunk - n * per_sequence};
  }
};

// What is rare, out of the way.
static __device__ __noinline__ uint4 load_apart(const void* data, Dtype dtype, std::int64_t inner) {
  return load4(data, dtype, 0, inner, false);
}

static __device__ __noinline__ uint4 load8_apart(const std::uint16_t* from, std::int64_t inner) {
  const uint4 low = load4(from, Dtype::kBFloat16, 0, inner, false);
  const uint4 high = load4(from, Dtype::kBFloat16, 4 * inner, inner, false);
  return {low.x, low.y, high.x, high.y};
}

static __device__ __noinline__ void store_apart(float* to, std::int64_t inner, uint4 x) {
  to[0] = __uint_as_float(x.x);
  to[inner] = __uint_as_float(x.y);
  to[2 * inner] = __uint_as_float(x.z);
  to[3 * inner] = __uint_as_float(x.w);
}

static __device__ __noinline__ void store_apart(std::uint16_t* to, std::int64_t inner, uint2 words) {
  to[0] = static_cast<std::uint16_t>(words.x);
  to[inner] = static_cast<std::uint16_t>(words.x >> 16);
  to[2 * inner] = static_cast<std::uint16_t>(words.y);
  to[3 * inner] = static_cast<std::uint16_t>(words.y >> 16);
}

// Four elements of a column of a second operand, those that are not finite as 0 and the first of them marked.
static __device__ __noinline__ float4 leave_out_apart(float4 x, std::uint32_t limit, int token) {
  if (!isfinite(x.w)) mark_shared(limit, token + 9), x.w = 0;
  if (!isfinite(x.z)) mark_shared(limit, token + 8), x.z = 0;
  if (!isfinite(x.y)) mark_shared(limit, token + 1), x.y = 0;
  if (!isfinite(x.x)) mark_shared(limit, token), x.x = 0;
  return x;
}

// kIsPlain: rows of all inputs and outputs are adjacent elements at multiples of 16 bytes, K is 128, and rows of gk,
// qg, kg, Aqk and Akk follow one another without gaps.
template <bool kIsBf16, int kBlocks, bool kIsPlain>
class TensorExtras {
 public:
  using Memory = TensorExtrasMemory<kBlocks>;
  static constexpr int kC = Memory::kC;
  static constexpr int kWarps = 2 * kBlocks;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kResident = kBlocks == 4 ? 2 : 1;  // blocks of threads on a multiprocessor

  __device__ TensorExtras(const ChunkKdaFwdTask& task, const ExtrasVectors& vectors, const Item& item,
                          std::int64_t chunk, std::uint32_t memory)
      : t_(task),
        vectors_(vectors),
        item_(item),
        memory_(memory),
        warp_(__shfl_sync(kAll, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        first_(chunk * kC),
        chunk_rows_(static_cast<int>(min(static_cast<std::int64_t>(kC), item.tokens - first_))),
        gate_(gate_of(task, item)) {}

  __device__ void run() {
    const bool needs_inverse = t_.at.Akk != nullptr || t_.at.w != nullptr || t_.at.u != nullptr;
    const bool needs_pairs = needs_inverse || t_.at.Aqk != nullptr;
    float sums[kNear][2][4] = {};
    float own[2][4] = {};
    {
      float x[8][4];
      start(x);
      __syncthreads();
      make_decays();
      settle(x);
      barrier_sync(1 + block(), 64);
      if (needs_pairs) multiply_own(own);
      barrier_sync(1 + block(), 64);
      rest(x);
    }
    if (!needs_pairs) return;
    store_flags();
    __syncthreads();
    multiply(sums);
    __syncthreads();
    if (Memory::kHasRoomForValues && t_.at.u != nullptr) load_values(0);
    const unsigned flags = load_flags(0, kWarps);
    store_pairs(sums, flags != 0);
    store_own(own);
    if (flags != 0) take_care(flags);
    __syncthreads();
    if (warp_ < kBlocks) {
      if (needs_inverse) invert_own();
    } else if (t_.at.Aqk != nullptr) {
      store_triangle(t_.at.Aqk, t_.Aqk, vectors_.Aqk, kBlock * (warp_ - kBlocks), kBlock);
    }
    if (!needs_inverse) return;
    __syncthreads();
    merge();
    if (!Memory::kHasRoomForValues && t_.at.u != nullptr) load_values(0);
    if (t_.at.Akk != nullptr) store_triangle(t_.at.Akk, t_.Akk, vectors_.Akk, 8 * warp_, 8);
    copies_wait();
    __syncthreads();
    solve(flags);
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr float kPerScale = 0x1p-32f;
  static constexpr float kScale = 0x1p32f;
  static constexpr Dtype kDtype = kIsBf16 ? Dtype::kBFloat16 : Dtype::kFloat16;
  // Products of eight keys of an earlier block with a block's rows: the last two warps have those of neighbouring
  // blocks, the others those whose keys decay over the blocks between.
  static constexpr int kFar = (kBlocks - 2) / 2;  // of a warp
  static constexpr int kNear = kBlocks - 1;

  __device__ __forceinline__ int block() const { return warp_ / 2; }
  __device__ __forceinline__ int half() const { return warp_ % 2; }
  __device__ __forceinline__ int row() const { return 8 * warp_; }      // first of eight, in the chunk
  __device__ __forceinline__ int channel() const { return 4 * lane_; }  // first of four
  __device__ __forceinline__ std::uint32_t at(int offset) const { return memory_ + static_cast<std::uint32_t>(offset); }
  __device__ __forceinline__ float shared_float(int offset, int index) const {
    return load_shared<float>(at(offset + 4 * index));
  }

  // Loads q, k, beta and the gates; what turns rows of q and k into scaled, normalised ones. x: gates, in natural
  // logarithm; their sums over eight rows go to shared memory.
  __device__ __forceinline__ void start(float (&x)[8][4]) {
    rows_ = channel() < t_.K ? chunk_rows_ - row() : 0;
    is_vector_ =
        t_.vector_inputs && (reinterpret_cast<std::uintptr_t>(t_.at.q) | reinterpret_cast<std::uintptr_t>(t_.at.k) |
                             reinterpret_cast<std::uintptr_t>(t_.at.g)) %
                                    16 ==
                                0;
    load_rows(t_.at.q, t_.q, q_);
    load_rows(t_.at.k, t_.k, k_);
    load_gates(x);
    float bias[4] = {};
    if (t_.at.dt_bias != nullptr && t_.gate_mode != GateMode::kActivated && channel() < t_.K) {
#pragma unroll
      for (int c = 0; c < 4; ++c) bias[c] = bias_of(t_, item_, channel() + c);
    }
    float beta = 0;
    if (lane_ < 8 && lane_ < chunk_rows_ - row()) beta = beta_of(t_, item_, first_ + row() + lane_);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < 128) store_shared(at(Memory::kLimits + 4 * thread), static_cast<std::uint32_t>(kC));
    if (thread == 0) store_shared(at(Memory::kFirstBad), static_cast<std::uint32_t>(kC));
    float squares[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 q = wide(q_[i]);
      const float4 k = wide(k_[i]);
      squares[i] = dot4(q, q, 0);
      squares[8 + i] = dot4(k, k, 0);
    }
    // Lane l has row l % 8 of q in l % 16 < 8, else of k.
    float sum = transposed_sum<8>(squares, lane_);
    sum += __shfl_xor_sync(kAll, sum, 16);
    const bool is_large = !t_.qk_l2norm && !(sum <= 0x1p80f);
    const bool is_key = lane_ % 16 >= 8;
    large_ = __ballot_sync(kAll, is_large) & 0xffffu;
    is_good_ = t_.qk_l2norm || !is_key || sum <= 4096.0f;
    is_tame_ = (!is_key || sum < HUGE_VALF) && isfinite(beta);
    const float plain_norm = t_.qk_l2norm ? 1.0f / sqrtf(sum + 1e-6f) : 1.0f;
    const float norm = is_large ? kPerScale : plain_norm;
    const int at_row = row() + lane_ % 8;
    if (lane_ < 16) {
      store_shared(at(Memory::kNorms + 8 * at_row + 4 * is_key), __float_as_uint(norm));
      if (is_key) store_shared(at(Memory::kKeyNorms + 4 * at_row), __float_as_uint(plain_norm));
      store_shared(at(Memory::kUnscale + 4 * (is_key * kC + at_row)), __float_as_uint(is_large ? 1.0f : kPerScale));
    }
    if (lane_ < 8) {
      store_shared(at(Memory::kBeta + 4 * at_row), __float_as_uint(beta));
      const bool is_large_key = (large_ >> (8 + lane_) & 1) != 0;
      store_shared(at(Memory::kSeeds + 4 * at_row), __float_as_uint(is_large_key ? beta * kScale : beta));
    }
    activate(bias, x);
  }

  static __device__ __forceinline__ std::uint32_t narrow2(float low, float high) {
    return kIsBf16 ? round_pair(low, high) : kda::cuda::narrow2(low, high, false);
  }
  static __device__ __forceinline__ uint2 narrow4(const float (&x)[4]) {
    return {narrow2(x[0], x[1]), narrow2(x[2], x[3])};
  }
  static __device__ __forceinline__ float4 wide(const uint2& raw) {
    if constexpr (kIsBf16) {
      return {first_of(raw.x), second_of(raw.x), first_of(raw.y), second_of(raw.y)};
    } else {
      return widen4({raw.x, raw.y, 0, 0}, kDtype);
    }
  }

  // This lane's part of eight rows; zero beyond the last token and channel.
  __device__ __forceinline__ void load_rows(const void* data, const RowStrides& strides, uint2 (&to)[8]) const {
    const auto* from = static_cast<const std::uint16_t*>(data) +
                       row_of(strides, item_, item_.key_head, first_ + row()) + channel() * strides.inner;
#pragma unroll
    for (int i = 0; i < 8; ++i, from += strides.token) {
      if (kIsPlain || is_vector_) {
        to[i] = load2_if(i < rows_, from);
      } else {
        const uint4 four = i < rows_ ? load_apart(from, kDtype, strides.inner) : uint4{0, 0, 0, 0};
        to[i] = {four.x, four.y};
      }
    }
  }

  __device__ __forceinline__ void load_gates(float (&x)[8][4]) const {
    const RowStrides& s = t_.g;
    const std::int64_t first = row_of(s, item_, item_.head, first_ + row()) + channel() * s.inner;
    if (t_.g_dtype == Dtype::kFloat32) {
      load_gates(static_cast<const float*>(t_.at.g) + first, x);
    } else {
      load_gates(static_cast<const std::uint16_t*>(t_.at.g) + first, x);
    }
  }

  template <class Number>
  __device__ __forceinline__ void load_gates(const Number* from, float (&x)[8][4]) const {
    constexpr Dtype kGateDtype = sizeof(Number) == 4 ? Dtype::kFloat32 : Dtype::kBFloat16;
#pragma unroll
    for (int i = 0; i < 8; ++i, from += t_.g.token) {
      const bool is_there = i < rows_;
      uint4 raw{0, 0, 0, 0};
      if (!kIsPlain && !is_vector_) {
        if (is_there) raw = load_apart(from, kGateDtype, t_.g.inner);
      } else if constexpr (sizeof(Number) == 4) {
        raw = load4_if(is_there, from);
      } else {
        const uint2 words = load2_if(is_there, from);
        raw = {words.x, words.y, 0, 0};
      }
      const float4 g = widen4(raw, kGateDtype);
      x[i][0] = g.x;
      x[i][1] = g.y;
      x[i][2] = g.z;
      x[i][3] = g.w;
    }
  }

  __device__ __forceinline__ void activate(const float (&bias)[4], float (&x)[8][4]) {
    if (t_.gate_mode == GateMode::kBounded) {
      for_gates(x, bias, [&](float g, float b) {
        return Gate{GateMode::kBounded, gate_.factor, gate_.lower_bound}(g, b);
      });
    } else if (t_.gate_mode == GateMode::kSoftplus) {
      for_gates(x, bias, [&](float g, float b) {
        return Gate{GateMode::kSoftplus, gate_.factor, gate_.lower_bound}(g, b);
      });
    } else {
      if (t_.gate_mode == GateMode::kAccumulated) take_steps(x);
      // Only these may be above 0.
      float most = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) most = fmaxf(most, x[i][c]);
      }
      is_good_ = is_good_ && most <= 0;
      is_tame_ = is_tame_ && most <= 0;
    }
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] = __fadd_rn(sum[c], x[i][c]);
    }
    store_shared(totals(warp_), uint4{__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                                      __float_as_uint(sum[3])});
  }

  __device__ __forceinline__ std::uint32_t totals(int eight) const {
    return at(Memory::kTotals + eight * 512 + 4 * channel());
  }

  template <class F>
  __device__ __forceinline__ void for_gates(float (&x)[8][4], const float (&bias)[4], const F& gate) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[i][c] = gate(x[i][c], bias[c]);
    }
    if (rows_ >= 8) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[i][c] = i < rows_ ? x[i][c] : 0.0f;
    }
  }

  // From rows of gk to what lies between them.
  __device__ __forceinline__ void take_steps(float (&x)[8][4]) const {
    float before[4] = {};
    if (row() > 0 && rows_ > 0) {
      const std::int64_t from = row_of(t_.g, item_, item_.head, first_ + row() - 1) + channel() * t_.g.inner;
#pragma unroll
      for (int c = 0; c < 4; ++c) before[c] = load1(t_.at.g, t_.g_dtype, from + c * t_.g.inner);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float now = x[i][c];
        x[i][c] = i < rows_ ? step_of_gk(now, before[c]) : 0.0f;
        before[c] = now;
      }
    }
  }

  // Decays of blocks, and of two and more blocks between two others.
  __device__ __forceinline__ void make_decays() const {
    const int c = static_cast<int>(threadIdx.x) % 128;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) / 128; i < kBlocks - 1 + Memory::kFactorPairs; i += kThreads / 128) {
      int first = i;  // block
      int count = 1;
      std::uint32_t to = at(Memory::kDecays + 512 * i + 4 * c);
      if (i >= kBlocks - 1) {
        const int pair = i - (kBlocks - 1);
        first = 1 + pair;
        count = 2;
        while (first + count > kBlocks - 1) first -= kBlocks - 1 - count++;
        to = at(Memory::kFactors + 512 * pair + 4 * c);
      }
      float sum = 0;
      const std::uint32_t from = at(Memory::kTotals + 1024 * first + 4 * c);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        sum += load_shared<float>(from + static_cast<std::uint32_t>(1024 * n));
        sum += load_shared<float>(from + static_cast<std::uint32_t>(1024 * n + 512));
      }
      store_shared(to, __float_as_uint(fast_exp2(kGkPerGate * sum)));
    }
  }

  // Where the decays of the blocks between `column_block` and `row_block`, not neighbours, are.
  __device__ __forceinline__ std::uint32_t decays_between(int row_block, int column_block) const {
    const int first = column_block + 1;
    const int count = row_block - first;
    if (count == 1) return at(Memory::kDecays + 512 * first);
    // Two blocks from 1 on, from 2 on, ..., then three, ...
    const int fewer = (count - 2) * (2 * kBlocks - 3 - count) / 2;
    return at(Memory::kFactors + 512 * (fewer + first - 1));
  }

  // This lane's part of eight rows of an output.
  template <class Number>
  struct Rows {
    Number* to;
    std::int64_t step;
    std::int64_t inner;
    int count;  // rows to write
    bool is_vector;
  };

  template <class Number>
  __device__ __forceinline__ Rows<Number> rows_to(void* data, const RowStrides& s, bool is_vector) const {
    Number* to = static_cast<Number*>(data) + row_of(s, item_, item_.head, first_ + row()) + channel() * s.inner;
    return {to, kIsPlain ? 128 : s.token, s.inner, data == nullptr ? 0 : rows_, is_vector};
  }

  template <class Number, class Words>
  static __device__ __forceinline__ void put(const Rows<Number>& rows, int i, const Words& x) {
    Number* to = rows.to + i * rows.step;
    if (kIsPlain || rows.is_vector) {
      store_if(i < rows.count, to, x);
    } else if (i < rows.count) {
      store_apart(to, rows.inner, x);
    }
  }

  // Where this lane's four channels of row i lie among the rows of a block.
  __device__ __forceinline__ std::uint32_t place(int i) const {
    return static_cast<std::uint32_t>(lane_ / 16 * Memory::kPanel + block() * Memory::kRows + half() * 1024 + i * 128 +
                                      ((lane_ % 16 * 8) ^ (i << 4)));
  }

  static __device__ __forceinline__ void store_split(std::uint32_t to, const float (&x)[4]) {
    const SplitPair a = split(x[0], x[1]);
    const SplitPair b = split(x[2], x[3]);
    store_shared(to, a.high, b.high);
    store_shared(to + Memory::kLowRows, a.low, b.low);
  }

  // From sums of gates to all that decays from the block's first row on: gk, qg, q P, k P, k / P. x turns into steps.
  __device__ __forceinline__ void settle(float (&x)[8][4]) {
    float before[4] = {};  // this warp
    float product[4];
    float prefix[4];
#pragma unroll 1
    for (int eight = 0; eight < 2 * block(); ++eight) add(before, totals(eight));
    const float4 first_total = load_shared<float4>(totals(2 * block()));
    const float firsts[4] = {first_total.x, first_total.y, first_total.z, first_total.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      prefix[c] = fast_exp2(kGkPerGate * before[c]) * kPerScale;
      const float first = half() == 1 ? firsts[c] : 0.0f;
      before[c] = __fadd_rn(before[c], first);
      product[c] = kScale * fast_exp2(kGkPerGate * first);
    }
    const auto gk = rows_to<float>(t_.at.gk, t_.gk, vectors_.gk);
    const auto qg = rows_to<std::uint16_t>(t_.at.qg, t_.qg, vectors_.qg);
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float log2[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[c] = __fadd_rn(sum[c], x[i][c]);
        log2[c] = __fadd_rn(before[c], sum[c]) * kGkPerGate;
        x[i][c] = fast_exp2(kGkPerGate * x[i][c]);
        product[c] *= x[i][c];
      }
      put(gk, i,
          uint4{__float_as_uint(log2[0]), __float_as_uint(log2[1]), __float_as_uint(log2[2]),
                __float_as_uint(log2[3])});
      const float2 norm = load_shared<float2>(at(Memory::kNorms + 8 * (row() + i)));
      const float4 q_wide = times(wide(q_[i]), norm.x);
      const float4 k_wide = times(wide(k_[i]), norm.y);
      float q[4] = {q_wide.x, q_wide.y, q_wide.z, q_wide.w};
      float k[4] = {k_wide.x, k_wide.y, k_wide.z, k_wide.w};
      float quotient[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        q[c] *= product[c];
        quotient[c] = k[c] * fast_reciprocal(product[c]);
        k[c] *= product[c];
      }
      const std::uint32_t to = memory_ + place(i);
      store_split(to + Memory::kQueries, q);
      store_split(to + Memory::kRight, quotient);
      store_split(to + Memory::kKeys, k);
#pragma unroll
      for (int c = 0; c < 4; ++c) q[c] *= prefix[c];
      unscale(q, i);
      put(qg, i, narrow4(q));
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      is_good_ = is_good_ && product[c] > kScale * 0x1p-120f;
      is_tame_ = is_tame_ && product[c] >= 0;
    }
  }

  static __device__ __forceinline__ void add(float (&sum)[4], std::uint32_t from) {
    const float4 x = load_shared<float4>(from);
    sum[0] = __fadd_rn(sum[0], x.x);
    sum[1] = __fadd_rn(sum[1], x.y);
    sum[2] = __fadd_rn(sum[2], x.z);
    sum[3] = __fadd_rn(sum[3], x.w);
  }

  // Rows of q of large numbers carry no scale.
  __device__ __forceinline__ void unscale(float (&x)[4], int i) const {
    if ((large_ >> i & 1) == 0) return;
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] *= kScale;
  }

  // k R and kg, from steps.
  __device__ __forceinline__ void rest(const float (&step)[8][4]) const {
    const auto kg = rows_to<std::uint16_t>(t_.at.kg, t_.kg, vectors_.kg);
    float after[4] = {};
#pragma unroll 1
    for (int eight = 2 * block() + 2; eight < kWarps; ++eight) add(after, totals(eight));
    const float4 second_total = load_shared<float4>(totals(2 * block() + 1));
    const float seconds[4] = {second_total.x, second_total.y, second_total.z, second_total.w};
    float product[4];
    float suffix[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      product[c] = fast_exp2(kGkPerGate * (half() == 0 ? seconds[c] : 0.0f));
      suffix[c] = fast_exp2(kGkPerGate * after[c]);
    }
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      const float4 k_wide = times(wide(k_[i]), shared_float(Memory::kKeyNorms, row() + i));
      float k[4] = {k_wide.x, k_wide.y, k_wide.z, k_wide.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        k[c] *= product[c];
        product[c] *= step[i][c];
      }
      store_split(memory_ + place(i) + Memory::kRight, k);
#pragma unroll
      for (int c = 0; c < 4; ++c) k[c] *= suffix[c];
      put(kg, i, narrow4(k));
    }
  }

  __device__ __forceinline__ void store_flags() const {
    const bool is_slow = !__all_sync(kAll, is_good_);
    const bool has_wild = !__all_sync(kAll, is_tame_);
    const unsigned flags =
        (is_slow ? kIsSlow : 0u) | (has_wild ? kHasWild : 0u) | ((large_ & 0xff00u) != 0 ? kHasLargeKeys : 0u);
    if (lane_ == 0) store_shared(at(Memory::kFlags + 4 * warp_), flags);
  }

  // Of `count` warps together.
  __device__ __forceinline__ unsigned load_flags(int first, int count) const {
    const unsigned flags = lane_ < count ? load_shared<std::uint32_t>(at(Memory::kFlags + 4 * (first + lane_))) : 0u;
    unsigned all = 0;
    if (__any_sync(kAll, (flags & kIsSlow) != 0)) all |= kIsSlow;
    if (__any_sync(kAll, (flags & kHasWild) != 0)) all |= kHasWild;
    if (__any_sync(kAll, (flags & kHasLargeKeys) != 0)) all |= kHasLargeKeys;
    return all;
  }

  // A block of rows and eight keys of a block before it.
  struct Pair {
    int block;
    int eight;
  };

  __device__ __forceinline__ bool is_far() const { return warp_ < kWarps - 2; }
  // Of the far ones, those the furthest apart first.
  __device__ __forceinline__ Pair far_pair(int n) const {
    int index = warp_ + (kWarps - 2) * n;
    int distance = kBlocks - 1;
    while (index >= 2 * (kBlocks - distance)) index -= 2 * (kBlocks - distance--);
    return {distance + index / 2, index};
  }
  __device__ __forceinline__ Pair near_pair(int n) const { return {n + 1, 2 * n + warp_ - (kWarps - 2)}; }

  // Eight rows of q, then of k: one operand. Eight keys: the second operand.
  static __device__ __forceinline__ SplitRows load_stacked(std::uint32_t from) {
    SplitRows rows;
    ldmatrix4(from, rows.high);
    ldmatrix4(from + Memory::kLowRows, rows.low);
    return rows;
  }
  static __device__ __forceinline__ SplitColumns load_keys(std::uint32_t from) {
    std::uint32_t r[4];
    ldmatrix4(from, r);
    return {{{r[0], r[2]}, {r[1], r[3]}}};
  }

  // Half of it to one sum and half to another, so that fewer products wait for one another.
  static __device__ __forceinline__ void multiply_apart(float (&d)[4], float (&other)[4], bool is_odd,
                                                        const SplitRows& a, const SplitColumns& b) {
    mma_bf16(d, a.low, b.at[0].high, b.at[1].high);
    mma_bf16(other, a.high, b.at[0].low, b.at[1].low);
    mma_bf16(is_odd ? other : d, a.high, b.at[0].high, b.at[1].high);
  }

  __device__ __forceinline__ std::uint32_t stacked(int row_block) const {
    return at((lane_ / 8 % 2 == 0 ? Memory::kQueries : Memory::kKeys) + row_block * Memory::kRows) +
           Memory::piece(lane_ % 8, lane_ / 16);
  }
  __device__ __forceinline__ std::uint32_t keys(int eight) const {
    return at(Memory::kRight + eight / 2 * Memory::kRows + lane_ / 16 * Memory::kLowRows) +
           Memory::piece(eight % 2 * 8 + lane_ % 8, lane_ / 8 % 2);
  }
  // From the first 16 channels of a row or key to others.
  static __device__ __forceinline__ std::uint32_t turn(std::uint32_t from, int step) {
    return (from ^ static_cast<std::uint32_t>(step % 4 << 5)) + static_cast<std::uint32_t>(step / 4 * Memory::kPanel);
  }

  // Pairs within the block: this warp's rows with the block's first eight keys, then, where half() is 1, the others.
  __device__ __forceinline__ void multiply_own(float (&own)[2][4]) const {
    const std::uint32_t rows = stacked(block()) + static_cast<std::uint32_t>(half() * 1024);
    const std::uint32_t first = keys(2 * block());
    float other[2][4] = {};
#pragma unroll 4
    for (int step = 0; step < 8; ++step) {
      const SplitRows a = load_stacked(turn(rows, step));
      multiply_apart(own[0], other[0], step % 2 != 0, a, load_keys(turn(first, step)));
      if (half() == 1) multiply_apart(own[1], other[1], step % 2 != 0, a, load_keys(turn(first, step) + 1024));
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      own[0][e] += other[0][e];
      own[1][e] += other[1][e];
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[kNear][2][4]) const {
    if (is_far()) {
      multiply_far(sums);
    } else {
      multiply_near(sums);
    }
  }

  __device__ __forceinline__ void multiply_near(float (&sums)[kNear][2][4]) const {
    const std::uint32_t rows = stacked(1);
    const std::uint32_t columns = keys(near_pair(0).eight);
#pragma unroll 2
    for (int step = 0; step < 8; ++step) {
#pragma unroll
      for (int n = 0; n < kNear; ++n) {
        const std::uint32_t from = turn(rows, step) + static_cast<std::uint32_t>(n * Memory::kRows);
        const SplitColumns b = load_keys(turn(columns, step) + static_cast<std::uint32_t>(n * Memory::kRows));
        multiply_split(sums[n][0], load_stacked(from), b);
        multiply_split(sums[n][1], load_stacked(from + 1024), b);
      }
    }
  }

  __device__ __forceinline__ void multiply_far(float (&sums)[kNear][2][4]) const {
    std::uint32_t rows[kFar];
    std::uint32_t columns[kFar];
    std::uint32_t factors[kFar];
#pragma unroll
    for (int n = 0; n < kFar; ++n) {
      const Pair pair = far_pair(n);
      rows[n] = stacked(pair.block);
      columns[n] = keys(pair.eight);
      factors[n] = decays_between(pair.block, pair.eight / 2) + static_cast<std::uint32_t>(lane_ % 4 * 8);
    }
    float others[kFar][2][4] = {};
#pragma unroll 4
    for (int step = 0; step < 8; ++step) {
#pragma unroll
      for (int n = 0; n < kFar; ++n) {
        SplitColumns b = load_keys(turn(columns[n], step));
        const SplitRows a[2] = {load_stacked(turn(rows[n], step)), load_stacked(turn(rows[n], step) + 1024)};
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const auto factor = load_shared<float2>(factors[n] + static_cast<std::uint32_t>(64 * step + 32 * part));
          b.at[part] = split(first_of(b.at[part]) * factor.x, second_of(b.at[part]) * factor.y);
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          multiply_apart(sums[n][part], others[n][part], step % 2 != 0, a[part], b);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kFar; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[n][0][e] += others[n][0][e];
        sums[n][1][e] += others[n][1][e];
      }
    }
  }

  __device__ __forceinline__ void store_query_pair(std::uint32_t square, int i, int j, float x, float next) const {
    store_shared(square + Memory::element(i, j), narrow2(x, next));
  }

  // Pairs within the block; A's in fp32, for the substitution.
  __device__ __forceinline__ void store_own(const float (&own)[2][4]) const {
    const int i = 8 * half() + lane_ / 4;
    const int j = lane_ % 4 * 2;
    const std::uint32_t square = memory_ + Memory::narrow_square(block(), block());
    const std::uint32_t pairs = at(Memory::kOwn + (block() * kBlock + i) * Memory::kOwnPitch * 4);
    const int at_row = kBlock * block() + i;
    // These products carry no scale, but for large rows.
    const float q_factor = t_.scale * (kScale * shared_float(Memory::kUnscale, at_row));
    const float k_factor = shared_float(Memory::kBeta, at_row) * (kScale * shared_float(Memory::kUnscale, kC + at_row));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = 8 * n + j;
      store_query_pair(square, i, column, column <= i ? q_factor * own[n][0] : 0.0f,
                       column < i ? q_factor * own[n][1] : 0.0f);
      if (n == 0 || half() == 1) {
        store_shared(pairs + static_cast<std::uint32_t>(4 * column), __float_as_uint(k_factor * own[n][2]),
                     __float_as_uint(k_factor * own[n][3]));
      }
    }
  }

  __device__ __forceinline__ void store_pairs(const float (&sums)[kNear][2][4], bool needs_care) const {
    if (is_far()) {
#pragma unroll
      for (int n = 0; n < kFar; ++n) store_pair(far_pair(n), sums[n], needs_care);
    } else {
#pragma unroll
      for (int n = 0; n < kNear; ++n) store_pair(near_pair(n), sums[n], needs_care);
    }
  }

  // Pairs of a block's rows with eight earlier keys.
  __device__ __forceinline__ void store_pair(const Pair& pair, const float (&sums)[2][4], bool needs_care) const {
    const int i = lane_ / 4;
    const int column = pair.eight % 2 * 8 + lane_ % 4 * 2;
    const std::uint32_t queries = memory_ + Memory::narrow_square(pair.block, pair.eight / 2);
    const std::uint32_t pairs = at(Memory::kSolve) + Memory::square(pair.block, pair.eight / 2);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int at_row = kBlock * pair.block + 8 * part + i;
      const float(&d)[4] = sums[part];
      const float q_factor = t_.scale * shared_float(Memory::kUnscale, at_row);
      const float k_factor = shared_float(Memory::kBeta, at_row) * shared_float(Memory::kUnscale, kC + at_row);
      store_query_pair(queries, 8 * part + i, column, q_factor * d[0], q_factor * d[1]);
      float x = k_factor * d[2];
      float y = k_factor * d[3];
      if (needs_care && (!isfinite(x) || !isfinite(y))) {
        x = isfinite(x) ? x : 0.0f;
        y = isfinite(y) ? y : 0.0f;
        mark_shared(at(Memory::kFirstBad), at_row);
      }
      store_fine(pairs + Memory::element(8 * part + i, column), split_fine(x, y));
    }
  }

  // What is rare between the pairs and the inverse, by all warps together.
  __device__ __forceinline__ void take_care(unsigned flags) const {
    if ((flags & kHasWild) != 0) leave_out_keys(memory_);
    __syncthreads();
    if (half() == 1) return;
    if ((load_flags(warp_, 2) & kIsSlow) != 0) pair_by_pair(t_, memory_);
    check_own();
  }

  // Not members: what they are called with stays in registers.
  static __device__ __noinline__ void pair_by_pair(const ChunkKdaFwdTask& t, std::uint32_t memory) {
    const ChunkPlace place = ChunkPlace::of(t, blockIdx.x);
    ExtrasPairByPair<kIsBf16, kBlocks>(t, place.item, place.chunk).run(memory);
  }

  // A product with a triangular matrix would let what is not finite reach earlier tokens, 0 times NaN being NaN. So
  // such numbers are left out of it, and poison() marks what follows them. Here those of this warp's rows of k P.
  static __device__ __noinline__ void leave_out_keys(std::uint32_t memory) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int panel = 0; panel < 2; ++panel) {
      const auto rows = memory + static_cast<std::uint32_t>(
                                     Memory::kKeys + (panel * kBlocks + warp / 2) * Memory::kRows + warp % 2 * 1024);
      const auto limits = memory + static_cast<std::uint32_t>(Memory::kLimits + 4 * (64 * panel + 2 * lane));
      for (int i = 0; i < 8; ++i) {
        const std::uint32_t from = rows + static_cast<std::uint32_t>(i * 128 + ((4 * lane) ^ (i << 4)));
        const SplitPair pair{load_shared<std::uint32_t>(from), load_shared<std::uint32_t>(from + Memory::kLowRows)};
        const bool is_first_wild = !isfinite(first_of(pair));
        const bool is_second_wild = !isfinite(second_of(pair));
        if (is_first_wild) mark_shared(limits, 8 * warp + i);
        if (is_second_wild) mark_shared(limits + 4, 8 * warp + i);
        const std::uint32_t keep = (is_first_wild ? 0u : 0xffffu) | (is_second_wild ? 0u : 0xffff0000u);
        store_shared(from, pair.high & keep);
        store_shared(from + Memory::kLowRows, pair.low & keep);
      }
    }
  }

  // What is not finite in A within the block is left out of it, and its row marked.
  __device__ __forceinline__ void check_own() const {
    const int i = lane_ % kBlock;
#pragma unroll 1
    for (int n = 0; n < 8; ++n) {
      const int j = 8 * (lane_ / 16) + n;
      if (j >= i) break;
      const std::uint32_t from = at(Memory::kOwn + ((block() * kBlock + i) * Memory::kOwnPitch + j) * 4);
      if (isfinite(load_shared<float>(from))) continue;
      store_shared(from, 0u);
      mark_shared(at(Memory::kFirstBad), kBlock * block() + i);
    }
  }

  // Rows `first` to `first + count` of Aqk or Akk.
  __device__ __forceinline__ void store_triangle(void* data, const RowStrides& s, bool is_vector, int first,
                                                 int count) const {
    const int row_block = first / kBlock;
    const int column = lane_ % (kC / 8) * 8;
    constexpr int kRowsAtOnce = 256 / kC;
    const std::uint32_t from = memory_ + Memory::narrow_square(row_block, column / kBlock);
    auto* to = static_cast<std::uint16_t*>(data) + row_of(s, item_, item_.head, first_ + first) + column * s.inner;
#pragma unroll 2
    for (int i = lane_ / (kC / 8); i < count; i += kRowsAtOnce) {
      if (first + i >= chunk_rows_) break;
      uint4 words{0, 0, 0, 0};
      if (column / kBlock <= row_block) {
        words = load_shared<uint4>(from + Memory::element((first + i) % kBlock, column % kBlock));
      }
      put8(to + i * (kIsPlain ? kC : s.token), s.inner, is_vector, words);
    }
  }

  static __device__ __forceinline__ void put8(std::uint16_t* to, std::int64_t step, bool is_vector,
                                              const uint4& words) {
    if (kIsPlain || is_vector) {
      __stcs(reinterpret_cast<uint4*>(to), words);
      return;
    }
    store_apart(to, step, uint2{words.x, words.y});
    store_apart(to + 4 * step, step, uint2{words.z, words.w});
  }

  // A square as the first operand.
  __device__ __forceinline__ std::uint32_t square_place() const {
    return Memory::element(lane_ / 8 % 2 * 8 + lane_ % 8, lane_ / 16 * 8);
  }
  __device__ __forceinline__ SplitRows load_square(std::uint32_t square) const {
    SplitRows rows;
    ldmatrix4(square + square_place(), rows.high);
    ldmatrix4(square + square_place() + Memory::kLowSquare, rows.low);
    return rows;
  }
  __device__ __forceinline__ FineRows load_fine(std::uint32_t square) const {
    FineRows rows;
    ldmatrix4(square + square_place(), rows.high);
    ldmatrix4(square + square_place() + Memory::kLowSquare, rows.low);
    ldmatrix4(square + square_place() + Memory::kRestSquare, rows.rest);
    return rows;
  }
  // Its columns 8 n to 8 n + 7 as the second.
  __device__ __forceinline__ FineColumns load_fine(std::uint32_t square, int n) const {
    const std::uint32_t from = square + Memory::element(lane_ / 8 % 2 * 8 + lane_ % 8, 8 * n);
    std::uint32_t split[4];
    std::uint32_t rest[4];
    ldmatrix4_transposed(from + static_cast<std::uint32_t>(lane_ / 16 * Memory::kLowSquare), split);
    ldmatrix4_transposed(from + Memory::kRestSquare, rest);
    return {{{split[0], split[2], rest[0]}, {split[1], split[3], rest[1]}}};
  }
  static __device__ __forceinline__ void store_fine(std::uint32_t to, const FinePair& pair) {
    store_shared(to, pair.high);
    store_shared(to + Memory::kLowSquare, pair.low);
    store_shared(to + Memory::kRestSquare, pair.rest);
  }

  // Akk = (I + A)^-1 by substitution, fp32 within blocks, block by block: Akk_ij is the sum over j <= m < i of -(Akk_ii
  // A_im) Akk_mj. Makes Akk diag(kSeeds) as well. Two warps share a block of rows, each has every other eight columns.
  __device__ __forceinline__ void merge() const {
    const int row_block = warp_ % kBlocks;
    const int n = warp_ / kBlocks;
    narrow_diagonal(row_block, n);
    if (row_block == 0) prefetch(n);
    {
      const FineRows inverse = load_fine(at(Memory::kInverse) + Memory::square(row_block, row_block));
      // Later squares than there are in the row mean nothing, but branches would keep products waiting.
      FineSum d[kBlocks - 1] = {};
#pragma unroll
      for (int m = 0; m < kBlocks - 1; ++m) {
        multiply_fine(d[m], inverse, load_fine(at(Memory::kSolve) + Memory::square(row_block, min(m, row_block)), n));
      }
      __syncwarp();
#pragma unroll
      for (int m = 0; m < kBlocks - 1; ++m) {
        if (m >= row_block) continue;
        const std::uint32_t square = at(Memory::kSolve) + Memory::square(row_block, m);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          store_fine(square + Memory::element(8 * part + lane_ / 4, 8 * n + lane_ % 4 * 2),
                     split_fine(-d[m][2 * part], -d[m][2 * part + 1]));
        }
      }
    }
    FineSum sums[kBlocks - 1] = {};
#pragma unroll
    for (int m = 0; m < kBlocks - 1; ++m) {
      __syncthreads();  // block m's rows are complete
      if (m >= row_block) continue;
      const FineRows left = load_fine(at(Memory::kSolve) + Memory::square(row_block, m));
#pragma unroll
      for (int j = 0; j <= m; ++j) {
        multiply_fine(sums[j], left, load_fine(at(Memory::kInverse) + Memory::square(m, j), n));
      }
      if (m + 1 < row_block) continue;
#pragma unroll
      for (int j = 0; j <= m; ++j) store_inverse(row_block, j, n, sums[j]);
    }
    __syncthreads();  // nobody reads A any more
#pragma unroll
    for (int j = 0; j < kBlocks - 1; ++j) {
      if (j < row_block) store_seeded(row_block, j, n, sums[j]);
    }
  }

  // Rows 8 n to 8 n + 7 of Akk's square on the diagonal, as they leave.
  __device__ __forceinline__ void narrow_diagonal(int row_block, int n) const {
    const std::uint32_t place = Memory::element(8 * n + lane_ / 4, lane_ % 4 * 4);
    const std::uint32_t from = at(Memory::kInverse) + Memory::square(row_block, row_block) + place;
    const auto high = load_shared<uint2>(from);
    const auto low = load_shared<uint2>(from + Memory::kLowSquare);
    store_shared(memory_ + Memory::narrow_square(row_block, row_block) + place, joined(high.x, low.x),
                 joined(high.y, low.y));
  }

  static __device__ __forceinline__ std::uint32_t joined(std::uint32_t high, std::uint32_t low) {
    const SplitPair pair{high, low};
    return kIsBf16 ? high : narrow2(first_of(pair), second_of(pair));
  }

  // Has the inputs of a chunk that is likely to come next on this multiprocessor brought to the cache: q and k, or v
  // and g.
  __device__ __forceinline__ void prefetch(int part) const {
    const unsigned next = blockIdx.x + static_cast<unsigned>(t_.multiprocessors * kResident);
    if (next >= gridDim.x || (!kIsPlain && !is_vector_)) return;
    const ChunkPlace place = ChunkPlace::of(t_, next);
    const std::int64_t first = place.chunk * kC;
    for (int i = lane_; i < kC && first + i < place.item.tokens; i += 32) {
      if (part == 0) {
        prefetch_row(t_.at.q, 2, t_.K, row_of(t_.q, place.item, place.item.key_head, first + i));
        prefetch_row(t_.at.k, 2, t_.K, row_of(t_.k, place.item, place.item.key_head, first + i));
      } else {
        const int bytes = t_.g_dtype == Dtype::kFloat32 ? 4 : 2;
        prefetch_row(t_.at.g, bytes, t_.K, row_of(t_.g, place.item, place.item.head, first + i));
        if (t_.at.u != nullptr) prefetch_row(t_.at.v, 2, t_.V, row_of(t_.v, place.item, place.item.head, first + i));
      }
    }
  }

  static __device__ __forceinline__ void prefetch_row(const void* data, int bytes, int count, std::int64_t at) {
    const auto* from = static_cast<const std::byte*>(data) + at * bytes;
    for (int i = 0; i < count * bytes; i += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
  }

  // Elements `part` of a square of Akk, NaN from the first row on that has been left out of A.
  __device__ __forceinline__ float2 inverse_of(int row_block, const FineSum& sums, int part) const {
    const int i = kBlock * row_block + 8 * part + lane_ / 4;
    const float bad = __uint_as_float(0x7fffffffu);
    const bool is_bad = i >= load_shared<int>(at(Memory::kFirstBad));
    return {is_bad ? bad : sums[2 * part], is_bad ? bad : sums[2 * part + 1]};
  }

  __device__ __forceinline__ void store_inverse(int row_block, int j, int n, const FineSum& sums) const {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const float2 x = inverse_of(row_block, sums, part);
      const std::uint32_t to = Memory::element(8 * part + lane_ / 4, 8 * n + lane_ % 4 * 2);
      store_shared(memory_ + Memory::narrow_square(row_block, j) + to, narrow2(x.x, x.y));
      // Nothing is made from the last block's rows.
      if (row_block == kBlocks - 1) continue;
      store_fine(at(Memory::kInverse) + Memory::square(row_block, j) + to, split_fine(x.x, x.y));
    }
  }

  __device__ __forceinline__ void store_seeded(int row_block, int j, int n, const FineSum& sums) const {
    const int column = 8 * n + lane_ % 4 * 2;
    const float2 seed = load_shared<float2>(at(Memory::kSeeds + 4 * (kBlock * j + column)));
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const float2 x = inverse_of(row_block, sums, part);
      const SplitPair solve = split(x.x * seed.x, x.y * seed.y);
      const std::uint32_t to =
          at(Memory::kSolve) + Memory::square(row_block, j) + Memory::element(8 * part + lane_ / 4, column);
      store_shared(to, solve.high);
      store_shared(to + Memory::kLowSquare, solve.low);
    }
  }

  // A lane has a column of the warp's block, and stores half of it.
  __device__ __forceinline__ void invert_own() const {
    const int first_bad = load_shared<int>(at(Memory::kFirstBad)) - kBlock * warp_;
    const int column = lane_ % kBlock;
    const int half = lane_ / kBlock;
    const float seed = shared_float(Memory::kSeeds, kBlock * warp_ + column);
    const std::uint32_t keys = at(Memory::kOwn + warp_ * kBlock * Memory::kOwnPitch * 4);
    float x[kBlock];
    substitute(
        column,
        [&](int i, int j) {
          return load_shared<float4>(keys + static_cast<std::uint32_t>((i * Memory::kOwnPitch + j) * 4));
        },
        x);
    const std::uint32_t square = Memory::square(warp_, warp_);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int i = 8 * half + n;
      float value = half == 0 ? x[n] : x[8 + n];
      if (i < column) value = 0;
      if (i > column && i >= first_bad) value = __uint_as_float(0x7fffffffu);
      const FinePair inverse = split_fine(value, 0);
      const SplitPair solve = split(i < column ? 0.0f : value * seed, 0);
      const std::uint32_t to = square + Memory::element(i, column);
      store_shared_half(at(Memory::kInverse) + to, static_cast<std::uint16_t>(inverse.high));
      store_shared_half(at(Memory::kInverse) + to + Memory::kLowSquare, static_cast<std::uint16_t>(inverse.low));
      store_shared_half(at(Memory::kInverse) + to + Memory::kRestSquare, static_cast<std::uint16_t>(inverse.rest));
      store_shared_half(at(Memory::kSolve) + to, static_cast<std::uint16_t>(solve.high));
      store_shared_half(at(Memory::kSolve) + to + Memory::kLowSquare, static_cast<std::uint16_t>(solve.low));
    }
  }

  // Begins to copy v of the chunk, 128 columns from `column` on: a thread's part of every fourth of its rows.
  __device__ __forceinline__ void load_values(int column) const {
    const RowStrides& s = t_.v;
    const bool is_vector = t_.vector_inputs && reinterpret_cast<std::uintptr_t>(t_.at.v) % 16 == 0;
    const int piece = static_cast<int>(threadIdx.x) % 16;
    const int at_column = column + 8 * piece;
    const int first = static_cast<int>(threadIdx.x) / 16;
    const auto* from =
        static_cast<const std::uint16_t*>(t_.at.v) + row_of(s, item_, item_.head, first_ + first) + at_column * s.inner;
#pragma unroll
    for (int n = 0; n < 4; ++n, from += kC / 4 * s.token) {
      const int i = first + n * (kC / 4);
      const bool is_there = i < chunk_rows_ && at_column < t_.V;
      if (kIsPlain || is_vector) {
        copy_async16_if(is_there, value_place(i, piece), from);
      } else {
        store_shared(value_place(i, piece), is_there ? load8_apart(from, s.inner) : uint4{0, 0, 0, 0});
      }
    }
  }

  __device__ __forceinline__ std::uint32_t value_place(int row, int piece) const {
    return at(Memory::kValues + row * 256 + ((piece ^ (row & 7)) << 4));
  }

  static constexpr int kTiles = 8 / kBlocks;  // of eight columns of w and u, of a warp
  __device__ __forceinline__ int column_of_warp() const { return warp_ * kTiles * 8; }

  template <bool kHasLow>
  static __device__ __forceinline__ void multiply_tiles(float (&d)[kTiles][4], const SplitRows& a,
                                                        const SplitColumns (&b)[kTiles]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma_bf16(d[n], a.low, b[n].at[0].high, b[n].at[1].high);
    if constexpr (kHasLow) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) mma_bf16(d[n], a.high, b[n].at[0].low, b[n].at[1].low);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma_bf16(d[n], a.high, b[n].at[0].high, b[n].at[1].high);
  }

  using Columns = float[kBlocks][kTiles][4];  // of all tokens, this warp's

  // w = (Akk diag(beta)) (k decayed from the chunk's first row on), and u = (Akk diag(beta)) v.
  __device__ __forceinline__ void solve(unsigned flags) const {
    const bool has_w = t_.at.w != nullptr;
    const bool has_u = t_.at.u != nullptr;
    const bool has_large = (flags & kHasLargeKeys) != 0;
    Columns u;
    {
      Columns w;
      bool is_finite = true;
      if (has_w && has_u && (flags & kHasWild) == 0) {
        is_finite = multiply_columns<true, true>(has_large, w, u);
      } else {
        if (has_w) multiply_columns<true, false>(has_large, w, u);
        if (has_w && (flags & kHasWild) != 0) poison(w);
        if (has_u) is_finite = multiply_columns<false, true>(has_large, w, u);
      }
      if (has_w) stage(Memory::kStage, w, kPerScale);
      if (!is_finite) poison(u);
    }
    __syncthreads();
    if (has_w) copy_out(t_.at.w, t_.w, vectors_.w, Memory::kStage, 0, t_.K);
    if (!has_u) return;
    stage(Memory::kInverse, u, 1.0f);
    __syncthreads();
    copy_out(t_.at.u, t_.u, vectors_.u, Memory::kInverse, 0, t_.V);
#pragma unroll 1
    for (int column = 128; column < t_.V; column += 128) {
      __syncthreads();  // u has left what may be the same place
      load_values(column);
      copies_wait();
      __syncthreads();
      if (!multiply_columns<false, true>(has_large, u, u)) poison(u);
      __syncthreads();
      stage(Memory::kInverse, u, 1.0f);
      __syncthreads();
      copy_out(t_.at.u, t_.u, vectors_.u, Memory::kInverse, column, t_.V);
    }
  }

  // With D_j the decay of block j, w = M_0 + D_0 (M_1 + D_1 (M_2 + ...)), M_j the part of block j's k P. Returns
  // whether all of v is finite.
  template <bool kHasW, bool kHasU>
  __device__ __forceinline__ bool multiply_columns(bool has_large, Columns& w, Columns& u) const {
    bool is_finite = true;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kHasW) w[i][n][e] = 0;
          if constexpr (kHasU) u[i][n][e] = 0;
        }
      }
    }
#pragma unroll
    for (int j = kBlocks - 1; j >= 0; --j) {
      SplitColumns keys[kTiles];
      SplitColumns values[kTiles];
      if constexpr (kHasU) is_finite = load_value_columns(j, has_large, values) && is_finite;
      if constexpr (kHasW) {
        load_key_columns(j, keys);
        if (j < kBlocks - 1) decay_columns(j, w);
      }
#pragma unroll
      for (int i = j; i < kBlocks; ++i) {
        const SplitRows left = load_square(at(Memory::kSolve) + Memory::square(i, j));
        if constexpr (kHasW) multiply_tiles<true>(w[i], left, keys);
        if constexpr (kHasU) multiply_tiles<!kIsBf16>(u[i], left, values);
      }
    }
    return is_finite;
  }

  __device__ __forceinline__ void load_key_columns(int j, SplitColumns (&right)[kTiles]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int piece = warp_ * kTiles + n;
      std::uint32_t r[4];
      ldmatrix4_transposed(
          at(Memory::kKeys + (piece / 8 * kBlocks + j) * Memory::kRows + lane_ / 16 * Memory::kLowRows) +
              Memory::piece(lane_ / 8 % 2 * 8 + lane_ % 8, piece % 8),
          r);
      right[n] = {{{r[0], r[2]}, {r[1], r[3]}}};
    }
  }

  // Rows behind block j decay over it.
  __device__ __forceinline__ void decay_columns(int j, Columns& w) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int column = column_of_warp() + 8 * n + lane_ % 4 * 2;
      const auto decay = load_shared<float2>(at(Memory::kDecays + 512 * j + 4 * column));
#pragma unroll
      for (int i = j + 1; i < kBlocks; ++i) {
        w[i][n][0] *= decay.x;
        w[i][n][1] *= decay.y;
        w[i][n][2] *= decay.x;
        w[i][n][3] *= decay.y;
      }
    }
  }

  // Tokens 16 j to 16 j + 15 of this warp's columns of v. Returns whether all are finite in all lanes; what is not
  // counts as 0.
  __device__ __forceinline__ bool load_value_columns(int j, bool has_large, SplitColumns (&right)[kTiles]) const {
    const int piece = warp_ * kTiles;
    std::uint32_t r[4];
    ldmatrix4_transposed(
        value_place(kBlock * j + lane_ / 8 % 2 * 8 + lane_ % 8, piece + (kTiles == 2 ? lane_ / 16 : 0)), r);
    constexpr std::uint32_t kExponents = kIsBf16 ? 0x7f807f80u : 0x7c007c00u;
    bool is_odd = false;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      const std::uint32_t exponents = ~r[n] & kExponents;
      is_odd = is_odd || (exponents & 0xffffu) == 0 || (exponents >> 16) == 0;
    }
    const bool is_finite = !__any_sync(kAll, is_odd);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      SplitColumns& to = right[n];
      if (kIsBf16 && is_finite && !has_large) {
        to = {{{r[2 * n], 0}, {r[2 * n + 1], 0}}};
        continue;
      }
      float4 x = wide({r[2 * n], r[2 * n + 1]});
      if (!is_finite) {
        x = leave_out_apart(x, at(Memory::kLimits + 4 * (8 * (piece + n) + lane_ / 4)), kBlock * j + lane_ % 4 * 2);
      }
      if (has_large) {
        // kSeeds has beta in kScale there.
        const std::uint32_t from = at(Memory::kUnscale + 4 * (kC + kBlock * j + lane_ % 4 * 2));
        const auto first = load_shared<float2>(from);
        const auto second = load_shared<float2>(from + 32);
        const auto scale = [](float unscale) { return unscale == 1.0f ? kPerScale : 1.0f; };
        x = times(x, float4{scale(first.x), scale(first.y), scale(second.x), scale(second.y)});
      }
      to = {{split(x.x, x.y), split(x.z, x.w)}};
    }
    return is_finite;
  }

  // Tokens from the first one on that was left out are NaN.
  __device__ __forceinline__ void poison(Columns& d) const {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const std::uint32_t from = at(Memory::kLimits + 4 * (column_of_warp() + 8 * n + lane_ % 4 * 2));
      const int first = load_shared<int>(from);
      const int second = load_shared<int>(from + 4);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (kBlock * i + lane_ / 4 + e / 2 * 8 >= (e % 2 == 0 ? first : second)) {
            d[i][n][e] = __uint_as_float(0x7fffffffu);
          }
        }
      }
    }
    __syncwarp();
    for (int i = lane_; i < kTiles * 8; i += 32) {
      store_shared(at(Memory::kLimits + 4 * (column_of_warp() + i)), static_cast<std::uint32_t>(kC));
    }
    __syncwarp();
  }

  // Puts this warp's columns where copy_out() finds them.
  __device__ __forceinline__ void stage(int to_offset, const Columns& d, float scale) const {
    const std::uint32_t to = at(to_offset + lane_ / 4 * Memory::kStagePitch + 2 * column_of_warp() + lane_ % 4 * 4);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          store_shared(to + static_cast<std::uint32_t>((kBlock * i + 8 * part) * Memory::kStagePitch + 16 * n),
                       narrow2(d[i][n][2 * part] * scale, d[i][n][2 * part + 1] * scale));
        }
      }
    }
  }

  // Whole rows, 128 columns from `column` on, of `width` columns in all.
  __device__ __forceinline__ void copy_out(void* data, const RowStrides& s, bool is_vector, int from_offset, int column,
                                           int width) const {
    const int piece = static_cast<int>(threadIdx.x) % 16;
    if (column + 8 * piece >= width) return;
    auto* to =
        static_cast<std::uint16_t*>(data) + row_of(s, item_, item_.head, first_) + (column + 8 * piece) * s.inner;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int i = static_cast<int>(threadIdx.x) / 16 + n * (kC / 4);
      if (i >= chunk_rows_) break;
      const auto words = load_shared<uint4>(at(from_offset + i * Memory::kStagePitch + 16 * piece));
      put8(to + i * s.token, s.inner, is_vector, words);
    }
  }

  const ChunkKdaFwdTask& t_;
  const ExtrasVectors& vectors_;
  const Item item_;
  const std::uint32_t memory_;
  const int warp_;
  const int lane_;
  const std::int64_t first_;  // token of the sequence
  const int chunk_rows_;      // valid ones
  const Gate gate_;
  int rows_ = 0;  // valid ones of this warp's eight: not above 0 if none is, or no channel of this lane
  bool is_vector_ = false;
  uint2 q_[8], k_[8];
  unsigned large_ = 0;  // of the rows of q, then of k, those that carry no scale
  bool is_good_ = true;
  bool is_tame_ = true;
};

template <bool kIsBf16, int kBlocks, bool kIsPlain>
__global__ void __launch_bounds__(TensorExtras<kIsBf16, kBlocks, kIsPlain>::kThreads,
                                  TensorExtras<kIsBf16, kBlocks, kIsPlain>::kResident)
    tensor_extras_kernel(const __grid_constant__ ChunkKdaFwdTask task, const __grid_constant__ ExtrasVectors vectors) {
  extern __shared__ __align__(1024) std::byte tensor_extras_memory[];
  const ChunkPlace place = ChunkPlace::of(task, blockIdx.x);
  if (place.chunk * task.C >= place.item.tokens) return;  // beyond the last one, where NC is an upper bound
  TensorExtras<kIsBf16, kBlocks, kIsPlain>(task, vectors, place.item, place.chunk, shared_address(tensor_extras_memory))
      .run();
}

}  // namespace kda::cuda
