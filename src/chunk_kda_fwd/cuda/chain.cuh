#pragma once

// The kernel that makes attn_out, v_new, h and final_state. A block of threads owns up to 16 columns per advancing warp
// of the state of one sequence and value head; its other warps prepare the blocks of tokens ahead of them.

#include "chunk_kda_fwd/cuda/advance.cuh"
#include "chunk_kda_fwd/cuda/prepare.cuh"

namespace kda::cuda {

template <int kTiles_, int kAdvancing_, int kPreparing_>
struct ChainShape {
  static constexpr int kTiles = kTiles_;  // of eight key channels
  static constexpr int kWidth = 8 * kTiles;
  static constexpr int kAdvancing = kAdvancing_;  // warps
  static constexpr int kPreparing = kPreparing_;
  static constexpr int kThreads = 32 * (kAdvancing + kPreparing);
  static constexpr int kColumns = 16 * kAdvancing;

  // Shared memory: staging, exchanges, slots.
  static constexpr int kFixedBytes = sizeof(Staging<kWidth>) + kAdvancing * sizeof(Exchange);
  static constexpr int kSlotBytes = sizeof(Slot<kWidth>);
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    chain_kernel(const __grid_constant__ ChunkKdaFwdTask task, const int slots) {
  extern __shared__ __align__(16) std::byte memory[];
  using Stage = Staging<Shape::kWidth>;
  constexpr int kBarrier = 1;  // of the preparing warps; then full[slots] and empty[slots]
  auto* slot = reinterpret_cast<Slot<Shape::kWidth>*>(memory + Shape::kFixedBytes);
  const auto full = [](int s) { return kBarrier + 1 + s; };
  const auto empty = [slots](int s) { return kBarrier + 1 + slots + s; };

  const std::int64_t index = blockIdx.x / task.panels;
  const int panel = static_cast<int>(blockIdx.x % task.panels);
  const std::int64_t place = index / task.HV;
  const std::int64_t n = task.is_packed ? task.sequences[place].longest : place;
  const Item item = item_of(task, n, index % task.HV);
  const std::int64_t blocks = (item.tokens + kBlock - 1) / kBlock;

  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= Shape::kAdvancing) {
    const int thread = static_cast<int>(threadIdx.x) - 32 * Shape::kAdvancing;
    Preparer<Shape::kWidth, Shape::kPreparing> preparer(task, item, *reinterpret_cast<Stage*>(memory), thread,
                                                        kBarrier);
    preparer.clear_staging();
    if (blocks > 0) preparer.fetch(0);
    for (std::int64_t b = 0; b < blocks; ++b) {
      const int s = static_cast<int>(b % slots);
      preparer.stage(b * kBlock);
      if (b + 1 < blocks) preparer.fetch((b + 1) * kBlock);
      if (b >= slots) barrier_sync(empty(s), Shape::kThreads);
      preparer.fill(slot[s]);
      barrier_arrive(full(s), Shape::kThreads);
    }
    return;
  }

  auto* exchange = reinterpret_cast<Exchange*>(memory + sizeof(Stage)) + warp;
  const int column = panel * Shape::kColumns + 16 * warp;
  const bool is_active = column < task.V;
  Advancer<Shape::kTiles> advancer(task, item, *exchange, column, static_cast<int>(threadIdx.x) % 32);
  if (is_active) {
    advancer.load_state();
    if (blocks > 0) advancer.fetch(0);
  }
  const int blocks_per_chunk = task.C / kBlock;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const int s = static_cast<int>(b % slots);
    if (is_active && task.at.h != nullptr && b % blocks_per_chunk == 0) advancer.store_h(b / blocks_per_chunk);
    barrier_sync(full(s), Shape::kThreads);
    if (is_active) advancer.advance(slot[s], b * kBlock, b + 1 < blocks);
    if (b + slots < blocks) barrier_arrive(empty(s), Shape::kThreads);
  }
  if (is_active) advancer.store_state();
}

}  // namespace kda::cuda
