// The one symbol that libkda_cuda exports.

#include <algorithm>
#include <cstring>

#include "chunk_kda_fwd/cuda/launch.h"
#include "cuda/abi.h"
#include "cuda/runtime.cuh"

namespace kda::cuda {
namespace {

bool count_devices(int* count, Failure* failure) {
  if (!succeeded(cudaGetDeviceCount(count), "no usable GPU", failure)) return false;
  if (*count > 0) return true;
  return succeeded(cudaErrorNoDevice, "no usable GPU", failure);
}

bool describe(int device, DeviceInfo* info, Failure* failure) {
  cudaDeviceProp properties{};
  if (!succeeded(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties", failure)) return false;
  info->multiprocessors = properties.multiProcessorCount;
  info->major = properties.major;
  info->minor = properties.minor;
  std::snprintf(info->name, sizeof(info->name), "%s", properties.name);
  return true;
}

bool allocate(int device, std::size_t bytes, void** data, Failure* failure) {
  const DeviceGuard guard(device, failure);
  return guard.is_set() && succeeded(cudaMalloc(data, bytes), "cudaMalloc", failure);
}

bool release(int device, void* data, Failure* failure) {
  const DeviceGuard guard(device, failure);
  return guard.is_set() && succeeded(cudaDeviceSynchronize(), "cudaDeviceSynchronize", failure) &&
         succeeded(cudaFree(data), "cudaFree", failure);
}

constexpr Api kApi = {kAbiVersion, KDA_VERSION, count_devices, describe, allocate, release, launch_chunk_kda_fwd};

}  // namespace
}  // namespace kda::cuda

extern "C" __attribute__((visibility("default"))) const kda::cuda::Api* kda_cuda_entry() { return &kda::cuda::kApi; }
