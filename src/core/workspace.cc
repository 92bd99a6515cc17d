#include "core/workspace.h"

#include <limits>
#include <string>

#include "core/error.h"

namespace kda {
namespace {

// Leaves room for the slack in front of the first region.
constexpr std::size_t kLargestWorkspace = std::numeric_limits<std::size_t>::max() / 2;

// False when the product exceeds kLargestWorkspace.
bool multiply(std::size_t& bytes, std::int64_t extent) noexcept {
  return extent >= 0 && !__builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes) &&
         bytes <= kLargestWorkspace;
}

std::size_t region_bytes(std::string_view name, std::initializer_list<std::int64_t> extents,
                         std::size_t element_bytes) {
  for (const std::int64_t extent : extents) {
    if (extent == 0) return 0;
  }
  std::size_t bytes = element_bytes;
  for (const std::int64_t extent : extents) {
    if (!multiply(bytes, extent)) {
      throw Error(ErrorKind::kOutOfMemory, "workspace region " + std::string(name) + " exceeds 64-bit sizes");
    }
  }
  return bytes;
}

std::size_t align_up(std::size_t bytes) noexcept {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

}  // namespace

std::size_t WorkspaceBuilder::add(std::string_view name, std::initializer_list<std::int64_t> extents,
                                  std::size_t element_bytes) {
  const std::size_t offset = end_;
  const std::size_t bytes = region_bytes(name, extents, element_bytes);
  if (bytes == 0) return offset;
  if (bytes > kLargestWorkspace - offset) {
    throw Error(ErrorKind::kOutOfMemory, "workspace with region " + std::string(name) + " exceeds 64-bit sizes");
  }
  regions_.push_back({name, offset, bytes});
  end_ = align_up(offset + bytes);
  return offset;
}

std::size_t workspace_bytes_for(std::span<const WorkspaceRegion> regions) noexcept {
  if (regions.empty()) return 0;
  return regions.back().offset + regions.back().bytes + kWorkspaceAlignment - 1;
}

std::byte* aligned_workspace(std::string_view op, const Workspace& workspace, std::size_t needed) {
  if (needed == 0) return nullptr;
  if (workspace.data == nullptr || workspace.bytes < needed) {
    fail(ErrorKind::kUnavailable, {op, "workspace"}, std::to_string(needed) + " bytes",
         workspace.data == nullptr ? "a null pointer" : std::to_string(workspace.bytes) + " bytes");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data);
  const std::size_t padding = (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
  return static_cast<std::byte*>(workspace.data) + padding;
}

}  // namespace kda
