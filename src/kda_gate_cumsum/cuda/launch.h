#pragma once

#include "cuda/abi.h"
#include "kda_gate_cumsum/cuda/task.h"

namespace kda::cuda {

// Api::kda_gate_cumsum.
bool launch_kda_gate_cumsum(const KdaGateCumsumTask& task, void* stream, Failure* failure);

}  // namespace kda::cuda
