#pragma once

// Which of the compiled instruction sets this process uses.

#include "cpu/highway.h"

#include <hwy/highway.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace kda::cpu {

// The best instruction set that this CPU and this build have in common (a HWY_* bit), or the one that the environment
// variable KDA_CPU_ISA names. Constant for the process. Throws Error (kUnavailable) when there is none, or when
// KDA_CPU_ISA names none of them.
[[nodiscard]] std::int64_t chosen_target();

template <class Function>
struct TargetEntry {
  std::int64_t target;
  Function* function;
};

template <class Function>
[[nodiscard]] Function* function_for_target(std::int64_t target, std::initializer_list<TargetEntry<Function>> entries) {
  for (const TargetEntry<Function>& entry : entries) {
    if (entry.target == target) return entry.function;
  }
  return nullptr;
}

}  // namespace kda::cpu

#if HWY_TARGETS & HWY_AVX3
#define KDA_ENTRY_AVX3(f) {HWY_AVX3, &N_AVX3::f},
#else
#define KDA_ENTRY_AVX3(f)
#endif
#if HWY_TARGETS & HWY_AVX2
#define KDA_ENTRY_AVX2(f) {HWY_AVX2, &N_AVX2::f},
#else
#define KDA_ENTRY_AVX2(f)
#endif
#if HWY_TARGETS & HWY_SSE4
#define KDA_ENTRY_SSE4(f) {HWY_SSE4, &N_SSE4::f},
#else
#define KDA_ENTRY_SSE4(f)
#endif
#if HWY_TARGETS & HWY_NEON
#define KDA_ENTRY_NEON(f) {HWY_NEON, &N_NEON::f},
#else
#define KDA_ENTRY_NEON(f)
#endif
#if HWY_TARGETS & HWY_NEON_WITHOUT_AES
#define KDA_ENTRY_NEON_WITHOUT_AES(f) {HWY_NEON_WITHOUT_AES, &N_NEON_WITHOUT_AES::f},
#else
#define KDA_ENTRY_NEON_WITHOUT_AES(f)
#endif
// The address of f as compiled for the chosen target; f is a function of HWY_NAMESPACE in the current namespace.
#define KDA_FOR_CHOSEN_TARGET(f)                                                             \
  ::kda::cpu::function_for_target<std::remove_pointer_t<decltype(&HWY_STATIC_DISPATCH(f))>>( \
      ::kda::cpu::chosen_target(),                                                           \
      {KDA_ENTRY_AVX3(f) KDA_ENTRY_AVX2(f) KDA_ENTRY_SSE4(f) KDA_ENTRY_NEON(f) KDA_ENTRY_NEON_WITHOUT_AES(f)})
