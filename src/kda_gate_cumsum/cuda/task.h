#pragma once

// One execution of kda_gate_cumsum as the kernel reads it: plain data, passed to it by value.

#include <cstdint>
#include <type_traits>

#include "kda_gate_cumsum/problem.h"

namespace kda {

struct KdaGateCumsumTask {
  KdaGateCumsumPointers at;
  int device;
  std::int64_t B, T, HV, K, C;
  std::int64_t chunks;  // of one head, of all sequences together
  Dtype g_dtype;
  GateMode gate_mode;
  float lower_bound;
  RowStrides g, gk;
  std::int64_t A_log_stride, dt_bias_stride;
  bool has_dt_bias;
  bool is_vector;  // four adjacent channels can be read and written at a time if the data is aligned too

  // In the host's memory, [sequences + 1] both; null when dense.
  const std::int64_t* cu_seqlens;
  const std::int64_t* first_chunk;
  std::int64_t sequences;
};

static_assert(std::is_trivially_copyable_v<KdaGateCumsumTask>);

}  // namespace kda
