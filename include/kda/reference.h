#pragma once

// The same operators in float64, straight from their formulas: slow, and the measure of every number in this library.

#include <vector>

#include "kda/chunk_kda_fwd.h"
#include "kda/export.h"
#include "kda/kda_gate.h"
#include "kda/kda_gate_cumsum.h"

namespace kda::reference {

// Results in float64, contiguous, in the shapes of ChunkKdaFwdOutputs (h as [B,NC,HV,K,V] or [NC,HV,K,V]).
struct ChunkKdaFwdResult {
  std::vector<double> attn_out;
  std::vector<double> final_state;
  std::vector<double> gk;
  std::vector<double> Aqk;
  std::vector<double> Akk;
  std::vector<double> w;
  std::vector<double> u;
  std::vector<double> qg;
  std::vector<double> kg;
  std::vector<double> v_new;
  std::vector<double> h;
};

// attn_out and final_state by the token recurrence, everything else by the formulas of the operator's header; v_new and
// h come from the recurrence too. Accepts whatever chunk_kda_fwd accepts on the CPU and throws the same errors. With
// intermediates false only attn_out and final_state are made.
[[nodiscard]] KDA_API ChunkKdaFwdResult chunk_kda_fwd(const ChunkKdaFwdInputs& inputs,
                                                      const ChunkKdaFwdAttributes& attributes,
                                                      bool intermediates = true);

// The gates, contiguous in g's shape. Accepts whatever kda_gate accepts on the CPU and throws the same errors.
[[nodiscard]] KDA_API std::vector<double> kda_gate(const KdaGateInputs& inputs, const KdaGateAttributes& attributes);

// gk, contiguous in g's shape, likewise.
[[nodiscard]] KDA_API std::vector<double> kda_gate_cumsum(const KdaGateCumsumInputs& inputs,
                                                          const KdaGateCumsumAttributes& attributes);

}  // namespace kda::reference
