#include "cuda/loader.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "kda/status.h"

namespace kda::cuda {
namespace {

// KDA_CUDA_LIBRARY if that is set, else the file beside this library.
std::string library_path() {
  if (const char* path = std::getenv("KDA_CUDA_LIBRARY")) return path;
  std::string name = "libkda_cuda.so";
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&library_path), &info) == 0 || info.dli_fname == nullptr) return name;
  const std::string self = info.dli_fname;
  const std::size_t slash = self.rfind('/');
  return slash == std::string::npos ? name : self.substr(0, slash + 1) + name;
}

struct Library {
  const Api* api = nullptr;
  std::string problem;  // why api is null
};

Library load() {
  const std::string path = library_path();
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return {nullptr, reason == nullptr ? "cannot load " + path : reason};
  }
  auto* entry = reinterpret_cast<Entry*>(dlsym(handle, kEntryName));
  if (entry == nullptr) return {nullptr, path + " has no " + kEntryName};
  const Api* api = entry();
  if (api->abi_version != kAbiVersion || std::string_view(api->library_version) != version()) {
    return {nullptr, path + " is of version " + api->library_version + ", this library of " + version()};
  }
  Failure failure;
  int count = 0;
  if (!api->count_devices(&count, &failure)) return {nullptr, failure.message};
  return {api, {}};
}

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

std::string capability_of(const DeviceInfo& info) {
  return std::to_string(info.major) + "." + std::to_string(info.minor);
}

}  // namespace

void fail(std::string_view op, const Failure& failure) {
  throw Error(failure.out_of_memory ? ErrorKind::kOutOfMemory : ErrorKind::kUnavailable,
              std::string(op) + ": cuda: " + failure.message);
}

const Api& api(std::string_view op) {
  if (library().api == nullptr) {
    throw Error(ErrorKind::kUnavailable, std::string(op) + ": cuda is not available: " + library().problem);
  }
  return *library().api;
}

DeviceInfo describe(std::string_view op, const Device& device) {
  static std::mutex mutex;
  static std::map<int, DeviceInfo> known;
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(device.index); found != known.end()) return found->second;
  DeviceInfo info;
  Failure failure;
  if (!api(op).describe(device.index, &info, &failure)) fail(op, failure);
  known.emplace(device.index, info);
  return info;
}

void require_device(std::string_view op, const Device& device) {
  const DeviceInfo info = describe(op, device);
  if (info.major >= 8) return;
  throw Error(ErrorKind::kUnavailable, std::string(op) +
                                           ": cuda: expected a GPU of compute capability 8.0 or newer, got " +
                                           info.name + ", " + capability_of(info));
}

int count_devices() {
  Failure failure;
  int count = 0;
  return library().api != nullptr && library().api->count_devices(&count, &failure) ? count : 0;
}

BackendInfo backend_info() {
  const Library& loaded = library();
  if (loaded.api == nullptr) return {"cuda", false, loaded.problem};
  Failure failure;
  int count = 0;
  DeviceInfo info;
  if (!loaded.api->count_devices(&count, &failure) || !loaded.api->describe(0, &info, &failure)) {
    return {"cuda", false, failure.message};
  }
  return {"cuda", true,
          std::string(info.name) + ", compute capability " + capability_of(info) +
              (count > 1 ? ", " + std::to_string(count) + " devices" : "")};
}

}  // namespace kda::cuda
