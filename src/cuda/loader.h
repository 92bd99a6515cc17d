#pragma once

// libkda's side of libkda_cuda: finds it, loads it, turns its failures into errors.

#include <string>
#include <string_view>

#include "cuda/abi.h"
#include "kda/info.h"
#include "kda/tensor.h"

namespace kda::cuda {

// Loads libkda_cuda at the first call. Throws Error (kUnavailable), naming `op`, when it or a device is missing.
[[nodiscard]] const Api& api(std::string_view op);

// Throws Error as api() does, and when there is no such device. CUDA is asked once for each device.
[[nodiscard]] DeviceInfo describe(std::string_view op, const Device& device);

// Throws Error when describe() would, or when the kernels are not compiled for the device.
void require_device(std::string_view op, const Device& device);

// Throws Error (kUnavailable or kOutOfMemory).
[[noreturn]] void fail(std::string_view op, const Failure& failure);

// CUDA devices of this process; 0 when libkda_cuda or a driver is missing.
[[nodiscard]] int count_devices();

[[nodiscard]] BackendInfo backend_info();

}  // namespace kda::cuda
