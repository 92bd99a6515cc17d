#pragma once

#include <cstddef>
#include <cstdint>

#include "core/sequences.h"
#include "kda/tensor.h"

namespace kda::cpu {

// The rows of one (sequence, head) of a tensor: element c of token t is at data + t * token + c * inner (elements).
struct Rows {
  std::byte* data = nullptr;  // null: the tensor is absent
  std::int64_t token = 0;
  std::int64_t inner = 0;
  Dtype dtype = Dtype::kFloat32;
  // Whether writes go past the caches: worth it where the tensor is larger than them, as its lines are not read first.
  bool streams = false;

  [[nodiscard]] bool present() const noexcept { return data != nullptr; }

  // The first element of token t's row from column c on.
  template <class Storage>
  [[nodiscard]] Storage* at(std::int64_t t, std::int64_t c) const noexcept {
    return reinterpret_cast<Storage*>(data) + t * token + c * inner;
  }
};

// Those of one head of a sequence, in the tensor at `data`.
[[nodiscard]] inline Rows rows_of(const void* data, Dtype dtype, const RowStrides& strides, const Sequence& sequence,
                                  std::int64_t head) noexcept {
  if (data == nullptr) return {};
  const std::int64_t offset = strides.offset(sequence.batch, sequence.first_token, head);
  auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));
  return {bytes + offset * static_cast<std::int64_t>(size_of(dtype)), strides.token, strides.inner, dtype};
}

// A rows x cols part of such a tensor: tokens [token, token + rows), columns [column, column + cols).
struct RowRange {
  std::int64_t token = 0;
  int rows = 0;
  int column = 0;
  int cols = 0;  // a multiple of 16
};

}  // namespace kda::cpu
