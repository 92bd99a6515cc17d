#pragma once

// chunk_kda_fwd: the chunked forward pass of Kimi Delta Attention. Per token and value head, with a K x V state S:
//
//     S = diag(exp(gate)) S;  S += beta k (v - S^T k)^T;  attn_out = scale S^T q
//
// computed `chunk_size` tokens at a time. Symbols used for shapes below:
//
//     B batch, T tokens (of all sequences together when cu_seqlens is given), H query/key heads, HV value heads,
//     K key dim, V value dim, C chunk_size, N sequences (B, or 1 in rank-3 layouts, or len(cu_seqlens) - 1),
//     NC chunks (ceil(T/C) per dense sequence; sum over sequences of ceil(T_n/C) with cu_seqlens; max_chunks where
//     cu_seqlens is on a GPU)
//
// Value head j reads query/key head j / (HV/H). Legal: K and V multiples of 16 in 16..256, 0 < H <= HV <= 128, HV % H
// == 0.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "kda/export.h"
#include "kda/plan.h"
#include "kda/status.h"
#include "kda/tensor.h"

namespace kda {

// The order of axes of q, k, v, g and beta. Outputs do not follow it.
enum class Layout : std::uint8_t { kBSND, kBNSD, kTND, kNTD };

[[nodiscard]] KDA_API std::string_view name_of(Layout layout) noexcept;

// "BSND", "BNSD", "TND" or "NTD", upper case. Throws Error (kValue) for anything else.
[[nodiscard]] KDA_API Layout parse_layout(std::string_view name);

// Shapes for layout BSND; BNSD swaps the middle two axes, TND and NTD drop B. Inputs may have any strides, 0 and
// negative too, and are never written.
struct ChunkKdaFwdInputs {
  TensorView q{};              // [B,T,H,K]   fp16 or bf16
  TensorView k{};              // [B,T,H,K]   q's dtype
  TensorView v{};              // [B,T,HV,V]  q's dtype
  TensorView g{};              // [B,T,HV,K]  fp32 or bf16: the gate (natural log), or what it is made from
  TensorView beta{};           // [B,T,HV]    fp32 or bf16
  TensorView A_log{};          // [HV]        fp32; required when use_gate_in_kernel
  TensorView dt_bias{};        // [HV*K]      fp32; optional
  TensorView initial_state{};  // [N,HV,K,V], or [N,HV,V,K] when state_v_first; fp32; optional
  // [N+1] int32 or int64, on a GPU only, instead of the attribute of this name: read there, by the kernels alone, so
  // that a captured graph can be replayed with new lengths. Nobody checks the numbers: each counts as raised to those
  // before it and as lowered to T. Tokens of no sequence are left alone.
  TensorView cu_seqlens{};
};

enum class BetaActivation : std::uint8_t { kNone, kSigmoid, kTwiceSigmoid };

// What chunk_kda and chunk_kda_fwd_direct do to their inputs on the way in, without a pass of its own. The aclnn-shaped
// operator has none of it.
struct ChunkKdaFwdFusions {
  bool qk_l2norm = false;  // q and k divided by sqrt(sum x^2 + 1e-6) along K, in fp32
  BetaActivation beta = BetaActivation::kNone;
  bool any_lower_bound = false;  // lower_bound may be any finite number
  // g is gk: base 2, accumulated within the chunk, fp32. What follows a strong gate is lost in it; -inf minus -inf
  // counts as 0. Not together with use_gate_in_kernel.
  bool g_is_gk = false;

  friend bool operator==(const ChunkKdaFwdFusions&, const ChunkKdaFwdFusions&) = default;
};

struct ChunkKdaFwdAttributes {
  Layout layout = Layout::kBSND;
  // Multiplies attn_out and Aqk; usually K**-0.5. Must be set, and finite. Rounded once to fp32.
  std::optional<double> scale{};
  std::int64_t chunk_size = 64;  // 64 or 128
  // The gate per token and key channel, with x = g + dt_bias:
  //     use_gate_in_kernel false:            g, already activated
  //     use_gate_in_kernel, safe_gate false: -exp(A_log) * softplus(x)
  //     use_gate_in_kernel, safe_gate true:  lower_bound * sigmoid(exp(A_log) * x)
  bool use_gate_in_kernel = false;
  bool safe_gate = false;
  double lower_bound = -5.0;  // in [-5, 0); looked at only when safe_gate and use_gate_in_kernel
  bool state_v_first = false;
  // [N+1] from 0 to T, non-decreasing: packed sequences of different lengths. Rank-4 layouts then need B = 1; N <=
  // 1024.
  std::optional<std::span<const std::int64_t>> cu_seqlens{};
  // With inputs.cu_seqlens, where NC is not known: what is to stand for it in h's shape, at least NC; sequences that
  // have more chunks are cut short. The most that N sequences of T tokens can have, (T + N (C - 1)) / C, when absent.
  std::optional<std::int64_t> max_chunks{};
  // [2*NC] pairs (sequence, chunk within it) in sequence order; checked, and not needed. Only with cu_seqlens.
  std::optional<std::span<const std::int64_t>> chunk_indices{};
  ChunkKdaFwdFusions fusions{};
};

// All but attn_out may be left out; what is left out is not computed where that saves work. Any non-overlapping
// strides. Shapes for rank-4 layouts; TND and NTD drop B.
struct ChunkKdaFwdOutputs {
  TensorView attn_out{};     // [B,T,HV,V]  q's dtype
  TensorView final_state{};  // [N,HV,K,V], or [N,HV,V,K] when state_v_first; fp32
  TensorView gk{};           // [B,HV,T,K]  fp32: cumulative gate within the chunk, divided by ln 2
  TensorView Aqk{};          // [B,HV,T,C]  q's dtype, as all that follow
  TensorView Akk{};          // [B,HV,T,C]
  TensorView w{};            // [B,HV,T,K]
  TensorView u{};            // [B,HV,T,V]
  TensorView qg{};           // [B,HV,T,K]
  TensorView kg{};           // [B,HV,T,K]
  TensorView v_new{};        // [B,HV,T,V]
  TensorView h{};  // [B,NC,HV,K,V] ([NC,HV,K,V] or [1,NC,HV,K,V] with cu_seqlens); last two swapped when state_v_first
};

// Number of outputs and their names, in the order of ChunkKdaFwdOutputs.
inline constexpr int kChunkKdaFwdOutputCount = 11;
inline constexpr std::array<std::string_view, kChunkKdaFwdOutputCount> kChunkKdaFwdOutputNames = {
    "attn_out", "final_state", "gk", "Aqk", "Akk", "w", "u", "qg", "kg", "v_new", "h"};

// The sizes that a legal call has; see the head of this file.
struct ChunkKdaFwdDims {
  std::int64_t B = 0;  // 1 in rank-3 layouts
  std::int64_t T = 0;  // per sequence when dense, of all sequences when packed
  std::int64_t H = 0;
  std::int64_t HV = 0;
  std::int64_t K = 0;
  std::int64_t V = 0;
  std::int64_t C = 0;
  std::int64_t N = 0;
  std::int64_t NC = 0;
};

// Checks inputs and attributes (not outputs) and returns the sizes. Throws Error.
[[nodiscard]] KDA_API ChunkKdaFwdDims chunk_kda_fwd_dims(const ChunkKdaFwdInputs& inputs,
                                                         const ChunkKdaFwdAttributes& attributes);

// What every output must look like for these inputs: row-major views without data. Throws Error.
[[nodiscard]] KDA_API ChunkKdaFwdOutputs chunk_kda_fwd_outputs(const ChunkKdaFwdInputs& inputs,
                                                               const ChunkKdaFwdAttributes& attributes);

// Everything that follows from shapes, strides, dtypes and attributes. Made once, executed any number of times, from
// any number of threads at once, each with a workspace of its own. A plan that was moved from refuses all that asks
// it for what it held with Error (kValue).
class KDA_API ChunkKdaFwdPlan {
 public:
  // Reads the views' metadata, not their data, and copies cu_seqlens. Throws Error.
  ChunkKdaFwdPlan(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs,
                  const ChunkKdaFwdAttributes& attributes, const PlanOptions& options = {});
  ~ChunkKdaFwdPlan();
  ChunkKdaFwdPlan(ChunkKdaFwdPlan&&) noexcept;
  ChunkKdaFwdPlan& operator=(ChunkKdaFwdPlan&&) noexcept;
  ChunkKdaFwdPlan(const ChunkKdaFwdPlan&) = delete;
  ChunkKdaFwdPlan& operator=(const ChunkKdaFwdPlan&) = delete;

  // Computes every present output. The views must be the planned ones but for their data pointers. Allocates nothing
  // and writes nothing but outputs and workspace. Throws Error: kMissing (null data), kValue (a view differs from the
  // planned one, an output overlaps an input or another output, or the workspace any of them), kUnavailable (workspace
  // null or too small).
  void execute(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs, Workspace workspace,
               Stream stream = nullptr) const;

  [[nodiscard]] const ChunkKdaFwdDims& dims() const;
  [[nodiscard]] std::size_t workspace_bytes() const;
  [[nodiscard]] std::span<const WorkspaceRegion> workspace_regions() const;
  // Compile-time variant: 2 for C = 64 and K = V = 128, else 1.
  [[nodiscard]] int variant() const;
  // Kernel launches (GPU) or parallel sections (CPU) of one execution.
  [[nodiscard]] int launches() const;
  // "cpu", ...
  [[nodiscard]] std::string_view backend() const;
  [[nodiscard]] int num_threads() const;
  // kBFloat16 only where it was asked for and the CPU can.
  [[nodiscard]] StateProducts state_products() const;

 private:
  struct Impl;
  [[nodiscard]] const Impl& held() const;
  std::unique_ptr<Impl> impl_;
};

// Plans, allocates a workspace and executes: for callers who run a shape once.
KDA_API void chunk_kda_fwd(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs,
                           const ChunkKdaFwdAttributes& attributes, const PlanOptions& options = {});

}  // namespace kda
