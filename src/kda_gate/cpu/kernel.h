#pragma once

// What the planned call (plan.cc, any compiler flags) and the kernels (kernel.cc, once per instruction set) share.

#include "kda/tensor.h"

namespace kda::cpu {

// A column is one (head, channel) pair of a row, or of one of several rows that lie behind each other. Work proceeds by
// blocks of columns, whose parameters are tables.

// Where the channels of a head are a multiple of this many, exp(A_log) needs one entry for so many columns.
inline constexpr int kGateGroup = 16;

// The columns of a block: with one entry per group, and with one per column.
inline constexpr int kGroupedColumns = 8192;
inline constexpr int kSingleColumns = 1024;

// Kernels work on whole register blocks, so they read (and do not use) this many entries beyond the last.
inline constexpr int kGatePadding = 64;

// A number too wide or too long for fp32: (hi + lo) * 2^exponent with |hi| in [0.25, 0.5], or 0.
struct ScaledNumber {
  float hi = 0;
  float lo = 0;
  float exponent = 0;
};

[[nodiscard]] ScaledNumber scaled(double value) noexcept;

// The parameters of a block of columns.
struct GateColumns {
  // Per group or per column. For softplus -exp(A_log) = hi * (1 + lo) * 2^exponent, and hi * 0.75: exactly, as hi has
  // 22 bits. For the bounded gate exp(A_log) = hi + lo.
  alignas(64) float rate_hi[kSingleColumns + kGatePadding];
  alignas(64) float rate_lo[kSingleColumns + kGatePadding];
  alignas(64) float rate_exponent[kSingleColumns + kGatePadding];
  alignas(64) float rate_three_quarters[kSingleColumns + kGatePadding];
  // Per column.
  alignas(64) float bias[kGroupedColumns + kGatePadding];
  ScaledNumber lower_bound;
};

// The gates of `count` adjacent elements that belong to columns first, first + 1, ...; first is a multiple of
// kGateGroup where entries are grouped.
using GateKernel = void(const GateColumns& columns, int first, int count, const void* g, void* out);

struct GateKernelKey {
  Dtype g_dtype = Dtype::kFloat32;
  Dtype out_dtype = Dtype::kFloat32;
  bool is_bounded = false;
  bool has_bias = false;
  bool is_grouped = false;
};

// Of the instruction set chosen for this process.
[[nodiscard]] GateKernel* gate_kernel(const GateKernelKey& key);

}  // namespace kda::cpu
