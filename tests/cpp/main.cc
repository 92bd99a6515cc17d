#include <gtest/gtest.h>

#include <cstdio>

#include "kda/info.h"
#include "kda/status.h"

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
  return RUN_ALL_TESTS();
}
