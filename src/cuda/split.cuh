#pragma once

// fp32 numbers as sums of two bf16 numbers, high + low: 16 bits of fraction, the exponents of fp32. A product of two such
// matrices takes three of bf16; what is left out is about 2^-18 of each term.

#include <cstdint>

namespace kda::cuda {

// Two adjacent elements.
struct SplitPair {
  std::uint32_t high;
  std::uint32_t low;
};

__device__ __forceinline__ float first_of(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ std::uint32_t round_pair(float first, float second) {
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}

__device__ __forceinline__ SplitPair split(float first, float second) {
  const std::uint32_t high = round_pair(first, second);
  return {high, round_pair(first - first_of(high), second - second_of(high))};
}

__device__ __forceinline__ float first_of(const SplitPair& pair) { return first_of(pair.high) + first_of(pair.low); }
__device__ __forceinline__ float second_of(const SplitPair& pair) { return second_of(pair.high) + second_of(pair.low); }

// d [16,8] += a [16,16] b [16,8], bf16. With lane = 4 r + c: d as in mma_tf32(); a rows r (0, 2) and r + 8 (1, 3), columns
// 2c and 2c + 1 (0, 1), 2c + 8 and 2c + 9 (2, 3); b column r, rows 2c and 2c + 1 (0), 2c + 8 and 2c + 9 (1).
__device__ __forceinline__ void multiply_pairs(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                               std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Fragments of a first and of a second operand.
struct SplitRows {
  std::uint32_t high[4];
  std::uint32_t low[4];
};
struct SplitColumns {
  SplitPair at[2];
};

__device__ __forceinline__ void multiply_split(float (&d)[4], const SplitRows& a, const SplitColumns& b) {
  multiply_pairs(d, a.low, b.at[0].high, b.at[1].high);
  multiply_pairs(d, a.high, b.at[0].low, b.at[1].low);
  multiply_pairs(d, a.high, b.at[0].high, b.at[1].high);
}

// The same in three parts each, 24 bits of fraction, and six products, for what cancels.
struct FinePair {
  std::uint32_t high;
  std::uint32_t low;
  std::uint32_t rest;
};
struct FineRows {
  std::uint32_t high[4];
  std::uint32_t low[4];
  std::uint32_t rest[4];
};
struct FineColumns {
  FinePair at[2];
};

__device__ __forceinline__ FinePair split_fine(float first, float second) {
  const std::uint32_t high = round_pair(first, second);
  first -= first_of(high);
  second -= second_of(high);
  const std::uint32_t low = round_pair(first, second);
  return {high, low, round_pair(first - first_of(low), second - second_of(low))};
}

__device__ __forceinline__ void multiply_fine(float (&d)[4], const FineRows& a, const FineColumns& b) {
  multiply_pairs(d, a.rest, b.at[0].high, b.at[1].high);
  multiply_pairs(d, a.low, b.at[0].low, b.at[1].low);
  multiply_pairs(d, a.high, b.at[0].rest, b.at[1].rest);
  multiply_pairs(d, a.low, b.at[0].high, b.at[1].high);
  multiply_pairs(d, a.high, b.at[0].low, b.at[1].low);
  multiply_pairs(d, a.high, b.at[0].high, b.at[1].high);
}

}  // namespace kda::cuda
