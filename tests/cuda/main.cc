// Runs the tests on device 0, or says why not and exits with 77.

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "cuda/device_call.h"
#include "kda/info.h"
#include "support/compare.h"
#include "support/gate_cases.h"
#include "support/run_case.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (const kda::BackendInfo& backend : kda::backends()) {
    if (backend.name != "cuda") continue;
    std::cout << "cuda: " << backend.detail << std::endl;
    if (!backend.available) {
      std::cout << "skipped: these tests need a GPU" << std::endl;
      return 77;
    }
  }
  // These call the library with host memory themselves.
  std::string& filter = ::testing::GTEST_FLAG(filter);
  filter += filter.find('-') == std::string::npos ? "-" : ":";
  filter +=
      "FarStrides.*:Bitwise.OnePlanInSeveralThreadsAtOnce:Bitwise.AnyNumberOfThreads:*Refusals*:*ThreadsDoNotMatter:"
      "*APlanServesSeveralThreadsAtOnce:KdaGate.MoreThanTwoToThe31Elements:*ParametersAreNotReadWhenGatesAreActivated";
  // Not promised: the error of g + dt_bias, which bf16 all but hides, is left out.
  filter += ":KdaGate.BFloat16OutputsAreTheRoundedFp32Gates";
  kda::testing::execute_call = kda::testing::execute_on_device;
  kda::testing::execute_gate = kda::testing::execute_gate_on_device;
  kda::testing::execute_gate_cumsum = kda::testing::execute_gate_cumsum_on_device;
  kda::testing::gate_ulps = 4;
  // What products of 16-bit operands cost; see docs/cuda.md.
  const char* tolerance = std::getenv("KDA_TEST_TOLERANCE");
  kda::testing::device_tolerance = tolerance == nullptr ? 5e-3 : std::atof(tolerance);
  return RUN_ALL_TESTS();
}
