#pragma once

// What the generic path's prepare makes of a block of 16 tokens of one value head, in the order in which lanes of the
// chain read it: with lane = 4 r + c, every array below is [32 lanes] of four fp32 numbers. All but decay, beta and the
// diagonal that `solve` leaves out is rounded to tf32. Channels go by groups of 16.

#include <cstdint>

namespace kda::cuda {

struct Image {
  int groups;

  // Of group p, tokens 8 m + r, channels 16 p + 4 c and the next three:
  static constexpr int kKeys = 0;        // [2]: k * decay from the block's first row on
  static constexpr int kQueries = 1024;  // [2]: scale * q * the same
  // Of group p, channel 16 p + 4 (r / 2) + 2 t + r % 2, tokens 2 c, 2 c + 1, 8 + 2 c and 9 + 2 c:
  static constexpr int kRest = 2048;  // [2]: k * decay of the rows that follow in the block
  static constexpr int kGroupBytes = 3072;
  static constexpr int kLanesBytes = 512;  // of one array

  // Of row 8 m + r, columns 2 c, 2 c + 1, 8 + 2 c and 9 + 2 c:
  [[nodiscard]] constexpr int qk() const { return groups * kGroupBytes; }     // [2]: scale * sum_d q_i k_j E_ij, j <= i
  [[nodiscard]] constexpr int solve() const { return qk() + 1024; }           // [2]: (I + A)^-1 - I
  [[nodiscard]] constexpr int decay() const { return qk() + 2048; }           // [channels] fp32, of the whole block
  [[nodiscard]] constexpr int beta() const { return decay() + groups * 64; }  // [4 c]: tokens as the columns above
  [[nodiscard]] constexpr int bytes() const { return beta() + 64; }
};

// Groups that the chain is compiled for: the fewest that hold K channels. What is beyond K is zero.
constexpr int image_groups(int K) {
  for (const int groups : {2, 4, 6, 8, 12}) {
    if (K <= 16 * groups) return groups;
  }
  return 16;
}

}  // namespace kda::cuda
