#pragma once

// Devices and streams of the C API, as the operators know them. Device 0 is the CPU, device n above 0 the CUDA device
// n - 1.

#include "acl/acl_rt.h"
#include "core/error.h"
#include "kda/plan.h"
#include "kda/tensor.h"

namespace kda::c_api {

// The calling thread's.
[[nodiscard]] Device current_device() noexcept;

// What the operators take for a live stream of the device, or for null: its default one. Throws Error.
[[nodiscard]] Stream stream_on(Argument argument, aclrtStream stream, const Device& device);

}  // namespace kda::c_api
