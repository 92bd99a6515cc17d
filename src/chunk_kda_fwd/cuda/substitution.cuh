#pragma once

// Forward substitution in a block of 16 tokens, the one way that stays exact when keys are alike.

#include "chunk_kda_fwd/cuda/item.cuh"

namespace kda::cuda {

// A column of (I + A)^-1 in fp32, A strictly lower triangular. load(i, j): float4 of A's row i, columns j to j + 3, j a
// multiple of 4; what lies on the diagonal and above is loaded at times, never used.
template <class Load>
__device__ __forceinline__ void substitute(int column, const Load& load, float (&x)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float even = i == column ? 1.0f : 0.0f;
    float odd = 0;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 a = load(i, j);
      even = fmaf(-a.x, x[j], even);
      if (j + 1 < i) odd = fmaf(-a.y, x[j + 1], odd);
      if (j + 2 < i) even = fmaf(-a.z, x[j + 2], even);
      if (j + 3 < i) odd = fmaf(-a.w, x[j + 3], odd);
    }
    x[i] = even + odd;
  }
}

}  // namespace kda::cuda
