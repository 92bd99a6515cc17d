#pragma once

// Lays out the named parts of a plan's workspace.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "kda/plan.h"

namespace kda {

// Every region starts at a multiple of this, and so does the part of the caller's memory that a plan uses.
inline constexpr std::size_t kWorkspaceAlignment = 512;

class WorkspaceBuilder {
 public:
  // Appends a region of product(extents) elements and returns its offset. name must outlive the regions: a literal.
  // An empty region is not listed. Throws Error (kOutOfMemory) when the size leaves 64 bits.
  std::size_t add(std::string_view name, std::initializer_list<std::int64_t> extents, std::size_t element_bytes);

  [[nodiscard]] std::span<const WorkspaceRegion> regions() const noexcept { return regions_; }
  // Moves the regions out.
  [[nodiscard]] std::vector<WorkspaceRegion> take() noexcept { return std::move(regions_); }

 private:
  std::vector<WorkspaceRegion> regions_;
  std::size_t end_ = 0;  // a multiple of kWorkspaceAlignment
};

// Bytes that hold these regions wherever the memory starts; 0 when there is nothing to hold.
[[nodiscard]] std::size_t workspace_bytes_for(std::span<const WorkspaceRegion> regions) noexcept;

// The first aligned byte of the caller's memory. Throws Error (kUnavailable) when that holds fewer than `needed` bytes
// or is null; null when nothing is needed.
[[nodiscard]] std::byte* aligned_workspace(std::string_view op, const Workspace& workspace, std::size_t needed);

}  // namespace kda
