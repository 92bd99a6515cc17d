#pragma once

// What the planned call (plan.cc) and the kernel (kernel.cc, once per instruction set) share.

#include "core/gate_mode.h"
#include "cpu/rows.h"

namespace kda::cpu {

// One chunk of one head. Rows start at the head's sequence.
struct GateCumsumItem {
  Rows g, gk;
  GateMode gate_mode = GateMode::kActivated;
  float exp_A_log = 1;
  float lower_bound = 0;
  const float* dt_bias = nullptr;  // of this head; null: absent
  std::int64_t dt_bias_stride = 0;
  std::int64_t token = 0;
  int rows = 0;
  int K = 0;
};

using GateCumsumKernel = void(const GateCumsumItem&);

// Of the instruction set chosen for this process.
[[nodiscard]] GateCumsumKernel* gate_cumsum_kernel();

}  // namespace kda::cpu
