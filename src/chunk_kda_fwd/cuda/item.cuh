#pragma once

// One sequence of one value head, and its gates, as the kernels see them.

#include "chunk_kda_fwd/cuda/task.h"
#include "cuda/numbers.cuh"

namespace kda::cuda {

inline constexpr int kBlock = 16;  // tokens that the state advances by

struct Item {
  std::int64_t n;            // sequence
  std::int64_t batch;        // index on the batch axes
  std::int64_t first_token;  // index on the token axes
  std::int64_t tokens;
  std::int64_t first_chunk;
  std::int64_t first_block;
  std::int64_t head;
  std::int64_t key_head;
};

__device__ __forceinline__ Item item_of(const ChunkKdaFwdTask& t, std::int64_t n, std::int64_t head) {
  const auto key_head = static_cast<std::int64_t>(static_cast<unsigned>(head) / static_cast<unsigned>(t.group));
  if (!t.is_packed) return {n, n, 0, t.T, 0, n * ((t.T + kBlock - 1) / kBlock), head, key_head};
  const PackedSequence s = t.sequences[n];
  return {n, 0, s.first_token, s.tokens, s.first_chunk, s.first_block, head, key_head};
}

__device__ __forceinline__ int blocks_of(const Item& item) {
  return static_cast<int>((item.tokens + kBlock - 1) / kBlock);
}

// Of all sequences together; task.blocks is only an upper bound where their lengths come from the device.
__device__ __forceinline__ std::int64_t blocks_of(const ChunkKdaFwdTask& t) {
  if (!t.is_packed) return t.blocks;
  const PackedSequence last = t.sequences[t.N - 1];
  return last.first_block + (last.tokens + kBlock - 1) / kBlock;
}

__device__ __forceinline__ std::int64_t row_of(const RowStrides& strides, const Item& item, std::int64_t head,
                                               std::int64_t token) {
  return item.batch * strides.batch + (item.first_token + token) * strides.token + head * strides.head;
}

__device__ __forceinline__ Gate gate_of(const ChunkKdaFwdTask& t, const Item& item) {
  const float A_log = t.at.A_log == nullptr ? 0.0f : t.at.A_log[item.head * t.A_log_stride];
  return {t.gate_mode, t.at.A_log == nullptr ? 1.0f : bounded_exp(A_log), t.lower_bound};
}

__device__ __forceinline__ float bias_of(const ChunkKdaFwdTask& t, const Item& item, int channel) {
  return t.at.dt_bias == nullptr ? 0.0f : t.at.dt_bias[(item.head * t.K + channel) * t.dt_bias_stride];
}

__device__ __forceinline__ float beta_of(const ChunkKdaFwdTask& t, const Item& item, std::int64_t token) {
  const float beta = load1(t.at.beta, t.beta_dtype, row_of(t.beta, item, item.head, token));
  if (t.beta_activation == BetaActivation::kNone) return beta;
  return (t.beta_activation == BetaActivation::kSigmoid ? 1.0f : 2.0f) * sigmoid(beta);
}

// The last sequence whose `member` (first_chunk or first_block) is at most `index`: the one, not empty, that this chunk
// or block belongs to.
__device__ __forceinline__ std::int64_t sequence_at(const ChunkKdaFwdTask& t, std::int64_t PackedSequence::*member,
                                                    std::int64_t index) {
  std::int64_t low = 0;
  std::int64_t high = t.N - 1;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (t.sequences[middle].*member <= index) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The step between two rows of gk, in natural logarithm. Equal rows, both -inf too, are a step of 0.
__device__ __forceinline__ float step_of_gk(float now, float before) {
  return now == before ? 0.0f : 0.693147181f * (now - before);
}

}  // namespace kda::cuda
