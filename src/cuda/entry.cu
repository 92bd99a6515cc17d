// The one symbol that libkda_cuda exports.

#include <algorithm>
#include <cstring>

#include "chunk_kda_fwd/cuda/launch.h"
#include "cuda/abi.h"
#include "cuda/runtime.cuh"
#include "kda_gate/cuda/launch.h"
#include "kda_gate_cumsum/cuda/launch.h"

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

bool copy(int device, void* to, const void* from, std::size_t bytes, Failure* failure) {
  const DeviceGuard guard(device, failure);
  return guard.is_set() && succeeded(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy", failure);
}

bool synchronize(int device, void* stream, Failure* failure) {
  const DeviceGuard guard(device, failure);
  return guard.is_set() &&
         succeeded(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize", failure);
}

bool synchronize_device(int device, Failure* failure) {
  const DeviceGuard guard(device, failure);
  return guard.is_set() && succeeded(cudaDeviceSynchronize(), "cudaDeviceSynchronize", failure);
}

bool create_stream(int device, void** stream, Failure* failure) {
  const DeviceGuard guard(device, failure);
  return guard.is_set() &&
         succeeded(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking),
                   "cudaStreamCreateWithFlags", failure);
}

bool destroy_stream(int device, void* stream, Failure* failure) {
  const DeviceGuard guard(device, failure);
  return guard.is_set() &&
         succeeded(cudaStreamDestroy(static_cast<cudaStream_t>(stream)), "cudaStreamDestroy", failure);
}

bool copy_async(int device, void* to, const void* from, std::size_t bytes, void* stream, Failure* failure) {
  const DeviceGuard guard(device, failure);
  return guard.is_set() &&
         succeeded(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
                   "cudaMemcpyAsync", failure);
}

bool fill_async(int device, void* to, int value, std::size_t bytes, void* stream, Failure* failure) {
  const DeviceGuard guard(device, failure);
  return guard.is_set() &&
         succeeded(cudaMemsetAsync(to, value, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync", failure);
}

constexpr Api kApi = {.abi_version = kAbiVersion,
                      .library_version = KDA_VERSION,
                      .count_devices = count_devices,
                      .describe = describe,
                      .allocate = allocate,
                      .release = release,
                      .copy = copy,
                      .synchronize = synchronize,
                      .synchronize_device = synchronize_device,
                      .create_stream = create_stream,
                      .destroy_stream = destroy_stream,
                      .copy_async = copy_async,
                      .fill_async = fill_async,
                      .chunk_kda_fwd = launch_chunk_kda_fwd,
                      .kda_gate = launch_kda_gate,
                      .kda_gate_cumsum = launch_kda_gate_cumsum};

}  // namespace
}  // namespace kda::cuda

extern "C" __attribute__((visibility("default"))) const kda::cuda::Api* kda_cuda_entry() { return &kda::cuda::kApi; }
