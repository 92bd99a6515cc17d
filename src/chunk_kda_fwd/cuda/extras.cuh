#pragma once

// The kernel that makes gk, Aqk, Akk, w, u, qg and kg, which nothing else reads, in fp32 on the ordinary cores. A block
// of threads owns one chunk of one value head, and in role kQueries its gk, Aqk, qg and kg, in role kKeys its Akk, w
// and u. Channels are worked on in panels of 32.
//
// Between blocks of 16 tokens, E_ij factors into the decay down to row i of its own block and the decay from column j
// to that block's first row, both at most 1.

#include "chunk_kda_fwd/cuda/item.cuh"
#include "cuda/lanes.cuh"

namespace kda::cuda {

enum class Role { kQueries, kKeys };

inline constexpr int kExtrasThreads = 256;
inline constexpr int kPanel = 32;
inline constexpr int kPanelPitch = kPanel + 1;

// A panel of channels of a chunk.
struct ChannelPanel {
  float* rows;    // [C] q or k of this role; then times the decay from the block's first row on
  float* k;       // [C]
  float* step;    // [C] gate, then decay per step
  float* k_rest;  // [C] decay of a row; then k * decay to the end of its block, later to the start of a later block
  float* decay;   // [C/16] of every block
};

class Extras {
 public:
  __device__ Extras(const ChunkKdaFwdTask& task, const Item& item, std::int64_t chunk, Role role, float* memory)
      : t_(task),
        item_(item),
        first_(chunk * task.C),
        rows_(static_cast<int>(min(static_cast<std::int64_t>(task.C), item.tokens - first_))),
        role_(role),
        thread_(static_cast<int>(threadIdx.x)),
        gate_(gate_of(task, item)) {
    const int size = t_.C * kPanelPitch;
    square_ = memory;
    norms_ = square_ + t_.C * (t_.C + 1);
    beta_ = norms_ + 2 * t_.C;
    panel_.decay = beta_ + t_.C;
    panel_.rows = panel_.decay + t_.C / kBlock * kPanelPitch;
    panel_.k = panel_.rows + size;
    panel_.step = panel_.k + size;
    panel_.k_rest = panel_.step + size;
  }

  static __host__ __device__ int floats(int C) {
    return C * (C + 1) + 3 * C + C / kBlock * kPanelPitch + 4 * C * kPanelPitch;
  }

  __device__ void run() {
    load_norms();
    for (int i = thread_; i < t_.C; i += kExtrasThreads) beta_[i] = i < rows_ ? beta_of(t_, item_, first_ + i) : 0.0f;
    for (int i = thread_; i < t_.C * (t_.C + 1); i += kExtrasThreads) square_[i] = 0;
    for (int channel = 0; channel < t_.K; channel += kPanel) {
      load_panel(channel);
      if (role_ == Role::kQueries && t_.at.gk != nullptr) store_gk(channel);
      decay_panel();
      if (needs_square()) add_own_blocks();
      rest_panel();
      if (role_ == Role::kQueries) store_decayed(channel);
      if (needs_square()) add_earlier_blocks();
    }
    __syncthreads();
    if (role_ == Role::kQueries) {
      if (t_.at.Aqk != nullptr) store_square(t_.at.Aqk, t_.Aqk, square_);
      return;
    }
    float* inverse = panel_.rows;
    invert(inverse);
    if (t_.at.Akk != nullptr) store_square(t_.at.Akk, t_.Akk, inverse);
    if (t_.at.w != nullptr) store_w(inverse);
    if (t_.at.u != nullptr) store_u(inverse);
  }

 private:
  __device__ bool needs_square() const { return role_ == Role::kKeys || t_.at.Aqk != nullptr; }
  __device__ int pitch() const { return t_.C + 1; }

  // f(row, channel of the panel) for all of a panel's valid elements.
  template <class F>
  __device__ void for_panel(int channel, int width, const F& f) const {
    const int lane = thread_ % kPanel;
    if (channel + lane >= width) return;
    for (int row = thread_ / kPanel; row < rows_; row += kExtrasThreads / kPanel) f(row, lane);
  }

  __device__ float element(const void* data, const RowStrides& s, std::int64_t head, int row, int channel) const {
    return load1(data, t_.dtype, row_of(s, item_, head, first_ + row) + channel * s.inner);
  }

  __device__ void put(void* data, Dtype dtype, const RowStrides& s, int row, int channel, float x) const {
    store1(data, dtype, row_of(s, item_, item_.head, first_ + row) + channel * s.inner, x);
  }

  // Factors of the rows of q and k.
  __device__ void load_norms() {
    const int lane = thread_ % 32;
    for (int i = thread_ / 32; i < 2 * t_.C; i += kExtrasThreads / 32) {
      const bool is_q = i < t_.C;
      const int row = is_q ? i : i - t_.C;
      float squares = 0;
      if (t_.qk_l2norm && row < rows_) {
        for (int c = lane; c < t_.K; c += 32) {
          const float x =
              is_q ? element(t_.at.q, t_.q, item_.key_head, row, c) : element(t_.at.k, t_.k, item_.key_head, row, c);
          squares = fmaf(x, x, squares);
        }
      }
      squares = warp_sum(squares);
      if (lane == 0) norms_[i] = t_.qk_l2norm ? 1.0f / sqrtf(squares + 1e-6f) : 1.0f;
    }
    __syncthreads();
  }

  // q or k, k, and gates; neutral beyond the last token and channel.
  __device__ void load_panel(int channel) {
    __syncthreads();
    for (int i = thread_; i < t_.C * kPanelPitch; i += kExtrasThreads) {
      panel_.rows[i] = panel_.k[i] = panel_.step[i] = panel_.k_rest[i] = 0;
    }
    __syncthreads();
    const float bias = channel + thread_ % kPanel < t_.K ? bias_of(t_, item_, channel + thread_ % kPanel) : 0.0f;
    for_panel(channel, t_.K, [&](int row, int c) {
      const int at = row * kPanelPitch + c;
      const float k = norms_[t_.C + row] * element(t_.at.k, t_.k, item_.key_head, row, channel + c);
      panel_.k[at] = k;
      panel_.rows[at] =
          role_ == Role::kKeys ? k : norms_[row] * element(t_.at.q, t_.q, item_.key_head, row, channel + c);
      panel_.step[at] = gate(row, channel + c, bias);
    });
    __syncthreads();
  }

  __device__ float gate(int row, int channel, float bias) const {
    const std::int64_t at = row_of(t_.g, item_, item_.head, first_ + row) + channel * t_.g.inner;
    const float g = load1(t_.at.g, t_.g_dtype, at);
    if (t_.gate_mode != GateMode::kAccumulated) return gate_(g, bias);
    return step_of_gk(g, row == 0 ? 0.0f : load1(t_.at.g, t_.g_dtype, at - t_.g.token));
  }

  __device__ void store_gk(int channel) const {
    if (thread_ >= kPanel || channel + thread_ >= t_.K) return;
    float* to = t_.at.gk + row_of(t_.gk, item_, item_.head, first_) + (channel + thread_) * t_.gk.inner;
    float before = 0;
    for (int first = 0; first < rows_; first += kSumRows) {
      float sum = 0;
      for (int row = first; row < min(first + kSumRows, rows_); ++row, to += t_.gk.token) {
        sum += panel_.step[row * kPanelPitch + thread_];
        *to = (before + sum) * kGkPerGate;
      }
      before += sum;
    }
  }

  // f(block, channel of the panel), a thread for each.
  template <class F>
  __device__ void for_blocks(const F& f) const {
    for (int i = thread_; i < t_.C / kBlock * kPanel; i += kExtrasThreads) f(i / kPanel, i % kPanel);
  }

  // Gates to steps; k_rest holds a row's decay from its block's first row on until rest_panel().
  __device__ void decay_panel() {
    __syncthreads();
    for_blocks([&](int block, int c) {
      float product = 1;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const int at = (block * kBlock + i) * kPanelPitch + c;
        const float gate = panel_.step[at];
        const float step = expf(gate);
        sum += gate;
        product *= step;
        panel_.step[at] = step;
        panel_.k_rest[at] = product;
      }
      panel_.decay[block * kPanelPitch + c] = expf(sum);
    });
    __syncthreads();
  }

  // Plain rows give way to decayed ones, and what was k_rest so far to k_rest.
  __device__ void rest_panel() {
    __syncthreads();
    for_blocks([&](int block, int c) {
      float product = 1;
#pragma unroll
      for (int i = kBlock - 1; i >= 0; --i) {
        const int at = (block * kBlock + i) * kPanelPitch + c;
        panel_.rows[at] *= panel_.k_rest[at];
        panel_.k_rest[at] = panel_.k[at] * product;
        product *= panel_.step[at];
      }
    });
    __syncthreads();
  }

  // Decay from the chunk's first row to the block, and from behind it to the chunk's end.
  __device__ float prefix(int block, int c) const {
    float product = 1;
    for (int b = 0; b < block; ++b) product *= panel_.decay[b * kPanelPitch + c];
    return product;
  }
  __device__ float suffix(int block, int c) const {
    float product = 1;
    for (int b = t_.C / kBlock - 1; b > block; --b) product *= panel_.decay[b * kPanelPitch + c];
    return product;
  }

  __device__ void store_decayed(int channel) const {
    if (t_.at.qg != nullptr) {
      for_panel(channel, t_.K, [&](int row, int c) {
        put(t_.at.qg, t_.dtype, t_.qg, row, channel + c, panel_.rows[row * kPanelPitch + c] * prefix(row / kBlock, c));
      });
    }
    if (t_.at.kg != nullptr) {
      for_panel(channel, t_.K, [&](int row, int c) {
        put(t_.at.kg, t_.dtype, t_.kg, row, channel + c,
            panel_.k_rest[row * kPanelPitch + c] * suffix(row / kBlock, c));
      });
    }
    __syncthreads();
  }

  // Adds the panel's part of Aqk, or of -A, between a block and those before it; moves k_rest on to the block's first
  // row.
  __device__ void add_earlier_blocks() {
    for (int block = 1; block < t_.C / kBlock; ++block) {
      const int before = block * kBlock;
      for (int i = thread_; i < kBlock * before; i += kExtrasThreads) add_pair(before + i / before, i % before);
      __syncthreads();
      for (int i = thread_; i < before * kPanel; i += kExtrasThreads) {
        panel_.k_rest[i / kPanel * kPanelPitch + i % kPanel] *= panel_.decay[block * kPanelPitch + i % kPanel];
      }
      __syncthreads();
    }
  }

  // Row times this, in Aqk or in -A.
  __device__ float factor(int row) const { return role_ == Role::kQueries ? t_.scale : -beta_[row]; }

  __device__ void add_pair(int row, int column) {
    float sum = 0;
    for (int c = 0; c < kPanel; ++c) {
      sum = fmaf(panel_.rows[row * kPanelPitch + c], panel_.k_rest[column * kPanelPitch + c], sum);
    }
    square_[row * pitch() + column] += factor(row) * sum;
  }

  // Pairs within a block: a thread carries a quarter of a key's channels down the rows.
  __device__ void add_own_blocks() {
    constexpr int kParts = 4;
    constexpr int kChannels = kPanel / kParts;
    const int part = thread_ % kParts;
    const int first = role_ == Role::kQueries ? 0 : 1;  // row of the first pair, counted from the column
    for (int column = thread_ / kParts; column < t_.C; column += kExtrasThreads / kParts) {
      const int begin = column / kBlock * kBlock;
      float sums[kBlock] = {};
#pragma unroll
      for (int n = 0; n < kChannels; ++n) {
        const int c = part * kChannels + n;
        float k = panel_.k[column * kPanelPitch + c];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
          const int at = (begin + i) * kPanelPitch + c;
          if (begin + i > column) k *= panel_.step[at];
          sums[i] = fmaf(k, panel_.rows[at], sums[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 1);
        sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 2);
        const int row = begin + i;
        if (part == 0 && row >= column + first) square_[row * pitch() + column] += factor(row) * sums[i];
      }
    }
  }

  // inverse = (I + A)^-1 by forward substitution, four threads per column.
  __device__ void invert(float* inverse) {
    constexpr int kParts = 4;
    const int part = thread_ % kParts;
    for (int column = thread_ / kParts; column < t_.C; column += kExtrasThreads / kParts) {
      for (int row = 0; row < t_.C; ++row) {
        float sum = 0;
        for (int j = column + part; j < row; j += kParts) {
          sum = fmaf(square_[row * pitch() + j], inverse[j * pitch() + column], sum);
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (part == 0) inverse[row * pitch() + column] = row == column ? 1.0f : sum;
        __syncwarp();
      }
    }
    __syncthreads();
  }

  __device__ void store_square(void* data, const RowStrides& strides, const float* square) const {
    for (int i = thread_; i < rows_ * t_.C; i += kExtrasThreads) {
      put(data, t_.dtype, strides, i / t_.C, i % t_.C, square[i / t_.C * pitch() + i % t_.C]);
    }
  }

  // data = inverse seed, for `columns` of the panel at `channel`; the seed [C] lies in square_, whose work is done.
  __device__ void store_product(void* data, const RowStrides& strides, int channel, int width,
                                const float* inverse) const {
    __syncthreads();
    for_panel(channel, width, [&](int row, int c) {
      float sum = 0;
      for (int j = 0; j <= row; ++j) sum = fmaf(inverse[row * pitch() + j], square_[j * kPanelPitch + c], sum);
      put(data, t_.dtype, strides, row, channel + c, sum);
    });
    __syncthreads();
  }

  __device__ void store_w(const float* inverse) {
    const int lane = thread_ % kPanel;
    for (int channel = 0; channel < t_.K; channel += kPanel) {
      const float bias = channel + lane < t_.K ? bias_of(t_, item_, channel + lane) : 0.0f;
      // Gates again, where the seed will be; neutral beyond the last token and channel.
      for (int i = thread_; i < t_.C * kPanelPitch; i += kExtrasThreads) square_[i] = 0;
      __syncthreads();
      for_panel(channel, t_.K, [&](int row, int c) { square_[row * kPanelPitch + c] = gate(row, channel + c, bias); });
      __syncthreads();
      for_blocks([&](int block, int c) {
        float product = 1;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
          float& x = square_[(block * kBlock + i) * kPanelPitch + c];
          sum += x;
          product *= expf(x);
          x = product;
        }
        panel_.decay[block * kPanelPitch + c] = expf(sum);
      });
      __syncthreads();
      for_panel(channel, t_.K, [&](int row, int c) {
        const float k = norms_[t_.C + row] * element(t_.at.k, t_.k, item_.key_head, row, channel + c);
        float& x = square_[row * kPanelPitch + c];
        x = beta_[row] * (k * x * prefix(row / kBlock, c));
      });
      store_product(t_.at.w, t_.w, channel, t_.K, inverse);
    }
  }

  __device__ void store_u(const float* inverse) {
    for (int column = 0; column < t_.V; column += kPanel) {
      for_panel(column, t_.V, [&](int row, int c) {
        square_[row * kPanelPitch + c] = beta_[row] * element(t_.at.v, t_.v, item_.head, row, column + c);
      });
      store_product(t_.at.u, t_.u, column, t_.V, inverse);
    }
  }

  const ChunkKdaFwdTask& t_;
  const Item& item_;
  const std::int64_t first_;  // token of the sequence
  const int rows_;            // valid ones
  const Role role_;
  const int thread_;
  const Gate gate_;
  float* square_;  // [C][C+1] Aqk or -A; later seeds
  float* norms_;   // [2][C]
  float* beta_;    // [C]
  ChannelPanel panel_;
};

__global__ void __launch_bounds__(kExtrasThreads, 3) extras_kernel(const __grid_constant__ ChunkKdaFwdTask task) {
  extern __shared__ __align__(16) float extras_memory[];
  const std::int64_t chunk = blockIdx.x / task.HV;
  const std::int64_t head = blockIdx.x % task.HV;
  const std::int64_t n = task.is_packed ? sequence_at(task, &PackedSequence::first_chunk, chunk) : chunk / task.NC;
  const Item item = item_of(task, n, head);
  const std::int64_t local = task.is_packed ? chunk - item.first_chunk : chunk % task.NC;
  if (local * task.C >= item.tokens) return;  // beyond the last one, where NC is an upper bound
  Extras(task, item, local, blockIdx.y == 0 ? Role::kQueries : Role::kKeys, extras_memory).run();
}

}  // namespace kda::cuda
