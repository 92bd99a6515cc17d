#pragma once

#include "cuda/abi.h"
#include "kda_gate/cuda/task.h"

namespace kda::cuda {

// Api::kda_gate.
bool launch_kda_gate(const KdaGateTask& task, void* stream, Failure* failure);

}  // namespace kda::cuda
