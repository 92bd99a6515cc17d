#pragma once

// The building blocks of chunk_kda_fwd's CPU kernels, one function each, of the instruction set chosen for this
// process.

#include <cstdint>

#include "chunk_kda_fwd/cpu/kernel.h"
#include "core/gate_mode.h"
#include "cpu/rows.h"

namespace kda::bench {

struct MicroKernels {
  // float32 numbers in a vector, and columns in a full panel.
  int lanes;
  int panel_columns;
  // Multiply-adds on as many independent sums as hide their latency; returns how many operations that were.
  double (*multiply_add)(std::int64_t rounds);
  // out [16][columns] = left [16][depth] times the panels of `right`, as MulAddPanel is used for a block.
  void (*panel_product)(int depth, int columns, const float* left, const float* right, float* out);
  void (*widen)(const cpu::Rows& from, const cpu::RowRange& range, float* to, int ld);
  void (*round)(const float* from, int ld, const cpu::Rows& to, const cpu::RowRange& range);
  // to = exp(from), `count` a multiple of 16.
  void (*exp)(int count, const float* from, float* to);
  // The gates of a block, in place.
  void (*gate)(GateMode mode, int rows, int cols, const float* bias, float* gate);
  // x [16][columns] = (I + A)^{-1} x with kk = -A.
  void (*solve)(const float* kk, int columns, float* x);
  // The stages of one block: everything that needs no state; then, for all columns of the state, v_new, attn_out and
  // the state behind the block.
  void (*prepare)(const cpu::ChunkShape& shape, const cpu::Item& item, const cpu::PrepareScratch& scratch,
                  const cpu::BlockSlot& slot);
  void (*predict)(const cpu::ChunkShape& shape, const cpu::Item& item, const cpu::BlockSlot& slot, float* state,
                  float* v_new);
  void (*finalize)(const cpu::ChunkShape& shape, const cpu::Item& item, const cpu::BlockSlot& slot, float* state,
                   const float* v_new, float* out);
  void (*update)(const cpu::ChunkShape& shape, const cpu::BlockSlot& slot, float* state, const float* v_new);
};

[[nodiscard]] const MicroKernels& micro_kernels();

}  // namespace kda::bench
