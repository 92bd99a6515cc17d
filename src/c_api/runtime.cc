// Devices, memory and streams of the acl subset.

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>
#include <unordered_map>

#include "acl/acl.h"
#include "c_api/calls.h"
#include "c_api/registry.h"
#include "c_api/stream.h"
#include "cuda/loader.h"
#include "kda/acl_cuda.h"

namespace kda::c_api {
namespace {

constexpr std::size_t kAlignment = 512;

enum class MemoryKind : std::uint8_t { kDevice, kHost };

std::atomic<bool> is_initialised = false;

// Of the calling thread, by its number.
thread_local std::int32_t current = 0;

Device device_of(std::int32_t number) { return number == 0 ? Device{} : Device{DeviceType::kCuda, number - 1}; }

bool is_gpu(const Device& device) { return device.type == DeviceType::kCuda; }

// Calls a function of libkda_cuda for a GPU.
template <typename Function, typename... Arguments>
void call_cuda(std::string_view function, Function cuda::Api::*member, const Device& device, Arguments... arguments) {
  cuda::Failure failure;
  if (!(cuda::api(function).*member)(device.index, arguments..., &failure)) cuda::fail(function, failure);
}

// On the CPU a stream has no state.
class StreamState {
 public:
  StreamState(const Device& device, Stream stream, bool is_owned)
      : device_(device), stream_(stream), is_owned_(is_owned) {}
  ~StreamState() {
    cuda::Failure failure;
    if (is_owned_) static_cast<void>(cuda::api({}).destroy_stream(device_.index, stream_, &failure));
  }
  StreamState(const StreamState&) = delete;
  StreamState& operator=(const StreamState&) = delete;

  [[nodiscard]] const Device& device() const noexcept { return device_; }
  [[nodiscard]] Stream stream() const noexcept { return stream_; }

 private:
  Device device_;
  Stream stream_;
  bool is_owned_;
};

struct ContextState {
  std::int32_t device;
};

auto& streams() { return registry<aclrtStream, StreamState>(); }
auto& contexts() { return registry<aclrtContext, ContextState>(); }

// Remembers what was allocated, so that freeing anything else is refused.
class Allocations {
 public:
  void* allocate(std::string_view function, std::size_t bytes, MemoryKind kind, const Device& device) {
    if (bytes == 0) fail(ErrorKind::kValue, {function, "size"}, "1 or more", "0");
    if (is_gpu(device)) {
      void* memory = nullptr;
      call_cuda(function, &cuda::Api::allocate, device, bytes, &memory);
      remember(memory, {kind, device});
      return memory;
    }
    void* memory = bytes > kLargest ? nullptr : std::aligned_alloc(kAlignment, round_up(bytes));
    if (memory == nullptr) {
      fail(ErrorKind::kOutOfMemory, {function, "size"}, "a size that memory can hold", std::to_string(bytes));
    }
    remember(memory, {kind, device});
    return memory;
  }

  void release(Argument argument, void* memory, MemoryKind kind) {
    if (memory == nullptr) fail(ErrorKind::kMissing, argument, "allocated memory", "a null pointer");
    give_back(argument.op, memory, forget(argument, memory, kind));
  }

 private:
  struct Block {
    MemoryKind kind;
    Device device;
  };

  static void give_back(std::string_view function, void* memory, const Block& block) {
    if (is_gpu(block.device)) {
      call_cuda(function, &cuda::Api::release, block.device, memory);
    } else {
      std::free(memory);
    }
  }

  static constexpr std::size_t kLargest = std::numeric_limits<std::ptrdiff_t>::max() - kAlignment;

  static std::size_t round_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  void remember(void* memory, const Block& block) {
    try {
      const std::lock_guard lock(registry_mutex());
      blocks_.emplace(memory, block);
    } catch (...) {
      give_back("aclrtMalloc", memory, block);
      throw;
    }
  }

  Block forget(Argument argument, void* memory, MemoryKind kind) {
    const std::lock_guard lock(registry_mutex());
    const auto found = blocks_.find(memory);
    if (found == blocks_.end() || found->second.kind != kind) {
      fail(ErrorKind::kValue, argument,
           kind == MemoryKind::kDevice ? "memory from aclrtMalloc" : "memory from aclrtMallocHost", "another pointer");
    }
    const Block block = found->second;
    blocks_.erase(found);
    return block;
  }

  std::unordered_map<void*, Block> blocks_;
};

Allocations& allocations() {
  static auto& instance = *new Allocations;  // used until the process ends
  return instance;
}

void require_pointer(Argument argument, const void* pointer) {
  if (pointer == nullptr) fail(ErrorKind::kMissing, argument, "a pointer", "a null pointer");
}

// Looks for GPUs only where the CPU is not meant.
void require_device(std::string_view function, std::int32_t device) {
  if (device == 0) return;
  const int gpus = cuda::count_devices();
  if (device > 0 && device <= gpus) return;
  fail_with(ACL_ERROR_RT_INVALID_DEVICEID, {function, "deviceId"}, gpus == 0 ? "0" : "0.." + std::to_string(gpus),
            std::to_string(device));
}

void require_capacity(Argument argument, std::size_t capacity, std::size_t count) {
  if (count > capacity) {
    fail(ErrorKind::kValue, argument, std::to_string(count) + " bytes or more", std::to_string(capacity));
  }
}

void require_kind(std::string_view function, int kind) {
  if (kind < ACL_MEMCPY_HOST_TO_HOST || kind > ACL_MEMCPY_DEFAULT) {
    fail(ErrorKind::kValue, {function, "kind"}, "an aclrtMemcpyKind", std::to_string(kind));
  }
}

// Both wait where there is no stream.
void copy(std::string_view function, void* dst, std::size_t capacity, const void* src, std::size_t count, int kind,
          const Device& device, const Stream* stream) {
  require_kind(function, kind);
  require_capacity({function, "destMax"}, capacity, count);
  if (count == 0) return;
  require_pointer({function, "dst"}, dst);
  require_pointer({function, "src"}, src);
  if (!is_gpu(device) || kind == ACL_MEMCPY_HOST_TO_HOST) {
    std::memmove(dst, src, count);
  } else if (stream == nullptr) {
    call_cuda(function, &cuda::Api::copy, device, dst, src, count);
  } else {
    call_cuda(function, &cuda::Api::copy_async, device, dst, src, count, *stream);
  }
}

void fill(std::string_view function, void* memory, std::size_t capacity, std::int32_t value, std::size_t count,
          const Device& device, const Stream* stream) {
  require_capacity({function, "maxCount"}, capacity, count);
  if (count == 0) return;
  require_pointer({function, "devPtr"}, memory);
  if (!is_gpu(device)) {
    std::memset(memory, value, count);
    return;
  }
  call_cuda(function, &cuda::Api::fill_async, device, memory, value, count, stream == nullptr ? nullptr : *stream);
  if (stream == nullptr) call_cuda(function, &cuda::Api::synchronize, device, nullptr);
}

template <typename Handle, typename Object>
void require_found(Argument argument, Handle handle, const std::shared_ptr<Object>& object, std::string_view what) {
  if (object != nullptr) return;
  fail(handle == nullptr ? ErrorKind::kMissing : ErrorKind::kValue, argument, "a live " + std::string(what),
       handle == nullptr ? "a null pointer" : "one that is destroyed or unknown");
}

struct Queue {
  Device device;
  Stream stream;
};

// Null: the current device's default stream.
Queue queue_of(Argument argument, aclrtStream stream) {
  if (stream == nullptr) return {current_device(), nullptr};
  const std::shared_ptr<StreamState> found = streams().find(stream);
  require_found(argument, stream, found, "aclrtStream");
  return {found->device(), found->stream()};
}

}  // namespace

Device current_device() noexcept { return device_of(current); }

Stream stream_on(Argument argument, aclrtStream stream, const Device& device) {
  if (stream == nullptr) return nullptr;
  const Queue queue = queue_of(argument, stream);
  if (!(queue.device == device)) {
    fail(ErrorKind::kValue, argument, "a stream of device " + name_of(device), "one of " + name_of(queue.device));
  }
  return queue.stream;
}

}  // namespace kda::c_api

using namespace kda::c_api;

aclError aclInit(const char* /*configPath*/) {
  return runtime_call([] {
    if (is_initialised.exchange(true)) {
      fail_with(ACL_ERROR_REPEAT_INITIALIZE, {"aclInit", "calls"}, "one before aclFinalize", "another");
    }
  });
}

aclError aclFinalize() {
  return runtime_call([] {
    if (!is_initialised.exchange(false)) {
      fail_with(ACL_ERROR_UNINITIALIZE, {"aclFinalize", "calls"}, "one after aclInit", "one without");
    }
  });
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  return runtime_call([&] {
    require_pointer({"aclrtGetDeviceCount", "count"}, count);
    *count = 1 + static_cast<uint32_t>(kda::cuda::count_devices());
  });
}

aclError aclrtSetDevice(int32_t deviceId) {
  return runtime_call([&] {
    require_device("aclrtSetDevice", deviceId);
    current = deviceId;
  });
}

aclError aclrtGetDevice(int32_t* deviceId) {
  return runtime_call([&] {
    require_pointer({"aclrtGetDevice", "deviceId"}, deviceId);
    *deviceId = current;
  });
}

aclError aclrtResetDevice(int32_t deviceId) {
  return runtime_call([&] { require_device("aclrtResetDevice", deviceId); });
}

aclError aclrtSynchronizeDevice() {
  return runtime_call([] {
    const kda::Device device = current_device();
    if (is_gpu(device)) call_cuda("aclrtSynchronizeDevice", &kda::cuda::Api::synchronize_device, device);
  });
}

aclError aclrtCreateContext(aclrtContext* context, int32_t deviceId) {
  return runtime_call([&] {
    require_pointer({"aclrtCreateContext", "context"}, context);
    require_device("aclrtCreateContext", deviceId);
    *context = contexts().add(std::make_shared<ContextState>(ContextState{deviceId}));
    current = deviceId;
  });
}

aclError aclrtDestroyContext(aclrtContext context) {
  return runtime_call([&] {
    require_found({"aclrtDestroyContext", "context"}, context, contexts().take(context), "aclrtContext");
  });
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  return runtime_call([&] {
    const std::shared_ptr<ContextState> found = contexts().find(context);
    require_found({"aclrtSetCurrentContext", "context"}, context, found, "aclrtContext");
    current = found->device;
  });
}

aclError aclrtCreateStream(aclrtStream* stream) {
  return runtime_call([&] {
    require_pointer({"aclrtCreateStream", "stream"}, stream);
    const kda::Device device = current_device();
    void* queue = nullptr;
    if (is_gpu(device)) call_cuda("aclrtCreateStream", &kda::cuda::Api::create_stream, device, &queue);
    *stream = streams().add(std::make_shared<StreamState>(device, queue, is_gpu(device)));
  });
}

aclError aclrtDestroyStream(aclrtStream stream) {
  return runtime_call([&] {
    require_found({"aclrtDestroyStream", "stream"}, stream, streams().take(stream), "aclrtStream");
  });
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  return runtime_call([&] {
    const Queue queue = queue_of({"aclrtSynchronizeStream", "stream"}, stream);
    if (is_gpu(queue.device)) {
      call_cuda("aclrtSynchronizeStream", &kda::cuda::Api::synchronize, queue.device, queue.stream);
    }
  });
}

aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy /*policy*/) {
  return runtime_call([&] {
    require_pointer({"aclrtMalloc", "devPtr"}, devPtr);
    *devPtr = allocations().allocate("aclrtMalloc", size, MemoryKind::kDevice, current_device());
  });
}

aclError aclrtFree(void* devPtr) {
  return runtime_call([&] { allocations().release({"aclrtFree", "devPtr"}, devPtr, MemoryKind::kDevice); });
}

aclError aclrtMallocHost(void** hostPtr, size_t size) {
  return runtime_call([&] {
    require_pointer({"aclrtMallocHost", "hostPtr"}, hostPtr);
    *hostPtr = allocations().allocate("aclrtMallocHost", size, MemoryKind::kHost, {});
  });
}

aclError aclrtFreeHost(void* hostPtr) {
  return runtime_call([&] { allocations().release({"aclrtFreeHost", "hostPtr"}, hostPtr, MemoryKind::kHost); });
}

aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind) {
  return runtime_call(
      [&] { copy("aclrtMemcpy", dst, destMax, src, count, static_cast<int>(kind), current_device(), nullptr); });
}

aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  return runtime_call([&] {
    const Queue queue = queue_of({"aclrtMemcpyAsync", "stream"}, stream);
    copy("aclrtMemcpyAsync", dst, destMax, src, count, static_cast<int>(kind), queue.device, &queue.stream);
  });
}

aclError aclrtMemset(void* devPtr, size_t maxCount, int32_t value, size_t count) {
  return runtime_call([&] { fill("aclrtMemset", devPtr, maxCount, value, count, current_device(), nullptr); });
}

aclError aclrtMemsetAsync(void* devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream) {
  return runtime_call([&] {
    const Queue queue = queue_of({"aclrtMemsetAsync", "stream"}, stream);
    fill("aclrtMemsetAsync", devPtr, maxCount, value, count, queue.device, &queue.stream);
  });
}

aclError kdaStreamFromCuda(aclrtStream* stream, int32_t deviceId, void* cudaStream) {
  return runtime_call([&] {
    require_pointer({"kdaStreamFromCuda", "stream"}, stream);
    require_device("kdaStreamFromCuda", deviceId);
    if (deviceId == 0) {
      fail_with(ACL_ERROR_RT_INVALID_DEVICEID, {"kdaStreamFromCuda", "deviceId"}, "a GPU, 1 or above", "0, the CPU");
    }
    *stream = streams().add(std::make_shared<StreamState>(device_of(deviceId), cudaStream, false));
  });
}
