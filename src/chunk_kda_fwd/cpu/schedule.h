#pragma once

// How the work items of a call are spread over threads. It decides who computes what, never what is computed.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "chunk_kda_fwd/problem.h"

namespace kda::cpu {

// Items of a group.
inline constexpr int kMaxGroup = 8;

// A work item is one sequence of one value head. Most items run whole on one thread ("alone"), in groups that take
// turns chunk by chunk: neighbouring heads of token-major tensors share pages, whose translations are few. Items that
// would keep one thread busy while others idle are "shared": window by window, threads prepare chunks and carry panels
// of the state on together.
class Schedule {
 public:
  Schedule(const ChunkKdaFwdProblem& problem, int threads);

  // Threads worth using; at least 1.
  [[nodiscard]] int threads() const noexcept { return threads_; }

  [[nodiscard]] std::int64_t items() const noexcept { return items_; }

  // Items [0, shared) are shared, the others alone.
  [[nodiscard]] std::int64_t shared() const noexcept { return shared_; }

  // Groups of the items that are alone. Group i has [group_begin(i), group_begin(i + 1)), at most max_group() of them.
  [[nodiscard]] std::int64_t groups() const noexcept { return groups_; }
  [[nodiscard]] std::int64_t group_begin(std::int64_t group) const noexcept {
    const std::int64_t alone = items_ - shared_;
    return shared_ + group * (alone / groups_) + std::min(group, alone % groups_);
  }
  [[nodiscard]] std::int64_t max_group() const noexcept { return groups_ == 0 ? 0 : group_begin(1) - group_begin(0); }

  // Chunks of each shared item in one window, and how many windows the longest has.
  [[nodiscard]] std::int64_t window_chunks() const noexcept { return window_chunks_; }
  [[nodiscard]] std::int64_t windows() const noexcept { return windows_; }

  // The sequence and the value head of an item; longer sequences come first.
  [[nodiscard]] std::int64_t sequence_of(std::int64_t item) const noexcept {
    const std::int64_t place = item / heads_;
    return order_.empty() ? place : order_[static_cast<std::size_t>(place)];
  }
  [[nodiscard]] std::int64_t head_of(std::int64_t item) const noexcept { return item % heads_; }

 private:
  void choose_shared(const ChunkKdaFwdProblem& problem);
  void choose_groups(const ChunkKdaFwdProblem& problem);
  [[nodiscard]] std::int64_t count_shared(const ChunkKdaFwdProblem& problem) const;

  int threads_ = 1;
  std::int64_t heads_ = 1;
  std::int64_t items_ = 0;
  std::int64_t shared_ = 0;
  std::int64_t groups_ = 0;
  std::int64_t window_chunks_ = 0;
  std::int64_t windows_ = 0;
  std::vector<std::int64_t> order_;  // packed sequences, longest first; empty when all are equally long
};

}  // namespace kda::cpu
