#pragma once

// Sequences of equal length, or packed one after the other, and rows of tensors that hold them.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kda {

// Strides in elements of a tensor with one row per (batch, token, head); the row's own stride is `inner`. 0 for axes
// that the tensor lacks.
struct RowStrides {
  std::int64_t batch = 0;
  std::int64_t token = 0;
  std::int64_t head = 0;
  std::int64_t inner = 0;

  [[nodiscard]] std::int64_t offset(std::int64_t b, std::int64_t t, std::int64_t hd) const noexcept {
    return b * batch + t * token + hd * head;
  }
};

// Whether rows are adjacent elements, and start at multiples of so many.
[[nodiscard]] constexpr bool steps_by(const RowStrides& strides, std::int64_t elements) noexcept {
  return strides.inner == 1 && strides.batch % elements == 0 && strides.token % elements == 0 &&
         strides.head % elements == 0;
}

// One sequence of a call.
struct Sequence {
  std::int64_t batch = 0;        // index on the batch axis of every tensor
  std::int64_t first_token = 0;  // index on the token axis
  std::int64_t tokens = 0;
  std::int64_t first_chunk = 0;  // chunks of the sequences before it, where they are packed
};

// N in 1..1024. Throws Error.
void require_sequence_count(std::string_view op, std::int64_t N);

// N + 1 values from 0 to `tokens`, non-decreasing, N in 1..1024. Throws Error.
void check_cu_seqlens(std::string_view op, std::span<const std::int64_t> cu_seqlens, std::int64_t tokens);

// The chunk at which every packed sequence starts, and the number of all chunks at the end.
[[nodiscard]] std::vector<std::int64_t> first_chunks(std::span<const std::int64_t> cu_seqlens, std::int64_t chunk_size);

}  // namespace kda
