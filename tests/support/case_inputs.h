#pragma once

// The inputs of a case: generated values, and tensors that hold them.

#include <cstddef>
#include <vector>

#include "kda/chunk_kda_fwd.h"
#include "support/op_cases.h"

namespace kda::testing {

// Values before they are rounded to their dtypes, row-major, whatever the layout: q, k, v, g [B,T,heads,dim],
// beta [B,T,HV], A_log [HV], dt_bias [HV*K], initial_state [N,HV,K,V]. Empty where the case has no such tensor.
struct CaseValues {
  std::vector<float> q, k, v, g, beta, A_log, dt_bias, initial_state;
};

[[nodiscard]] CaseValues generate(const OpCase& c);

// Tensors and attributes of a call, with the memory that they point to.
struct CaseInputs {
  ChunkKdaFwdInputs tensors;
  ChunkKdaFwdAttributes attributes;
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::int64_t> cu_seqlens;
  std::vector<std::int64_t> chunk_indices;

  CaseInputs() = default;
  CaseInputs(CaseInputs&&) = default;
  CaseInputs& operator=(CaseInputs&&) = default;
  CaseInputs(const CaseInputs&) = delete;
  CaseInputs& operator=(const CaseInputs&) = delete;
};

// Lays the values out as the case says; what lies between elements is NaN.
[[nodiscard]] CaseInputs make_inputs(const OpCase& c, const CaseValues& values);
[[nodiscard]] CaseInputs make_inputs(const OpCase& c);

}  // namespace kda::testing
