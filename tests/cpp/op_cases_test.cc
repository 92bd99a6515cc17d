// Every case of tests/op_cases/chunk_kda_fwd.json through the C++ door, against float64.

#include <gtest/gtest.h>

#include "support/expect.h"
#include "support/op_cases.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

class OpCases : public ::testing::TestWithParam<OpCase> {};

TEST_P(OpCases, MeetsItsBounds) { expect_case_within_bounds(GetParam(), kept_outputs(GetParam())); }

INSTANTIATE_TEST_SUITE_P(ChunkKdaFwd, OpCases,
                         ::testing::ValuesIn(load_op_cases(KDA_OP_CASES_DIR "/chunk_kda_fwd.json")),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace kda::testing
