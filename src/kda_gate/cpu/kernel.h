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

// The largest argument of the exponential in the common range, and a limit to g that every format can hold.
inline constexpr float kCommonArgument = 60.0f;
inline constexpr float kCommonGate = 60000.0f;

// Kernels work on whole register blocks, so they read (and do not use) this many entries beyond the last.
inline constexpr int kGatePadding = 64;

// A number too wide or too long for fp32: (hi + lo) * 2^exponent. The exponent of moderate numbers, from 2^-30 to 2^30
// in magnitude, is 0; it is not of others, whose hi is at most 0.5, and may be 0 or not finite.
struct ScaledNumber {
  float hi = 0;
  float lo = 0;
  float exponent = 0;
};

[[nodiscard]] ScaledNumber scaled(double value) noexcept;

// The parameters of a block of columns.
struct GateColumns {
  // Per group or per column. For softplus -exp(A_log) = (hi + hi_lo) * 2^exponent, and 0.75 of hi; lo is what makes up
  // for the errors of hi and of 0.75 hi as factors of 0.75 + lo. For the bounded gate exp(A_log) = hi + lo.
  alignas(64) float rate_hi[kSingleColumns + kGatePadding];
  alignas(64) float rate_lo[kSingleColumns + kGatePadding];
  alignas(64) float rate_hi_lo[kSingleColumns + kGatePadding];
  alignas(64) float rate_three_quarters[kSingleColumns + kGatePadding];
  alignas(64) float rate_exponent[kSingleColumns + kGatePadding];
  // Per column.
  alignas(64) float bias[kGroupedColumns + kGatePadding];
  ScaledNumber lower_bound;
  // Elements of g up to it in magnitude have gates in the common range (activation-inl.h): the factors, exp(A_log) of
  // softplus or lower_bound, are moderate, and the argument of the exponential is at most kCommonArgument. Negative:
  // none.
  float common_limit = -1;
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
