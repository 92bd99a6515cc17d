// kda_gate's CPU kernels: this file is compiled once per instruction set.

#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kda_gate/cpu/kernel.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/rows-inl.h"
#include "cpu/targets.h"
#include "kda_gate/cpu/activation-inl.h"
#include "kda_gate/cpu/kernel.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {
namespace {

// The gates of x [kGateBlock] in the general way, which is rare enough to be one function for all formats.
template <class Gate>
HWY_NOINLINE void MakeGeneralBlock(const GateColumns& columns, int first, const float* x, float* y) {
  const Vs gates = Gate::template Gate<false>(columns, first, LoadVectors(x));
  ForVectors([&](auto i) KDA_INLINE_LAMBDA { hn::Store(gates.part[i], D(), y + i * kLanes); });
}

template <class In, class Out, class Gate>
HWY_INLINE void MakeBlock(const GateColumns& columns, int first, typename In::Storage limit,
                          const typename In::Storage* g, typename Out::Storage* out) {
  Vs x;
  ForVectors([&](auto i) KDA_INLINE_LAMBDA { x.part[i] = In::Load(g + i * kLanes); });
  Vs y;
  if (HWY_LIKELY(IsWithin(g, limit))) {
    y = Gate::template Gate<true>(columns, first, x);
  } else {
    HWY_ALIGN float block[kGateBlock];
    ForVectors([&](auto i) KDA_INLINE_LAMBDA { hn::Store(x.part[i], D(), block + i * kLanes); });
    MakeGeneralBlock<Gate>(columns, first, block, block);
    y = LoadVectors(block);
  }
  ForVectors([&](auto i) KDA_INLINE_LAMBDA { Out::Store(y.part[i], out + i * kLanes); });
}

template <class In, class Out, class Gate>
void MakeGates(const GateColumns& columns, int first, int count, const void* g, void* out) {
  const auto* from = static_cast<const typename In::Storage*>(g);
  auto* to = static_cast<typename Out::Storage*>(out);
  typename In::Storage limit;
  StoreOne<In>(columns.common_limit, &limit);
  int done = 0;
  for (; done + kGateBlock <= count; done += kGateBlock) {
    MakeBlock<In, Out, Gate>(columns, first + done, limit, from + done, to + done);
  }
  if (done == count) return;
  // A partial block by way of whole ones, so that every element goes through the same operations.
  typename In::Storage in_block[kGateBlock] = {};
  typename Out::Storage out_block[kGateBlock];
  const auto rest = static_cast<std::size_t>(count - done);
  std::memcpy(in_block, from + done, rest * sizeof(*from));
  MakeBlock<In, Out, Gate>(columns, first + done, limit, in_block, out_block);
  std::memcpy(to + done, out_block, rest * sizeof(*to));
}

template <class In, class Out, template <bool, bool> class Gate>
GateKernel* KernelFor(const GateKernelKey& key) {
  if (key.is_grouped) {
    return key.has_bias ? &MakeGates<In, Out, Gate<true, true>> : &MakeGates<In, Out, Gate<false, true>>;
  }
  return key.has_bias ? &MakeGates<In, Out, Gate<true, false>> : &MakeGates<In, Out, Gate<false, false>>;
}

}  // namespace

GateKernel* Kernel(const GateKernelKey& key) {
  GateKernel* kernel = nullptr;
  WithFormat(key.g_dtype, [&](auto in) HWY_ATTR {
    WithFormat(key.out_dtype, [&](auto out) HWY_ATTR {
      using In = decltype(in);
      using Out = decltype(out);
      kernel = key.is_bounded ? KernelFor<In, Out, BoundedGate>(key) : KernelFor<In, Out, SoftplusGate>(key);
    });
  });
  return kernel;
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kda::cpu {

ScaledNumber scaled(double value) noexcept {
  int exponent = 0;
  double fraction = std::frexp(value, &exponent) / 2;  // in [0.25, 0.5)
  if (!std::isfinite(value) || value == 0) return {static_cast<float>(value), 0, 1};
  ++exponent;
  if (std::abs(exponent) <= 30) {
    fraction = value;
    exponent = 0;
  }
  const auto hi = static_cast<float>(fraction);
  return {hi, static_cast<float>(fraction - static_cast<double>(hi)), static_cast<float>(exponent)};
}

GateKernel* gate_kernel(const GateKernelKey& key) { return KDA_FOR_CHOSEN_TARGET(Kernel)(key); }

}  // namespace kda::cpu
#endif  // HWY_ONCE
