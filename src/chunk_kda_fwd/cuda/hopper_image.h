#pragma once

// What hopper_prepare makes of a block of 16 tokens of one value head, laid out as hopper_chain's matrix products read
// it.

namespace kda::cuda {

// Columns of a state that a group of four warps advances.
inline constexpr int kStateColumns = 64;

struct BlockImage {
  // [2 panels of 64 channels][16 keys, 16 queries][64] bf16, 128-byte swizzle: one operand of 32 rows.
  static constexpr int kKeys = 0;        // k * decay from the block's first row on
  static constexpr int kQueries = 2048;  // scale * q * the same
  // [2 panels of 64 channels][16 tokens][64] bf16, 128-byte swizzle.
  static constexpr int kRest = 8192;  // k * decay of the rows that follow in the block
  static constexpr int kQk = 12288;   // scale * sum_d q_i k_j E_ij, [16,16] bf16, 32-byte swizzle; lower triangular
  // (I + A)^-1 - I, [16,16] tf32, 64-byte swizzle; of every eight columns the even ones first.
  static constexpr int kSolve = 12800;
  // fp32, of the whole block: [4][kDecayPitch bytes], row c the channels 8 n + 2 c and 8 n + 2 c + 1 of every n.
  static constexpr int kDecay = 13824;
  static constexpr int kDecayPitch = 144;
  static constexpr int kBeta = kDecay + 4 * kDecayPitch;  // [16] fp32
  static constexpr int kBytes = kBeta + 64;

  // Swizzled byte offsets: of 16-byte piece `piece` (0..15) of a row, given the bytes of a panel, and of an element of
  // a square.
  static constexpr int kPairPanel = 4096;  // of keys and queries
  static constexpr int kRestPanel = 2048;
  static constexpr int row(int token, int piece, int panel_bytes) {
    return (piece >> 3) * panel_bytes + token * 128 + (((piece & 7) ^ (token & 7)) << 4);
  }
  static constexpr int square(int i, int j) {
    const int at = i * 32 + j * 2;
    return at ^ ((at >> 7 & 1) << 4);
  }
  static constexpr int solve(int i, int j) {
    const int at = i * 64 + j / 8 * 32 + (j % 2 * 4 + j % 8 / 2) * 4;
    return at ^ ((at >> 7 & 3) << 4);
  }
};

}  // namespace kda::cuda
