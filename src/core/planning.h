#pragma once

// What the plans of all operators do alike.

#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/error.h"
#include "kda/plan.h"
#include "kda/tensor.h"

namespace kda {

// A backend of one operator: Make makes its kernels.
template <class Make>
struct Backend {
  std::string_view name;
  DeviceType device;
  Make* make_kernel;
};

// The one for tensors on this device. Throws Error (kUnavailable) naming `argument` when there is none.
template <class Make>
[[nodiscard]] const Backend<Make>& backend_for(std::span<const Backend<Make>> backends, const Device& device,
                                               Argument argument) {
  std::string names;
  for (const Backend<Make>& backend : backends) {
    if (backend.device == device.type) return backend;
    names.append(names.empty() ? "" : ", ").append(backend.name);
  }
  fail(ErrorKind::kUnavailable, argument, "a device that this build has a backend for (" + names + ")",
       name_of(device));
}

// What a plan holds. Throws Error (kValue) when that was moved to another plan.
template <class Impl>
[[nodiscard]] const Impl& held(std::string_view op, const std::unique_ptr<Impl>& impl) {
  if (impl == nullptr) fail(ErrorKind::kValue, {op, "plan"}, "one that holds a call", "one that was moved from");
  return *impl;
}

void check_options(std::string_view op, const PlanOptions& options);

// The view of an execution is the planned one but for its data pointer.
void require_planned(Argument argument, const TensorView& planned, const TensorView& given);

// Runs what may exhaust memory; `what` names it in the message.
template <typename Function>
auto guard_memory(std::string_view op, std::string_view what, Function function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  fail(ErrorKind::kOutOfMemory, {op, what}, "enough memory", "less");
}

}  // namespace kda
