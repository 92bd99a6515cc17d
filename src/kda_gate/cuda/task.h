#pragma once

// One execution of kda_gate as the kernel reads it: plain data, passed to it by value.

#include <type_traits>

#include "kda_gate/problem.h"

namespace kda {

// lower_bound in two numbers of fp32, if there is one.
struct GateBound {
  float value = 0;
  float error = 0;
  bool is_moderate = false;  // neither so large nor so small that products of fp32 lose bits of it
};

struct KdaGateTask {
  KdaGateProblem problem;
  KdaGatePointers at;
  // One axis before H and D, adjacent channels, and eight of them can be read and written at a time if the data is
  // aligned too.
  bool is_vector;
  GateBound bound;
};

static_assert(std::is_trivially_copyable_v<KdaGateTask>);

}  // namespace kda
