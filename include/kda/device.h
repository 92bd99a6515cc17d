#pragma once

// Memory of a GPU and waiting for one, for programs that have no library of their own for that. Streams of the
// operators are cudaStream_t; any memory of the device, from cudaMalloc or from a framework, serves them.

#include <cstddef>
#include <string_view>

#include "kda/export.h"
#include "kda/plan.h"
#include "kda/tensor.h"

namespace kda {

class KDA_API DeviceMemory {
 public:
  // `device` is a CUDA device; `op` is what messages begin with. Throws Error (kUnavailable, kOutOfMemory).
  DeviceMemory(const Device& device, std::size_t bytes, std::string_view op = "DeviceMemory");
  // Waits for the device, whatever it is doing with the memory.
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

  // All of it; ordered with the legacy default stream, and done on return. Throw Error (kUnavailable).
  void copy_from_host(const void* from);
  void copy_to_host(void* to) const;

 private:
  Device device_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

// Waits for everything on the stream. Throws Error (kUnavailable), also for what went wrong in it.
KDA_API void synchronize(const Device& device, Stream stream);

}  // namespace kda
