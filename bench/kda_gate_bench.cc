// kda_gate on large arrays, bf16 in and fp32 out, against the bandwidth of a plain copy that moves the same bytes.
//
// Every iteration times the copy and then the gate, so that a machine whose speed changes changes both. Counters: the
// gate's rate in bytes read and written per second, and its ratio to the copy's, by wall time and by CPU time.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

#include "kda/kda_gate.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kT = 8192;
constexpr std::int64_t kH = 32;
constexpr std::int64_t kD = 128;
constexpr std::int64_t kElements = kT * kH * kD;
constexpr double kBytes = 6.0 * kElements;

// Reads 2 bytes and writes 4 for every element: what memory can do, without arithmetic.
void copy_part(const std::uint16_t* from, float* to, std::int64_t count) {
  // Half of what is written repeats: the source has half the bytes.
  constexpr std::int64_t kPiece = 2048;
  for (std::int64_t i = 0; i < count; i += kPiece) {
    std::memcpy(to + i, from + i, kPiece * 2);
    std::memcpy(reinterpret_cast<char*>(to + i) + kPiece * 2, from + i, kPiece * 2);
  }
}

void copy(const std::vector<std::uint16_t>& from, std::vector<float>& to, int threads) {
  std::vector<std::thread> helpers;
  const std::int64_t share = kElements / threads;
  for (int i = 1; i < threads; ++i) {
    helpers.emplace_back([&, i] { copy_part(from.data() + i * share, to.data() + i * share, share); });
  }
  copy_part(from.data(), to.data(), share);
  for (std::thread& helper : helpers) helper.join();
}

// Wall time, and the CPU time of all threads: on a busy machine only the latter says what the code needs.
struct Times {
  double wall = 0;
  double cpu = 0;
};

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

template <class F>
Times measure(const F& f) {
  const double cpu = cpu_seconds();
  const auto start = Clock::now();
  f();
  return {std::chrono::duration<double>(Clock::now() - start).count(), cpu_seconds() - cpu};
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Arguments: bounded, with dt_bias, threads.
void gate(benchmark::State& state) {
  const auto threads = static_cast<int>(state.range(2));
  std::vector<std::uint16_t> g(kElements);
  for (std::size_t i = 0; i < g.size(); ++i) {
    // Signs and exponents as of numbers around 1.
    const std::uint32_t hash = static_cast<std::uint32_t>(i) * 2654435761u;
    g[i] = static_cast<std::uint16_t>((hash >> 16 & 0x80ffu) | 0x3f00u);
  }
  std::vector<float> out(kElements);
  const std::vector<float> A_log(kH, 0.3f);
  const std::vector<float> dt_bias(kH * kD, 0.1f);
  kda::KdaGateInputs inputs;
  inputs.g = kda::TensorView::contiguous(g.data(), kda::Dtype::kBFloat16, {kT, kH, kD});
  inputs.A_log = kda::TensorView::contiguous(A_log.data(), kda::Dtype::kFloat32, {kH});
  if (state.range(1) != 0)
    inputs.dt_bias = kda::TensorView::contiguous(dt_bias.data(), kda::Dtype::kFloat32, {kH * kD});
  const auto view = kda::TensorView::contiguous(out.data(), kda::Dtype::kFloat32, {kT, kH, kD});
  kda::KdaGateAttributes attributes;
  if (state.range(0) != 0) attributes.lower_bound = -5.0;
  const kda::KdaGatePlan plan(inputs, view, attributes, {.num_threads = threads});

  std::vector<double> rates, ratios, cpu_ratios;
  for (auto _ : state) {
    const Times copied = measure([&] { copy(g, out, threads); });
    const Times gated = measure([&] { plan.execute(inputs, view); });
    state.SetIterationTime(gated.wall);
    rates.push_back(kBytes / gated.wall);
    ratios.push_back(copied.wall / gated.wall);
    cpu_ratios.push_back(copied.cpu / gated.cpu);
  }
  state.counters["rate_max"] = *std::max_element(rates.begin(), rates.end());
  state.counters["rate_median"] = median(rates);
  state.counters["of_copy_min"] = *std::min_element(ratios.begin(), ratios.end());
  state.counters["of_copy_median"] = median(ratios);
  state.counters["of_copy_cpu_median"] = median(cpu_ratios);
}

BENCHMARK(gate)
    ->ArgNames({"bounded", "dt_bias", "threads"})
    ->ArgsProduct({{0, 1}, {0, 1}, {1, 2}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
