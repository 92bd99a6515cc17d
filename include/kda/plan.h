#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kda {

// The factors of chunk_kda_fwd's three products with the state (keys times state, queries times state, keys times
// v_new) on the CPU; their sums and the state itself are fp32 either way.
//
// kBFloat16 rounds the factors to bf16 and multiplies pairs of them with AVX-512's dot product (vdpbf16ps), at twice
// the rate. attn_out, final_state, v_new and h then have a relative error (Frobenius norm) of typically 2e-3, and at
// most 5e-3 on random and correlated keys and on a trained model's layer. Where one and the same key repeats with
// little decay (1e-4 to 1e-2 per token), what rounding leaves beside it adds up until it has decayed: up to 3.5e-2,
// measured up to 16384 tokens. Subnormal factors and sums count as 0, factors beyond bf16's largest number as infinite.
// All other promises stay: the same bits for any number of threads, company and choice of outputs, and for a sequence
// cut between chunks.
enum class StateProducts : std::uint8_t { kFloat32, kBFloat16 };

// How a plan is to run. Nothing here changes a bit of any result, but for state_products.
struct PlanOptions {
  // CPU threads that may work on one execution, the calling thread included; at most 1024 do. 0: KDA_NUM_THREADS if
  // that is set in the environment, else the CPUs this process may run on.
  int num_threads = 0;
  // Where kBFloat16 cannot be had (other CPUs, GPUs, other operators), it changes nothing.
  // ChunkKdaFwdPlan::state_products() tells.
  StateProducts state_products = StateProducts::kFloat32;
};

// Memory that an execution may scribble on, owned by the caller; two executions at the same time need two of them. The
// pointer may have any alignment.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// One named part of a plan's workspace, for those who want to know where the memory goes.
struct WorkspaceRegion {
  std::string_view name;
  std::size_t offset = 0;  // bytes from the workspace's first 512-byte boundary
  std::size_t bytes = 0;
};

// A device queue: null on the CPU, a cudaStream_t on an NVIDIA GPU.
using Stream = void*;

}  // namespace kda
