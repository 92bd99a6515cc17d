#pragma once

// One execution of chunk_kda_fwd as the kernels read it: plain data, passed to them by value.

#include <cstddef>
#include <cstdint>

#include "chunk_kda_fwd/problem.h"
#include "cuda/divisor.h"

namespace kda {

// A packed sequence, as the kernels find it in device memory. Entry n describes sequence n, but for `longest`: the
// sequence in place n when the longest comes first.
struct PackedSequence {
  std::int64_t first_token;
  std::int64_t tokens;
  std::int64_t first_chunk;
  std::int64_t first_block;  // blocks of 16 tokens before it
  std::int64_t longest;
};

struct ChunkKdaFwdTask {
  ChunkKdaFwdPointers at;
  int device;
  int K, V, C;
  std::int64_t HV, N, T, NC;
  std::int64_t group;  // value heads of one query/key head

  Dtype dtype, g_dtype, beta_dtype;
  GateMode gate_mode;
  BetaActivation beta_activation;
  bool qk_l2norm;
  bool is_packed;
  bool vector_inputs;   // q, k, v, g: rows can be read 4 elements at a time if the data is aligned too
  bool vector_outputs;  // attn_out: rows can be written 8 elements at a time if the data is aligned too
  float scale, lower_bound;

  RowStrides q, k, v, g, beta;
  std::int64_t A_log_stride, dt_bias_stride;
  StateStrides initial_state;
  RowStrides attn_out, gk, Aqk, Akk, w, u, qg, kg, v_new;
  StateStrides final_state, h;

  int panels;              // blocks of threads that share the columns of one state
  bool is_hopper;          // the path for K = 128 in bf16 on Hopper
  bool has_tensor_extras;  // gk, Aqk, Akk, w, u, qg and kg on the tensor cores
  std::int64_t blocks;     // of 16 tokens, of all sequences together
  Divisor by_heads;        // HV
  Divisor by_blocks;       // blocks of a sequence, when dense
  int multiprocessors;
  int image_groups;   // of 16 channels, in an Image
  std::byte* images;  // device memory, [blocks,HV] BlockImage on the Hopper path, else Image
  // Where multiprocessors would be idle while the states advance, so many of them make images meanwhile: those of every
  // sequence's blocks from head_blocks on. 0: all images are made before.
  int preparers;
  int groups;  // of 64 columns of a state, on each of the others
  int head_blocks;
  Divisor by_sequences;  // N
  unsigned* made;  // device memory, [blocks,HV]: 1 once an image made meanwhile is there; null where there are none
  PackedSequence* sequences;             // device memory, [N]; null when dense
  const PackedSequence* host_sequences;  // what goes there; null when it is made there from at.cu_seqlens
  Dtype cu_seqlens_dtype;
  std::int64_t cu_seqlens_stride;
};

}  // namespace kda
