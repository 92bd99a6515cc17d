#pragma once

// Calls of the CUDA runtime whose failures become Failure.

#include <cuda_runtime.h>

#include <cstdio>

#include "cuda/abi.h"

namespace kda::cuda {

// True when `status` is success; else describes it.
inline bool succeeded(cudaError_t status, const char* what, Failure* failure) {
  if (status == cudaSuccess) return true;
  failure->out_of_memory = status == cudaErrorMemoryAllocation;
  std::snprintf(failure->message, sizeof(failure->message), "%s: %s", what, cudaGetErrorString(status));
  // What is not sticky must not reach the next check.
  static_cast<void>(cudaGetLastError());
  return false;
}

// Makes a device current for as long as it lives.
class DeviceGuard {
 public:
  DeviceGuard(int device, Failure* failure) {
    is_set_ = succeeded(cudaGetDevice(&before_), "cudaGetDevice", failure) &&
              (before_ == device || succeeded(cudaSetDevice(device), "cudaSetDevice", failure));
    changed_ = is_set_ && before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) static_cast<void>(cudaSetDevice(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  [[nodiscard]] bool is_set() const { return is_set_; }

 private:
  int before_ = 0;
  bool is_set_ = false;
  bool changed_ = false;
};

}  // namespace kda::cuda
