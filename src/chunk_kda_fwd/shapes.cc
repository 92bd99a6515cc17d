#include "chunk_kda_fwd/shapes.h"

#include "chunk_kda_fwd/arguments.h"
#include "chunk_kda_fwd/problem.h"
#include "core/planning.h"

namespace kda {
namespace {

// Positions in ChunkKdaFwdOutputs.
enum OutputIndex { kAttnOut, kFinalState, kGk, kAqk, kAkk, kW, kU, kQg, kKg, kVNew, kH };

// [B,NC,HV,K,V] for dense rank-4 layouts, else [NC,HV,K,V].
Shape h_shape(const ChunkKdaFwdDims& dims, const ChunkKdaFwdAttributes& attributes, bool is_packed) {
  const Extent batch{"B", dims.B};
  const bool has_leading = axes_of(attributes.layout).has_batch() && !is_packed;
  return chunk_state_shape({&batch, has_leading ? 1U : 0U}, dims, attributes.state_v_first);
}

}  // namespace

LayoutAxes axes_of(Layout layout) noexcept {
  switch (layout) {
    case Layout::kBNSD:
      return {.batch = 0, .token = 2, .head = 1, .inner = 3};
    case Layout::kTND:
      return {.batch = -1, .token = 0, .head = 1, .inner = 2};
    case Layout::kNTD:
      return {.batch = -1, .token = 1, .head = 0, .inner = 2};
    case Layout::kBSND:
      break;
  }
  return {.batch = 0, .token = 1, .head = 2, .inner = 3};
}

Layout token_major(Layout layout) noexcept { return axes_of(layout).has_batch() ? Layout::kBSND : Layout::kTND; }

Layout head_major(Layout layout) noexcept { return axes_of(layout).has_batch() ? Layout::kBNSD : Layout::kNTD; }

Shape row_shape(Layout layout, const ChunkKdaFwdDims& dims, Extent heads, Extent inner) {
  const Extent batch{"B", dims.B};
  const Extent tokens{"T", dims.T};
  switch (layout) {
    case Layout::kBNSD:
      return {batch, heads, tokens, inner};
    case Layout::kTND:
      return {tokens, heads, inner};
    case Layout::kNTD:
      return {heads, tokens, inner};
    case Layout::kBSND:
      break;
  }
  return {batch, tokens, heads, inner};
}

Shape scalar_shape(Layout layout, const ChunkKdaFwdDims& dims, Extent heads) {
  return row_shape(layout, dims, heads, {}).without_last();
}

Shape state_shape(const ChunkKdaFwdDims& dims, bool state_v_first) {
  const Extent key{"K", dims.K};
  const Extent value{"V", dims.V};
  return {{"N", dims.N}, {"HV", dims.HV}, state_v_first ? value : key, state_v_first ? key : value};
}

Shape chunk_state_shape(std::span<const Extent> leading, const ChunkKdaFwdDims& dims, bool state_v_first) {
  const Extent chunks{"NC", dims.NC};
  const Extent heads{"HV", dims.HV};
  const Extent rows = state_v_first ? Extent{"V", dims.V} : Extent{"K", dims.K};
  const Extent columns = state_v_first ? Extent{"K", dims.K} : Extent{"V", dims.V};
  if (leading.empty()) return {chunks, heads, rows, columns};
  return {leading.front(), chunks, heads, rows, columns};
}

Shape output_shape(int index, const ChunkKdaFwdDims& dims, const ChunkKdaFwdAttributes& attributes, bool is_packed) {
  const Extent heads{"HV", dims.HV};
  const Extent key{"K", dims.K};
  const Extent value{"V", dims.V};
  const Extent chunk{"C", dims.C};
  const Layout by_head = head_major(attributes.layout);
  switch (index) {
    case kAttnOut:
      return row_shape(token_major(attributes.layout), dims, heads, value);
    case kFinalState:
      return state_shape(dims, attributes.state_v_first);
    case kAqk:
    case kAkk:
      return row_shape(by_head, dims, heads, chunk);
    case kU:
    case kVNew:
      return row_shape(by_head, dims, heads, value);
    case kH:
      return h_shape(dims, attributes, is_packed);
    default:
      return row_shape(by_head, dims, heads, key);
  }
}

Dtype output_dtype(int index, Dtype q_dtype) noexcept {
  return index == kFinalState || index == kGk ? Dtype::kFloat32 : q_dtype;
}

ChunkKdaFwdDims chunk_kda_fwd_dims(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdAttributes& attributes) {
  return guard_memory(kChunkKdaFwdName, "dims", [&] { return make_problem(inputs, nullptr, attributes).dims; });
}

ChunkKdaFwdOutputs chunk_kda_fwd_outputs(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdAttributes& attributes) {
  const auto problem =
      guard_memory(kChunkKdaFwdName, "outputs", [&] { return make_problem(inputs, nullptr, attributes); });
  ChunkKdaFwdOutputs outputs;
  for (int i = 0; i < kChunkKdaFwdOutputCount; ++i) {
    const OutputMember& output = kChunkKdaFwdOutputs[static_cast<std::size_t>(i)];
    const Shape shape = output_shape(i, problem.dims, attributes, problem.is_packed());
    outputs.*output.member = shape.contiguous_view(output_dtype(i, problem.dtype), problem.device);
  }
  return outputs;
}

}  // namespace kda
