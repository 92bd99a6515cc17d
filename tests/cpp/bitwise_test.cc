// What may not change a bit of any result: threads, company, what follows, what else is asked for, layouts and strides.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "support/case_inputs.h"
#include "support/compare.h"
#include "support/expect.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Compile-time variant 2, with grouped value heads.
OpCase dense_case() {
  OpCase c;
  c.seed = 5;
  c.T = 150;
  c.H = 2;
  c.HV = 4;
  c.initial_state = true;
  return c;
}

// Variant 1, raw gates.
OpCase general_case() {
  OpCase c = dense_case();
  c.dtype = Dtype::kFloat16;
  c.K = 48;
  c.V = 80;
  c.T = 300;
  c.chunk_size = 128;
  c.use_gate_in_kernel = true;
  c.dt_bias = true;
  c.state_v_first = true;
  return c;
}

std::vector<OpCase> base_cases() { return {dense_case(), general_case()}; }

// Part of a call: tokens of one batch or of the packed tokens, chunks on h's chunk axis, one sequence, some heads.
struct Part {
  std::int64_t batch = 0;
  std::int64_t sequence = 0;
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;
  std::int64_t first_chunk = 0;
  std::int64_t chunks = 0;
  std::int64_t first_head = 0;
  std::int64_t heads = 0;
};

Part whole(const OpCase& c) {
  return {.tokens = c.T, .chunks = (c.T + c.chunk_size - 1) / c.chunk_size, .heads = c.HV};
}

std::int64_t chunks_per_batch(const OpCase& c) {
  if (!c.cu_seqlens) return (c.T + c.chunk_size - 1) / c.chunk_size;
  std::int64_t chunks = 0;
  for (std::size_t n = 0; n + 1 < c.cu_seqlens->size(); ++n) {
    chunks += ((*c.cu_seqlens)[n + 1] - (*c.cu_seqlens)[n] + c.chunk_size - 1) / c.chunk_size;
  }
  return chunks;
}

// The bytes of a part of an output, head by head.
Bytes part_of(const OpCase& c, const RunResult& result, int output, const Part& part) {
  const Bytes all = result.bytes(output);
  Bytes taken;
  const auto take = [&](std::int64_t item, std::int64_t items) {
    const auto size = static_cast<std::ptrdiff_t>(all.size()) / std::max<std::int64_t>(items, 1);
    taken.insert(taken.end(), all.begin() + item * size, all.begin() + (item + 1) * size);
  };
  for (std::int64_t hv = part.first_head; hv < part.first_head + part.heads; ++hv) {
    if (output == kFinalState) {
      take(part.sequence * c.HV + hv, c.N() * c.HV);
    } else if (output == kH) {
      const std::int64_t NC = chunks_per_batch(c);
      for (std::int64_t i = 0; i < part.chunks; ++i) {
        take((part.batch * NC + part.first_chunk + i) * c.HV + hv, c.B * NC * c.HV);
      }
    } else {
      for (std::int64_t t = part.first_token; t < part.first_token + part.tokens; ++t) {
        const std::int64_t row =
            output == kAttnOut ? (part.batch * c.T + t) * c.HV + hv : (part.batch * c.HV + hv) * c.T + t;
        take(row, c.B * c.T * c.HV);
      }
    }
  }
  return taken;
}

// The case and the values of one part of its tokens, alone.
struct Cut {
  OpCase c;
  CaseValues values;
};

Cut cut(const OpCase& c, const CaseValues& values, const Part& part) {
  Cut result{c, values};
  result.c.B = 1;
  result.c.T = part.tokens;
  result.c.cu_seqlens.reset();
  result.c.chunk_indices = false;
  const auto rows = [&](std::vector<float> CaseValues::*member, std::int64_t width) {
    const auto first = (values.*member).begin() + (part.batch * c.T + part.first_token) * width;
    (result.values.*member).assign(first, first + part.tokens * width);
  };
  rows(&CaseValues::q, c.H * c.K);
  rows(&CaseValues::k, c.H * c.K);
  rows(&CaseValues::v, c.HV * c.V);
  rows(&CaseValues::g, c.HV * c.K);
  rows(&CaseValues::beta, c.HV);
  if (c.initial_state) {
    const std::int64_t size = c.HV * c.K * c.V;
    const auto first = values.initial_state.begin() + part.sequence * size;
    result.values.initial_state.assign(first, first + size);
  }
  return result;
}

void expect_same_part(const OpCase& a_case, const RunResult& a, const Part& a_part, const OpCase& b_case,
                      const RunResult& b, const Part& b_part, OutputSet outputs = all_outputs()) {
  for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
    if (!outputs[output] || !a.has(output) || !b.has(output)) continue;
    EXPECT_TRUE(part_of(a_case, a, output, a_part) == part_of(b_case, b, output, b_part))
        << kChunkKdaFwdOutputNames[output] << " differs";
  }
}

void expect_same(const RunResult& a, const RunResult& b, OutputSet outputs = all_outputs()) {
  for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
    if (!outputs[output] || !a.has(output) || !b.has(output)) continue;
    EXPECT_TRUE(a.bytes(output) == b.bytes(output)) << kChunkKdaFwdOutputNames[output] << " differs";
  }
}

OutputSet without(OutputSet outputs, std::initializer_list<int> left_out) {
  for (const int output : left_out) outputs.reset(static_cast<std::size_t>(output));
  return outputs;
}

RunOptions with_threads(int threads) {
  RunOptions options;
  options.plan.num_threads = threads;
  return options;
}

TEST(Bitwise, RunToRun) {
  for (const OpCase& c : base_cases()) {
    const CaseInputs inputs = make_inputs(c);
    expect_same(run(inputs, all_outputs()), run(inputs, all_outputs()));
  }
}

TEST(Bitwise, AnyNumberOfThreads) {
  OpCase single_head = dense_case();
  single_head.H = single_head.HV = 1;
  single_head.T = 500;
  OpCase packed = general_case();
  packed.cu_seqlens = std::vector<std::int64_t>{0, 3, 3, 140, 300};
  for (const OpCase& c : {dense_case(), general_case(), single_head, packed}) {
    const CaseInputs inputs = make_inputs(c);
    for (const OutputSet outputs : {all_outputs(), OutputSet().set(kAttnOut).set(kFinalState)}) {
      const RunResult one = run(inputs, outputs, with_threads(1));
      for (int threads = 2; threads <= 8; ++threads) {
        SCOPED_TRACE(threads);
        expect_same(run(inputs, outputs, with_threads(threads)), one);
      }
    }
  }
}

TEST(Bitwise, OnePlanInSeveralThreadsAtOnce) {
  const OpCase c = dense_case();
  const CaseInputs inputs = make_inputs(c);
  const RunResult alone = run(inputs, all_outputs());
  std::vector<RunResult> results;
  for (int i = 0; i < 4; ++i) results.push_back(run(inputs, all_outputs()));
  for (RunResult& result : results) {
    for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
      const TensorView& view = result.views.*kOutputViews[output];
      std::memset(view.data, 0xff, static_cast<std::size_t>(view.numel()) * size_of(view.dtype));
    }
  }
  const ChunkKdaFwdPlan plan(inputs.tensors, results[0].views, inputs.attributes, {.num_threads = 2});
  std::vector<std::thread> callers;
  for (RunResult& result : results) {
    callers.emplace_back([&] {
      Bytes workspace(plan.workspace_bytes(), std::byte{0xff});
      for (int i = 0; i < 5; ++i) plan.execute(inputs.tensors, result.views, {workspace.data(), workspace.size()});
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const RunResult& result : results) expect_same(result, alone);
}

TEST(Bitwise, PackedSequenceAloneOrInCompany) {
  for (OpCase c : base_cases()) {
    const std::vector<std::int64_t> lengths = {70, 0, 129, 5, 64, 16, 1};
    c.cu_seqlens = std::vector<std::int64_t>{0};
    for (const std::int64_t length : lengths) c.cu_seqlens->push_back(c.cu_seqlens->back() + length);
    c.T = c.cu_seqlens->back();
    const CaseValues values = generate(c);
    const RunResult packed = run(make_inputs(c, values), all_outputs());
    Part part{.heads = c.HV};
    for (std::size_t n = 0; n < lengths.size(); ++n) {
      SCOPED_TRACE("sequence " + std::to_string(n));
      part.sequence = static_cast<std::int64_t>(n);
      part.first_token = (*c.cu_seqlens)[n];
      part.tokens = lengths[n];
      part.chunks = (lengths[n] + c.chunk_size - 1) / c.chunk_size;
      const Cut one = cut(c, values, part);
      expect_same_part(c, packed, part, one.c, run(make_inputs(one.c, one.values), all_outputs()), whole(one.c));
      part.first_chunk += part.chunks;
    }
  }
}

// A batch small enough for caches, and one whose outputs are written past them.
class Batch : public ::testing::TestWithParam<std::int64_t> {};

INSTANTIATE_TEST_SUITE_P(Bitwise, Batch, ::testing::Values(3, 12));

TEST_P(Batch, AloneOrInCompany) {
  for (OpCase c : base_cases()) {
    c.B = GetParam();
    const CaseValues values = generate(c);
    const RunResult batch = run(make_inputs(c, values), all_outputs());
    for (std::int64_t b = 0; b < c.B; ++b) {
      Part part = whole(c);
      part.batch = part.sequence = b;
      const Cut one = cut(c, values, part);
      expect_same_part(c, batch, part, one.c, run(make_inputs(one.c, one.values), all_outputs()), whole(one.c));
    }
  }
}

// Everything but kg, which knows its chunk's end, and the final state.
TEST(Bitwise, WhatFollowsChangesNothingBefore) {
  const OutputSet causal = without(all_outputs(), {kKg, kFinalState});
  for (OpCase c : base_cases()) {
    c.T = 333;
    CaseValues values = generate(c);
    std::vector<RunResult> results;
    results.push_back(run(make_inputs(c, values), all_outputs()));
    for (const std::int64_t tokens : {1, 15, 16, 17, 40, 64, 100, 127, 128, 129, 200}) {
      SCOPED_TRACE("prefix of " + std::to_string(tokens) + " tokens");
      Part part = whole(c);
      part.tokens = tokens;
      part.chunks = (tokens + c.chunk_size - 1) / c.chunk_size;
      const Cut prefix = cut(c, values, part);
      const RunResult alone = run(make_inputs(prefix.c, prefix.values), all_outputs());
      expect_same_part(c, results[0], part, prefix.c, alone, part, causal);
      CaseValues poisoned = values;
      std::fill(poisoned.q.begin() + tokens * c.H * c.K, poisoned.q.end(), kNan);
      std::fill(poisoned.k.begin() + tokens * c.H * c.K, poisoned.k.end(), kNan);
      std::fill(poisoned.v.begin() + tokens * c.HV * c.V, poisoned.v.end(), kNan);
      std::fill(poisoned.g.begin() + tokens * c.HV * c.K, poisoned.g.end(), kNan);
      std::fill(poisoned.beta.begin() + tokens * c.HV, poisoned.beta.end(), kNan);
      expect_same_part(c, run(make_inputs(c, poisoned), all_outputs()), part, prefix.c, alone, part, causal);
    }
  }
}

// The second part of a sequence, started from the first part's final state.
struct Halves {
  RunResult first, second;
  Cut first_cut, second_cut;
};

Halves run_in_two(const OpCase& c, const CaseValues& values, std::int64_t split, OutputSet outputs) {
  Part part = whole(c);
  part.tokens = split;
  Halves halves;
  halves.first_cut = cut(c, values, part);
  part.first_token = split;
  part.tokens = c.T - split;
  halves.second_cut = cut(c, values, part);
  halves.second_cut.c.initial_state = true;
  const CaseInputs first_inputs = make_inputs(halves.first_cut.c, halves.first_cut.values);
  halves.first = run(first_inputs, outputs);
  halves.second_cut.values.initial_state.assign(static_cast<std::size_t>(c.HV * c.K * c.V), 0);
  CaseInputs second_inputs = make_inputs(halves.second_cut.c, halves.second_cut.values);
  // The very bytes of the first call's final state, in the layout that it has.
  second_inputs.tensors.initial_state = halves.first.views.final_state;
  halves.second = run(second_inputs, outputs);
  return halves;
}

TEST(Bitwise, SplitAtAChunkBoundary) {
  for (const OpCase& c : base_cases()) {
    const CaseValues values = generate(c);
    for (const OutputSet outputs : {all_outputs(), OutputSet().set(kAttnOut).set(kFinalState)}) {
      const RunResult together = run(make_inputs(c, values), outputs);
      for (std::int64_t split = c.chunk_size; split < c.T; split += c.chunk_size) {
        const Halves halves = run_in_two(c, values, split, outputs);
        Part part = whole(c);
        part.tokens = split;
        part.chunks = split / c.chunk_size;
        expect_same_part(c, together, part, halves.first_cut.c, halves.first, part,
                         without(all_outputs(), {kFinalState}));
        part.first_token = split;
        part.tokens = c.T - split;
        part.first_chunk = part.chunks;
        part.chunks = whole(c).chunks - part.chunks;
        expect_same_part(c, together, part, halves.second_cut.c, halves.second, whole(halves.second_cut.c));
      }
    }
  }
}

TEST(Splitting, AnywhereIsRightToRounding) {
  for (const OpCase& c : base_cases()) {
    const CaseValues values = generate(c);
    const OutputSet outputs = OutputSet().set(kAttnOut).set(kFinalState);
    const RunResult together = run(make_inputs(c, values), outputs);
    const auto attn_out = together.values(kAttnOut);
    for (const std::int64_t split : {1, 17, 63, 65, 100}) {
      const Halves halves = run_in_two(c, values, split, outputs);
      EXPECT_LE(relative_error(halves.second.values(kFinalState), together.values(kFinalState)),
                1e-6 + device_tolerance);
      std::vector<double> joined = halves.first.values(kAttnOut);
      const auto rest = halves.second.values(kAttnOut);
      joined.insert(joined.end(), rest.begin(), rest.end());
      // Only roundings at the edge between two numbers of the dtype may fall differently.
      EXPECT_LE(relative_error(joined, attn_out), (c.dtype == Dtype::kFloat16 ? 1e-4 : 1e-3) + device_tolerance);
    }
  }
}

// With neither Aqk nor Akk asked for, attn_out and final_state may come from smaller blocks; nothing else may differ.
TEST(Bitwise, AnySubsetOfTheOutputs) {
  for (OpCase c : base_cases()) {
    c.T = c.chunk_size + 20;
    c.H = c.HV = 1;
    const CaseInputs inputs = make_inputs(c);
    const RunResult full = run(inputs, all_outputs());
    const RunResult least = run(inputs, OutputSet().set(kAttnOut).set(kFinalState));
    const OutputSet from_blocks = OutputSet().set(kAttnOut).set(kFinalState);
    for (unsigned long long bits = 0; bits < 1ull << (kChunkKdaFwdOutputCount - 1); ++bits) {
      const OutputSet outputs(bits << 1 | 1);
      SCOPED_TRACE(outputs.to_string());
      const RunResult some = run(inputs, outputs);
      ASSERT_TRUE(some.untouched);
      if (outputs[kAqk] || outputs[kAkk]) {
        expect_same(some, full);
      } else {
        expect_same(some, least, from_blocks);
        expect_same(some, full, ~from_blocks);
      }
      if (HasFailure()) return;
    }
  }
}

TEST(Bitwise, LayoutsAndStrides) {
  for (OpCase c : base_cases()) {
    c.T = 140;
    const RunResult plain = run(make_inputs(c), all_outputs());
    for (const Layout layout : {Layout::kBSND, Layout::kBNSD, Layout::kTND, Layout::kNTD}) {
      for (const Strides strides :
           {Strides::kContiguous, Strides::kPadded, Strides::kFused, Strides::kReversed, Strides::kInner}) {
        for (const OutputStrides output_strides : {OutputStrides::kContiguous, OutputStrides::kPadded,
                                                   OutputStrides::kInner, OutputStrides::kReversedAxes}) {
          c.layout = layout;
          c.strides = strides;
          SCOPED_TRACE(std::string(name_of(layout)) + ", strides " + std::to_string(static_cast<int>(strides)) +
                       " and " + std::to_string(static_cast<int>(output_strides)));
          const RunResult other = run(make_inputs(c), all_outputs(), {.plan = {}, .output_strides = output_strides});
          EXPECT_TRUE(other.untouched);
          expect_same(other, plain);
        }
      }
    }
  }
}

// A head or a sequence repeated by a stride of 0 is the same as one written out.
TEST(Bitwise, BroadcastInputs) {
  OpCase c = dense_case();
  c.H = 4;
  c.T = 70;
  CaseValues values = generate(c);
  for (std::int64_t row = 0; row < c.T * c.H; ++row) {
    for (std::int64_t d = 0; d < c.K; ++d) values.k[row * c.K + d] = values.k[row / c.H * c.H * c.K + d];
  }
  for (std::int64_t e = 0; e < c.T * c.HV; ++e) values.beta[e] = values.beta[0];
  CaseInputs inputs = make_inputs(c, values);
  const RunResult written_out = run(inputs, all_outputs());
  inputs.tensors.k.strides[2] = 0;
  inputs.tensors.beta.strides[1] = inputs.tensors.beta.strides[2] = 0;
  expect_same(run(inputs, all_outputs()), written_out);
}

TEST(Bitwise, MetadataAndHintsChangeNothing) {
  OpCase c = dense_case();
  c.cu_seqlens = std::vector<std::int64_t>{0, 20, 150};
  const RunResult plain = run(make_inputs(c), all_outputs());
  c.chunk_indices = true;
  expect_same(run(make_inputs(c), all_outputs()), plain);
  c.safe_gate = true;
  expect_same(run(make_inputs(c), all_outputs()), plain);
}

TEST(Bitwise, StateVFirstTransposes) {
  OpCase c = general_case();
  c.state_v_first = false;
  const RunResult k_first = run(make_inputs(c), all_outputs());
  c.state_v_first = true;
  const RunResult v_first = run(make_inputs(c), all_outputs());
  expect_same(k_first, v_first, without(all_outputs(), {kFinalState, kH}));
  for (const int output : {kFinalState, kH}) {
    const auto a = k_first.values(output);
    const auto b = v_first.values(output);
    const std::int64_t size = c.K * c.V;
    for (std::int64_t e = 0; e < static_cast<std::int64_t>(a.size()); ++e) {
      ASSERT_EQ(a[e], b[e / size * size + e % c.V * c.K + e / c.V % c.K]);
    }
  }
}

TEST(Bitwise, EmptySequenceHandsItsStateOn) {
  OpCase c = general_case();
  c.T = 10;
  c.cu_seqlens = std::vector<std::int64_t>{0, 0, 10, 10};
  CaseValues values = generate(c);
  // Bits that arithmetic would lose.
  values.initial_state[0] = kNan;
  values.initial_state[1] = -0.0f;
  values.initial_state[2] = -kInfinity;
  values.initial_state[3] = 1e-44f;
  const CaseInputs inputs = make_inputs(c, values);
  const RunResult result = run(inputs, OutputSet().set(kAttnOut).set(kFinalState));
  const Bytes before = packed_bytes(inputs.tensors.initial_state);
  const Bytes after = result.bytes(kFinalState);
  const auto size = static_cast<std::ptrdiff_t>(before.size()) / 3;
  for (const int n : {0, 2})
    EXPECT_TRUE(std::equal(before.begin() + n * size, before.begin() + (n + 1) * size, after.begin() + n * size));
}

// Poison in one place, and the value heads that may not notice.
struct Poisoning {
  const char* what;
  std::vector<float> CaseValues::*tensor;
  std::int64_t heads_of_tensor;  // 2: q or k head 0, read by value heads 0 and 1; 4: value head 0
  std::int64_t first_clean_head;
};

TEST(Isolation, BetweenHeads) {
  for (const OpCase& c : base_cases()) {
    const CaseValues values = generate(c);
    const RunResult clean = run(make_inputs(c, values), all_outputs());
    const std::vector<Poisoning> poisonings = {{"q", &CaseValues::q, 2, 2},
                                               {"k", &CaseValues::k, 2, 2},
                                               {"v", &CaseValues::v, 4, 1},
                                               {"g", &CaseValues::g, 4, 1},
                                               {"beta", &CaseValues::beta, 4, 1}};
    for (const Poisoning& poisoning : poisonings) {
      for (const float poison : {kNan, kInfinity}) {
        SCOPED_TRACE(std::string(poisoning.what) + ", " + std::to_string(poison));
        CaseValues poisoned = values;
        std::vector<float>& tensor = poisoned.*poisoning.tensor;
        const auto row = static_cast<std::int64_t>(tensor.size()) / (c.T * poisoning.heads_of_tensor);
        for (std::int64_t t = 0; t < c.T; t += 37) {
          std::fill_n(tensor.begin() + t * poisoning.heads_of_tensor * row, row, poison);
        }
        Part part = whole(c);
        part.first_head = poisoning.first_clean_head;
        part.heads = c.HV - part.first_head;
        expect_same_part(c, run(make_inputs(c, poisoned), all_outputs()), part, c, clean, part);
      }
    }
  }
}

TEST(Isolation, BetweenSequences) {
  for (OpCase c : base_cases()) {
    c.T = 150;
    c.cu_seqlens = std::vector<std::int64_t>{0, 40, 90, 150};
    const CaseValues values = generate(c);
    const RunResult clean = run(make_inputs(c, values), all_outputs());
    for (const float poison : {kNan, kInfinity}) {
      CaseValues poisoned = values;
      const auto poison_rows = [&](std::vector<float>& tensor) {
        const auto width = static_cast<std::int64_t>(tensor.size()) / c.T;
        std::fill(tensor.begin() + 40 * width, tensor.begin() + 90 * width, poison);
      };
      for (auto* tensor : {&poisoned.q, &poisoned.k, &poisoned.v, &poisoned.g, &poisoned.beta}) poison_rows(*tensor);
      std::fill_n(poisoned.initial_state.begin() + c.HV * c.K * c.V, c.HV * c.K * c.V, poison);
      const RunResult result = run(make_inputs(c, poisoned), all_outputs());
      Part part{.tokens = 40, .chunks = 1, .heads = c.HV};
      expect_same_part(c, result, part, c, clean, part);
      part = {.sequence = 2, .first_token = 90, .tokens = 60, .first_chunk = 2, .chunks = 1, .heads = c.HV};
      expect_same_part(c, result, part, c, clean, part);
    }
  }
}

// Address space without memory behind it until it is touched.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~SparseMemory() {
    if (ok()) munmap(data_, bytes_);
  }
  SparseMemory(SparseMemory&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = MAP_FAILED; }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  SparseMemory& operator=(SparseMemory&&) = delete;

  [[nodiscard]] bool ok() const { return data_ != MAP_FAILED; }
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_;
  std::size_t bytes_;
};

constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 24;

// The view with a stride of kFar elements on one axis (of extent 2), negative if asked for, in sparse memory.
bool move_far(TensorView& view, int axis, bool backwards, std::vector<SparseMemory>& memory) {
  const std::int64_t near_elements = view.numel() + 1024;
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  memory.emplace_back(static_cast<std::size_t>((kFar + near_elements) * size));
  if (!memory.back().ok()) return false;
  TensorView far = view;
  far.data = memory.back().data() + (backwards ? kFar * size : 0);
  far.strides[axis] = backwards ? -kFar : kFar;
  if (view.data != nullptr) {
    std::array<std::int64_t, kMaxRank> index{};
    for (std::int64_t e = 0; e < view.numel(); ++e) {
      std::int64_t from = 0;
      std::int64_t to = 0;
      for (int i = 0; i < view.rank; ++i) {
        from += index[i] * view.strides[i];
        to += index[i] * far.strides[i];
      }
      std::memcpy(static_cast<std::byte*>(far.data) + to * size, static_cast<const std::byte*>(view.data) + from * size,
                  static_cast<std::size_t>(size));
      for (int i = view.rank; i-- > 0 && ++index[i] == view.shape[i];) index[i] = 0;
    }
  }
  view = far;
  return true;
}

// Which axis of inputs and outputs goes far: tokens (of which there are two then) or heads.
void expect_same_when_far(const OpCase& c, bool tokens, bool backwards) {
  CaseInputs inputs = make_inputs(c);
  const RunResult plain = run(inputs, all_outputs());
  std::vector<SparseMemory> memory;
  bool ok = true;
  ChunkKdaFwdInputs& t = inputs.tensors;
  for (TensorView* view : {&t.q, &t.k, &t.v, &t.g, &t.beta})
    ok = ok && move_far(*view, tokens ? 1 : 2, backwards, memory);
  ok = ok && move_far(t.initial_state, 1, backwards, memory);
  ChunkKdaFwdOutputs outputs = chunk_kda_fwd_outputs(t, inputs.attributes);
  for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
    const bool sequence_major = output == kAttnOut || output == kH;
    int axis = sequence_major == tokens ? 1 : 2;
    if (output == kFinalState) axis = 1;
    if (output == kH) axis = 2;
    ok = ok && move_far(outputs.*kOutputViews[output], axis, backwards, memory);
  }
  if (!ok) GTEST_SKIP() << "no address space";
  const ChunkKdaFwdPlan plan(t, outputs, inputs.attributes);
  Bytes workspace(plan.workspace_bytes(), std::byte{0xff});
  plan.execute(t, outputs, {workspace.data(), workspace.size()});
  for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
    EXPECT_TRUE(packed_bytes(outputs.*kOutputViews[output]) == plain.bytes(output)) << kChunkKdaFwdOutputNames[output];
  }
}

TEST(FarStrides, Tokens) {
  for (OpCase c : base_cases()) {
    c.T = 2;
    c.H = c.HV = 2;
    expect_same_when_far(c, /*tokens=*/true, /*backwards=*/false);
    expect_same_when_far(c, /*tokens=*/true, /*backwards=*/true);
  }
}

TEST(FarStrides, Heads) {
  for (OpCase c : base_cases()) {
    c.T = 140;
    c.H = c.HV = 2;
    expect_same_when_far(c, /*tokens=*/false, /*backwards=*/false);
    expect_same_when_far(c, /*tokens=*/false, /*backwards=*/true);
  }
}

}  // namespace
}  // namespace kda::testing
