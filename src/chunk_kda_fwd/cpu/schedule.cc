#include "chunk_kda_fwd/cpu/schedule.h"

#include <algorithm>
#include <numeric>

namespace kda::cpu {
namespace {

// Tokens (of one head) for which waking another thread pays.
constexpr double kTokensPerThread = 32;

// What the states of a group may take: a second-level cache holds them beside a chunk.
constexpr std::int64_t kGroupStateBytes = std::int64_t{512} * 1024;

// Work that may be wasted by uneven items before some are shared.
constexpr double kTolerance = 1.1;

}  // namespace

Schedule::Schedule(const ChunkKdaFwdProblem& problem, int threads) {
  const ChunkKdaFwdDims& dims = problem.dims;
  heads_ = dims.HV;
  items_ = dims.N * dims.HV;
  const double batch = problem.is_packed() ? 1.0 : static_cast<double>(dims.N);
  const double work = static_cast<double>(dims.T) * batch * static_cast<double>(dims.HV);
  threads_ = static_cast<int>(std::clamp(work / kTokensPerThread, 1.0, static_cast<double>(threads)));
  if (problem.is_packed()) {
    order_.resize(static_cast<std::size_t>(dims.N));
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](std::int64_t a, std::int64_t b) {
      return problem.sequence(a).tokens > problem.sequence(b).tokens;
    });
  }
  if (items_ == 0) return;
  choose_shared(problem);
  choose_groups(problem);
}

void Schedule::choose_shared(const ChunkKdaFwdProblem& problem) {
  if (threads_ == 1) return;
  const std::int64_t chunks = (problem.sequence(sequence_of(0)).tokens + problem.dims.C - 1) / problem.dims.C;
  if (chunks < 2) return;
  shared_ = count_shared(problem);
  if (shared_ == 0) return;
  window_chunks_ = std::clamp<std::int64_t>((std::int64_t{2} * threads_ + shared_ - 1) / shared_, 2, 16);
  windows_ = (chunks + window_chunks_ - 1) / window_chunks_;
}

void Schedule::choose_groups(const ChunkKdaFwdProblem& problem) {
  const std::int64_t state_bytes = problem.dims.K * problem.dims.V * std::int64_t{sizeof(float)};
  const std::int64_t fitting = std::clamp<std::int64_t>(kGroupStateBytes / state_bytes, 1, kMaxGroup);
  const std::int64_t most = std::min(fitting, heads_);
  const std::int64_t alone = items_ - shared_;
  const std::int64_t share = (alone + threads_ - 1) / threads_;
  // A thread that is held up can leave a second group to others.
  const std::int64_t rounds = std::max<std::int64_t>((share + most - 1) / most, share < kMaxGroup ? 1 : 2);
  groups_ = std::min(alone, rounds * threads_);
}

std::int64_t Schedule::count_shared(const ChunkKdaFwdProblem& problem) const {
  const double threads = threads_;
  const auto items = static_cast<double>(items_);
  const auto longest = static_cast<double>(problem.sequence(sequence_of(0)).tokens);
  if (!problem.is_packed()) {
    const std::int64_t rounds = (items_ + threads_ - 1) / threads_;
    if (static_cast<double>(rounds) * threads / items <= kTolerance) return 0;
    // The last full round and what is left over: enough items for their panels to occupy every thread.
    return std::min(items_, threads_ + items_ % threads_);
  }
  const double total = static_cast<double>(problem.dims.T) * static_cast<double>(heads_);
  if (longest * threads <= total) return 0;
  std::int64_t shared = 0;
  while (shared<items_&& static_cast<double>(problem.sequence(sequence_of(shared)).tokens) * threads> total) ++shared;
  return shared;
}

}  // namespace kda::cpu
