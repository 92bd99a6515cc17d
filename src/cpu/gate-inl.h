// From raw gates to gates, and their cumulative sum gk, on dense fp32 rows.
#if defined(KDA_SRC_CPU_GATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_SRC_CPU_GATE_INL_H_
#undef KDA_SRC_CPU_GATE_INL_H_
#else
#define KDA_SRC_CPU_GATE_INL_H_
#endif

#include "core/gate_mode.h"
#include "cpu/elementary-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// x = g + dt_bias -> gate, in place.
template <class Activation>
HWY_INLINE void ActivateRows(int rows, int cols, const float* HWY_RESTRICT bias, float* HWY_RESTRICT gate,
                             const Activation& activation) {
  const D d;
  for (int r = 0; r < rows; ++r) {
    float* row = gate + r * cols;
    for (int c = 0; c < cols; c += static_cast<int>(kLanes)) {
      hn::Store(activation(hn::Add(hn::Load(d, row + c), hn::Load(d, bias + c))), d, row + c);
    }
  }
}

// gate [rows][cols], cols a multiple of kLanes: from what the operator was given to natural-log gates.
HWY_INLINE void MakeGates(GateMode mode, float exp_A_log, float lower_bound, int rows, int cols,
                          const float* HWY_RESTRICT bias, float* HWY_RESTRICT gate) {
  if (mode == GateMode::kSoftplus) {
    const V factor = Broadcast(-exp_A_log);
    ActivateRows(rows, cols, bias, gate, [&](V x) HWY_ATTR { return hn::Mul(factor, Softplus(x)); });
  } else if (mode == GateMode::kBounded) {
    const V factor = Broadcast(exp_A_log);
    const V bound = Broadcast(lower_bound);
    ActivateRows(rows, cols, bias, gate, [&](V x) HWY_ATTR { return hn::Mul(bound, Sigmoid(hn::Mul(factor, x))); });
  }
}

// gk [rows][cols] of these gates; `sum` [cols] carries the chunk's cumulative gate from block to block.
HWY_INLINE void AccumulateGates(int rows, int cols, const float* HWY_RESTRICT gate, float* HWY_RESTRICT sum,
                                float* HWY_RESTRICT gk) {
  const D d;
  const V per_ln2 = Broadcast(1.44269504f);
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < cols; c += static_cast<int>(kLanes)) {
      const V total = hn::Add(hn::Load(d, sum + c), hn::Load(d, gate + r * cols + c));
      hn::Store(total, d, sum + c);
      hn::Store(hn::Mul(total, per_ln2), d, gk + r * cols + c);
    }
  }
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
