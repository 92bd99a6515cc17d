#pragma once

#include <string>
#include <vector>

#include "kda/export.h"

namespace kda {

// "0.1.0"
[[nodiscard]] KDA_API const char* version() noexcept;

// A backend and whether it can be used in this process.
struct BackendInfo {
  std::string name;  // "cpu", "cuda"
  bool available = false;
  std::string detail;  // what it found ("AVX3, 2 threads"), or why it is missing
};

[[nodiscard]] KDA_API std::vector<BackendInfo> backends();

// The instruction set that the CPU backend uses in this process ("AVX2", "AVX3", "NEON", ...), and all that this CPU
// and this build have in common, best first.
[[nodiscard]] KDA_API std::string cpu_instruction_set();
[[nodiscard]] KDA_API std::vector<std::string> cpu_instruction_sets();

// Threads that a plan with num_threads = 0 gets.
[[nodiscard]] KDA_API int default_num_threads() noexcept;

}  // namespace kda
