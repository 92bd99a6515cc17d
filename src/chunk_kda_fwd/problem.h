#pragma once

// A checked call in the form that backends and the reference read: no layouts, no optional shapes, only strides.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/gate_mode.h"
#include "core/sequences.h"
#include "kda/chunk_kda_fwd.h"

namespace kda {

// Strides in elements of initial_state and final_state ([N,HV,K,V] once state_v_first is undone) and of h
// ([B,NC,HV,K,V]: seq is the batch, chunk the chunk; chunk is 0 for the two others).
struct StateStrides {
  std::int64_t seq = 0;
  std::int64_t chunk = 0;
  std::int64_t head = 0;
  std::int64_t k = 0;
  std::int64_t v = 0;
};

struct ChunkKdaFwdProblem {
  ChunkKdaFwdDims dims;
  Dtype dtype = Dtype::kBFloat16;  // of q, k, v, attn_out and the 16-bit intermediates
  Dtype g_dtype = Dtype::kFloat32;
  Dtype beta_dtype = Dtype::kFloat32;
  Device device{};
  GateMode gate_mode = GateMode::kActivated;
  bool qk_l2norm = false;
  BetaActivation beta_activation = BetaActivation::kNone;
  float scale = 0;
  float lower_bound = -5;
  std::vector<std::int64_t> cu_seqlens;  // empty when dense, and when the device has it

  RowStrides q, k, v, g, beta;
  std::int64_t A_log_stride = 0;
  std::int64_t dt_bias_stride = 0;
  StateStrides initial_state;

  // cu_seqlens on the device: lengths are not known here, dims.NC is an upper bound.
  bool has_device_cu_seqlens = false;
  Dtype cu_seqlens_dtype = Dtype::kInt64;
  std::int64_t cu_seqlens_stride = 0;

  RowStrides attn_out, gk, Aqk, Akk, w, u, qg, kg, v_new;
  StateStrides final_state, h;

  // Which optional tensors the call has. A_log and dt_bias only count where the gate mode reads them.
  bool has_A_log = false;
  bool has_dt_bias = false;
  bool has_initial_state = false;
  bool has_final_state = false;
  bool has_gk = false;
  bool has_Aqk = false;
  bool has_Akk = false;
  bool has_w = false;
  bool has_u = false;
  bool has_qg = false;
  bool has_kg = false;
  bool has_v_new = false;
  bool has_h = false;

  [[nodiscard]] bool is_packed() const noexcept { return !cu_seqlens.empty() || has_device_cu_seqlens; }

  // Value heads that share one query/key head.
  [[nodiscard]] std::int64_t group() const noexcept { return dims.HV / dims.H; }

  // 0 <= n < dims.N. Not where only the device knows.
  [[nodiscard]] Sequence sequence(std::int64_t n) const noexcept;

 private:
  friend ChunkKdaFwdProblem make_problem(const ChunkKdaFwdInputs&, const ChunkKdaFwdOutputs*,
                                         const ChunkKdaFwdAttributes&);
  std::vector<std::int64_t> first_chunk_;  // per packed sequence
};

// The data pointers of one execution; null where a tensor is absent or has no elements.
struct ChunkKdaFwdPointers {
  const void* q;
  const void* k;
  const void* v;
  const void* g;
  const void* beta;
  const float* A_log;
  const float* dt_bias;
  const float* initial_state;
  const void* cu_seqlens;
  void* attn_out;
  float* final_state;
  float* gk;
  void* Aqk;
  void* Akk;
  void* w;
  void* u;
  void* qg;
  void* kg;
  void* v_new;
  void* h;
};

// Checks everything that can be checked without data and throws Error. outputs may be null: then none is present.
[[nodiscard]] ChunkKdaFwdProblem make_problem(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs* outputs,
                                              const ChunkKdaFwdAttributes& attributes);

// The inputs that a call with this gate mode reads: without A_log and dt_bias when the gate is already activated.
[[nodiscard]] ChunkKdaFwdInputs inputs_read(const ChunkKdaFwdInputs& inputs, GateMode gate_mode) noexcept;

// Checks the data pointers of what a call reads and writes, and throws Error: only a tensor without elements may have
// null data, and no output overlaps an input or another output.
void check_pointers(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs);

// Throws Error (kValue) when the first `bytes` of a workspace overlap a tensor of the call.
void check_workspace(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs, const void* workspace,
                     std::size_t bytes);

[[nodiscard]] ChunkKdaFwdPointers pointers_of(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs);

}  // namespace kda
