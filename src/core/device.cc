#include "kda/device.h"

#include <string>

#include "core/error.h"
#include "cuda/loader.h"

namespace kda {
namespace {

constexpr std::string_view kMemory = "DeviceMemory";

const cuda::Api& api_for(std::string_view op, const Device& device) {
  if (device.type == DeviceType::kCuda) return cuda::api(op);
  fail(ErrorKind::kUnavailable, {op, "device"}, "a CUDA device", name_of(device));
}

}  // namespace

DeviceMemory::DeviceMemory(const Device& device, std::size_t bytes, std::string_view op)
    : device_(device), bytes_(bytes) {
  const cuda::Api& api = api_for(op, device);
  if (bytes == 0) return;
  cuda::Failure failure;
  if (!api.allocate(device.index, bytes, &data_, &failure)) cuda::fail(op, failure);
}

DeviceMemory::~DeviceMemory() {
  cuda::Failure failure;
  if (data_ != nullptr) static_cast<void>(cuda::api(kMemory).release(device_.index, data_, &failure));
}

void DeviceMemory::copy_from_host(const void* from) {
  cuda::Failure failure;
  if (data_ != nullptr && !cuda::api(kMemory).copy(device_.index, data_, from, bytes_, &failure)) {
    cuda::fail(kMemory, failure);
  }
}

void DeviceMemory::copy_to_host(void* to) const {
  cuda::Failure failure;
  if (data_ != nullptr && !cuda::api(kMemory).copy(device_.index, to, data_, bytes_, &failure)) {
    cuda::fail(kMemory, failure);
  }
}

void synchronize(const Device& device, Stream stream) {
  constexpr std::string_view kName = "synchronize";
  cuda::Failure failure;
  if (!api_for(kName, device).synchronize(device.index, stream, &failure)) cuda::fail(kName, failure);
}

}  // namespace kda
