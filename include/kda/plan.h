#pragma once

#include <cstddef>
#include <string_view>

namespace kda {

// How a plan is to run. Nothing here changes a bit of any result.
struct PlanOptions {
  // CPU threads that may work on one execution, the calling thread included; at most 1024 do. 0: KDA_NUM_THREADS if that
  // is set in the environment, else the CPUs this process may run on.
  int num_threads = 0;
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
