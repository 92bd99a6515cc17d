#pragma once

// Runs a case through the C++ door, with everything that it may not touch under watch.

#include <array>
#include <bitset>
#include <cstddef>
#include <string>
#include <vector>

#include "kda/chunk_kda_fwd.h"
#include "kda/reference.h"
#include "support/case_inputs.h"
#include "support/op_cases.h"

namespace kda::testing {

// Indices into kChunkKdaFwdOutputNames and the two tables below.
enum Output : int { kAttnOut, kFinalState, kGk, kAqk, kAkk, kW, kU, kQg, kKg, kVNew, kH };

extern const std::array<TensorView ChunkKdaFwdOutputs::*, kChunkKdaFwdOutputCount> kOutputViews;
extern const std::array<std::vector<double> reference::ChunkKdaFwdResult::*, kChunkKdaFwdOutputCount> kReferenceOutputs;

using OutputSet = std::bitset<kChunkKdaFwdOutputCount>;

[[nodiscard]] OutputSet all_outputs();

// What the Python door keeps for the case's flags.
[[nodiscard]] OutputSet kept_outputs(const OpCase& c);

// Memory full of NaN (0xff) between guard bytes.
class GuardedMemory {
 public:
  GuardedMemory() = default;
  explicit GuardedMemory(std::size_t bytes);

  [[nodiscard]] std::byte* data() { return memory_.data() + kGuard; }
  [[nodiscard]] const std::byte* data() const { return memory_.data() + kGuard; }
  [[nodiscard]] bool guards_intact() const;

 private:
  static constexpr std::size_t kGuard = 256;
  std::vector<std::byte> memory_;
};

enum class OutputStrides { kContiguous, kPadded, kInner, kReversedAxes };

struct RunOptions {
  PlanOptions plan;
  OutputStrides output_strides = OutputStrides::kContiguous;
};

struct RunResult {
  ChunkKdaFwdOutputs views;
  std::array<GuardedMemory, kChunkKdaFwdOutputCount> memory;
  bool untouched = true;  // guards and gaps kept their bytes, and so did the inputs
  std::string backend;

  [[nodiscard]] bool has(int output) const { return (views.*kOutputViews[static_cast<std::size_t>(output)]).present(); }
  // Elements in row-major order, as raw bytes and as numbers.
  [[nodiscard]] std::vector<std::byte> bytes(int output) const;
  [[nodiscard]] std::vector<double> values(int output) const;
};

[[nodiscard]] RunResult run(const CaseInputs& inputs, OutputSet outputs, const RunOptions& options = {});

// Plans and executes one call on tensors in this process's memory, and returns the backend's name. Clears `untouched`
// when something was written that the call may not write.
using Execute = std::string(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs,
                            const ChunkKdaFwdAttributes& attributes, const PlanOptions& options, bool& untouched);

// What run() calls. On the CPU as it is; the tests of another device put their own here.
extern Execute* execute_call;

// Elements of a view in row-major order, without gaps.
[[nodiscard]] std::vector<std::byte> packed_bytes(const TensorView& view);

}  // namespace kda::testing
