#pragma once

// A legal call of chunk_kda_fwd that tests then change: grouped value heads, a tail chunk, K != V, every tensor
// present.

#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

#include "kda/chunk_kda_fwd.h"

namespace kda::testing {

struct Call {
  ChunkKdaFwdInputs inputs;
  ChunkKdaFwdOutputs outputs;
  ChunkKdaFwdAttributes attributes;
  std::vector<std::int64_t> cu_seqlens;
  std::vector<std::int64_t> chunk_indices;
  std::list<std::vector<std::byte>> memory;

  Call() = default;
  Call(const Call&) = delete;  // views point into memory
  Call& operator=(const Call&) = delete;

  static constexpr std::int64_t kB = 2, kT = 100, kH = 2, kHV = 4, kK = 32, kV = 64;

  // [B,T,heads,dim] in the order of the layout; packed calls have B = 1.
  [[nodiscard]] std::vector<std::int64_t> rows(std::int64_t heads, std::int64_t dim) const {
    const std::int64_t B = attributes.cu_seqlens ? 1 : kB;
    switch (attributes.layout) {
      case Layout::kBNSD:
        return {B, heads, kT, dim};
      case Layout::kTND:
        return {kT, heads, dim};
      case Layout::kNTD:
        return {heads, kT, dim};
      case Layout::kBSND:
        break;
    }
    return {B, kT, heads, dim};
  }

  // Sets every view, without data. The attributes must already say layout, cu_seqlens and state_v_first.
  void describe() {
    const auto view = [](Dtype dtype, const std::vector<std::int64_t>& shape) {
      return TensorView::contiguous(nullptr, dtype, shape);
    };
    const bool is_rank3 = attributes.layout == Layout::kTND || attributes.layout == Layout::kNTD;
    const std::int64_t N =
        attributes.cu_seqlens ? static_cast<std::int64_t>(cu_seqlens.size()) - 1 : (is_rank3 ? 1 : kB);
    auto scalars = rows(kHV, 1);
    scalars.pop_back();
    inputs.q = view(Dtype::kBFloat16, rows(kH, kK));
    inputs.k = view(Dtype::kBFloat16, rows(kH, kK));
    inputs.v = view(Dtype::kBFloat16, rows(kHV, kV));
    inputs.g = view(Dtype::kFloat32, rows(kHV, kK));
    inputs.beta = view(Dtype::kFloat32, scalars);
    inputs.A_log = view(Dtype::kFloat32, {kHV});
    inputs.dt_bias = view(Dtype::kFloat32, {kHV * kK});
    inputs.initial_state =
        view(Dtype::kFloat32, attributes.state_v_first ? std::vector{N, kHV, kV, kK} : std::vector{N, kHV, kK, kV});
    outputs = chunk_kda_fwd_outputs(inputs, attributes);
  }

  void give_data(TensorView& view) {
    if (!view.present() || view.numel() == 0) return;
    memory.emplace_back(static_cast<std::size_t>(view.numel()) * size_of(view.dtype));
    view.data = memory.back().data();
  }

  // Zeros for every contiguous view of the call.
  void give_data() {
    for (TensorView* view :
         {&inputs.q, &inputs.k, &inputs.v, &inputs.g, &inputs.beta, &inputs.A_log, &inputs.dt_bias,
          &inputs.initial_state, &outputs.attn_out, &outputs.final_state, &outputs.gk, &outputs.Aqk, &outputs.Akk,
          &outputs.w, &outputs.u, &outputs.qg, &outputs.kg, &outputs.v_new, &outputs.h}) {
      give_data(*view);
    }
  }
};

inline void make_dense(Call& call, Layout layout = Layout::kBSND) {
  call.attributes.layout = layout;
  call.attributes.scale = 0.125;
  call.attributes.use_gate_in_kernel = true;
  call.attributes.safe_gate = true;
  call.describe();
}

// Sequences of 0, 65 and 35 tokens: chunks (1,0), (1,1), (2,0).
inline void make_packed(Call& call, Layout layout = Layout::kBSND) {
  call.cu_seqlens = {0, 0, 65, Call::kT};
  call.chunk_indices = {1, 0, 1, 1, 2, 0};
  call.attributes.cu_seqlens = call.cu_seqlens;
  call.attributes.chunk_indices = call.chunk_indices;
  make_dense(call, layout);
}

}  // namespace kda::testing
