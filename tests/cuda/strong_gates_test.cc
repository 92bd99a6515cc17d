// Gates too strong for one anchor in a block of 16 tokens, and what else the Hopper path takes out of its usual way.
// The CPU's tests know gates that are strong everywhere; here the strong ones lie at chosen rows of blocks.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/case_inputs.h"
#include "support/compare.h"
#include "support/expect.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

OpCase strong_case() {
  OpCase c;
  c.seed = 31;
  c.T = 150;
  c.H = 2;
  c.HV = 4;
  c.initial_state = true;
  return c;
}

// Numbers that look random.
class Sequence {
 public:
  // Uniform in [0, 1).
  float next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<float>(state_ >> 40) * 0x1p-24f;
  }

 private:
  std::uint64_t state_ = 12345;
};

// What strong gates look like. Each takes an element's place (token, channel) and a random number.
struct Pattern {
  const char* name;
  float (*gate)(std::int64_t token, std::int64_t channel, float random);
};

const Pattern kPatterns[] = {
    {"every power of ten", [](std::int64_t, std::int64_t, float x) { return -std::pow(10.0f, 8 * x - 4); }},
    {"one channel in twenty at -12", [](std::int64_t, std::int64_t d, float x) { return d % 20 == 7 ? -12.0f : -x; }},
    {"just beyond and within one anchor",
     [](std::int64_t, std::int64_t d, float x) { return -5.2f + 0.2f * x * static_cast<float>(d % 3); }},
    {"resets of one row", [](std::int64_t t, std::int64_t, float x) { return t % 11 == 5 ? -kInfinity : -0.1f * x; }},
    {"resets of scattered channels",
     [](std::int64_t, std::int64_t, float x) { return x < 0.02f   ? -kInfinity
                                                      : x < 0.04f ? -1000.0f
                                                                  : -x; }},
    {"a growing half", [](std::int64_t t, std::int64_t d, float x) { return d < 64 ? -static_cast<float>(t) : -x; }},
};

CaseValues with_gates(const OpCase& c, const Pattern& pattern) {
  CaseValues values = generate(c);
  Sequence random;
  for (std::size_t e = 0; e < values.g.size(); ++e) {
    const auto at = static_cast<std::int64_t>(e);
    values.g[e] = pattern.gate(at / (c.HV * c.K) % c.T, at % c.K, random.next());
  }
  return values;
}

class StrongGates : public ::testing::TestWithParam<Pattern> {};

INSTANTIATE_TEST_SUITE_P(Cuda, StrongGates, ::testing::ValuesIn(kPatterns), [](const auto& test) {
  std::string name = test.param.name;
  std::replace_if(
      name.begin(), name.end(), [](char x) { return std::isalnum(x) == 0; }, '_');
  return name;
});

TEST_P(StrongGates, AreExact) {
  for (const std::int64_t tokens : {150, 11}) {
    OpCase c = strong_case();
    c.T = tokens;
    const CaseInputs inputs = make_inputs(c, with_gates(c, GetParam()));
    expect_within_bounds(c, inputs, run(inputs, all_outputs()));
  }
}

TEST_P(StrongGates, AreExactWithNormalisedKeys) {
  const OpCase c = strong_case();
  CaseValues values = with_gates(c, GetParam());
  for (float& k : values.k) k *= 300;
  for (float& q : values.q) q *= 0.01f;
  CaseInputs inputs = make_inputs(c, values);
  inputs.attributes.fusions.qk_l2norm = true;
  expect_within_bounds(c, inputs, run(inputs, all_outputs()));
}

// The rows of a block that precede the first strong one are computed another way than the rest of it.
TEST_P(StrongGates, WhatFollowsChangesNothingBefore) {
  OpCase c = strong_case();
  c.T = 48;
  const CaseValues values = with_gates(c, GetParam());
  const auto results = [&](const CaseValues& v) {
    return run(make_inputs(c, v), OutputSet().set(kAttnOut).set(kVNew));
  };
  // attn_out and v_new of the first tokens of every head.
  const auto rows = [&](const RunResult& result, std::int64_t tokens) {
    const auto size = static_cast<std::ptrdiff_t>(2 * c.V);
    const auto attn_out = result.bytes(kAttnOut);
    const auto v_new = result.bytes(kVNew);
    std::vector<std::byte> taken(attn_out.begin(), attn_out.begin() + tokens * c.HV * size);
    for (std::int64_t head = 0; head < c.HV; ++head) {
      const auto first = v_new.begin() + head * c.T * size;
      taken.insert(taken.end(), first, first + tokens * size);
    }
    return taken;
  };
  const RunResult all = results(values);
  for (std::int64_t tokens = 1; tokens < c.T; ++tokens) {
    for (const float poison : {0.0f, -40.0f, kNan}) {
      SCOPED_TRACE("after " + std::to_string(tokens) + " tokens gates of " + std::to_string(poison));
      CaseValues other = values;
      std::fill(other.g.begin() + tokens * c.HV * c.K, other.g.end(), poison);
      if (std::isnan(poison)) {
        std::fill(other.q.begin() + tokens * c.H * c.K, other.q.end(), poison);
        std::fill(other.k.begin() + tokens * c.H * c.K, other.k.end(), poison);
      }
      ASSERT_TRUE(rows(results(other), tokens) == rows(all, tokens));
    }
  }
}

// Without normalisation, keys beyond what k / P may hold; a reset lets nothing of a large one through.
TEST(LargeKeys, AreExact) {
  for (const float size : {100.0f, 3e4f}) {
    OpCase c = strong_case();
    c.H = c.HV = 1;
    CaseValues values = generate(c);
    for (std::int64_t t = 0; t < c.T; ++t) {
      if (t % 13 != 4) continue;
      for (std::int64_t d = 0; d < c.K; ++d) values.k[t * c.K + d] *= size;
      values.beta[t] = 1 / (size * size);
      std::fill_n(values.g.begin() + (t + 1 < c.T ? t + 1 : t) * c.K, c.K, -kInfinity);
    }
    const CaseInputs inputs = make_inputs(c, values);
    expect_within_bounds(c, inputs, run(inputs, OutputSet().set(kAttnOut).set(kFinalState).set(kVNew)));
  }
}

}  // namespace
}  // namespace kda::testing
