#include "cuda/device_call.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "chunk_kda_fwd/arguments.h"
#include "core/overlap.h"

namespace kda::testing {
namespace {

constexpr std::size_t kArenaBytes = std::size_t{3} << 30;
constexpr std::size_t kGuardBytes = 256;
constexpr int kGuardByte = 0xa5;

std::vector<std::pair<std::byte*, std::size_t>>& taken() {
  static std::vector<std::pair<std::byte*, std::size_t>> parts;
  return parts;
}

bool is_guard(const std::byte* at) {
  std::byte bytes[kGuardBytes];
  check_cuda(cudaMemcpy(bytes, at, kGuardBytes, cudaMemcpyDeviceToHost), "guard");
  return std::all_of(std::begin(bytes), std::end(bytes), [](std::byte b) { return b == std::byte{kGuardByte}; });
}

}  // namespace

void check_cuda(int status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(static_cast<cudaError_t>(status)));
}

DeviceArena& DeviceArena::instance() {
  static DeviceArena arena;
  return arena;
}

DeviceArena::DeviceArena() { check_cuda(cudaMalloc(reinterpret_cast<void**>(&base_), kArenaBytes), "arena"); }

std::byte* DeviceArena::take(std::size_t bytes) {
  const std::size_t padded = (bytes + 255) / 256 * 256;
  std::byte* part = base_ + used_ + kGuardBytes;
  used_ += padded + 2 * kGuardBytes;
  if (used_ > kArenaBytes) throw std::runtime_error("device arena: too small");
  check_cuda(cudaMemset(part - kGuardBytes, kGuardByte, padded + 2 * kGuardBytes), "arena");
  taken().push_back({part, padded});
  return part;
}

bool DeviceArena::reset() {
  bool intact = true;
  for (const auto& [part, bytes] : taken()) intact = intact && is_guard(part - kGuardBytes) && is_guard(part + bytes);
  taken().clear();
  used_ = 0;
  return intact;
}

TensorView to_device(const TensorView& view) {
  TensorView copy = view;
  copy.device = {DeviceType::kCuda, 0};
  if (view.numel() == 0) return copy;
  const ByteRange range = byte_range(view).value();
  const auto bytes = static_cast<std::size_t>(range.high - range.low);
  const auto* from = static_cast<const std::byte*>(view.data) + range.low;
  // As far from a multiple of 16 bytes as on the host.
  const std::size_t shift = reinterpret_cast<std::uintptr_t>(from) % 16;
  std::byte* memory = DeviceArena::instance().take(bytes + shift) + shift;
  check_cuda(cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice), "copy to the device");
  copy.data = memory - range.low;
  return copy;
}

void to_host(const TensorView& device, const TensorView& host) {
  if (host.numel() == 0) return;
  const ByteRange range = byte_range(host).value();
  check_cuda(
      cudaMemcpy(static_cast<std::byte*>(host.data) + range.low, static_cast<const std::byte*>(device.data) + range.low,
                 static_cast<std::size_t>(range.high - range.low), cudaMemcpyDeviceToHost),
      "copy to the host");
}

DeviceCall::DeviceCall(const ChunkKdaFwdInputs& host_inputs, const ChunkKdaFwdOutputs& host_outputs) {
  for (const InputMember& member : kChunkKdaFwdInputs) inputs.*member.member = to_device(member.of(host_inputs));
  for (const OutputMember& member : kChunkKdaFwdOutputs) outputs.*member.member = to_device(member.of(host_outputs));
}

void DeviceCall::fetch(const ChunkKdaFwdOutputs& host_outputs) const {
  for (const OutputMember& member : kChunkKdaFwdOutputs) to_host(member.of(outputs), member.of(host_outputs));
}

std::string execute_on_device(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs,
                              const ChunkKdaFwdAttributes& attributes, const PlanOptions& options, bool& untouched) {
  const DeviceCall call(inputs, outputs);
  const ChunkKdaFwdPlan plan(call.inputs, call.outputs, attributes, options);
  std::byte* workspace = plan.workspace_bytes() == 0 ? nullptr : DeviceArena::instance().take(plan.workspace_bytes());
  plan.execute(call.inputs, call.outputs, {workspace, plan.workspace_bytes()});
  check_cuda(cudaDeviceSynchronize(), "execution");
  call.fetch(outputs);
  // Inputs are compared as bytes, gaps included.
  for (const InputMember& member : kChunkKdaFwdInputs) {
    const TensorView& host = member.of(inputs);
    if (host.numel() == 0) continue;
    const ByteRange range = byte_range(host).value();
    std::vector<std::byte> back(static_cast<std::size_t>(range.high - range.low));
    check_cuda(cudaMemcpy(back.data(), static_cast<const std::byte*>(member.of(call.inputs).data) + range.low,
                          back.size(), cudaMemcpyDeviceToHost),
               "inputs");
    untouched = untouched && std::equal(back.begin(), back.end(), static_cast<const std::byte*>(host.data) + range.low);
  }
  untouched = DeviceArena::instance().reset() && untouched;
  return std::string(plan.backend());
}

namespace {

// Runs execute(inputs, out) on copies of everything and brings the output back.
template <typename Inputs, typename Function>
void execute_gates(const Inputs& inputs, const TensorView& out, const Function& execute) {
  Inputs copies = inputs;
  for (TensorView* view : {&copies.g, &copies.A_log, &copies.dt_bias}) {
    if (view->present()) *view = to_device(*view);
  }
  const TensorView copy = to_device(out);
  execute(copies, copy);
  check_cuda(cudaDeviceSynchronize(), "execution");
  to_host(copy, out);
  if (!DeviceArena::instance().reset()) throw std::runtime_error("guard bytes were overwritten");
}

}  // namespace

void execute_gate_on_device(const KdaGateInputs& inputs, const TensorView& out, const KdaGateAttributes& attributes,
                            const PlanOptions& options) {
  execute_gates(inputs, out, [&](const KdaGateInputs& on_device, const TensorView& to) {
    kda_gate(on_device, to, attributes, options);
  });
}

void execute_gate_cumsum_on_device(const KdaGateCumsumInputs& inputs, const TensorView& gk,
                                   const KdaGateCumsumAttributes& attributes, const PlanOptions& options) {
  execute_gates(inputs, gk, [&](const KdaGateCumsumInputs& on_device, const TensorView& to) {
    kda_gate_cumsum(on_device, to, attributes, options);
  });
}

}  // namespace kda::testing
