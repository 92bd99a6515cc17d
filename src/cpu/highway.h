#pragma once

// Highway, restricted to the instruction sets this library is built for: SSE4.2, AVX2, AVX-512 and NEON. Vectors of
// unknown length (SVE, RVV) cannot be held in arrays, which the register blocks of our kernels are. Include before any
// other Highway header.

#if defined(__x86_64__)
// Older releases of Highway know nothing between SSE4 and one-lane emulation, so SSE4 is the least we run on.
#define HWY_BASELINE_TARGETS HWY_SSE4
#elif defined(__aarch64__) && !defined(TOOLCHAIN_MISS_SYS_AUXV_H)
// Every 64-bit ARM CPU has NEON, so there is nothing to choose at run time. Left to choose, Highway asks for AES, which
// not every such CPU has and we do not use. This is the switch that all its releases know.
#define TOOLCHAIN_MISS_SYS_AUXV_H
#endif

#define HWY_DISABLED_TARGETS                                                                                   \
  (HWY_SSE2 | HWY_SSSE3 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR | HWY_AVX10_2 | HWY_NEON_BF16 | HWY_SVE | \
   HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#include <hwy/detect_targets.h>

// Targets that the installed release does not know.
#ifndef HWY_SSE2
#define HWY_SSE2 0
#endif
#ifndef HWY_AVX3_ZEN4
#define HWY_AVX3_ZEN4 0
#endif
#ifndef HWY_AVX3_SPR
#define HWY_AVX3_SPR 0
#endif
#ifndef HWY_AVX10_2
#define HWY_AVX10_2 0
#endif
#ifndef HWY_NEON_BF16
#define HWY_NEON_BF16 0
#endif
#ifndef HWY_NEON_WITHOUT_AES
#define HWY_NEON_WITHOUT_AES 0
#endif
