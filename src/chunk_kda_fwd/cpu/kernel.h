#pragma once

// What the planned call (plan.cc, any compiler flags) and the kernels (kernel.cc, once per instruction set) share.
//
// A chunk is worked on in blocks of 16 tokens. Within a block, the product of the steps' decays up to a row is at most
// 1 and computed directly, so no exponent is ever positive and no gate, not even -inf, needs a case of its own. The
// state moves on block by block; attn_out, v_new, h and final_state follow from it alone, whichever other outputs are
// asked for.

#include <cstddef>
#include <cstdint>

#include "chunk_kda_fwd/problem.h"
#include "cpu/rows.h"
#include "kda/plan.h"

namespace kda::cpu {

inline constexpr int kBlock = 16;
inline constexpr int kMaxBlocks = 128 / kBlock;

// The sizes and attributes that all work items of a call share.
struct ChunkShape {
  int K = 0;
  int V = 0;
  int C = 0;
  GateMode gate_mode = GateMode::kActivated;
  bool qk_l2norm = false;
  BetaActivation beta_activation = BetaActivation::kNone;
  float scale = 0;
  float lower_bound = 0;
  // Whether any of Aqk, Akk, w, u, qg is wanted: they need scratch and products of their own.
  bool spans_blocks = false;
  StateProducts products = StateProducts::kFloat32;

  [[nodiscard]] int blocks() const noexcept { return C / kBlock; }
};

// initial_state, final_state or h of one (sequence, head): element (chunk, k, v) at data + chunk * chunk + k * k + v *
// v.
struct StateView {
  std::byte* data = nullptr;  // null: absent
  std::int64_t chunk = 0;
  std::int64_t k = 0;
  std::int64_t v = 0;
  Dtype dtype = Dtype::kFloat32;
  bool streams = false;  // as in Rows

  [[nodiscard]] bool present() const noexcept { return data != nullptr; }
};

// One sequence of one value head.
struct Item {
  std::int64_t tokens = 0;
  Rows q, k, v, g, beta;
  float gate_factor = 1;           // exp(A_log), at most FLT_MAX
  const float* dt_bias = nullptr;  // of this head; null: absent
  std::int64_t dt_bias_stride = 0;
  StateView initial_state, final_state, h;
  Rows attn_out, gk, Aqk, Akk, w, u, qg, kg, v_new;

  [[nodiscard]] std::int64_t chunks(int C) const noexcept { return (tokens + C - 1) / C; }

  // Whether an output needs the products between blocks of a chunk.
  [[nodiscard]] bool wants_akk() const noexcept { return Akk.present() || w.present() || u.present(); }
};

// Two bf16 numbers, the one that comes first in the lower half.
using Pair = std::uint32_t;

// Hands out parts of a float array, each at a multiple of 64 bytes; with a null base it only counts.
class FloatArena {
 public:
  explicit FloatArena(float* base) noexcept : base_(base) {}

  [[nodiscard]] float* take(std::size_t count) noexcept {
    float* part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count + 15) / 16 * 16;
    return part;
  }

  // None where products are not bf16.
  [[nodiscard]] Pair* take_pairs(const ChunkShape& s, std::size_t count) noexcept {
    return reinterpret_cast<Pair*>(take(s.products == StateProducts::kBFloat16 ? count : 0));
  }

  [[nodiscard]] std::size_t used() const noexcept { return used_; }

 private:
  float* base_;
  std::size_t used_ = 0;
};

// What the state's way through a block needs. Rows beyond the last valid token are neutral: zero, or decay 1.
struct BlockSlot {
  float* q_decayed;  // [16,K]  q * decay from the block's first row on
  float* k_decayed;  // [16,K]  k * the same
  float* k_rest;     // [16,K]  k * decay of the rows that follow in the block
  float* decay;      // [K]     decay of the whole block
  float* qk;         // [16,16] row i, column j <= i: sum_d q_i k_j E_ij (without scale)
  float* kk;         // [16,16] row i, column j < i: -beta_i sum_d k_i k_j E_ij
  float* beta;       // [16]
  // Where products are bf16 only:
  Pair* q_decayed_pairs;  // [16,K/2] of adjacent channels
  Pair* k_decayed_pairs;  // [16,K/2]
  Pair* k_rest_pairs;     // [8,K]    of adjacent tokens

  BlockSlot() = default;
  BlockSlot(FloatArena& arena, const ChunkShape& s) noexcept
      : q_decayed(arena.take(kBlock * static_cast<std::size_t>(s.K))),
        k_decayed(arena.take(kBlock * static_cast<std::size_t>(s.K))),
        k_rest(arena.take(kBlock * static_cast<std::size_t>(s.K))),
        decay(arena.take(static_cast<std::size_t>(s.K))),
        qk(arena.take(std::size_t{kBlock} * kBlock)),
        kk(arena.take(std::size_t{kBlock} * kBlock)),
        beta(arena.take(kBlock)),
        q_decayed_pairs(arena.take_pairs(s, kBlock / 2 * static_cast<std::size_t>(s.K))),
        k_decayed_pairs(arena.take_pairs(s, kBlock / 2 * static_cast<std::size_t>(s.K))),
        k_rest_pairs(arena.take_pairs(s, kBlock / 2 * static_cast<std::size_t>(s.K))) {}
};

// The prepared blocks of one chunk.
struct ChunkSlot {
  BlockSlot blocks[kMaxBlocks];

  ChunkSlot(FloatArena& arena, const ChunkShape& s) noexcept {
    for (int b = 0; b < s.blocks(); ++b) blocks[b] = BlockSlot(arena, s);
  }
};

// Scratch of the stages that do not touch the state (gate, prepare, post_wu).
struct PrepareScratch {
  float* q;        // [16,K]
  float* k;        // [16,K]
  float* gate;     // [16,K] natural logarithm, then decay per step
  float* bias;     // [K]
  float* gk;       // [K]    sum of the gates since the chunk began
  float* partial;  // [16,8,16] partial sums of qk and kk for pairs of columns
  float* rows;     // [16,max(C,K,V)] an output on its way out
  float* prefix;   // [K] decay from the chunk's first row to the current block
  // Where shape.spans_blocks only:
  float* k_rest_t;  // [K,C]  k * decay from its row to the current block, transposed
  float* akk_rows;  // [16,C] -beta_i A_ij of the current block's rows
  float* akk;       // [C,C]
  float* w;         // [C,K]
  float* u;         // [C,V]

  PrepareScratch(FloatArena& arena, const ChunkShape& s) noexcept {
    const auto K = static_cast<std::size_t>(s.K);
    const auto V = static_cast<std::size_t>(s.V);
    const auto C = static_cast<std::size_t>(s.C);
    const std::size_t widest = C > K ? (C > V ? C : V) : (K > V ? K : V);
    q = arena.take(kBlock * K);
    k = arena.take(kBlock * K);
    gate = arena.take(kBlock * K);
    bias = arena.take(K);
    gk = arena.take(K);
    partial = arena.take(std::size_t{kBlock} * 8 * 16);
    rows = arena.take(kBlock * widest);
    prefix = arena.take(K);
    const std::size_t spanning = s.spans_blocks ? C : 0;
    k_rest_t = arena.take(K * spanning);
    akk_rows = arena.take(kBlock * spanning);
    akk = arena.take(C * spanning);
    w = arena.take(spanning * K);
    u = arena.take(spanning * V);
  }
};

// Scratch of the stages that carry the state on (fwd_h, finalize) through one panel of columns.
struct StateScratch {
  float* v_new;  // [16,panel] beta * (v - k_decayed h), then solved for v_new
  float* out;    // [16,panel]
  float* rows;   // [16,K]     a transposed state on its way in or out
  // Where products are bf16 only:
  Pair* state_pairs;  // [K/2,panel] of adjacent channels of the state
  Pair* v_new_pairs;  // [8,panel]   of adjacent tokens

  StateScratch(FloatArena& arena, const ChunkShape& s) noexcept
      : v_new(arena.take(std::size_t{kBlock} * 64)),
        out(arena.take(std::size_t{kBlock} * 64)),
        rows(arena.take(kBlock * static_cast<std::size_t>(s.K))),
        state_pairs(arena.take_pairs(s, 32 * static_cast<std::size_t>(s.K))),
        v_new_pairs(arena.take_pairs(s, std::size_t{kBlock} / 2 * 64)) {}
};

// Columns [begin, end) of the state, at panel boundaries. The state is held by panels of columns: the panel that starts
// at column c lies at state + c * K, its K rows adjacent.
struct Columns {
  int begin = 0;
  int end = 0;
};

class ChunkPrefetch;

// The kernels of one instruction set.
struct ChunkKernels {
  StateProducts products;
  int panel_columns;
  // Fills the slot from the inputs and writes gk, Aqk, Akk, w, u, qg and kg.
  void (*prepare)(const ChunkShape&, const Item&, std::int64_t chunk, const ChunkSlot&, const PrepareScratch&);
  // Carries the state's columns over one chunk and writes h (before), v_new and attn_out. Meanwhile brings another
  // chunk's inputs near.
  void (*advance)(const ChunkShape&, const Item&, std::int64_t chunk, const ChunkSlot&, float* state, Columns,
                  const StateScratch&, ChunkPrefetch&);
  // state = initial_state, or 0; final_state = state.
  void (*load_state)(const ChunkShape&, const Item&, float* state, Columns, const StateScratch&);
  void (*store_state)(const ChunkShape&, const Item&, const float* state, Columns, const StateScratch&);
};

// Of the instruction set chosen for this process: those with the products asked for, if it has them, else with fp32.
[[nodiscard]] const ChunkKernels& chunk_kernels(StateProducts products);

}  // namespace kda::cpu
