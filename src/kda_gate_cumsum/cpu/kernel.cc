// kda_gate_cumsum's CPU kernel: this file is compiled once per instruction set.

#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kda_gate_cumsum/cpu/kernel.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <algorithm>

#include "cpu/gate-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/targets.h"
#include "kda_gate_cumsum/cpu/kernel.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace {

constexpr int kBlockRows = 16;
constexpr int kMaxColumns = 256;

// The last K % 16 columns, element by element: nothing beyond a row may be touched.
void WidenTail(const Rows& src, const RowRange& range, float* dst, int ld) {
  WithFormat(src.dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    for (int r = 0; r < range.rows; ++r) {
      for (int c = 0; c < range.cols; ++c) {
        dst[r * ld + c] = LoadOne<Format>(src.at<typename Format::Storage>(range.token + r, range.column + c));
      }
    }
  });
}

void StoreTail(const float* src, int ld, const Rows& dst, const RowRange& range) {
  for (int r = 0; r < range.rows; ++r) {
    for (int c = 0; c < range.cols; ++c) *dst.at<float>(range.token + r, range.column + c) = src[r * ld + c];
  }
}

void GateCumsum(const GateCumsumItem& item) {
  HWY_ALIGN float bias[kMaxColumns] = {};
  HWY_ALIGN float sum[kMaxColumns] = {};
  HWY_ALIGN float gate[kBlockRows * kMaxColumns] = {};
  HWY_ALIGN float gk[kBlockRows * kMaxColumns];
  const int whole = item.K / 16 * 16;
  const int ld = (item.K + 15) / 16 * 16;
  if (item.dt_bias != nullptr) {
    for (int c = 0; c < item.K; ++c) bias[c] = item.dt_bias[c * item.dt_bias_stride];
  }
  for (int r = 0; r < item.rows; r += kBlockRows) {
    const RowRange columns{item.token + r, std::min(kBlockRows, item.rows - r), 0, whole};
    const RowRange tail{columns.token, columns.rows, whole, item.K - whole};
    WidenRows(item.g, columns, gate, ld);
    WidenTail(item.g, tail, gate + whole, ld);
    MakeGates(item.gate_mode, item.exp_A_log, item.lower_bound, columns.rows, ld, bias, gate);
    AccumulateGates(columns.rows, ld, gate, sum, gk);
    RoundRows(gk, ld, item.gk, columns);
    StoreTail(gk + whole, ld, item.gk, tail);
  }
}

}  // namespace

GateCumsumKernel* Kernel() { return &GateCumsum; }

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {

GateCumsumKernel* gate_cumsum_kernel() {
  static GateCumsumKernel* const kernel = KDA_FOR_CHOSEN_TARGET(Kernel)();
  return kernel;
}

}  // namespace kda::cpu
#endif  // HWY_ONCE
