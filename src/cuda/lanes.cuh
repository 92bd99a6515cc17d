#pragma once

// Arithmetic across the lanes of a warp, and on four adjacent channels.

namespace kda::cuda {

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

}  // namespace kda::cuda
