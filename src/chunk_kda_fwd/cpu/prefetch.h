#pragma once

#include <algorithm>
#include <cstdint>

#include "chunk_kda_fwd/cpu/kernel.h"

namespace kda::cpu {

// Brings the rows that a chunk reads, and before the first chunk initial_state, to the second-level cache, a few at a
// time, while the state moves through the chunk that is computed before it. In the token-major layouts a head's rows
// lie far apart, so that the processor does not see the next one coming.
//
// GCC takes a function that only prefetches for one without effect and removes its calls, so nothing here may stay a
// call.
class ChunkPrefetch {
 public:
  // Brings nothing.
  ChunkPrefetch() = default;

  // Those of the item's chunk, if it has that one, in `steps` calls of step().
  ChunkPrefetch(const ChunkShape& s, const Item& item, std::int64_t chunk, std::int64_t steps) noexcept {
    const std::int64_t token = chunk * s.C;
    if (token >= item.tokens) return;
    tokens_ = std::min<std::int64_t>(s.C, item.tokens - token);
    parts_per_step_ = static_cast<int>((kParts * tokens_ + steps - 1) / steps);
    q_ = Row(item.q, token, s.K);
    k_ = Row(item.k, token, s.K);
    g_ = Row(item.g, token, s.K);
    v_ = Row(item.v, token, s.V);
    beta_ = Row(item.beta, token, 1);
    if (chunk == 0 && item.initial_state.present()) {
      const StateView& state = item.initial_state;
      const bool by_keys = state.v == 1;
      state_ = Row({state.data, by_keys ? state.k : state.v, by_keys ? state.v : state.k, state.dtype}, 0,
                   by_keys ? s.V : s.K);
      state_rows_ = state_.data == nullptr ? 0 : (by_keys ? s.K : s.V);
      state_rows_per_step_ = static_cast<int>((state_rows_ + steps - 1) / steps);
    }
  }

  [[gnu::always_inline]] void step() noexcept {
    for (int i = 0; i < parts_per_step_; ++i) fetch_part();
    for (int i = 0; i < state_rows_per_step_ && state_row_ < state_rows_; ++i) state_.fetch(state_row_++);
  }

 private:
  // A token's rows are fetched in three parts of about the same size.
  static constexpr int kParts = 3;

  static constexpr std::int64_t kLine = 64;

  struct Row {
    const std::byte* data = nullptr;
    std::int64_t next = 0;  // bytes to the next token's
    std::int64_t bytes = 0;

    Row() = default;
    Row(const Rows& rows, std::int64_t token, std::int64_t columns) noexcept {
      if (rows.inner != 1 && columns != 1) return;
      const auto size = static_cast<std::int64_t>(size_of(rows.dtype));
      data = rows.data + token * rows.token * size;
      next = rows.token * size;
      bytes = columns * size;
      // From the beginning of a line, so that none is left out.
      const auto into_line = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data) % kLine);
      data -= into_line;
      bytes += into_line;
    }

    [[gnu::always_inline]] void fetch(std::int64_t index) const noexcept {
      for (std::int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(data + index * next + at, 0, 2);
    }
  };

  [[gnu::always_inline]] void fetch_part() noexcept {
    if (token_ >= tokens_) return;
    if (part_ == 0) {
      q_.fetch(token_);
      k_.fetch(token_);
    } else if (part_ == 1) {
      g_.fetch(token_);
    } else {
      v_.fetch(token_);
      beta_.fetch(token_);
      ++token_;
    }
    part_ = part_ + 1 == kParts ? 0 : part_ + 1;
  }

  std::int64_t token_ = 0;  // the next to bring
  std::int64_t tokens_ = 0;
  int parts_per_step_ = 0;
  int part_ = 0;
  Row q_, k_, g_, v_, beta_;
  std::int64_t state_row_ = 0;  // the next to bring
  std::int64_t state_rows_ = 0;
  int state_rows_per_step_ = 0;
  Row state_;
};

}  // namespace kda::cpu
