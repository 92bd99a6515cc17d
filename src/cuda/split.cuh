#pragma once

// fp32 numbers as sums of two bf16 numbers, high + low: 16 bits of fraction, the exponents of fp32. A product of two
// such matrices takes three of bf16; what is left out is about 2^-18 of each term.

#include <cstdint>

#include "cuda/mma.cuh"

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

// Fragments of a first and of a second operand.
struct SplitRows {
  std::uint32_t high[4];
  std::uint32_t low[4];
};
struct SplitColumns {
  SplitPair at[2];
};

__device__ __forceinline__ void multiply_split(float (&d)[4], const SplitRows& a, const SplitColumns& b) {
  mma_bf16(d, a.low, b.at[0].high, b.at[1].high);
  mma_bf16(d, a.high, b.at[0].low, b.at[1].low);
  mma_bf16(d, a.high, b.at[0].high, b.at[1].high);
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

// The sum of the small products and that of the others, so that fewer products wait for one another.
struct FineSum {
  float small[4];
  float large[4];
  __device__ __forceinline__ float operator[](int e) const { return small[e] + large[e]; }
};

__device__ __forceinline__ void multiply_fine(FineSum& d, const FineRows& a, const FineColumns& b) {
  mma_bf16(d.small, a.rest, b.at[0].high, b.at[1].high);
  mma_bf16(d.large, a.low, b.at[0].high, b.at[1].high);
  mma_bf16(d.small, a.low, b.at[0].low, b.at[1].low);
  mma_bf16(d.large, a.high, b.at[0].low, b.at[1].low);
  mma_bf16(d.small, a.high, b.at[0].rest, b.at[1].rest);
  mma_bf16(d.large, a.high, b.at[0].high, b.at[1].high);
}

}  // namespace kda::cuda
