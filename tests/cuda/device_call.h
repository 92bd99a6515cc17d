#pragma once

// Calls whose tensors travel to a device and back.

#include <cstddef>
#include <string>

#include "kda/chunk_kda_fwd.h"
#include "kda/kda_gate.h"
#include "kda/kda_gate_cumsum.h"

namespace kda::testing {

// Memory of device 0, handed out from one large allocation: calls come by the thousand.
class DeviceArena {
 public:
  static DeviceArena& instance();
  // At a multiple of 256 bytes, with guard bytes around it.
  [[nodiscard]] std::byte* take(std::size_t bytes);
  // Gives everything back; false when guard bytes were overwritten.
  [[nodiscard]] bool reset();

 private:
  DeviceArena();
  std::byte* base_ = nullptr;
  std::size_t used_ = 0;
};

// A copy on device 0 of all bytes that the view covers, gaps included; the same strides, aligned as the original is.
[[nodiscard]] TensorView to_device(const TensorView& view);
// The bytes back.
void to_host(const TensorView& device, const TensorView& host);

// An Execute (support/run_case.h).
std::string execute_on_device(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs,
                              const ChunkKdaFwdAttributes& attributes, const PlanOptions& options, bool& untouched);

// ExecuteGate and ExecuteGateCumsum (support/gate_cases.h).
void execute_gate_on_device(const KdaGateInputs& inputs, const TensorView& out, const KdaGateAttributes& attributes,
                            const PlanOptions& options);
void execute_gate_cumsum_on_device(const KdaGateCumsumInputs& inputs, const TensorView& gk,
                                   const KdaGateCumsumAttributes& attributes, const PlanOptions& options);

// The inputs and outputs of a call on the device.
struct DeviceCall {
  ChunkKdaFwdInputs inputs;
  ChunkKdaFwdOutputs outputs;

  DeviceCall(const ChunkKdaFwdInputs& host_inputs, const ChunkKdaFwdOutputs& host_outputs);
  void fetch(const ChunkKdaFwdOutputs& host_outputs) const;
};

void check_cuda(int status, const char* what);

}  // namespace kda::testing
