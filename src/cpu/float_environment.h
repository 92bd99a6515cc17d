#pragma once

#include <cfenv>
#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kda::cpu {

// While it lives, the calling thread rounds to nearest, keeps subnormal numbers and traps nothing, as threads do that
// nobody told otherwise. Callers may have been: results must not depend on it, nor on how many of a call's threads are
// the caller's. Ends with the caller's environment, exception flags included. Threads started meanwhile inherit it.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() noexcept { set_default(); }
  ~DefaultFloatEnvironment() { restore(); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  // <cfenv> sets the x87 unit as well and takes some 300 ns for it, which short calls would feel; this takes 20.
#if defined(__x86_64__)
  static constexpr std::uint32_t kDefault = 0x1f80;  // all exceptions masked

  void set_default() noexcept {
    callers_ = _mm_getcsr();
    _mm_setcsr(kDefault);
  }
  void restore() const noexcept { _mm_setcsr(callers_); }

  std::uint32_t callers_ = kDefault;
#else
  void set_default() noexcept {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  void restore() const noexcept { std::fesetenv(&callers_); }

  std::fenv_t callers_{};
#endif
};

}  // namespace kda::cpu
