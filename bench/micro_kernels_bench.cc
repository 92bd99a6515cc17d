// The building blocks of chunk_kda_fwd's CPU kernels, one thread, K = V = 128, everything in cache.
//
// Counters: the rate of arithmetic or of bytes, and its ratio to a loop of nothing but multiply-adds, or to a copy that
// moves as many bytes within as much memory. Both are measured immediately before each benchmark, on a machine whose
// speed may change. KDA_CPU_ISA chooses the instruction set.

#include "micro_kernels.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "kda/info.h"

namespace {

using kda::Dtype;
using kda::GateMode;
using kda::bench::micro_kernels;
using kda::cpu::BlockSlot;
using kda::cpu::ChunkShape;
using kda::cpu::FloatArena;
using kda::cpu::Item;
using kda::cpu::kBlock;
using kda::cpu::PrepareScratch;
using kda::cpu::Rows;

constexpr int kK = 128;
constexpr int kV = 128;

// Of this thread: on a busy machine the wall time says less.
double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// The best of a few short runs: a rate per second of what f() returns.
template <class F>
double best_rate(const F& f) {
  double best = 0;
  for (int run = 0; run < 8; ++run) {
    const double start = cpu_seconds();
    const double done = f();
    best = std::max(best, done / (cpu_seconds() - start));
  }
  return best;
}

double multiply_add_rate() {
  return best_rate([] { return micro_kernels().multiply_add(100'000); });
}

// `bytes` are read and written in all.
double copy_rate(std::size_t bytes) {
  std::vector<char> from(bytes / 2, 1), to(bytes / 2);
  const std::size_t rounds = std::max<std::size_t>(1, (std::size_t{1} << 24) / bytes);
  return best_rate([&] {
    for (std::size_t i = 0; i < rounds; ++i) {
      std::memcpy(to.data(), from.data(), from.size());
      benchmark::ClobberMemory();
    }
    return static_cast<double>(rounds * bytes);
  });
}

// Times f(), and counts so much of a unit for each time; `limit` is the rate to compare with, 0 for none.
template <class F>
void time_it(benchmark::State& state, const char* unit, double amount, const char* ratio, double limit, const F& f) {
  const double start = cpu_seconds();
  for (auto _ : state) {
    f();
    benchmark::ClobberMemory();
  }
  const double seconds = cpu_seconds() - start;
  const double all = amount * static_cast<double>(state.iterations());
  state.counters[unit] = benchmark::Counter(all, benchmark::Counter::kIsRate);
  if (limit > 0) state.counters[ratio] = all / seconds / limit;
}

template <class F>
void time_flops(benchmark::State& state, double flops, const F& f) {
  time_it(state, "flops", flops, "of_peak", multiply_add_rate(), f);
}

template <class F>
void time_bytes(benchmark::State& state, std::size_t bytes, const F& f) {
  time_it(state, "bytes", static_cast<double>(bytes), "of_copy", copy_rate(bytes), f);
}

template <class F>
void time_elements(benchmark::State& state, double elements, const F& f) {
  time_it(state, "elements", elements, "", 0, f);
}

struct Free {
  void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
};

// Aligned to the widest vector.
class Floats {
 public:
  explicit Floats(std::size_t count)
      : data_(static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t(64)))), count_(count) {
    std::fill_n(data_.get(), count, 0.0f);
  }
  Floats(std::size_t count, float low, float high) : Floats(count) {
    std::mt19937 random(1);
    std::uniform_real_distribution<float> distribution(low, high);
    for (std::size_t i = 0; i < count; ++i) data_[static_cast<std::ptrdiff_t>(i)] = distribution(random);
  }

  [[nodiscard]] float* data() const { return data_.get(); }
  [[nodiscard]] Rows rows(std::int64_t token) const {
    return {reinterpret_cast<std::byte*>(data()), token, 1, Dtype::kFloat32};
  }
  // The same memory as the upper halves of such numbers.
  [[nodiscard]] std::vector<std::uint16_t> bfloat16() const {
    std::vector<std::uint16_t> made(count_);
    for (std::size_t i = 0; i < count_; ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, data() + i, sizeof(bits));
      made[i] = static_cast<std::uint16_t>(bits >> 16);
    }
    return made;
  }

 private:
  std::unique_ptr<float[], Free> data_;
  std::size_t count_;
};

// One block of one head, with all that its stages read and write.
class Block {
 public:
  Block()
      : numbers_(kBlock * kK, -0.15f, 0.15f),
        gates_(kBlock * kK, -1.0f, 0.0f),
        qkv_(numbers_.bfloat16()),
        out_(kBlock * kV),
        beta_(kBlock, 0.0f, 1.0f),
        state_(kK * kV, -1.0f, 1.0f),
        v_new_(kBlock * kV),
        sums_(kBlock * kV),
        memory_(1 << 16) {
    shape_.K = kK;
    shape_.V = kV;
    shape_.C = 64;
    shape_.scale = 0.088f;
    FloatArena arena(memory_.data());
    slot_ = BlockSlot(arena, shape_);
    scratch_ = std::make_unique<PrepareScratch>(arena, shape_);
    const Rows rows = {reinterpret_cast<std::byte*>(qkv_.data()), kK, 1, Dtype::kBFloat16};
    item_.tokens = kBlock;
    item_.q = item_.k = item_.v = rows;
    item_.g = gates_.rows(kK);
    item_.beta = beta_.rows(1);
    item_.attn_out = {reinterpret_cast<std::byte*>(out_.data()), kV, 1, Dtype::kBFloat16};
    prepare();
    predict();
  }

  void prepare() const { micro_kernels().prepare(shape_, item_, *scratch_, slot_); }
  void predict() const { micro_kernels().predict(shape_, item_, slot_, state_.data(), v_new_.data()); }
  void finalize() const { micro_kernels().finalize(shape_, item_, slot_, state_.data(), v_new_.data(), sums_.data()); }
  void update() const { micro_kernels().update(shape_, slot_, state_.data(), v_new_.data()); }

 private:
  Floats numbers_, gates_;
  std::vector<std::uint16_t> qkv_, out_;
  Floats beta_, state_, v_new_, sums_, memory_;
  ChunkShape shape_;
  Item item_;
  BlockSlot slot_;
  std::unique_ptr<PrepareScratch> scratch_;
};

void multiply_add(benchmark::State& state) {
  double done = 0;
  for (auto _ : state) done += micro_kernels().multiply_add(10'000);
  state.counters["flops"] = benchmark::Counter(done, benchmark::Counter::kIsRate);
}
BENCHMARK(multiply_add);

void copy(benchmark::State& state) {
  const auto half = static_cast<std::size_t>(state.range(0)) / 2;
  std::vector<char> from(half, 1), to(half);
  time_it(state, "bytes", 2.0 * static_cast<double>(half), "", 0, [&] { std::memcpy(to.data(), from.data(), half); });
}
BENCHMARK(copy)->ArgName("bytes")->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 28);

// 16 rows times a matrix; 128 columns are more than a first-level cache holds.
void panel_product(benchmark::State& state) {
  const auto columns = static_cast<int>(state.range(0));
  const Floats left(kBlock * kK, -1, 1), right(static_cast<std::size_t>(kK * columns), -1, 1);
  const Floats out(static_cast<std::size_t>(kBlock * columns));
  time_flops(state, 2.0 * kBlock * kK * columns,
             [&] { micro_kernels().panel_product(kK, columns, left.data(), right.data(), out.data()); });
}
BENCHMARK(panel_product)->ArgName("columns")->Arg(16)->Arg(32)->Arg(64)->Arg(128)->Arg(256);

constexpr Dtype kDtypes[] = {Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat32};

// 16 rows of 128, from or to a tensor whose elements are so far apart.
struct Tensor {
  explicit Tensor(const benchmark::State& state)
      : dtype(kDtypes[state.range(0)]),
        elements(static_cast<std::size_t>(kBlock * kK * state.range(1)), -1, 1),
        rows{reinterpret_cast<std::byte*>(elements.data()), state.range(1) * kK, state.range(1), dtype},
        bytes(kBlock * kK * (sizeof(float) + kda::size_of(dtype))) {}

  Dtype dtype;
  Floats elements;
  Rows rows;
  std::size_t bytes;
};

void widen_rows(benchmark::State& state) {
  const Tensor tensor(state);
  const Floats rows(kBlock * kK);
  time_bytes(state, tensor.bytes, [&] { micro_kernels().widen(tensor.rows, {0, kBlock, 0, kK}, rows.data(), kK); });
}
BENCHMARK(widen_rows)->ArgNames({"dtype", "inner"})->ArgsProduct({{0, 1, 2}, {1, 2}});

void round_rows(benchmark::State& state) {
  const Tensor tensor(state);
  const Floats rows(kBlock * kK, -1, 1);
  time_bytes(state, tensor.bytes, [&] { micro_kernels().round(rows.data(), kK, tensor.rows, {0, kBlock, 0, kK}); });
}
BENCHMARK(round_rows)->ArgNames({"dtype", "inner"})->ArgsProduct({{0, 1, 2}, {1, 2}});

void exponentials(benchmark::State& state) {
  const Floats from(kBlock * kK, -20, 0), to(kBlock * kK);
  time_elements(state, kBlock * kK, [&] { micro_kernels().exp(kBlock * kK, from.data(), to.data()); });
}
BENCHMARK(exponentials);

// In place: its own results are as good an input as any.
void gates(benchmark::State& state) {
  const auto mode = state.range(0) == 0 ? GateMode::kSoftplus : GateMode::kBounded;
  const Floats bias(kK, -1, 1), gate(kBlock * kK, -1, 1);
  time_elements(state, kBlock * kK, [&] { micro_kernels().gate(mode, kBlock, kK, bias.data(), gate.data()); });
}
BENCHMARK(gates)->ArgName("bounded")->Arg(0)->Arg(1);

// In place again: with a matrix of zeros, which takes as long as any, the numbers stay.
void solve(benchmark::State& state) {
  const auto columns = static_cast<int>(state.range(0));
  const Floats kk(kBlock * kBlock), x(static_cast<std::size_t>(kBlock * columns), -1, 1);
  time_flops(state, kBlock * (kBlock - 1.0) * columns, [&] { micro_kernels().solve(kk.data(), columns, x.data()); });
}
BENCHMARK(solve)->ArgName("columns")->Arg(16)->Arg(64)->Arg(128);

// The block's own products, q k on and below the diagonal and k k below; decays and exponentials are not counted.
constexpr double kPrepareFlops = kK * (kBlock * (kBlock + 1.0) + kBlock * (kBlock - 1.0));
constexpr double kPredictFlops = 2.0 * kBlock * kK * kV + kBlock * (kBlock - 1.0) * kV;
constexpr double kFinalizeFlops = 2.0 * kBlock * kK * kV + kBlock * (kBlock + 1.0) * kV;
constexpr double kUpdateFlops = 2.0 * kBlock * kK * kV + kK * kV;

void prepare_block(benchmark::State& state) {
  const Block block;
  time_flops(state, kPrepareFlops, [&] { block.prepare(); });
}
BENCHMARK(prepare_block);

void predict_and_solve(benchmark::State& state) {
  const Block block;
  time_flops(state, kPredictFlops, [&] { block.predict(); });
}
BENCHMARK(predict_and_solve);

void finalize_block(benchmark::State& state) {
  const Block block;
  time_flops(state, kFinalizeFlops, [&] { block.finalize(); });
}
BENCHMARK(finalize_block);

// The state decays, so that it stays bounded however often this is done.
void update_state(benchmark::State& state) {
  const Block block;
  time_flops(state, kUpdateFlops, [&] { block.update(); });
}
BENCHMARK(update_state);

// All of a block that a call for attn_out and final_state does.
void whole_block(benchmark::State& state) {
  const Block block;
  time_flops(state, kPrepareFlops + kPredictFlops + kFinalizeFlops + kUpdateFlops, [&] {
    block.prepare();
    block.predict();
    block.finalize();
    block.update();
  });
}
BENCHMARK(whole_block);

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  try {
    benchmark::AddCustomContext("instruction set", kda::cpu_instruction_set());
    benchmark::AddCustomContext("dtype 0, 1, 2", "bfloat16, float16, float32");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
