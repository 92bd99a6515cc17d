// Device, memory and streams of the acl subset, for a device that is the CPU.

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

namespace kda::c_api {
namespace {

constexpr std::size_t kAlignment = 512;

enum class MemoryKind : std::uint8_t { kDevice, kHost };

std::atomic<bool> is_initialised = false;

// Streams and contexts have no state on the CPU.
struct StreamState {};
struct ContextState {};

auto& streams() { return registry<aclrtStream, StreamState>(); }
auto& contexts() { return registry<aclrtContext, ContextState>(); }

// Remembers what was allocated, so that freeing anything else is refused.
class Allocations {
 public:
  void* allocate(std::string_view function, std::size_t bytes, MemoryKind kind) {
    if (bytes == 0) fail(ErrorKind::kValue, {function, "size"}, "1 or more", "0");
    void* memory = bytes > kLargest ? nullptr : std::aligned_alloc(kAlignment, round_up(bytes));
    if (memory == nullptr) {
      fail(ErrorKind::kOutOfMemory, {function, "size"}, "a size that memory can hold", std::to_string(bytes));
    }
    remember(memory, kind);
    return memory;
  }

  void release(Argument argument, void* memory, MemoryKind kind) {
    if (memory == nullptr) fail(ErrorKind::kMissing, argument, "allocated memory", "a null pointer");
    forget(argument, memory, kind);
    std::free(memory);
  }

 private:
  static constexpr std::size_t kLargest = std::numeric_limits<std::ptrdiff_t>::max() - kAlignment;

  static std::size_t round_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  void remember(void* memory, MemoryKind kind) {
    const std::lock_guard lock(registry_mutex());
    try {
      kinds_.emplace(memory, kind);
    } catch (...) {
      std::free(memory);
      throw;
    }
  }

  void forget(Argument argument, void* memory, MemoryKind kind) {
    const std::lock_guard lock(registry_mutex());
    const auto found = kinds_.find(memory);
    if (found == kinds_.end() || found->second != kind) {
      fail(ErrorKind::kValue, argument,
           kind == MemoryKind::kDevice ? "memory from aclrtMalloc" : "memory from aclrtMallocHost", "another pointer");
    }
    kinds_.erase(found);
  }

  std::unordered_map<void*, MemoryKind> kinds_;
};

Allocations& allocations() {
  static auto& instance = *new Allocations;  // used until the process ends
  return instance;
}

void require_pointer(Argument argument, const void* pointer) {
  if (pointer == nullptr) fail(ErrorKind::kMissing, argument, "a pointer", "a null pointer");
}

void require_device(std::string_view function, std::int32_t device) {
  if (device != 0) fail_with(ACL_ERROR_RT_INVALID_DEVICEID, {function, "deviceId"}, "0", std::to_string(device));
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

void copy(std::string_view function, void* dst, std::size_t capacity, const void* src, std::size_t count, int kind) {
  require_kind(function, kind);
  require_capacity({function, "destMax"}, capacity, count);
  if (count == 0) return;
  require_pointer({function, "dst"}, dst);
  require_pointer({function, "src"}, src);
  std::memmove(dst, src, count);
}

void fill(std::string_view function, void* memory, std::size_t capacity, std::int32_t value, std::size_t count) {
  require_capacity({function, "maxCount"}, capacity, count);
  if (count == 0) return;
  require_pointer({function, "devPtr"}, memory);
  std::memset(memory, value, count);
}

template <typename Handle, typename Object>
void require_found(Argument argument, Handle handle, const std::shared_ptr<Object>& object, std::string_view what) {
  if (object != nullptr) return;
  fail(handle == nullptr ? ErrorKind::kMissing : ErrorKind::kValue, argument, "a live " + std::string(what),
       handle == nullptr ? "a null pointer" : "one that is destroyed or unknown");
}

}  // namespace

void require_stream(Argument argument, aclrtStream stream) {
  if (stream != nullptr) require_found(argument, stream, streams().find(stream), "aclrtStream");
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
    *count = 1;
  });
}

aclError aclrtSetDevice(int32_t deviceId) {
  return runtime_call([&] { require_device("aclrtSetDevice", deviceId); });
}

aclError aclrtGetDevice(int32_t* deviceId) {
  return runtime_call([&] {
    require_pointer({"aclrtGetDevice", "deviceId"}, deviceId);
    *deviceId = 0;
  });
}

aclError aclrtResetDevice(int32_t deviceId) {
  return runtime_call([&] { require_device("aclrtResetDevice", deviceId); });
}

aclError aclrtSynchronizeDevice() { return ACL_SUCCESS; }

aclError aclrtCreateContext(aclrtContext* context, int32_t deviceId) {
  return runtime_call([&] {
    require_pointer({"aclrtCreateContext", "context"}, context);
    require_device("aclrtCreateContext", deviceId);
    *context = contexts().add(std::make_shared<ContextState>());
  });
}

aclError aclrtDestroyContext(aclrtContext context) {
  return runtime_call([&] {
    require_found({"aclrtDestroyContext", "context"}, context, contexts().take(context), "aclrtContext");
  });
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  return runtime_call([&] {
    require_found({"aclrtSetCurrentContext", "context"}, context, contexts().find(context), "aclrtContext");
  });
}

aclError aclrtCreateStream(aclrtStream* stream) {
  return runtime_call([&] {
    require_pointer({"aclrtCreateStream", "stream"}, stream);
    *stream = streams().add(std::make_shared<StreamState>());
  });
}

aclError aclrtDestroyStream(aclrtStream stream) {
  return runtime_call([&] {
    require_found({"aclrtDestroyStream", "stream"}, stream, streams().take(stream), "aclrtStream");
  });
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  return runtime_call([&] { require_stream({"aclrtSynchronizeStream", "stream"}, stream); });
}

aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy /*policy*/) {
  return runtime_call([&] {
    require_pointer({"aclrtMalloc", "devPtr"}, devPtr);
    *devPtr = allocations().allocate("aclrtMalloc", size, MemoryKind::kDevice);
  });
}

aclError aclrtFree(void* devPtr) {
  return runtime_call([&] { allocations().release({"aclrtFree", "devPtr"}, devPtr, MemoryKind::kDevice); });
}

aclError aclrtMallocHost(void** hostPtr, size_t size) {
  return runtime_call([&] {
    require_pointer({"aclrtMallocHost", "hostPtr"}, hostPtr);
    *hostPtr = allocations().allocate("aclrtMallocHost", size, MemoryKind::kHost);
  });
}

aclError aclrtFreeHost(void* hostPtr) {
  return runtime_call([&] { allocations().release({"aclrtFreeHost", "hostPtr"}, hostPtr, MemoryKind::kHost); });
}

aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind) {
  return runtime_call([&] { copy("aclrtMemcpy", dst, destMax, src, count, static_cast<int>(kind)); });
}

aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  return runtime_call([&] {
    require_stream({"aclrtMemcpyAsync", "stream"}, stream);
    copy("aclrtMemcpyAsync", dst, destMax, src, count, static_cast<int>(kind));
  });
}

aclError aclrtMemset(void* devPtr, size_t maxCount, int32_t value, size_t count) {
  return runtime_call([&] { fill("aclrtMemset", devPtr, maxCount, value, count); });
}

aclError aclrtMemsetAsync(void* devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream) {
  return runtime_call([&] {
    require_stream({"aclrtMemsetAsync", "stream"}, stream);
    fill("aclrtMemsetAsync", devPtr, maxCount, value, count);
  });
}
