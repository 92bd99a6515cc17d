#include "core/sequences.h"

#include <string>

#include "core/checked.h"
#include "core/error.h"

namespace kda {
namespace {

constexpr std::int64_t kMaxPackedSequences = 1024;

std::string at(std::size_t index) { return "cu_seqlens[" + std::to_string(index) + "]"; }

}  // namespace

void require_sequence_count(std::string_view op, std::int64_t N) {
  if (N >= 1 && N <= kMaxPackedSequences) return;
  fail(ErrorKind::kValue, {op, "cu_seqlens"}, "N + 1 values with N in 1..1024", std::to_string(N + 1) + " values");
}

void check_cu_seqlens(std::string_view op, std::span<const std::int64_t> cu_seqlens, std::int64_t tokens) {
  const auto fail_value = [&](const std::string& expected, const std::string& got) {
    fail(ErrorKind::kValue, {op, "cu_seqlens"}, expected, got);
  };
  require_sequence_count(op, static_cast<std::int64_t>(cu_seqlens.size()) - 1);
  if (cu_seqlens.data() == nullptr) fail(ErrorKind::kMissing, {op, "cu_seqlens"}, "data", "a null pointer");
  if (cu_seqlens.front() != 0) fail_value(at(0) + " = 0", std::to_string(cu_seqlens.front()));
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) {
    if (cu_seqlens[i] < cu_seqlens[i - 1]) {
      fail_value(at(i) + " >= " + at(i - 1) + " = " + std::to_string(cu_seqlens[i - 1]), std::to_string(cu_seqlens[i]));
    }
  }
  if (cu_seqlens.back() != tokens) {
    fail_value(at(cu_seqlens.size() - 1) + " = T = " + std::to_string(tokens), std::to_string(cu_seqlens.back()));
  }
}

std::vector<std::int64_t> first_chunks(std::span<const std::int64_t> cu_seqlens, std::int64_t chunk_size) {
  std::vector<std::int64_t> first(cu_seqlens.size(), 0);
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) {
    first[i] = first[i - 1] + ceil_div(cu_seqlens[i] - cu_seqlens[i - 1], chunk_size);
  }
  return first;
}

}  // namespace kda
