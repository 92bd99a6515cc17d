#pragma once

// The matrix products and barriers that kernels issue, one instruction each.

#include <cstdint>

namespace kda::cuda {

// Rounded to the nearest tf32 number (10 bits of fraction), which mma would else truncate to: one instruction from
// compute capability 9.0 on, four before.
__device__ __forceinline__ float to_tf32(float x) {
  std::uint32_t bits;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
  return __uint_as_float(bits);
}

// d [16,8] += a [16,8] b [8,8]. With lane = 4 r + c: d holds rows r (0, 1) and r + 8 (2, 3), columns 2c and 2c + 1; a
// rows r (0, 2) and r + 8 (1, 3), columns c (0, 1) and c + 4 (2, 3); b column r, rows c (0) and c + 4 (1).
__device__ __forceinline__ void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// The same of bf16: a [16,16] rows r (0, 2) and r + 8 (1, 3), columns 2c and 2c + 1 (0, 1), 2c + 8 and 2c + 9 (2, 3);
// b [16,8] column r, rows 2c and 2c + 1 (0), 2c + 8 and 2c + 9 (1).
__device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An 8 x 8 matrix of 16-bit elements, transposed: lane = 4 r + c holds row r, columns 2c and 2c + 1.
__device__ __forceinline__ std::uint32_t transposed8x8(std::uint32_t pair) {
  std::uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

// A named barrier for that many threads. A warp takes part as a whole.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace kda::cuda
