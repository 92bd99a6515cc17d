// kda_gate on the CPU: how elements are cut into runs of columns, and runs into units of work.

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/checked.h"
#include "cpu/thread_pool.h"
#include "kda_gate/backend.h"
#include "kda_gate/cpu/kernel.h"

namespace kda::cpu {
namespace {

// Elements of a unit of work: enough to make its tables worth while, at most.
constexpr std::int64_t kFewestElements = 1 << 13;
constexpr std::int64_t kMostElements = 1 << 17;

// Runs of adjacent elements shorter than this are gathered into a buffer first.
constexpr std::int64_t kShortestRun = 32;

// What bounds the arguments of a block of columns' gates.
struct GateRange {
  bool is_moderate = true;  // all factors; every rate and bias is finite
  float rate = 0;           // the largest, where it multiplies the argument
  float bias = 0;           // the largest magnitude

  [[nodiscard]] float common_limit(bool is_bounded) const noexcept {
    if (!is_moderate) return -1;
    const float argument = is_bounded ? kCommonArgument / rate : kCommonArgument;
    return std::min(argument - bias, kCommonGate);
  }
};

// Where an element of g or out is, in elements.
struct Offsets {
  std::int64_t g = 0;
  std::int64_t out = 0;

  void advance(const GateAxis& axis, std::int64_t steps) noexcept {
    g += steps * axis.g;
    out += steps * axis.out;
  }
};

// Whether stepping along `outer` goes on where `inner` ends; an axis of one step goes anywhere.
bool continues(const GateAxis& outer, std::int64_t inner_elements) noexcept {
  return outer.extent == 1 || (outer.g == inner_elements && outer.out == inner_elements);
}

template <class Storage>
void copy_strided(const std::byte* from, std::int64_t from_step, std::byte* to, std::int64_t to_step,
                  std::int64_t count) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_step * static_cast<std::int64_t>(sizeof(Storage)),
                from + i * from_step * static_cast<std::int64_t>(sizeof(Storage)), sizeof(Storage));
  }
}

void copy_strided(Dtype dtype, const std::byte* from, std::int64_t from_step, std::byte* to, std::int64_t to_step,
                  std::int64_t count) noexcept {
  const auto copy = size_of(dtype) == 2 ? &copy_strided<std::uint16_t> : &copy_strided<std::uint32_t>;
  copy(from, from_step, to, to_step, count);
}

class CpuKdaGate final : public KdaGateKernel {
 public:
  CpuKdaGate(const KdaGateProblem& problem, int threads) : problem_(problem) {
    const std::int64_t D = problem_.channel.extent;
    const bool is_dense = continues(problem_.channel, 1);
    columns_ = problem_.head.extent * D;
    run_ = !is_dense || D < kShortestRun ? 0 : D;
    if (is_dense && continues(problem_.head, D)) {
      run_ = columns_;
      join_rows();
    }
    is_grouped_ = run_ != 0 && D % kGateGroup == 0;
    kernel_ = gate_kernel({.g_dtype = problem.g_dtype,
                           .out_dtype = problem.out_dtype,
                           .is_bounded = problem.lower_bound.has_value(),
                           .has_bias = problem.has_dt_bias,
                           .is_grouped = is_grouped_});
    column_blocks_ = ceil_div(columns_, block_columns());
    rows_per_unit_ = rows_per_unit(threads);
    row_blocks_ = ceil_div(rows_, rows_per_unit_);
    threads_ = static_cast<int>(std::min<std::int64_t>(threads, units()));
    ThreadPool::instance().reserve(threads_);
  }

  [[nodiscard]] int launches() const noexcept override { return 1; }
  [[nodiscard]] int num_threads() const noexcept override { return threads_; }

  void run(const KdaGatePointers& pointers, Stream /*stream*/) const override {
    ThreadPool::instance().for_each(units(), threads_,
                                    [&](std::int64_t unit, int /*thread*/) { run_unit(pointers, unit); });
  }

 private:
  [[nodiscard]] std::int64_t block_columns() const noexcept { return is_grouped_ ? kGroupedColumns : kSingleColumns; }

  // A block of rows, and a block of their columns.
  [[nodiscard]] std::int64_t units() const noexcept { return row_blocks_ * column_blocks_; }

  // Makes short rows that lie behind each other one row with repeated columns.
  void join_rows() noexcept {
    GateAxis& innermost = problem_.lead[static_cast<std::size_t>(problem_.lead_axes - 1)];
    joined_ =
        continues(innermost, columns_) ? std::clamp<std::int64_t>(kSingleColumns / columns_, 1, innermost.extent) : 1;
    const std::int64_t last = innermost.extent - (ceil_div(innermost.extent, joined_) - 1) * joined_;
    last_columns_ = last * columns_;
    rows_ = problem_.rows / innermost.extent * ceil_div(innermost.extent, joined_);
    innermost = {ceil_div(innermost.extent, joined_), innermost.g * joined_, innermost.out * joined_};
    columns_ *= joined_;
    run_ = columns_;
  }

  [[nodiscard]] std::int64_t rows_per_unit(int threads) const noexcept {
    const std::int64_t width = std::min(columns_, block_columns());
    const std::int64_t share = saturating_mul(rows_, columns_) / (std::int64_t{8} * threads);
    return std::max<std::int64_t>(1, std::clamp(share, kFewestElements, kMostElements) / width);
  }

  void run_unit(const KdaGatePointers& at, std::int64_t unit) const noexcept {
    const std::int64_t first = unit % column_blocks_ * block_columns();
    const std::int64_t end = std::min(first + block_columns(), columns_);
    GateColumns columns;
    fill_columns(at, first, end, columns);
    const std::int64_t first_row = unit / column_blocks_ * rows_per_unit_;
    const std::int64_t end_row = std::min(first_row + rows_per_unit_, rows_);
    for (std::int64_t row = first_row; row < end_row; ++row) {
      run_row(at, columns, first, std::min(end, columns_of(row)), offsets_of(row));
    }
  }

  // The parameters of columns [first, end).
  void fill_columns(const KdaGatePointers& at, std::int64_t first, std::int64_t end,
                    GateColumns& columns) const noexcept {
    const std::int64_t D = problem_.channel.extent;
    const int group = is_grouped_ ? kGateGroup : 1;
    GateRange range;
    if (problem_.lower_bound) {
      columns.lower_bound = scaled(*problem_.lower_bound);
      range.is_moderate = columns.lower_bound.exponent == 0;
    }
    int column = 0;
    while (first + column < end) {
      const std::int64_t head = (first + column) / D % problem_.head.extent;
      const std::int64_t channel = (first + column) % D;
      const int count = static_cast<int>(std::min(D - channel, end - first - column));
      fill_rate(gate_rate(problem_, at.A_log, head), column / group, count / group, columns, range);
      if (problem_.has_dt_bias) {
        const float* bias = at.dt_bias + head * problem_.dt_bias_head + channel * problem_.dt_bias_channel;
        fill_bias(bias, column, count, columns, range);
      }
      column += count;
    }
    for (float* table :
         {columns.rate_hi, columns.rate_lo, columns.rate_hi_lo, columns.rate_three_quarters, columns.rate_exponent}) {
      std::fill_n(table + column / group, kGatePadding, 0.0f);
    }
    std::fill_n(columns.bias + column, kGatePadding, 0.0f);
    columns.common_limit = range.common_limit(problem_.lower_bound.has_value());
  }

  void fill_rate(double rate, int column, int count, GateColumns& columns, GateRange& range) const noexcept {
    ScaledNumber number;
    if (problem_.lower_bound) {
      // Not 0 for a rate that is not: it multiplies infinite arguments, too.
      number.hi = rate > 0 ? std::max(static_cast<float>(rate), FLT_TRUE_MIN) : static_cast<float>(rate);
      number.lo = std::isnan(rate) ? 0.0f : static_cast<float>(rate - static_cast<double>(number.hi));
      range.rate = std::max(range.rate, number.hi);
      range.is_moderate = range.is_moderate && number.hi <= FLT_MAX;
    } else {
      number = scaled(-rate);
      const float three_quarters = 0.75f * number.hi;
      std::fill_n(columns.rate_hi_lo + column, count, number.lo);
      std::fill_n(columns.rate_three_quarters + column, count, three_quarters);
      const double missing = 0.75 * (double{number.hi} + double{number.lo}) - double{three_quarters};
      number.lo = number.hi == 0 ? 0.0f : static_cast<float>(missing / double{number.hi});
      range.is_moderate = range.is_moderate && number.exponent == 0;
    }
    std::fill_n(columns.rate_hi + column, count, number.hi);
    std::fill_n(columns.rate_lo + column, count, number.lo);
    std::fill_n(columns.rate_exponent + column, count, number.exponent);
  }

  void fill_bias(const float* bias, int column, int count, GateColumns& columns, GateRange& range) const noexcept {
    float* to = columns.bias + column;
    for (int i = 0; i < count; ++i) to[i] = bias[i * problem_.dt_bias_channel];
    // As integers, which order magnitudes like numbers, with infinity and NaN above all.
    std::uint32_t largest = 0;
    for (int i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<std::uint32_t>(to[i]) & 0x7FFFFFFFu);
    const auto magnitude = std::bit_cast<float>(largest);
    range.is_moderate = range.is_moderate && std::isfinite(magnitude);
    range.bias = std::max(range.bias, magnitude);
  }

  [[nodiscard]] std::int64_t columns_of(std::int64_t row) const noexcept {
    const std::int64_t extent = problem_.lead[static_cast<std::size_t>(problem_.lead_axes - 1)].extent;
    return joined_ > 1 && row % extent == extent - 1 ? last_columns_ : columns_;
  }

  [[nodiscard]] Offsets offsets_of(std::int64_t row) const noexcept {
    Offsets offsets;
    for (int i = problem_.lead_axes; i-- > 0;) {
      const GateAxis& axis = problem_.lead[static_cast<std::size_t>(i)];
      offsets.advance(axis, row % axis.extent);
      row /= axis.extent;
    }
    return offsets;
  }

  // Columns [first, end) of a row that starts at `row`; the tables start at column `first`.
  void run_row(const KdaGatePointers& at, const GateColumns& columns, std::int64_t first, std::int64_t end,
               const Offsets& row) const noexcept {
    if (run_ == 0) return run_gathered(at, columns, first, end, row);
    for (std::int64_t column = first; column < end;) {
      const std::int64_t in_run = column % run_;
      const int count = static_cast<int>(std::min(run_ - in_run, end - column));
      Offsets offsets = row;
      offsets.advance(problem_.head, column / run_);
      kernel_(columns, static_cast<int>(column - first), count, g_at(at, offsets.g + in_run),
              out_at(at, offsets.out + in_run));
      column += count;
    }
  }

  void run_gathered(const KdaGatePointers& at, const GateColumns& columns, std::int64_t first, std::int64_t end,
                    const Offsets& row) const noexcept {
    alignas(64) std::byte in[kSingleColumns * sizeof(float)];
    alignas(64) std::byte out[kSingleColumns * sizeof(float)];
    for_each_run(first, end, row, [&](std::int64_t column, const Offsets& offsets, std::int64_t count) {
      std::byte* to = in + column * static_cast<std::int64_t>(size_of(problem_.g_dtype));
      copy_strided(problem_.g_dtype, g_at(at, offsets.g), problem_.channel.g, to, 1, count);
    });
    kernel_(columns, 0, static_cast<int>(end - first), in, out);
    for_each_run(first, end, row, [&](std::int64_t column, const Offsets& offsets, std::int64_t count) {
      const std::byte* from = out + column * static_cast<std::int64_t>(size_of(problem_.out_dtype));
      copy_strided(problem_.out_dtype, from, 1, out_at(at, offsets.out), problem_.channel.out, count);
    });
  }

  // f(column - first, offsets, count) for what columns [first, end) have of each head.
  template <class F>
  void for_each_run(std::int64_t first, std::int64_t end, const Offsets& row, const F& f) const noexcept {
    const std::int64_t D = problem_.channel.extent;
    for (std::int64_t column = first; column < end;) {
      const std::int64_t channel = column % D;
      const std::int64_t count = std::min(D - channel, end - column);
      Offsets offsets = row;
      offsets.advance(problem_.head, column / D);
      offsets.advance(problem_.channel, channel);
      f(column - first, offsets, count);
      column += count;
    }
  }

  [[nodiscard]] const std::byte* g_at(const KdaGatePointers& at, std::int64_t offset) const noexcept {
    return static_cast<const std::byte*>(at.g) + offset * static_cast<std::int64_t>(size_of(problem_.g_dtype));
  }
  [[nodiscard]] std::byte* out_at(const KdaGatePointers& at, std::int64_t offset) const noexcept {
    return static_cast<std::byte*>(at.out) + offset * static_cast<std::int64_t>(size_of(problem_.out_dtype));
  }

  KdaGateProblem problem_;
  GateKernel* kernel_ = nullptr;
  std::int64_t rows_ = problem_.rows;
  std::int64_t columns_ = 0;       // of a row
  std::int64_t run_ = 0;           // columns that are adjacent in memory; 0: too few to matter
  std::int64_t joined_ = 1;        // rows of the problem in one of rows_
  std::int64_t last_columns_ = 0;  // of the last row along the innermost axis, where rows are joined
  bool is_grouped_ = false;        // one entry per kGateGroup columns in the tables
  std::int64_t column_blocks_ = 1;
  std::int64_t rows_per_unit_ = 1;
  std::int64_t row_blocks_ = 1;
  int threads_ = 1;
};

}  // namespace

std::unique_ptr<KdaGateKernel> make_kda_gate(const KdaGateProblem& problem, const PlanOptions& options) {
  return std::make_unique<CpuKdaGate>(problem, threads_for(options));
}

}  // namespace kda::cpu
