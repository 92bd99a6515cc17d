#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kda/info.h"
#include "kda/status.h"
#include "support/compare.h"
#include "support/run_case.h"

namespace {

kda::testing::Execute* const execute_as_asked = kda::testing::execute_call;

std::string execute_with_bfloat16_products(const kda::ChunkKdaFwdInputs& inputs, const kda::ChunkKdaFwdOutputs& outputs,
                                           const kda::ChunkKdaFwdAttributes& attributes,
                                           const kda::PlanOptions& options, bool& untouched) {
  kda::PlanOptions changed = options;
  changed.state_products = kda::StateProducts::kBFloat16;
  return execute_as_asked(inputs, outputs, attributes, changed, untouched);
}

}  // namespace

// What tests/CMakeLists.txt takes for "this machine cannot run it".
constexpr int kSkipped = 77;

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    static_cast<void>(kda::cpu_instruction_set());
  } catch (const kda::Error& error) {
    std::printf("skipped: %s\n", error.what());
    return kSkipped;
  }
  // --bfloat16_products=TOLERANCE: what run() runs has bf16 products with the state, and so much error more.
  constexpr std::string_view kFlag = "--bfloat16_products=";
  if (argc == 2 && std::string_view(argv[1]).starts_with(kFlag)) {
    kda::testing::execute_call = execute_with_bfloat16_products;
    kda::testing::device_tolerance = std::atof(argv[1] + kFlag.size());
  }
  return RUN_ALL_TESTS();
}
