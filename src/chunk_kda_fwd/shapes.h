#pragma once

// Which shape every tensor of a call has, given its sizes.

#include <span>

#include "core/checks.h"
#include "kda/chunk_kda_fwd.h"

namespace kda {

// Where the axes of q, k, v, g and beta are; batch is -1 in rank-3 layouts.
struct LayoutAxes {
  int batch;
  int token;
  int head;
  int inner;

  [[nodiscard]] bool has_batch() const noexcept { return batch >= 0; }
};

[[nodiscard]] LayoutAxes axes_of(Layout layout) noexcept;

// The layouts of sequence-major and head-major outputs of a call with this input layout.
[[nodiscard]] Layout token_major(Layout layout) noexcept;
[[nodiscard]] Layout head_major(Layout layout) noexcept;

// [B,T,heads,inner], its axes in the order of the layout.
[[nodiscard]] Shape row_shape(Layout layout, const ChunkKdaFwdDims& dims, Extent heads, Extent inner);
// [B,T,heads], likewise.
[[nodiscard]] Shape scalar_shape(Layout layout, const ChunkKdaFwdDims& dims, Extent heads);
// [N,HV,K,V], or [N,HV,V,K] when state_v_first.
[[nodiscard]] Shape state_shape(const ChunkKdaFwdDims& dims, bool state_v_first);
// [leading...,NC,HV,K,V]; last two swapped when state_v_first. leading: none or one extent.
[[nodiscard]] Shape chunk_state_shape(std::span<const Extent> leading, const ChunkKdaFwdDims& dims, bool state_v_first);

// The canonical shape of output number `index` in the order of ChunkKdaFwdOutputs.
[[nodiscard]] Shape output_shape(int index, const ChunkKdaFwdDims& dims, const ChunkKdaFwdAttributes& attributes,
                                 bool is_packed);
[[nodiscard]] Dtype output_dtype(int index, Dtype q_dtype) noexcept;

}  // namespace kda
