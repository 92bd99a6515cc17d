#include "support/expect.h"

#include <gtest/gtest.h>

#include "kda/reference.h"
#include "support/compare.h"

namespace kda::testing {

void expect_within_bounds(const OpCase& c, const CaseInputs& inputs, const RunResult& result) {
  EXPECT_TRUE(result.untouched) << "wrote to an input, between the elements of an output, or out of bounds";
  const auto expected = reference::chunk_kda_fwd(inputs.tensors, inputs.attributes);
  for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
    if (!result.has(output)) continue;
    const Comparison comparison = compare(c, output, result.values(output), expected.*kReferenceOutputs[output]);
    EXPECT_TRUE(comparison.ok()) << kChunkKdaFwdOutputNames[output] << ": error " << comparison.error << ", bound "
                                 << comparison.bound << ", rounding " << comparison.rounding;
  }
}

void expect_case_within_bounds(const OpCase& c, OutputSet outputs) {
  const CaseInputs inputs = make_inputs(c);
  expect_within_bounds(c, inputs, run(inputs, outputs));
}

}  // namespace kda::testing
