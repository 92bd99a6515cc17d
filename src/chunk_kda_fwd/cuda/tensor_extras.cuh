#pragma once

// The kernel that makes gk, Aqk, Akk, w, u, qg and kg for K = V = 128, on the tensor cores: products of numbers split
// in two bf16 each. A block of threads owns a chunk of one value head, a warp 16 of its tokens: lanes 0 to 15 the first
// eight rows, the others the rest, each lane four adjacent channels of a panel of 64.
//
// Within a block of 16 tokens, with P_i the decay from its first row through row i, E_ij = P_i / P_j, as long as 1 / P
// is a number to multiply with; rows from the first one on where it is not are computed pair by pair. Between blocks
// E_ij is P_i times the decay of the blocks between times the decay of the rows behind j in its block, all at most 1.

#include "chunk_kda_fwd/cuda/prepare.cuh"
#include "cuda/async.cuh"
#include "cuda/split.cuh"

namespace kda::cuda {

// Which outputs can be written 16 bytes at a time.
struct ExtrasVectors {
  bool gk, Aqk, Akk, w, u, qg, kg;
};

// The first `bytes` of 8, zeros for the others.
__device__ __forceinline__ void copy_async8(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Predicated, where the compiler would branch.
__device__ __forceinline__ void store_if(bool is_there, void* to, const uint4& x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.v4.u32 [%1], {%2,%3,%4,%5};\n}\n" ::"r"(
                   static_cast<int>(is_there)),
               "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ void store_if(bool is_there, void* to, const uint2& x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.v2.u32 [%1], {%2,%3};\n}\n" ::"r"(
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

  // Byte offsets. Scaled: by kScale, or, rows of large numbers, not at all.
  static constexpr int kKeys = 0;                               // [2 panels][blocks] k P, scaled
  static constexpr int kQueries = kKeys + 2 * kBlocks * kRows;  // [blocks] q P of a panel, scaled
  static constexpr int kRight = kQueries + kBlocks * kRows;     // [blocks] k / P over kScale, then k R
  static constexpr int kSolve = kQueries;                       // after the pairs: A, then Akk diag(beta)
  static constexpr int kInverse = kSolve + kTriangle;           // Aqk, then Akk, then v [C][128] in 128-byte swizzle
  static constexpr int kOwn = kInverse + most(kTriangle, kC * 256);  // [blocks][16][kOwnPitch] fp32: A within blocks
  static constexpr int kOwnPitch = 20;
  static constexpr int kTotals = most(kRight + kBlocks * kRows, kOwn + kBlocks * kBlock * kOwnPitch * 4);
  static constexpr int kFactors = kTotals + kBlocks * 1024;  // of totals: [2 blocks][128] fp32, sums of gates
  static constexpr int kFactorPairs = (kBlocks - 2) * (kBlocks - 1) / 2;
  static constexpr int kBeta = kFactors + kFactorPairs * 256;  // [C] fp32
  static constexpr int kUnscale = kBeta + kC * 4;              // [2][C] fp32: 1 / scale of q's rows, of k's rows
  static constexpr int kLimits = kUnscale + 2 * kC * 4;        // [128] int: first token that is not finite
  static constexpr int kFirstBad = kLimits + 512;              // int: first row of A that is not
  static constexpr int kBytes = kFirstBad + 16;
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
        chunk_row_(static_cast<int>(threadIdx.x) / 32 * kBlock),
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
    const std::uint32_t queries = memory + Memory::kInverse + Memory::square(block, block);
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
    if (token_ + i >= item_.tokens) return {0, 0, 0, 0};
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

  static __device__ __forceinline__ ChunkPlace of(const ChunkKdaFwdTask& t) {
    const unsigned chunk = divide(blockIdx.x, t.by_heads);
    const unsigned head = blockIdx.x - chunk * t.by_heads.divisor;
    const auto per_sequence = static_cast<unsigned>(t.NC);
    const std::int64_t n = t.is_packed ? sequence_at(t, &PackedSequence::first_chunk, chunk) : chunk / per_sequence;
    const Item item = item_of(t, n, head);
    return {item, t.is_packed ? chunk - item.first_chunk : chunk % per_sequence};
  }
};

// What is rare, out of the way.
static __device__ __noinline__ uint4 load_apart(const void* data, Dtype dtype, std::int64_t at, std::int64_t inner) {
  return load4(data, dtype, at, inner, false);
}

static __device__ __noinline__ void store_apart(float* to, std::int64_t inner, float4 x) {
  to[0] = x.x;
  to[inner] = x.y;
  to[2 * inner] = x.z;
  to[3 * inner] = x.w;
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

// kIsPlain: rows of all inputs and outputs are adjacent elements at multiples of 16 bytes.
template <bool kIsBf16, int kBlocks, bool kIsPlain>
class TensorExtras {
 public:
  using Memory = TensorExtrasMemory<kBlocks>;
  static constexpr int kC = Memory::kC;
  static constexpr int kThreads = 32 * kBlocks;
  static constexpr int kResident = kBlocks == 4 ? 2 : 1;  // blocks of threads on a multiprocessor

  __device__ TensorExtras(const ChunkKdaFwdTask& task, const ExtrasVectors& vectors, const Item& item,
                          std::int64_t chunk, std::uint32_t memory)
      : t_(task),
        vectors_(vectors),
        item_(item),
        memory_(memory),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        first_(chunk * kC),
        first_place_(static_cast<std::uint32_t>(lane_ / 16 * 1024 + lane_ % 16 * 8)),
        chunk_rows_(static_cast<int>(min(static_cast<std::int64_t>(kC), item.tokens - first_))) {}

  __device__ void run() {
    const bool needs_inverse = t_.at.Akk != nullptr || t_.at.w != nullptr || t_.at.u != nullptr;
    const bool needs_pairs = needs_inverse || t_.at.Aqk != nullptr;
    start();
    float own[3][4] = {};             // rows 0 to 7, keys 0 to 7; rows 8 to 15, all keys
    float others[kItems][2][4] = {};  // of the items
#pragma unroll 1
    for (int panel = 0; panel < 2; ++panel) {
      float x[8][4];
      activate(panel, x);
      __syncthreads();
      if (needs_pairs) make_factors(panel);
      settle(panel, x);
      __syncwarp();
      if (needs_pairs) multiply_own(panel, own);
      __syncwarp();
      rest(panel, x);
      if (panel == 0) {
        fetch_gates(1);
      }
      __syncthreads();
      if (needs_pairs) multiply_others(panel, others);
    }
    if (!needs_pairs) return;
    __syncthreads();
    store_own(own);
    store_others(others);
    __syncwarp();
    if (!__all_sync(kAll, is_good_)) pair_by_pair(t_, memory_);
    check_own();
    __syncthreads();
    if (t_.at.Aqk != nullptr) store_triangle(t_.at.Aqk, t_.Aqk, vectors_.Aqk, false);
    if (!needs_inverse) return;
    uint4 v[8];
    if (t_.at.u != nullptr) load_values(v);
    __syncwarp();
    invert();
    __syncwarp();
    if (t_.at.Akk != nullptr) store_triangle(t_.at.Akk, t_.Akk, vectors_.Akk, true);
    __syncthreads();
    if (t_.at.u != nullptr) put_values(v);
    __syncthreads();
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      const bool is_w = pass == 0;
      if ((is_w ? t_.at.w : t_.at.u) != nullptr) solve(is_w);
    }
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr float kPerScale = 0x1p-32f;
  static constexpr float kScale = 0x1p32f;
  static constexpr Dtype kDtype = kIsBf16 ? Dtype::kBFloat16 : Dtype::kFloat16;
  // Products of eight keys of an earlier block with a block's rows, over all warps: kItems each.
  static constexpr int kItems = kBlocks - 1;

  __device__ __forceinline__ int half() const { return lane_ / 16; }
  __device__ __forceinline__ int row() const { return kBlock * warp_ + 8 * half(); }  // first of eight, in the chunk
  __device__ __forceinline__ int channel(int panel) const { return 64 * panel + lane_ % 16 * 4; }
  __device__ __forceinline__ std::uint32_t at(int offset) const { return memory_ + static_cast<std::uint32_t>(offset); }

  // Loads q and k, the first panel of gates, and beta; what turns rows of q and k into scaled, normalised ones.
  __device__ __forceinline__ void start() {
    rows_ = chunk_rows_ - row();
    is_vector_ =
        t_.vector_inputs && (reinterpret_cast<std::uintptr_t>(t_.at.q) | reinterpret_cast<std::uintptr_t>(t_.at.k) |
                             reinterpret_cast<std::uintptr_t>(t_.at.g)) %
                                    16 ==
                                0;
    fetch_gates(0);
    for (int panel = 0; panel < 2; ++panel) {
      load_rows(t_.at.k, t_.k, panel, raw_rows(panel));
      load_rows(t_.at.q, t_.q, panel, raw_rows(panel) + Memory::kLowRows);
    }
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kC) {
      const float beta = thread < chunk_rows_ ? beta_of(t_, item_, first_ + thread) : 0.0f;
      store_shared(at(Memory::kBeta + 4 * thread), __float_as_uint(beta));
    }
    if (thread < 128) store_shared(at(Memory::kLimits + 4 * thread), static_cast<std::uint32_t>(kC));
    if (thread == 0) store_shared(at(Memory::kFirstBad), static_cast<std::uint32_t>(kC));
    copies_wait();
    float squares[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      squares[i] =
          square(raw_rows(1) + Memory::kLowRows + place(i), square(raw_rows(0) + Memory::kLowRows + place(i), 0));
      squares[8 + i] = square(raw_rows(1) + place(i), square(raw_rows(0) + place(i), 0));
    }
    const float sum = transposed_sum<8>(squares, lane_);
    const bool is_large = !t_.qk_l2norm && !(sum <= 0x1p80f);
    row_factor_ = (t_.qk_l2norm ? 1.0f / sqrtf(sum + 1e-6f) : 1.0f) * (is_large ? kPerScale : 1.0f);
    large_ = __ballot_sync(kAll, is_large);
    is_good_ = t_.qk_l2norm || lane_ % 16 < 8 || sum <= 4096.0f;
    // Lane 16 h + l has row 8 h + l of q in l < 8, else of k.
    store_shared(at(Memory::kUnscale + 4 * (lane_ / 8 % 2 * kC + row() + lane_ % 8)),
                 __float_as_uint(is_large ? 1.0f : kPerScale));
  }

  static __device__ __forceinline__ std::uint32_t narrow2(float low, float high) {
    return kIsBf16 ? round_pair(low, high) : kda::cuda::narrow2(low, high, false);
  }
  static __device__ __forceinline__ float4 wide(const uint2& raw) { return widen4({raw.x, raw.y, 0, 0}, kDtype); }
  static __device__ __forceinline__ float square(std::uint32_t from, float sum) {
    const float4 x = wide(load_shared<uint2>(from));
    return dot4(x, x, sum);
  }

  // k as it comes lies where the high parts of k P will, q where the low parts will: each lane its own.
  __device__ __forceinline__ std::uint32_t raw_rows(int panel) const {
    return at(Memory::kKeys + (panel * kBlocks + warp_) * Memory::kRows);
  }

  // Copies this lane's part of eight rows; zero beyond the last token.
  __device__ __forceinline__ void load_rows(const void* data, const RowStrides& strides, int panel,
                                            std::uint32_t to) const {
    const auto* from = static_cast<const std::uint16_t*>(data) +
                       row_of(strides, item_, item_.key_head, first_ + row()) + channel(panel) * strides.inner;
#pragma unroll
    for (int i = 0; i < 8; ++i, from += strides.token) {
      if (kIsPlain || is_vector_) {
        copy_async8(to + place(i), from, i < rows_ ? 8 : 0);
      } else {
        const uint4 four = i < rows_ ? load_apart(from, kDtype, 0, strides.inner) : uint4{0, 0, 0, 0};
        store_shared(to + place(i), four.x, four.y);
      }
    }
  }

  __device__ __forceinline__ void fetch_gates(int panel) {
    const RowStrides& s = t_.g;
    const std::int64_t first = row_of(s, item_, item_.head, first_ + row()) + channel(panel) * s.inner;
    if (t_.g_dtype == Dtype::kFloat32) {
      fetch_gates(static_cast<const float*>(t_.at.g) + first);
    } else {
      fetch_gates(static_cast<const std::uint16_t*>(t_.at.g) + first);
    }
    if (t_.at.dt_bias == nullptr || t_.gate_mode == GateMode::kActivated) return;
#pragma unroll
    for (int c = 0; c < 4; ++c) bias_[c] = bias_of(t_, item_, channel(panel) + c);
  }

  template <class Number>
  __device__ __forceinline__ void fetch_gates(const Number* from) {
    constexpr Dtype kGateDtype = sizeof(Number) == 4 ? Dtype::kFloat32 : Dtype::kBFloat16;
#pragma unroll
    for (int i = 0; i < 8; ++i, from += t_.g.token) {
      const bool is_there = i < rows_;
      if (!kIsPlain && !is_vector_) {
        g_[i] = is_there ? load_apart(from, kGateDtype, 0, t_.g.inner) : uint4{0, 0, 0, 0};
      } else if constexpr (sizeof(Number) == 4) {
        g_[i] = load4_if(is_there, from);
      } else {
        const uint2 raw = load2_if(is_there, from);
        g_[i].x = raw.x;
        g_[i].y = raw.y;
      }
    }
  }

  // x: gates, in natural logarithm; their sums over eight rows go to shared memory.
  __device__ __forceinline__ void activate(int panel, float (&x)[8][4]) {
    const Gate gate = gate_of(t_, item_);
    if (t_.g_dtype == Dtype::kFloat32) {
      widen_gates<Dtype::kFloat32>(x);
    } else {
      widen_gates<Dtype::kBFloat16>(x);
    }
    if (t_.gate_mode == GateMode::kBounded) {
      for_gates(x, [&](float g, float bias) {
        return Gate{GateMode::kBounded, gate.factor, gate.lower_bound}(g, bias);
      });
    } else if (t_.gate_mode == GateMode::kSoftplus) {
      for_gates(x, [&](float g, float bias) {
        return Gate{GateMode::kSoftplus, gate.factor, gate.lower_bound}(g, bias);
      });
    } else if (t_.gate_mode == GateMode::kAccumulated) {
      take_steps(panel, x);
    }
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] = __fadd_rn(sum[c], x[i][c]);
    }
    store4(totals(2 * warp_ + half(), panel), sum);
  }

  __device__ __forceinline__ std::uint32_t totals(int eight, int panel) const {
    return at(Memory::kTotals + eight * 512 + 4 * channel(panel));
  }

  static __device__ __forceinline__ void store4(std::uint32_t to, const float (&x)[4]) {
    store_shared(to, uint4{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])});
  }

  template <class F>
  __device__ __forceinline__ void for_gates(float (&x)[8][4], const F& gate) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[i][c] = gate(x[i][c], bias_[c]);
    }
    if (rows_ >= 8) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[i][c] = i < rows_ ? x[i][c] : 0.0f;
    }
  }

  template <Dtype kGateDtype>
  __device__ __forceinline__ void widen_gates(float (&x)[8][4]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 g = widen4(g_[i], kGateDtype);
      x[i][0] = g.x;
      x[i][1] = g.y;
      x[i][2] = g.z;
      x[i][3] = g.w;
    }
  }

  // From rows of gk to what lies between them.
  __device__ __forceinline__ void take_steps(int panel, float (&x)[8][4]) const {
    float before[4] = {};
    if (row() > 0 && rows_ > 0) {
      const std::int64_t from = row_of(t_.g, item_, item_.head, first_ + row() - 1) + channel(panel) * t_.g.inner;
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

  // Decays of the blocks between two that are not neighbours.
  __device__ __forceinline__ void make_factors(int panel) const {
    for (int i = static_cast<int>(threadIdx.x); i < Memory::kFactorPairs * 64; i += kThreads) {
      int row_block = 2;
      int column_block = i / 64;
      while (column_block >= row_block - 1) column_block -= row_block++ - 1;
      float sum = 0;
      for (int eight = 2 * column_block + 2; eight < 2 * row_block; ++eight) {
        sum += load_shared<float>(at(Memory::kTotals + eight * 512 + 4 * (64 * panel + i % 64)));
      }
      store_shared(at(Memory::kFactors + 4 * i), __float_as_uint(fast_exp2(kGkPerGate * sum)));
    }
  }

  // This lane's part of eight rows of an output, one after the other.
  template <class Number>
  struct Rows {
    Number* to;
    std::int64_t step;
    int count;  // rows to write
    bool is_vector;
  };

  template <class Number>
  __device__ __forceinline__ Rows<Number> rows_to(void* data, const RowStrides& s, bool is_vector, int panel,
                                                  int first) const {
    Number* to =
        static_cast<Number*>(data) + row_of(s, item_, item_.head, first_ + row() + first) + channel(panel) * s.inner;
    return {to, first == 0 ? s.token : -s.token, data == nullptr ? 0 : rows_, is_vector};
  }

  static __device__ __forceinline__ void put(Rows<float>& rows, int i, std::int64_t inner, const float (&x)[4]) {
    const float4 four{x[0], x[1], x[2], x[3]};
    if (kIsPlain || rows.is_vector) {
      const uint4 bits{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
      store_if(i < rows.count, rows.to, bits);
    } else if (i < rows.count) {
      store_apart(rows.to, inner, four);
    }
    rows.to += rows.step;
  }

  static __device__ __forceinline__ void put(Rows<std::uint16_t>& rows, int i, std::int64_t inner,
                                             const float (&x)[4]) {
    const uint2 four{narrow2(x[0], x[1]), narrow2(x[2], x[3])};
    if (kIsPlain || rows.is_vector) {
      store_if(i < rows.count, rows.to, four);
    } else if (i < rows.count) {
      store_apart(rows.to, inner, four);
    }
    rows.to += rows.step;
  }

  // Where this lane's four channels of row 8 half + i lie among the rows of a block. Computed again for every use: the
  // compiler would keep the eight of them in registers, which are short.
  __device__ __forceinline__ std::uint32_t place(int i) const {
    std::uint32_t x;
    asm volatile("xor.b32 %0, %1, %2;" : "=r"(x) : "r"(first_place_), "r"(i << 4));
    return x + static_cast<std::uint32_t>(i * 128);
  }

  static __device__ __forceinline__ void store_split(std::uint32_t to, const float (&x)[4]) {
    const SplitPair a = split(x[0], x[1]);
    const SplitPair b = split(x[2], x[3]);
    store_shared(to, a.high, b.high);
    store_shared(to + Memory::kLowRows, a.low, b.low);
  }

  // From sums of gates to all that decays from the block's first row on: gk, qg, q P, k P, k / P. x turns into steps.
  __device__ __forceinline__ void settle(int panel, float (&x)[8][4]) {
    float before[4] = {};  // this half
    float product[4];
    float prefix[4];
    for (int eight = 0; eight < 2 * warp_; ++eight) add(before, totals(eight, panel));
#pragma unroll
    for (int c = 0; c < 4; ++c) prefix[c] = fast_exp2(kGkPerGate * before[c]) * kPerScale;
    const float4 first = load_shared<float4>(totals(2 * warp_, panel));
    const float firsts[4] = {first.x, first.y, first.z, first.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (half() == 1) before[c] = __fadd_rn(before[c], firsts[c]);
      product[c] = half() == 1 ? kScale * fast_exp2(kGkPerGate * firsts[c]) : kScale;
    }
    auto gk = rows_to<float>(t_.at.gk, t_.gk, vectors_.gk, panel, 0);
    auto qg = rows_to<std::uint16_t>(t_.at.qg, t_.qg, vectors_.qg, panel, 0);
    const std::uint32_t keys = at(Memory::kKeys + (panel * kBlocks + warp_) * Memory::kRows);
    const std::uint32_t queries = at(Memory::kQueries + warp_ * Memory::kRows);
    const std::uint32_t right = at(Memory::kRight + warp_ * Memory::kRows);
#pragma unroll
    for (int i = 0; i < 8; ++i) k_[i] = load_shared<uint2>(keys + place(i));
    uint2 raw_q = load_shared<uint2>(keys + Memory::kLowRows + place(0));
    float sum[4] = {};
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float log2[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        most = fmaxf(most, x[i][c]);
        sum[c] = __fadd_rn(sum[c], x[i][c]);
        log2[c] = __fadd_rn(before[c], sum[c]) * kGkPerGate;
        x[i][c] = fast_exp2(kGkPerGate * x[i][c]);
        product[c] *= x[i][c];
      }
      put(gk, i, t_.gk.inner, log2);
      const float q_factor = __shfl_sync(kAll, row_factor_, lane_ / 16 * 16 + i);
      const float k_factor = __shfl_sync(kAll, row_factor_, lane_ / 16 * 16 + 8 + i);
      const float4 q_wide = times(wide(raw_q), q_factor);
      if (i < 7) raw_q = load_shared<uint2>(keys + Memory::kLowRows + place(i + 1));
      const float4 k_wide = times(wide(k_[i]), k_factor);
      float q[4] = {q_wide.x, q_wide.y, q_wide.z, q_wide.w};
      float k[4] = {k_wide.x, k_wide.y, k_wide.z, k_wide.w};
      float quotient[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        q[c] *= product[c];
        quotient[c] = k[c] * fast_reciprocal(product[c]);
        k[c] *= product[c];
      }
      store_split(queries + place(i), q);
      store_split(keys + place(i), k);
      store_split(right + place(i), quotient);
#pragma unroll
      for (int c = 0; c < 4; ++c) q[c] *= prefix[c];
      unscale(q, i);
      put(qg, i, t_.qg.inner, q);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) is_good_ = is_good_ && product[c] > kScale * 0x1p-120f;
    is_good_ = is_good_ && most <= 0;
  }

  __device__ __forceinline__ void add(float (&sum)[4], std::uint32_t from) const {
    const float4 x = load_shared<float4>(from);
    sum[0] = __fadd_rn(sum[0], x.x);
    sum[1] = __fadd_rn(sum[1], x.y);
    sum[2] = __fadd_rn(sum[2], x.z);
    sum[3] = __fadd_rn(sum[3], x.w);
  }

  // Rows of large numbers carry no scale. `index`: i of q, 8 + i of k.
  __device__ __forceinline__ void unscale(float (&x)[4], int index) const {
    if (large_ == 0) return;
    if ((large_ >> (lane_ / 16 * 16 + index) & 1) == 0) return;
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] *= kScale;
  }

  // k R and kg, from steps.
  __device__ __forceinline__ void rest(int panel, const float (&step)[8][4]) const {
    auto kg = rows_to<std::uint16_t>(t_.at.kg, t_.kg, vectors_.kg, panel, 7);
    const std::uint32_t right = at(Memory::kRight + warp_ * Memory::kRows);
    float after[4] = {};
    for (int eight = 2 * warp_ + 2; eight < 2 * kBlocks; ++eight) add(after, totals(eight, panel));
    const float4 second = load_shared<float4>(totals(2 * warp_ + 1, panel));
    const float seconds[4] = {second.x, second.y, second.z, second.w};
    float product[4];
    float suffix[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      product[c] = half() == 0 ? fast_exp2(kGkPerGate * seconds[c]) : 1.0f;
      suffix[c] = fast_exp2(kGkPerGate * after[c]);
    }
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      const float4 k_wide = times(wide(k_[i]), __shfl_sync(kAll, row_factor_, lane_ / 16 * 16 + 8 + i));
      float k[4] = {k_wide.x, k_wide.y, k_wide.z, k_wide.w};
      unscale(k, 8 + i);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        k[c] *= product[c];
        product[c] *= step[i][c];
      }
      store_split(right + place(i), k);
#pragma unroll
      for (int c = 0; c < 4; ++c) k[c] *= suffix[c];
      put(kg, i, t_.kg.inner, k);
    }
  }

  // Rows 8 part to 8 part + 7 of q, then of k, of a block: one operand.
  __device__ __forceinline__ SplitRows load_stacked(int panel, int block, int part, int step) const {
    const int base = lane_ / 8 % 2 == 0 ? Memory::kQueries + block * Memory::kRows
                                        : Memory::kKeys + (panel * kBlocks + block) * Memory::kRows;
    const std::uint32_t from = at(base) + Memory::piece(8 * part + lane_ % 8, 2 * step + lane_ / 16);
    SplitRows rows;
    ldmatrix4(from, rows.high);
    ldmatrix4(from + Memory::kLowRows, rows.low);
    return rows;
  }

  // Eight keys of a block, as the second operand.
  __device__ __forceinline__ SplitColumns load_keys(int eight, int step) const {
    std::uint32_t r[4];
    ldmatrix4(at(Memory::kRight + eight / 2 * Memory::kRows + lane_ / 16 * Memory::kLowRows) +
                  Memory::piece(eight % 2 * 8 + lane_ % 8, 2 * step + lane_ / 8 % 2),
              r);
    return {{{r[0], r[2]}, {r[1], r[3]}}};
  }

  __device__ __forceinline__ void multiply_own(int panel, float (&own)[3][4]) const {
#pragma unroll 1
    for (int step = 0; step < 4; ++step) {
      const SplitColumns first = load_keys(2 * warp_, step);
      multiply_split(own[0], load_stacked(panel, warp_, 0, step), first);
      const SplitRows lower = load_stacked(panel, warp_, 1, step);
      multiply_split(own[1], lower, first);
      multiply_split(own[2], lower, load_keys(2 * warp_ + 1, step));
    }
  }

  // A block of rows, later ones first, and eight keys of the blocks before it.
  struct Pair {
    int block;
    int eight;

    __device__ __forceinline__ void operator++() {
      if (++eight < 2 * block) return;
      eight = 0;
      --block;
    }
  };

  __device__ __forceinline__ Pair first_pair() const {
    Pair pair{kBlocks - 1, warp_ * kItems};
    while (pair.eight >= 2 * pair.block) pair.eight -= 2 * pair.block--;
    return pair;
  }

  __device__ __forceinline__ void multiply_others(int panel, float (&others)[kItems][2][4]) const {
#pragma unroll 1
    for (int step = 0; step < 4; ++step) {
      Pair pair = first_pair();
      SplitRows rows[2];
#pragma unroll
      for (int n = 0; n < kItems; ++n, ++pair) {
        if (n == 0 || pair.eight == 0) {
          rows[0] = load_stacked(panel, pair.block, 0, step);
          rows[1] = load_stacked(panel, pair.block, 1, step);
        }
        SplitColumns keys = load_keys(pair.eight, step);
        const int between = pair.block - 1 - pair.eight / 2;
        if (between > 0) {
          const int index = (pair.block - 2) * (pair.block - 1) / 2 + pair.eight / 2;
          const std::uint32_t factors = at(Memory::kFactors + index * 256 + (16 * step + lane_ % 4 * 2) * 4);
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            const float2 factor = load_shared<float2>(factors + static_cast<std::uint32_t>(32 * part));
            keys.at[part] = split(first_of(keys.at[part]) * factor.x, second_of(keys.at[part]) * factor.y);
          }
        }
        multiply_split(others[n][0], rows[0], keys);
        multiply_split(others[n][1], rows[1], keys);
      }
    }
  }

  __device__ __forceinline__ float shared_float(int offset, int index) const {
    return load_shared<float>(at(offset + 4 * index));
  }

  __device__ __forceinline__ void store_query_pair(std::uint32_t square, int i, int j, float x, float next) const {
    store_shared(square + Memory::element(i, j), narrow2(x, next));
  }

  // Pairs within the block; A's in fp32, for the substitution.
  __device__ __forceinline__ void store_own(const float (&own)[3][4]) const {
    const int i = lane_ / 4;
    const int j = lane_ % 4 * 2;
    const std::uint32_t square = at(Memory::kInverse) + Memory::square(warp_, warp_);
    const std::uint32_t keys = at(Memory::kOwn + warp_ * kBlock * Memory::kOwnPitch * 4);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int at_row = kBlock * warp_ + 8 * part + i;
      // These products carry no scale, but for large rows.
      const float q_factor = t_.scale * (kScale * shared_float(Memory::kUnscale, at_row));
      const float k_factor =
          shared_float(Memory::kBeta, at_row) * (kScale * shared_float(Memory::kUnscale, kC + at_row));
#pragma unroll
      for (int n = 0; n <= part; ++n) {
        const float(&d)[4] = own[part + n];
        const bool is_whole = n < part;
        store_query_pair(square, 8 * part + i, 8 * n + j, is_whole || j <= i ? q_factor * d[0] : 0.0f,
                         is_whole || j < i ? q_factor * d[1] : 0.0f);
        store_shared(keys + static_cast<std::uint32_t>(((8 * part + i) * Memory::kOwnPitch + 8 * n + j) * 4),
                     __float_as_uint(k_factor * d[2]), __float_as_uint(k_factor * d[3]));
      }
    }
    store_query_pair(square, i, 8 + j, 0, 0);
  }

  __device__ __forceinline__ void store_others(const float (&others)[kItems][2][4]) const {
    const int i = lane_ / 4;
    const int j = lane_ % 4 * 2;
    Pair pair = first_pair();
#pragma unroll
    for (int n = 0; n < kItems; ++n, ++pair) {
      const std::uint32_t square = Memory::square(pair.block, pair.eight / 2);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int at_row = kBlock * pair.block + 8 * part + i;
        const float(&d)[4] = others[n][part];
        const float q_factor = t_.scale * shared_float(Memory::kUnscale, at_row);
        const float k_factor = shared_float(Memory::kBeta, at_row) * shared_float(Memory::kUnscale, kC + at_row);
        const std::uint32_t to = Memory::element(8 * part + i, pair.eight % 2 * 8 + j);
        store_shared(at(Memory::kInverse) + square + to, narrow2(q_factor * d[0], q_factor * d[1]));
        float x = k_factor * d[2];
        float y = k_factor * d[3];
        if (!isfinite(x) || !isfinite(y)) {
          x = isfinite(x) ? x : 0.0f;
          y = isfinite(y) ? y : 0.0f;
          mark_shared(at(Memory::kFirstBad), at_row);
        }
        store_fine(at(Memory::kSolve) + square + to, split_fine(x, y));
      }
    }
  }

  // Not a member: what it is called with stays in registers.
  static __device__ __noinline__ void pair_by_pair(const ChunkKdaFwdTask& t, std::uint32_t memory) {
    const ChunkPlace place = ChunkPlace::of(t);
    ExtrasPairByPair<kIsBf16, kBlocks>(t, place.item, place.chunk).run(memory);
  }

  // What is not finite in A within the block is left out of it, and its row marked.
  __device__ __forceinline__ void check_own() const {
    const int i = lane_ % kBlock;
    for (int n = 0; n < 8; ++n) {
      const int j = 8 * half() + n;
      if (j >= i) break;
      const std::uint32_t from = at(Memory::kOwn + ((warp_ * kBlock + i) * Memory::kOwnPitch + j) * 4);
      if (isfinite(load_shared<float>(from))) continue;
      store_shared(from, 0u);
      mark_shared(at(Memory::kFirstBad), kBlock * warp_ + i);
    }
  }

  // This warp's rows of Aqk or Akk, which lie where Akk will.
  __device__ __forceinline__ void store_triangle(void* data, const RowStrides& s, bool is_vector, bool is_split) const {
    auto* to = static_cast<std::uint16_t*>(data) + row_of(s, item_, item_.head, first_ + kBlock * warp_);
#pragma unroll 1
    for (int i = lane_; i < kBlock * kC / 8; i += 32) {
      const int in_block = i / (kC / 8);
      const int column = i % (kC / 8) * 8;
      if (kBlock * warp_ + in_block >= chunk_rows_) break;
      uint4 words{0, 0, 0, 0};
      if (column / kBlock <= warp_) {
        const std::uint32_t from =
            at(Memory::kInverse) + Memory::square(warp_, column / kBlock) + Memory::element(in_block, column % kBlock);
        words = load_shared<uint4>(from);
        if (!kIsBf16 && is_split) {
          const uint4 low = load_shared<uint4>(from + Memory::kLowSquare);
          words = {joined(words.x, low.x), joined(words.y, low.y), joined(words.z, low.z), joined(words.w, low.w)};
        }
      }
      put8(to + in_block * s.token + column * s.inner, s.inner, is_vector, words);
    }
  }

  static __device__ __forceinline__ std::uint32_t joined(std::uint32_t high, std::uint32_t low) {
    const SplitPair pair{high, low};
    return narrow2(first_of(pair), second_of(pair));
  }

  static __device__ __forceinline__ void put8(std::uint16_t* to, std::int64_t step, bool is_vector,
                                              const uint4& words) {
    if (kIsPlain || is_vector) {
      *reinterpret_cast<uint4*>(to) = words;
      return;
    }
    store_apart(to, step, uint2{words.x, words.y});
    store_apart(to + 4 * step, step, uint2{words.z, words.w});
  }

  // A square as the first operand; transposed, rows as the second's rows: columns 0 to 7, then 8 to 15.
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
  __device__ __forceinline__ void load_fine(std::uint32_t square, FineColumns (&columns)[2]) const {
    std::uint32_t high[4];
    std::uint32_t low[4];
    std::uint32_t rest[4];
    ldmatrix4_transposed(square + square_place(), high);
    ldmatrix4_transposed(square + square_place() + Memory::kLowSquare, low);
    ldmatrix4_transposed(square + square_place() + Memory::kRestSquare, rest);
    columns[0] = {{{high[0], low[0], rest[0]}, {high[1], low[1], rest[1]}}};
    columns[1] = {{{high[2], low[2], rest[2]}, {high[3], low[3], rest[3]}}};
  }
  static __device__ __forceinline__ void store_fine(std::uint32_t to, const FinePair& pair) {
    store_shared(to, pair.high);
    store_shared(to + Memory::kLowSquare, pair.low);
    store_shared(to + Memory::kRestSquare, pair.rest);
  }

  // Akk = (I + A)^-1 by substitution, fp32 within blocks, block by block: Akk_ij is the sum over j <= m < i of -(Akk_ii
  // A_im) Akk_mj. Makes Akk diag(beta) as well.
  __device__ __forceinline__ void invert() const {
    const int first_bad = load_shared<int>(at(Memory::kFirstBad)) - kBlock * warp_;
    invert_own(first_bad);
    __syncwarp();
    {
      const FineRows inverse = load_fine(at(Memory::kInverse) + Memory::square(warp_, warp_));
#pragma unroll 1
      for (int m = 0; m < warp_; ++m) {
        const std::uint32_t square = at(Memory::kSolve) + Memory::square(warp_, m);
        FineColumns columns[2];
        load_fine(square, columns);
        float d[2][4] = {};
        multiply_fine(d[0], inverse, columns[0]);
        multiply_fine(d[1], inverse, columns[1]);
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          store_fine(square + Memory::element(n % 2 * 8 + lane_ / 4, n / 2 * 8 + lane_ % 4 * 2),
                     split_fine(-d[n / 2][n % 2 * 2], -d[n / 2][n % 2 * 2 + 1]));
        }
      }
    }
    float sums[kBlocks - 1][2][4] = {};
#pragma unroll 1
    for (int m = 0; m < kBlocks - 1; ++m) {
      __syncthreads();  // block m's rows are complete
      if (m >= warp_) continue;
      const FineRows left = load_fine(at(Memory::kSolve) + Memory::square(warp_, m));
#pragma unroll
      for (int j = 0; j < kBlocks - 1; ++j) {
        if (j > m) continue;
        FineColumns columns[2];
        load_fine(at(Memory::kInverse) + Memory::square(m, j), columns);
        multiply_fine(sums[j][0], left, columns[0]);
        multiply_fine(sums[j][1], left, columns[1]);
      }
      if (m + 1 < warp_) continue;
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kBlocks - 1; ++j) {
        if (j <= m) store_inverse(j, sums[j], first_bad);
      }
    }
  }

  __device__ __forceinline__ void store_inverse(int j, const float (&sums)[2][4], int first_bad) const {
    const std::uint32_t square = Memory::square(warp_, j);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = 8 * n + lane_ % 4 * 2;
      const float2 beta = load_shared<float2>(at(Memory::kBeta + 4 * (kBlock * j + column)));
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int i = 8 * part + lane_ / 4;
        const float bad = __uint_as_float(0x7fffffffu);
        const float x = i >= first_bad ? bad : sums[n][2 * part];
        const float y = i >= first_bad ? bad : sums[n][2 * part + 1];
        const std::uint32_t to = square + Memory::element(i, column);
        const SplitPair solve = split(x * beta.x, y * beta.y);
        store_fine(at(Memory::kInverse) + to, split_fine(x, y));
        store_shared(at(Memory::kSolve) + to, solve.high);
        store_shared(at(Memory::kSolve) + to + Memory::kLowSquare, solve.low);
      }
    }
  }

  // A lane has a column, and stores half of it.
  __device__ __forceinline__ void invert_own(int first_bad) const {
    const int column = lane_ % kBlock;
    const float beta = shared_float(Memory::kBeta, kBlock * warp_ + column);
    const std::uint32_t keys = at(Memory::kOwn + warp_ * kBlock * Memory::kOwnPitch * 4);
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      float even = i == column ? 1.0f : 0.0f;
      float odd = 0;
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 a = load_shared<float4>(keys + static_cast<std::uint32_t>((i * Memory::kOwnPitch + j) * 4));
        even = fmaf(-a.x, x[j], even);
        if (j + 1 < i) odd = fmaf(-a.y, x[j + 1], odd);
        if (j + 2 < i) even = fmaf(-a.z, x[j + 2], even);
        if (j + 3 < i) odd = fmaf(-a.w, x[j + 3], odd);
      }
      x[i] = even + odd;
    }
    const std::uint32_t square = Memory::square(warp_, warp_);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int i = 8 * half() + n;
      float value = half() == 0 ? x[n] : x[8 + n];
      if (i < column) value = 0;
      if (i > column && i >= first_bad) value = __uint_as_float(0x7fffffffu);
      const FinePair inverse = split_fine(value, 0);
      const SplitPair solve = split(i < column ? 0.0f : value * beta, 0);
      const std::uint32_t to = square + Memory::element(i, column);
      store_shared_half(at(Memory::kInverse) + to, static_cast<std::uint16_t>(inverse.high));
      store_shared_half(at(Memory::kInverse) + to + Memory::kLowSquare, static_cast<std::uint16_t>(inverse.low));
      store_shared_half(at(Memory::kInverse) + to + Memory::kRestSquare, static_cast<std::uint16_t>(inverse.rest));
      store_shared_half(at(Memory::kSolve) + to, static_cast<std::uint16_t>(solve.high));
      store_shared_half(at(Memory::kSolve) + to + Memory::kLowSquare, static_cast<std::uint16_t>(solve.low));
    }
  }

  // v of the chunk: a thread's part of every eighth of its rows.
  __device__ __forceinline__ void load_values(uint4 (&v)[8]) const {
    const RowStrides& s = t_.v;
    const bool is_vector = t_.vector_inputs && reinterpret_cast<std::uintptr_t>(t_.at.v) % 16 == 0;
    const int column = static_cast<int>(threadIdx.x) % 16 * 8;
    const auto* from =
        static_cast<const std::uint16_t*>(t_.at.v) + row_of(s, item_, item_.head, first_) + column * s.inner;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int i = static_cast<int>(threadIdx.x) / 16 + n * (kThreads / 16);
      v[n] = {0, 0, 0, 0};
      if (i >= chunk_rows_) continue;
      if (kIsPlain || is_vector) {
        v[n] = __ldg(reinterpret_cast<const uint4*>(from + i * s.token));
      } else {
        const uint4 low = load4(from, kDtype, i * s.token, s.inner, false);
        const uint4 high = load4(from, kDtype, i * s.token + 4 * s.inner, s.inner, false);
        v[n] = {low.x, low.y, high.x, high.y};
      }
    }
  }

  __device__ __forceinline__ std::uint32_t value_place(int row, int piece) const {
    return at(Memory::kInverse + row * 256 + ((piece ^ (row & 7)) << 4));
  }

  __device__ __forceinline__ void put_values(const uint4 (&v)[8]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int i = static_cast<int>(threadIdx.x) / 16 + n * (kThreads / 16);
      store_shared(value_place(i, static_cast<int>(threadIdx.x) % 16), v[n]);
    }
  }

  static constexpr int kTiles = 16 / kBlocks;  // of eight columns of w and u, of a warp

  // w = (Akk diag(beta)) (k decayed from the chunk's first row on), or u = (Akk diag(beta)) v, in this warp's columns.
  __device__ __forceinline__ void solve(bool is_w) const {
    float d[kBlocks][kTiles][4] = {};
    float before[kTiles] = {};
    bool is_finite = true;
#pragma unroll 1
    for (int j = 0; j < kBlocks; ++j) {
      SplitColumns right[kTiles];
      if (is_w) {
        is_finite = load_decayed_keys(j, before, right) && is_finite;
      } else {
        is_finite = load_value_columns(j, right) && is_finite;
      }
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (i < j) continue;
        const SplitRows left = load_square(at(Memory::kSolve) + Memory::square(i, j));
#pragma unroll
        for (int n = 0; n < kTiles; ++n) multiply_split(d[i][n], left, right[n]);
      }
    }
    if (!is_finite) poison(d);
    store_columns(is_w ? t_.at.w : t_.at.u, is_w ? t_.w : t_.u, is_w ? vectors_.w : vectors_.u, d);
  }

  // Tokens 16 j to 16 j + 15 of this warp's columns of k, decayed. Returns whether all are finite in all lanes; what is
  // not counts as 0.
  __device__ __forceinline__ bool load_decayed_keys(int j, float (&before)[kTiles],
                                                    SplitColumns (&right)[kTiles]) const {
    float unscale[4];
    const std::uint32_t from = at(Memory::kUnscale + 4 * (kC + kBlock * j + lane_ % 4 * 2));
    *reinterpret_cast<float2*>(unscale) = load_shared<float2>(from);
    *reinterpret_cast<float2*>(unscale + 2) = load_shared<float2>(from + 32);
    bool is_finite = true;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int piece = warp_ * kTiles + n;
      std::uint32_t r[4];
      ldmatrix4_transposed(
          at(Memory::kKeys + (piece / 8 * kBlocks + j) * Memory::kRows + lane_ / 16 * Memory::kLowRows) +
              Memory::piece(lane_ / 8 % 2 * 8 + lane_ % 8, piece % 8),
          r);
      const int column = 8 * piece + lane_ / 4;
      const float prefix = fast_exp2(kGkPerGate * before[n]);
      before[n] += shared_float(Memory::kTotals, 256 * j + column);
      before[n] += shared_float(Memory::kTotals, 256 * j + 128 + column);
      const SplitPair early{r[0], r[2]};
      const SplitPair late{r[1], r[3]};
      float x[4] = {first_of(early), second_of(early), first_of(late), second_of(late)};
      float zero = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] *= prefix * unscale[e];
        zero = fmaf(x[e], 0.0f, zero);
      }
      if (__any_sync(kAll, zero != 0)) {
        is_finite = false;
        leave_out(x, j, column);
      }
      right[n] = {{split(x[0], x[1]), split(x[2], x[3])}};
    }
    return is_finite;
  }

  // The same of v.
  __device__ __forceinline__ bool load_value_columns(int j, SplitColumns (&right)[kTiles]) const {
    bool is_finite = true;
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      const int piece = warp_ * kTiles + 2 * pair;
      std::uint32_t r[4];
      ldmatrix4_transposed(value_place(kBlock * j + lane_ / 8 % 2 * 8 + lane_ % 8, piece + lane_ / 16), r);
      constexpr std::uint32_t kExponents = kIsBf16 ? 0x7f807f80u : 0x7c007c00u;
      bool is_odd = false;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const std::uint32_t exponents = ~r[n] & kExponents;
        is_odd = is_odd || (exponents & 0xffffu) == 0 || (exponents >> 16) == 0;
      }
      const bool needs_care = __any_sync(kAll, is_odd);
      is_finite = is_finite && !needs_care;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        SplitColumns& to = right[2 * pair + n];
        if (kIsBf16 && !needs_care) {
          to = {{{r[2 * n], 0}, {r[2 * n + 1], 0}}};
          continue;
        }
        const float4 wide_values = widen4({r[2 * n], r[2 * n + 1], 0, 0}, kDtype);
        float x[4] = {wide_values.x, wide_values.y, wide_values.z, wide_values.w};
        if (needs_care) leave_out(x, j, 8 * (piece + n) + lane_ / 4);
        to = {{split(x[0], x[1]), split(x[2], x[3])}};
      }
    }
    return is_finite;
  }

  // A product with a triangular matrix would let what is not finite reach earlier tokens, 0 times NaN being NaN. So
  // such numbers are left out of it, and poison() marks what follows them.
  __device__ __forceinline__ void leave_out(float (&x)[4], int j, int column) const {
    const float4 finite =
        leave_out_apart({x[0], x[1], x[2], x[3]}, at(Memory::kLimits + 4 * column), kBlock * j + lane_ % 4 * 2);
    x[0] = finite.x;
    x[1] = finite.y;
    x[2] = finite.z;
    x[3] = finite.w;
  }

  __device__ __forceinline__ void poison(float (&d)[kBlocks][kTiles][4]) const {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const std::uint32_t from = at(Memory::kLimits + 4 * ((warp_ * kTiles + n) * 8 + lane_ % 4 * 2));
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
      store_shared(at(Memory::kLimits + 4 * (warp_ * kTiles * 8 + i)), static_cast<std::uint32_t>(kC));
    }
    __syncwarp();
  }

  // Four lanes' words: lane c gets word c of each.
  __device__ __forceinline__ uint4 exchange(std::uint32_t (&words)[4]) const {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      const bool is_upper = (lane_ & distance) != 0;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int low = distance == 1 ? 2 * n : n;
        const int high = low + distance;
        const std::uint32_t got = __shfl_xor_sync(kAll, is_upper ? words[low] : words[high], distance);
        words[low] = is_upper ? got : words[low];
        words[high] = is_upper ? words[high] : got;
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }

  __device__ __forceinline__ void store_columns(void* data, const RowStrides& s, bool is_vector,
                                                const float (&d)[kBlocks][kTiles][4]) const {
    auto* to = static_cast<std::uint16_t*>(data) + row_of(s, item_, item_.head, first_) + warp_ * kTiles * 8 * s.inner;
    constexpr int kHalves = 4 / kTiles;  // of a block's rows that one exchange serves
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int group = 0; group < 2 / kHalves; ++group) {
        std::uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float(&tile)[4] = d[i][n % kTiles];
          const int part = group * kHalves + n / kTiles;
          words[n] = narrow2(tile[2 * part], tile[2 * part + 1]);
        }
        const uint4 all = exchange(words);
        const int n = lane_ % 4;
        const int at_row = kBlock * i + 8 * (group * kHalves + n / kTiles) + lane_ / 4;
        if (at_row < chunk_rows_) put8(to + at_row * s.token + n % kTiles * 8 * s.inner, s.inner, is_vector, all);
      }
    }
  }

  const ChunkKdaFwdTask& t_;
  const ExtrasVectors& vectors_;
  const Item item_;
  const std::uint32_t memory_;
  const int warp_;
  const int lane_;
  const std::int64_t first_;         // token of the sequence
  const std::uint32_t first_place_;  // of place(0)
  const int chunk_rows_;             // valid ones
  int rows_ = 0;                     // valid ones of this lane's eight: not above 0 if none is
  bool is_vector_ = false;
  uint2 k_[8];
  uint4 g_[8];
  float bias_[4] = {};
  float row_factor_ = 1;  // of row lane % 8 of q or k
  unsigned large_ = 0;
  bool is_good_ = true;
};

template <bool kIsBf16, int kBlocks, bool kIsPlain>
__global__ void __launch_bounds__(TensorExtras<kIsBf16, kBlocks, kIsPlain>::kThreads,
                                  TensorExtras<kIsBf16, kBlocks, kIsPlain>::kResident)
    tensor_extras_kernel(const __grid_constant__ ChunkKdaFwdTask task, const __grid_constant__ ExtrasVectors vectors) {
  extern __shared__ __align__(1024) std::byte tensor_extras_memory[];
  const ChunkPlace place = ChunkPlace::of(task);
  if (place.chunk * task.C >= place.item.tokens) return;  // beyond the last one, where NC is an upper bound
  TensorExtras<kIsBf16, kBlocks, kIsPlain>(task, vectors, place.item, place.chunk, shared_address(tensor_extras_memory))
      .run();
}

}  // namespace kda::cuda
