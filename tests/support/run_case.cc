#include "support/run_case.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "support/dtypes.h"

namespace kda::testing {

const std::array<TensorView ChunkKdaFwdOutputs::*, kChunkKdaFwdOutputCount> kOutputViews = {
    &ChunkKdaFwdOutputs::attn_out, &ChunkKdaFwdOutputs::final_state, &ChunkKdaFwdOutputs::gk, &ChunkKdaFwdOutputs::Aqk,
    &ChunkKdaFwdOutputs::Akk,      &ChunkKdaFwdOutputs::w,           &ChunkKdaFwdOutputs::u,  &ChunkKdaFwdOutputs::qg,
    &ChunkKdaFwdOutputs::kg,       &ChunkKdaFwdOutputs::v_new,       &ChunkKdaFwdOutputs::h};

using Reference = reference::ChunkKdaFwdResult;
const std::array<std::vector<double> Reference::*, kChunkKdaFwdOutputCount> kReferenceOutputs = {
    &Reference::attn_out, &Reference::final_state, &Reference::gk, &Reference::Aqk,   &Reference::Akk, &Reference::w,
    &Reference::u,        &Reference::qg,          &Reference::kg, &Reference::v_new, &Reference::h};

namespace {

constexpr std::byte kPoison{0xff};
constexpr std::byte kGuardByte{0xa5};

// Calls visit(offset in elements) for every element in row-major order.
template <typename Visit>
void for_each_offset(const TensorView& view, Visit visit) {
  const std::int64_t count = view.numel();
  std::array<std::int64_t, kMaxRank> index{};
  std::int64_t offset = 0;
  for (std::int64_t e = 0; e < count; ++e) {
    visit(offset);
    for (int axis = view.rank; axis-- > 0;) {
      offset += view.strides[axis];
      if (++index[axis] < view.shape[axis]) break;
      offset -= index[axis] * view.strides[axis];
      index[axis] = 0;
    }
  }
}

struct Extent {
  std::int64_t first = 0;  // offset of element (0, 0, ...) from the lowest one
  std::int64_t elements = 0;
};

// Gives the row-major view `shape` other strides.
Extent set_strides(TensorView& shape, OutputStrides mode) {
  std::int64_t pitch = mode == OutputStrides::kInner ? 3 : 1;
  Extent extent;
  const bool reversed = mode == OutputStrides::kReversedAxes;
  for (int i = 0; i < shape.rank; ++i) {
    const int axis = reversed ? i : shape.rank - 1 - i;
    shape.strides[axis] = pitch;
    pitch *= shape.shape[axis];
    if (mode == OutputStrides::kPadded && i == 0) pitch += 16;
    if (reversed && i % 2 == 1 && shape.shape[axis] > 0) {
      extent.first += (shape.shape[axis] - 1) * shape.strides[axis];
      shape.strides[axis] = -shape.strides[axis];
    }
  }
  extent.elements = pitch;
  return extent;
}

bool gaps_intact(const TensorView& view, const Extent& extent, const GuardedMemory& memory) {
  const std::size_t size = size_of(view.dtype);
  std::vector<std::byte> copy(memory.data(), memory.data() + static_cast<std::size_t>(extent.elements) * size);
  for_each_offset(view, [&](std::int64_t offset) {
    std::memset(copy.data() + static_cast<std::size_t>(extent.first + offset) * size, 0xff, size);
  });
  return std::all_of(copy.begin(), copy.end(), [](std::byte b) { return b == kPoison; });
}

std::string execute_on_cpu(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs,
                           const ChunkKdaFwdAttributes& attributes, const PlanOptions& options, bool& untouched) {
  const ChunkKdaFwdPlan plan(inputs, outputs, attributes, options);
  // A workspace may have any alignment.
  constexpr std::size_t kMisalignment = 3;
  GuardedMemory workspace(plan.workspace_bytes() + kMisalignment);
  plan.execute(inputs, outputs, {workspace.data() + kMisalignment, plan.workspace_bytes()});
  untouched = untouched && workspace.guards_intact();
  return std::string(plan.backend());
}

}  // namespace

Execute* execute_call = execute_on_cpu;

OutputSet all_outputs() { return OutputSet().set(); }

OutputSet kept_outputs(const OpCase& c) {
  OutputSet kept;
  for (const int output : {kAttnOut, kAqk, kAkk}) kept.set(output);
  kept.set(kFinalState, c.output_final_state);
  kept.set(kGk, !c.use_gate_in_kernel || c.disable_recompute);
  for (const int output : {kW, kU, kQg, kKg, kVNew}) kept.set(output, c.disable_recompute);
  kept.set(kH, c.disable_recompute || c.return_intermediate_states);
  return kept;
}

GuardedMemory::GuardedMemory(std::size_t bytes) : memory_(bytes + 2 * kGuard, kPoison) {
  std::fill_n(memory_.begin(), kGuard, kGuardByte);
  std::fill_n(memory_.rbegin(), kGuard, kGuardByte);
}

bool GuardedMemory::guards_intact() const {
  const auto is_guard = [](std::byte b) { return b == kGuardByte; };
  return std::all_of(memory_.begin(), memory_.begin() + kGuard, is_guard) &&
         std::all_of(memory_.rbegin(), memory_.rbegin() + kGuard, is_guard);
}

std::vector<std::byte> packed_bytes(const TensorView& view) {
  const std::size_t size = size_of(view.dtype);
  std::vector<std::byte> bytes(static_cast<std::size_t>(view.numel()) * size);
  std::byte* to = bytes.data();
  for_each_offset(view, [&](std::int64_t offset) {
    std::memcpy(to, static_cast<const std::byte*>(view.data) + offset * static_cast<std::int64_t>(size), size);
    to += size;
  });
  return bytes;
}

std::vector<std::byte> RunResult::bytes(int output) const { return packed_bytes(views.*kOutputViews[output]); }

std::vector<double> RunResult::values(int output) const {
  const TensorView& view = views.*kOutputViews[output];
  std::vector<double> numbers;
  numbers.reserve(static_cast<std::size_t>(view.numel()));
  for_each_offset(view, [&](std::int64_t offset) { numbers.push_back(load(view.data, view.dtype, offset)); });
  return numbers;
}

RunResult run(const CaseInputs& inputs, OutputSet outputs, const RunOptions& options) {
  RunResult result;
  result.views = chunk_kda_fwd_outputs(inputs.tensors, inputs.attributes);
  std::array<Extent, kChunkKdaFwdOutputCount> extents;
  for (int i = 0; i < kChunkKdaFwdOutputCount; ++i) {
    TensorView& view = result.views.*kOutputViews[i];
    if (!outputs[i]) {
      view = {};
      continue;
    }
    extents[i] = set_strides(view, options.output_strides);
    result.memory[i] = GuardedMemory(static_cast<std::size_t>(extents[i].elements) * size_of(view.dtype));
    view.data = result.memory[i].data() + extents[i].first * static_cast<std::int64_t>(size_of(view.dtype));
  }
  const std::vector<std::vector<std::byte>> before = inputs.memory;
  result.backend = execute_call(inputs.tensors, result.views, inputs.attributes, options.plan, result.untouched);
  result.untouched = result.untouched && before == inputs.memory;
  for (int i = 0; i < kChunkKdaFwdOutputCount; ++i) {
    if (!outputs[i]) continue;
    result.untouched = result.untouched && result.memory[i].guards_intact() &&
                       gaps_intact(result.views.*kOutputViews[i], extents[i], result.memory[i]);
  }
  return result;
}

}  // namespace kda::testing
