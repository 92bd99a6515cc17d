#pragma once

// What libkda and libkda_cuda know of each other. libkda_cuda is a shared object of its own, loaded when a plan first
// names a CUDA device, so that libkda itself needs no driver. Both are built from the same sources and refuse each
// other otherwise. Nothing here is a CUDA type, nothing throws.

#include <cstddef>
#include <cstdint>

namespace kda {
struct ChunkKdaFwdTask;
struct KdaGateTask;
struct KdaGateCumsumTask;
}  // namespace kda

namespace kda::cuda {

inline constexpr std::uint32_t kAbiVersion = 4;
inline constexpr const char* kEntryName = "kda_cuda_entry";

struct Failure {
  bool out_of_memory = false;
  char message[256] = {};
};

struct DeviceInfo {
  int multiprocessors = 0;
  int major = 0;  // compute capability
  int minor = 0;
  char name[256] = {};
};

// The functions return false and fill `failure` when CUDA reports an error. They leave the calling thread's current
// device as it was.
struct Api {
  std::uint32_t abi_version;
  const char* library_version;
  // Devices of this process; 0 devices are a failure that says why.
  bool (*count_devices)(int* count, Failure* failure);
  bool (*describe)(int device, DeviceInfo* info, Failure* failure);
  bool (*allocate)(int device, std::size_t bytes, void** data, Failure* failure);
  // Waits for the device first.
  bool (*release)(int device, void* data, Failure* failure);
  // Between the host and a device, either way.
  bool (*copy)(int device, void* to, const void* from, std::size_t bytes, Failure* failure);
  bool (*synchronize)(int device, void* stream, Failure* failure);
  bool (*synchronize_device)(int device, Failure* failure);
  // A stream that does not wait for the legacy default one.
  bool (*create_stream)(int device, void** stream, Failure* failure);
  // What is on it still runs to its end.
  bool (*destroy_stream)(int device, void* stream, Failure* failure);
  // Like copy(), and like memset, when the stream comes to it.
  bool (*copy_async)(int device, void* to, const void* from, std::size_t bytes, void* stream, Failure* failure);
  bool (*fill_async)(int device, void* to, int value, std::size_t bytes, void* stream, Failure* failure);
  // Put the launches of one execution on the stream.
  bool (*chunk_kda_fwd)(const ChunkKdaFwdTask& task, void* stream, Failure* failure);
  bool (*kda_gate)(const KdaGateTask& task, void* stream, Failure* failure);
  bool (*kda_gate_cumsum)(const KdaGateCumsumTask& task, void* stream, Failure* failure);
};

using Entry = const Api*();

}  // namespace kda::cuda
