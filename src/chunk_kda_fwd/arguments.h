#pragma once

// The tensors of a call as tables, for code that treats them all alike.

#include <array>
#include <string_view>

#include "core/error.h"
#include "kda/chunk_kda_fwd.h"

namespace kda {

inline constexpr std::string_view kChunkKdaFwdName = "chunk_kda_fwd";

template <typename Owner>
struct TensorMember {
  std::string_view name;
  TensorView Owner::*member;

  [[nodiscard]] const TensorView& of(const Owner& owner) const noexcept { return owner.*member; }
  [[nodiscard]] Argument argument() const noexcept { return {kChunkKdaFwdName, name}; }
};

using InputMember = TensorMember<ChunkKdaFwdInputs>;
using OutputMember = TensorMember<ChunkKdaFwdOutputs>;

inline constexpr std::array<InputMember, 9> kChunkKdaFwdInputs{{
    {"q", &ChunkKdaFwdInputs::q},
    {"k", &ChunkKdaFwdInputs::k},
    {"v", &ChunkKdaFwdInputs::v},
    {"g", &ChunkKdaFwdInputs::g},
    {"beta", &ChunkKdaFwdInputs::beta},
    {"A_log", &ChunkKdaFwdInputs::A_log},
    {"dt_bias", &ChunkKdaFwdInputs::dt_bias},
    {"initial_state", &ChunkKdaFwdInputs::initial_state},
    {"cu_seqlens", &ChunkKdaFwdInputs::cu_seqlens},
}};

inline constexpr std::array<OutputMember, kChunkKdaFwdOutputCount> kChunkKdaFwdOutputs{{
    {kChunkKdaFwdOutputNames[0], &ChunkKdaFwdOutputs::attn_out},
    {kChunkKdaFwdOutputNames[1], &ChunkKdaFwdOutputs::final_state},
    {kChunkKdaFwdOutputNames[2], &ChunkKdaFwdOutputs::gk},
    {kChunkKdaFwdOutputNames[3], &ChunkKdaFwdOutputs::Aqk},
    {kChunkKdaFwdOutputNames[4], &ChunkKdaFwdOutputs::Akk},
    {kChunkKdaFwdOutputNames[5], &ChunkKdaFwdOutputs::w},
    {kChunkKdaFwdOutputNames[6], &ChunkKdaFwdOutputs::u},
    {kChunkKdaFwdOutputNames[7], &ChunkKdaFwdOutputs::qg},
    {kChunkKdaFwdOutputNames[8], &ChunkKdaFwdOutputs::kg},
    {kChunkKdaFwdOutputNames[9], &ChunkKdaFwdOutputs::v_new},
    {kChunkKdaFwdOutputNames[10], &ChunkKdaFwdOutputs::h},
}};

}  // namespace kda
