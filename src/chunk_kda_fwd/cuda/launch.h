#pragma once

#include "chunk_kda_fwd/cuda/task.h"
#include "cuda/abi.h"

namespace kda::cuda {

// Api::chunk_kda_fwd.
bool launch_chunk_kda_fwd(const ChunkKdaFwdTask& task, void* stream, Failure* failure);

// The launches that make attn_out, v_new, h and final_state on the Hopper path.
bool launch_hopper(const ChunkKdaFwdTask& task, void* stream, Failure* failure);

// The launch that makes gk, Aqk, Akk, w, u, qg and kg, where any is asked for.
bool launch_extras(const ChunkKdaFwdTask& task, void* stream, Failure* failure);

}  // namespace kda::cuda
