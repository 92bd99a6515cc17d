// chunk_kda_fwd on the CPU: workspace, work items and the order in which threads do them.

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <vector>

#include "chunk_kda_fwd/backend.h"
#include "chunk_kda_fwd/cpu/kernel.h"
#include "chunk_kda_fwd/cpu/prefetch.h"
#include "chunk_kda_fwd/cpu/schedule.h"
#include "core/checked.h"
#include "core/workspace.h"
#include "cpu/thread_pool.h"

namespace kda::cpu {
namespace {

StateView state_of(const void* data, Dtype dtype, const StateStrides& strides, std::int64_t offset) {
  if (data == nullptr) return {};
  auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));
  return {bytes + offset * static_cast<std::int64_t>(size_of(dtype)), strides.chunk, strides.k, strides.v, dtype};
}

// An attn_out of more bytes than caches hold is not there any more when a reader comes.
constexpr std::int64_t kStreamedBytes = 1 << 20;

bool streams_outputs(const ChunkKdaFwdDims& d) noexcept {
  return saturating_mul(saturating_mul(d.B, d.T), saturating_mul(d.HV, d.V)) > kStreamedBytes / 2;
}

// States of more bytes than caches keep until the next call.
constexpr std::int64_t kStreamedStateBytes = std::int64_t{8} << 20;

bool streams_states(const ChunkKdaFwdDims& d) noexcept {
  return saturating_mul(saturating_mul(d.N, d.HV), saturating_mul(d.K, d.V)) > kStreamedStateBytes / 4;
}

Item make_item(const ChunkKdaFwdProblem& p, const ChunkKdaFwdPointers& at, std::int64_t n, std::int64_t head) {
  const Sequence sequence = p.sequence(n);
  const std::int64_t key_head = head / p.group();
  const auto rows = [&](const void* data, const RowStrides& strides) {
    return rows_of(data, p.dtype, strides, sequence, head);
  };
  Item item;
  item.tokens = sequence.tokens;
  item.q = rows_of(at.q, p.dtype, p.q, sequence, key_head);
  item.k = rows_of(at.k, p.dtype, p.k, sequence, key_head);
  item.v = rows(at.v, p.v);
  item.g = rows_of(at.g, p.g_dtype, p.g, sequence, head);
  item.beta = rows_of(at.beta, p.beta_dtype, p.beta, sequence, head);
  if (p.has_A_log) item.gate_factor = bounded_exp(at.A_log[head * p.A_log_stride]);
  if (p.has_dt_bias) {
    item.dt_bias = at.dt_bias + head * p.dims.K * p.dt_bias_stride;
    item.dt_bias_stride = p.dt_bias_stride;
  }
  const auto state = [&](const float* data, const StateStrides& strides) {
    return state_of(data, Dtype::kFloat32, strides, n * strides.seq + head * strides.head);
  };
  item.initial_state = state(at.initial_state, p.initial_state);
  item.final_state = state(at.final_state, p.final_state);
  item.h = state_of(at.h, p.dtype, p.h, sequence.batch * p.h.seq + sequence.first_chunk * p.h.chunk + head * p.h.head);
  item.attn_out = rows(at.attn_out, p.attn_out);
  item.gk = rows_of(at.gk, Dtype::kFloat32, p.gk, sequence, head);
  item.Aqk = rows(at.Aqk, p.Aqk);
  item.Akk = rows(at.Akk, p.Akk);
  item.w = rows(at.w, p.w);
  item.u = rows(at.u, p.u);
  item.qg = rows(at.qg, p.qg);
  item.kg = rows(at.kg, p.kg);
  item.v_new = rows(at.v_new, p.v_new);
  const bool streams = streams_outputs(p.dims);
  for (Rows* output :
       {&item.attn_out, &item.gk, &item.Aqk, &item.Akk, &item.w, &item.u, &item.qg, &item.kg, &item.v_new}) {
    output->streams = streams;
  }
  item.h.streams = streams;
  item.final_state.streams = streams_states(p.dims);
  return item;
}

ChunkShape make_shape(const ChunkKdaFwdProblem& p, StateProducts products) {
  ChunkShape shape;
  shape.K = static_cast<int>(p.dims.K);
  shape.V = static_cast<int>(p.dims.V);
  shape.C = static_cast<int>(p.dims.C);
  shape.gate_mode = p.gate_mode;
  shape.qk_l2norm = p.qk_l2norm;
  shape.beta_activation = p.beta_activation;
  shape.scale = p.scale;
  shape.lower_bound = p.lower_bound;
  shape.spans_blocks = p.has_Aqk || p.has_Akk || p.has_w || p.has_u || p.has_qg;
  shape.products = products;
  return shape;
}

// What one thread needs to run items alone; the scratch alone also serves shared items.
struct ThreadSpace {
  PrepareScratch prepare;
  StateScratch advance;
  ChunkSlot slot;
  float* states[kMaxGroup];

  ThreadSpace(FloatArena& arena, const ChunkShape& s, std::int64_t group) noexcept
      : prepare(arena, s), advance(arena, s), slot(arena, s) {
    for (std::int64_t i = 0; i < group; ++i) {
      states[i] = arena.take(static_cast<std::size_t>(s.K) * static_cast<std::size_t>(s.V));
    }
  }
};

template <class Part, class... Sizes>
std::int64_t floats_of(const ChunkShape& s, Sizes... sizes) {
  FloatArena arena(nullptr);
  const Part part(arena, s, sizes...);
  static_cast<void>(part);
  return static_cast<std::int64_t>(arena.used());
}

class CpuChunkKdaFwd final : public ChunkKdaFwdKernel {
 public:
  CpuChunkKdaFwd(const ChunkKdaFwdProblem& problem, const PlanOptions& options)
      : problem_(problem),
        kernels_(&chunk_kernels(options.state_products)),
        shape_(make_shape(problem, kernels_->products)),
        schedule_(problem, threads_for(options)),
        thread_floats_(floats_of<ThreadSpace>(shape_, schedule_.max_group())),
        slot_floats_(floats_of<ChunkSlot>(shape_)) {
    WorkspaceBuilder builder;
    const std::int64_t shared = schedule_.shared();
    threads_at_ = builder.add("threads", {schedule_.threads(), thread_floats_}, sizeof(float));
    slots_at_ = builder.add("shared_chunks", {2, shared, schedule_.window_chunks(), slot_floats_}, sizeof(float));
    states_at_ = builder.add("shared_states", {shared, shape_.K, shape_.V}, sizeof(float));
    regions_ = builder.take();
    ThreadPool::instance().reserve(schedule_.threads());
  }

  [[nodiscard]] std::span<const WorkspaceRegion> regions() const noexcept override { return regions_; }

  [[nodiscard]] int launches() const noexcept override {
    const std::int64_t shared = schedule_.shared() == 0 ? 0 : schedule_.windows() + 1;
    const std::int64_t all = shared + (schedule_.items() > schedule_.shared() ? 1 : 0);
    return static_cast<int>(std::min<std::int64_t>(all, std::numeric_limits<int>::max()));
  }

  [[nodiscard]] int num_threads() const noexcept override { return schedule_.threads(); }

  [[nodiscard]] StateProducts state_products() const noexcept override { return shape_.products; }

  void run(const ChunkKdaFwdPointers& pointers, std::byte* workspace, Stream /*stream*/) const override {
    const Call call{pointers, workspace};
    ThreadPool& pool = ThreadPool::instance();
    if (schedule_.shared() > 0) {
      for (std::int64_t window = 0; window <= schedule_.windows(); ++window) {
        pool.for_each(prepare_units() + advance_units(), schedule_.threads(),
                      [&](std::int64_t unit, int thread) { run_shared(call, window, unit, thread); });
      }
    }
    pool.for_each(schedule_.groups(), schedule_.threads(),
                  [&](std::int64_t group, int thread) { run_group(call, group, thread); });
  }

 private:
  struct Call {
    const ChunkKdaFwdPointers& pointers;
    std::byte* workspace;
  };

  [[nodiscard]] Item item_of(const Call& call, std::int64_t index) const {
    return make_item(problem_, call.pointers, schedule_.sequence_of(index), schedule_.head_of(index));
  }

  [[nodiscard]] ThreadSpace space_of(const Call& call, int thread) const {
    FloatArena arena(reinterpret_cast<float*>(call.workspace + threads_at_) + thread * thread_floats_);
    return {arena, shape_, schedule_.max_group()};
  }

  [[nodiscard]] ChunkSlot shared_slot(const Call& call, std::int64_t item, std::int64_t chunk) const {
    const std::int64_t window = chunk / schedule_.window_chunks();
    const std::int64_t place = chunk % schedule_.window_chunks();
    const std::int64_t index = ((window % 2) * schedule_.shared() + item) * schedule_.window_chunks() + place;
    FloatArena arena(reinterpret_cast<float*>(call.workspace + slots_at_) + index * slot_floats_);
    return {arena, shape_};
  }

  void run_group(const Call& call, std::int64_t group, int thread) const {
    const std::int64_t first = schedule_.group_begin(group);
    const std::int64_t count = schedule_.group_begin(group + 1) - first;
    const ThreadSpace space = space_of(call, thread);
    const Columns all{0, shape_.V};
    Item items[kMaxGroup];
    std::int64_t chunks = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      items[i] = item_of(call, first + i);
      chunks = std::max(chunks, items[i].chunks(shape_.C));
    }
    const auto load = [&](std::int64_t i) {
      kernels_->load_state(shape_, items[i], space.states[i], all, space.advance);
    };
    const auto store = [&](std::int64_t i) {
      if (!items[i].final_state.present()) return;
      kernels_->store_state(shape_, items[i], space.states[i], all, space.advance);
    };
    // A state comes right before its item's first chunk and leaves right behind its last one: while it is in the cache,
    // and while others are worked on.
    for (std::int64_t i = 0; i < count; ++i) {
      if (items[i].tokens > 0) continue;
      load(i);
      store(i);
    }
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (std::int64_t i = 0; i < count; ++i) {
        if (chunk >= items[i].chunks(shape_.C)) continue;
        ChunkPrefetch next = prefetch_behind(call, group, {items, static_cast<std::size_t>(count)}, i, chunk);
        if (chunk == 0) load(i);
        kernels_->prepare(shape_, items[i], chunk, space.slot, space.prepare);
        kernels_->advance(shape_, items[i], chunk, space.slot, space.states[i], all, space.advance, next);
        if (chunk + 1 == items[i].chunks(shape_.C)) store(i);
      }
    }
  }

  // What a thread reads after this chunk of items[i]: the next item's, or the first one's next chunk, or behind the
  // group's last the first of a group that this thread may well get.
  [[nodiscard]] ChunkPrefetch prefetch_behind(const Call& call, std::int64_t group, std::span<const Item> items,
                                              std::int64_t i, std::int64_t chunk) const {
    const std::int64_t rows = std::min<std::int64_t>(shape_.C, items[i].tokens - chunk * shape_.C);
    const std::int64_t steps = advance_steps((rows + kBlock - 1) / kBlock);
    if (i + 1 < static_cast<std::int64_t>(items.size())) return {shape_, items[i + 1], chunk, steps};
    const std::int64_t following = group + schedule_.threads();
    if (chunk + 1 < items[0].chunks(shape_.C) || following >= schedule_.groups()) {
      return {shape_, items[0], chunk + 1, steps};
    }
    return {shape_, item_of(call, schedule_.group_begin(following)), 0, steps};
  }

  // Steps of an advance through so many blocks in which it prefetches.
  [[nodiscard]] std::int64_t advance_steps(std::int64_t blocks) const {
    return panels() * blocks * (shape_.K / kBlock) * 3;
  }

  // Panels of the shared items' states, and chunks of one window of them.
  [[nodiscard]] std::int64_t panels() const {
    return (shape_.V + kernels_->panel_columns - 1) / kernels_->panel_columns;
  }
  [[nodiscard]] std::int64_t advance_units() const { return schedule_.shared() * panels(); }
  [[nodiscard]] std::int64_t prepare_units() const { return schedule_.shared() * schedule_.window_chunks(); }

  // States advance through one window while the next is prepared.
  void run_shared(const Call& call, std::int64_t window, std::int64_t unit, int thread) const {
    if (unit < advance_units()) {
      advance_shared(call, window - 1, unit / panels(), static_cast<int>(unit % panels()), thread);
    } else {
      const std::int64_t place = unit - advance_units();
      const std::int64_t chunk = window * schedule_.window_chunks() + place / schedule_.shared();
      prepare_shared(call, chunk, place % schedule_.shared(), thread);
    }
  }

  void prepare_shared(const Call& call, std::int64_t chunk, std::int64_t index, int thread) const {
    const Item item = item_of(call, index);
    if (chunk >= item.chunks(shape_.C)) return;
    kernels_->prepare(shape_, item, chunk, shared_slot(call, index, chunk), space_of(call, thread).prepare);
  }

  void advance_shared(const Call& call, std::int64_t window, std::int64_t index, int panel, int thread) const {
    const Item item = item_of(call, index);
    const StateScratch scratch = space_of(call, thread).advance;
    float* state = reinterpret_cast<float*>(call.workspace + states_at_) + index * shape_.K * shape_.V;
    const int begin = panel * kernels_->panel_columns;
    const Columns columns{begin, std::min(begin + kernels_->panel_columns, shape_.V)};
    if (window < 0) return kernels_->load_state(shape_, item, state, columns, scratch);
    const std::int64_t first = window * schedule_.window_chunks();
    const std::int64_t end = std::min(first + schedule_.window_chunks(), item.chunks(shape_.C));
    ChunkPrefetch none;
    for (std::int64_t chunk = first; chunk < end; ++chunk) {
      kernels_->advance(shape_, item, chunk, shared_slot(call, index, chunk), state, columns, scratch, none);
    }
    const bool last = window + 1 == schedule_.windows();
    if (last && item.final_state.present()) kernels_->store_state(shape_, item, state, columns, scratch);
  }

  ChunkKdaFwdProblem problem_;
  const ChunkKernels* kernels_;
  ChunkShape shape_;
  Schedule schedule_;
  std::int64_t thread_floats_;
  std::int64_t slot_floats_;
  std::size_t threads_at_ = 0;
  std::size_t slots_at_ = 0;
  std::size_t states_at_ = 0;
  std::vector<WorkspaceRegion> regions_;
};

}  // namespace

std::unique_ptr<ChunkKdaFwdKernel> make_chunk_kda_fwd(const ChunkKdaFwdProblem& problem, const PlanOptions& options) {
  return std::make_unique<CpuChunkKdaFwd>(problem, options);
}

}  // namespace kda::cpu
