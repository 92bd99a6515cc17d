#pragma once

// The objects behind the C API's handles. A handle is a number in a pointer's clothes, never used twice and never an
// address: whatever a caller passes is looked up, so that stale, foreign and made-up handles are recognised, and what
// one thread uses survives its destruction by another.

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace kda::c_api {

// Unique among the handles of all kinds, and outside every address space.
[[nodiscard]] std::uintptr_t next_handle() noexcept;

// Guards what the handles of all kinds stand for. A forked child finds it free, whatever the parent's threads were
// doing.
[[nodiscard]] std::mutex& registry_mutex() noexcept;

template <typename Handle, typename Object>
class Registry {
 public:
  [[nodiscard]] Handle add(std::shared_ptr<Object> object) {
    const std::uintptr_t key = next_handle();
    const std::lock_guard lock(registry_mutex());
    objects_.emplace(key, std::move(object));
    return reinterpret_cast<Handle>(key);  // NOLINT(performance-no-int-to-ptr): a number in a pointer's clothes
  }

  // Null when the handle is not live, as for the two others.
  template <typename AnyHandle>
  [[nodiscard]] std::shared_ptr<Object> find(AnyHandle handle) {
    return take_if(handle, [](const Object&) { return false; });
  }

  template <typename AnyHandle>
  [[nodiscard]] std::shared_ptr<Object> take(AnyHandle handle) {
    return take_if(handle, [](const Object&) { return true; });
  }

  // Finds, and in the same step removes what the predicate holds for.
  template <typename AnyHandle, typename Predicate>
  [[nodiscard]] std::shared_ptr<Object> take_if(AnyHandle handle, Predicate predicate) {
    const std::lock_guard lock(registry_mutex());
    const auto found = objects_.find(reinterpret_cast<std::uintptr_t>(handle));
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<Object> object = found->second;
    if (predicate(*object)) objects_.erase(found);
    return object;
  }

 private:
  std::unordered_map<std::uintptr_t, std::shared_ptr<Object>> objects_;
};

// The registry of a kind. Never destroyed, as other objects with static lifetime may still use handles.
template <typename Handle, typename Object>
[[nodiscard]] Registry<Handle, Object>& registry() {
  static auto& instance = *new Registry<Handle, Object>;
  return instance;
}

}  // namespace kda::c_api
