// Inside a program that uses OpenMP: right numbers in and around its parallel regions, and no more threads than said.

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <vector>

#include "kda/kda.h"

namespace kda {
namespace {

constexpr int kTeam = 4;

int threads_of_this_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

// One shape, executed on data of its own by every caller.
class Gate {
 public:
  explicit Gate(int num_threads) : plan_({.g = g_}, g_, {}, {.num_threads = num_threads}) {}

  [[nodiscard]] std::vector<float> compute() const {
    std::vector<float> in(kElements);
    std::vector<float> out(kElements);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = -static_cast<float>(i % 101) / 64;
    TensorView g = g_;
    g.data = in.data();
    TensorView gk = g_;
    gk.data = out.data();
    plan_.execute({.g = g}, gk);
    return out;
  }

 private:
  static constexpr std::size_t kElements = std::size_t{8} * 512 * 64;
  TensorView g_ = TensorView::contiguous(nullptr, Dtype::kFloat32, {8, 512, 64});
  KdaGateCumsumPlan plan_;
};

// Counts rather than expects: assertions do not belong into a parallel region.
int wrong_in_a_team(const Gate& gate, const std::vector<float>& expected) {
  int wrong = 0;
#pragma omp parallel for num_threads(kTeam) reduction(+ : wrong)
  for (int i = 0; i < 32; ++i) wrong += gate.compute() == expected ? 0 : 1;
  return wrong;
}

TEST(OpenMP, InAndAroundParallelRegions) {
  const std::vector<float> expected = Gate(1).compute();
  EXPECT_EQ(wrong_in_a_team(Gate(1), expected), 0);
  const int alone = threads_of_this_process();
  EXPECT_LE(alone, kTeam) << "calls of one thread start none";
  const Gate gate(3);
  EXPECT_TRUE(gate.compute() == expected);
  EXPECT_EQ(wrong_in_a_team(gate, expected), 0);
  EXPECT_TRUE(gate.compute() == expected);
  EXPECT_LE(threads_of_this_process(), alone + 2) << "two workers for the whole team";
}

TEST(OpenMP, ItsSettingsStayAsTheyAre) {
  omp_set_num_threads(2);
  static_cast<void>(Gate(3).compute());
  EXPECT_EQ(omp_get_max_threads(), 2);
}

}  // namespace
}  // namespace kda
