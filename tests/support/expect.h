#pragma once

// Expectations that several test files share.

#include "support/case_inputs.h"
#include "support/op_cases.h"
#include "support/run_case.h"

namespace kda::testing {

// Every output of the result meets the bound that tests/op_cases/README.md sets, and nothing else was written.
void expect_within_bounds(const OpCase& c, const CaseInputs& inputs, const RunResult& result);

// Runs the case for these outputs and expects the same.
void expect_case_within_bounds(const OpCase& c, OutputSet outputs);

}  // namespace kda::testing
