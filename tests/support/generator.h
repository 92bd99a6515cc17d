#pragma once

// The random numbers of tests/op_cases/README.md.

#include <cstdint>

namespace kda::testing {

enum GeneratedTensor : std::uint64_t { kQ, kK, kV, kG, kBeta, kALog, kDtBias, kInitialState, kBaseKeys };

[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t z) {
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9u;
  z ^= z >> 27;
  z *= 0x94D049BB133111EBu;
  z ^= z >> 31;
  return z;
}

// One tensor's numbers, each by the index of its element.
class Generator {
 public:
  Generator(std::uint64_t seed, GeneratedTensor tensor) : base_(mix(seed * kGolden + tensor)) {}

  [[nodiscard]] std::uint64_t bits(std::int64_t e) const {
    return mix(base_ + (static_cast<std::uint64_t>(e) + 1) * kGolden);
  }
  [[nodiscard]] double uniform(std::int64_t e) const { return static_cast<double>(bits(e) >> 40) * 0x1p-24; }
  [[nodiscard]] std::int64_t bell(std::int64_t e) const {
    const std::uint64_t z = bits(e);
    return static_cast<std::int64_t>((z & 0xffffu) + ((z >> 16) & 0xffffu) + ((z >> 32) & 0xffffu) + (z >> 48)) -
           131070;
  }
  [[nodiscard]] double normal(std::int64_t e) const {
    return static_cast<double>(bell(e)) * (1.7320508075688772 / 65536);
  }

 private:
  static constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;
  std::uint64_t base_;
};

}  // namespace kda::testing
