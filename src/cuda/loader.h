#pragma once

// libkda's side of libkda_cuda: finds it, loads it, turns its failures into errors.

#include <cstddef>
#include <string>
#include <string_view>

#include "cuda/abi.h"
#include "kda/info.h"
#include "kda/tensor.h"

namespace kda::cuda {

// Loads libkda_cuda at the first call. Throws Error (kUnavailable), naming `op`, when it or a device is missing.
[[nodiscard]] const Api& api(std::string_view op);

// Throws Error as api() does, and when there is no such device.
[[nodiscard]] DeviceInfo describe(std::string_view op, const Device& device);

// Throws Error (kUnavailable or kOutOfMemory).
[[noreturn]] void fail(std::string_view op, const Failure& failure);

[[nodiscard]] BackendInfo backend_info();

// Device memory for those who have none of their own.
class DeviceMemory {
 public:
  DeviceMemory(std::string_view op, const Device& device, std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  [[nodiscard]] void* data() const noexcept { return data_; }

 private:
  const Api* api_;
  int device_;
  void* data_ = nullptr;
};

}  // namespace kda::cuda
