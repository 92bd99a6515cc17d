#pragma once

// The state's way through the blocks of a sequence. A block of threads owns 64 columns of the state of one value head,
// or what is left of V: transposed, [64,128], as the sums of its matrix products, and rounded to bf16 as their first
// operand, so that the state never passes through shared memory. Columns beyond V are 0, and nobody's output. Row by
// row of a block's tokens, h the state before it:
//
//     x = beta (v - keys h)
//     v_new = x + solve x
//     attn_out = queries h + qk v_new
//     h = decay h + rest^T v_new
//
// One more warp keeps images and v coming; three others write v_new and h where they are asked for.

#include <cuda.h>

#include <type_traits>

#include "chunk_kda_fwd/cuda/hopper_image.h"
#include "chunk_kda_fwd/cuda/hopper_prepare.cuh"
#include "chunk_kda_fwd/cuda/item.cuh"
#include "cuda/async.cuh"
#include "cuda/wgmma.cuh"

namespace kda::cuda {

struct HopperChainShape {
  // Four warps for the state, and four of which only one does anything, or each where more is asked for: registers are
  // shared out by groups of four.
  static constexpr int kThreads = 128 + 128;
  static constexpr int state_registers(bool is_plain) { return is_plain ? 216 : 208; }
  static constexpr int other_registers(bool is_plain) { return is_plain ? 40 : 48; }
  static constexpr int kColumns = kStateColumns;
  static constexpr int parts(int V) { return (V + kColumns - 1) / kColumns; }
  static constexpr int kStages = 4;

  // A stage: the image, then v [16 tokens][64 columns], 128-byte swizzle.
  static constexpr int kValues = 15360;
  static constexpr int kValueBytes = kBlock * kColumns * 2;
  static constexpr int kStageBytes = kValues + kValueBytes;
  static constexpr int kExchangeBytes = kBlock * 32;  // of one warp: [16 tokens][16 columns] 16-bit

  static constexpr int kExchanges = kStages * kStageBytes;
  static constexpr int kBarriers = kExchanges + 4 * kExchangeBytes;
  static constexpr int kPlainBytes = kBarriers + (3 * kStages + 2) * 8;

  // Where more is asked for, outputs on their way out: of a stage attn_out and v_new, [16 tokens][64 columns] each, and
  // the state before a chunk, [128 channels][64 columns] or [2 panels][64 columns][64 channels]; 128-byte swizzle.
  static constexpr int kOutputs = (kPlainBytes + 1023) / 1024 * 1024;
  static constexpr int kOutputBytes = kBlock * kColumns * 2;
  static constexpr int kState = kOutputs + kStages * 2 * kOutputBytes;
  static constexpr int kStatePanel = 64 * kColumns * 2;
  static constexpr int kBytes = kState + 2 * kStatePanel;
};
static_assert(BlockImage::kBytes <= HopperChainShape::kValues);

// v as the loads see it: of rank 4, [batch, head, token, column], in boxes of 16 tokens and 64 columns.
struct HopperValues {
  CUtensorMap map;
  bool is_valid;  // else v is read element by element
};

// Which outputs are written in pieces of 16 bytes; the others are written element by element.
struct HopperOutputs {
  bool attn_out_in_vectors;
  bool v_new_in_vectors;
  bool h_in_vectors;
  bool h_is_v_first;  // h in vectors has its channels adjacent, else its columns
};

// threadIdx.x, read once: the compiler would read it again for every use, and wait for it.
__device__ __forceinline__ unsigned thread_index() {
  unsigned index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Stages and their barriers.
struct HopperStages {
  const std::uint32_t memory;

  // `readers`: threads that arrive when they are through with a stage.
  __device__ void init(int readers) const {
    if (threadIdx.x != 0) return;
    for (int stage = 0; stage < HopperChainShape::kStages; ++stage) {
      mbarrier_init(full(stage), 32);
      mbarrier_init(empty(stage), readers);
      mbarrier_init(done(stage), 128);
    }
    mbarrier_init(state_put(), 128);
    mbarrier_init(state_taken(), 32);
    mbarrier_init_fence();
  }
  __device__ __forceinline__ std::uint32_t at(int stage) const {
    return memory + static_cast<std::uint32_t>(stage * HopperChainShape::kStageBytes);
  }
  __device__ __forceinline__ std::uint32_t full(int stage) const {
    return memory + static_cast<std::uint32_t>(HopperChainShape::kBarriers + stage * 8);
  }
  __device__ __forceinline__ std::uint32_t empty(int stage) const { return full(HopperChainShape::kStages + stage); }
  // The stage's block is computed, its outputs lie in shared memory.
  __device__ __forceinline__ std::uint32_t done(int stage) const { return full(2 * HopperChainShape::kStages + stage); }
  // The state before a chunk lies in shared memory, and has been read there.
  __device__ __forceinline__ std::uint32_t state_put() const { return full(3 * HopperChainShape::kStages); }
  __device__ __forceinline__ std::uint32_t state_taken() const { return full(3 * HopperChainShape::kStages + 1); }
};

// Loads what the products read, block after block.
class HopperLoader {
 public:
  using Shape = HopperChainShape;

  __device__ HopperLoader(const ChunkKdaFwdTask& task, const HopperValues& values, const Item& item,
                          const HopperStages& stages, int first_column)
      : t_(task),
        values_(values),
        item_(item),
        stages_(stages),
        first_column_(first_column),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() const {
    const std::byte* image = t_.images + (item_.first_block * t_.HV + item_.head) * BlockImage::kBytes;
    const int blocks = blocks_of(item_);
    int made = t_.preparers > 0 ? min(t_.head_blocks, blocks) : blocks;  // images that are known to be there
    unsigned parity = 1;
    for (int block = 0, stage = 0; block < blocks; ++block) {
      while (made <= block) made = look(block, blocks);
      mbarrier_wait(stages_.empty(stage), parity);
      const std::int64_t token = static_cast<std::int64_t>(block) * kBlock;
      const bool is_whole = values_.is_valid && token + kBlock <= item_.tokens;
      const std::uint32_t to = stages_.at(stage);
      if (!is_whole) fill(token, to + Shape::kValues);
      const std::uint32_t full = stages_.full(stage);
      if (lane_ == 0) {
        mbarrier_arrive_expect(full, BlockImage::kBytes + (is_whole ? Shape::kValueBytes : 0));
        bulk_load(to, image, BlockImage::kBytes, full);
        if (is_whole) {
          tensor_load(to + Shape::kValues, &values_.map, first_column_, static_cast<int>(item_.first_token + token),
                      static_cast<int>(item_.head), static_cast<int>(item_.batch), full);
        }
      } else {
        mbarrier_arrive(full);
      }
      __syncwarp();
      image += t_.HV * BlockImage::kBytes;
      if (++stage == Shape::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }

 private:
  // How many of the sequence's images are there, given that those before `block` are.
  __device__ __forceinline__ int look(int block, int blocks) const {
    const int mine = block + lane_;
    const bool is_made = mine < blocks && load_acquire(t_.made + (item_.first_block + mine) * t_.HV + item_.head) != 0;
    const unsigned missing = __ballot_sync(kAllLanes, !is_made);
    global_async_proxy_fence();
    return missing == 0 ? block + 32 : block + __ffs(static_cast<int>(missing)) - 1;
  }

  // v of a block that is not complete, or that no tensor map describes; zero beyond the last token and column.
  __device__ __forceinline__ void fill(std::int64_t token, std::uint32_t to) const {
#pragma unroll 1
    for (int i = 0; i < kBlock; ++i) {
      std::uint32_t pair = 0;
      if (token + i < item_.tokens && first_column_ + 2 * lane_ < t_.V) {
        const auto* from = static_cast<const std::uint16_t*>(t_.at.v) + row_of(t_.v, item_, item_.head, token + i) +
                           (first_column_ + 2 * lane_) * t_.v.inner;
        pair = from[0] | static_cast<std::uint32_t>(from[t_.v.inner]) << 16;
      }
      store_shared(to + static_cast<std::uint32_t>(i * 128 + ((lane_ / 4 ^ i % 8) * 16) + lane_ % 4 * 4), pair);
    }
    __syncwarp();
  }

  const ChunkKdaFwdTask& t_;
  const HopperValues& values_;
  const Item& item_;
  const HopperStages& stages_;
  const int first_column_;
  const int lane_;
};

// Three warps that write what the products left in shared memory, where more is asked for than attn_out in vectors. A
// stage is free for the next block once attn_out and v_new are read.
class HopperStorer {
 public:
  using Shape = HopperChainShape;

  __device__ HopperStorer(const ChunkKdaFwdTask& task, const HopperOutputs& outputs, const Item& item,
                          const HopperStages& stages, int first_column)
      : t_(task),
        outputs_(outputs),
        item_(item),
        stages_(stages),
        first_column_(first_column),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run(int warp) const {
    if (warp == 0) store_rows(t_.at.attn_out, t_.attn_out, outputs_.attn_out_in_vectors, 0);
    if (warp == 1) store_rows(t_.at.v_new, t_.v_new, outputs_.v_new_in_vectors, Shape::kOutputBytes);
    if (warp == 2) store_states();
  }

 private:
  // A lane has 16 bytes of every fourth token.
  __device__ __forceinline__ void store_rows(void* data, const RowStrides& s, bool in_vectors, int part) const {
    const int column = first_column_ + lane_ % 8 * 8;
    auto* to = static_cast<std::uint16_t*>(data) + row_of(s, item_, item_.head, lane_ / 8) + column * s.inner;
    const int tokens = data == nullptr || column >= t_.V ? 0 : static_cast<int>(item_.tokens) - lane_ / 8;
    const std::uint32_t from = stages_.memory + static_cast<std::uint32_t>(Shape::kOutputs + part + lane_ / 8 * 128);
    const int blocks = blocks_of(item_);
    unsigned parity = 0;
    for (int block = 0, stage = 0; block < blocks; ++block) {
      mbarrier_wait(stages_.done(stage), parity);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 pieces[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          pieces[i] = load_shared<uint4>(from + static_cast<std::uint32_t>(stage * 2 * Shape::kOutputBytes +
                                                                           (2 * half + i) * 512 +
                                                                           (lane_ % 8 ^ (lane_ / 8 + i * 4)) * 16));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = 8 * half + 4 * i;
          if (block * kBlock + row < tokens) store(to + row * s.token, pieces[i], s.inner, in_vectors);
        }
      }
      mbarrier_arrive(stages_.empty(stage));
      to += kBlock * s.token;
      if (++stage == Shape::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }

  __device__ __forceinline__ void store_states() const {
    if (t_.at.h == nullptr) return;
    const StateStrides& s = t_.h;
    auto* to = static_cast<std::uint16_t*>(t_.at.h) + item_.batch * s.seq + item_.first_chunk * s.chunk +
               item_.head * s.head + first_column_ * s.v;
    const int columns = min(t_.V - first_column_, Shape::kColumns);
    unsigned parity = 0;
    for (std::int64_t token = 0; token < item_.tokens; token += t_.C) {
      mbarrier_wait(stages_.state_put(), parity);
      if (outputs_.h_is_v_first) {
        store_state<16, true>(to, columns, s.v, 1);
      } else if (outputs_.h_in_vectors) {
        store_state<8, true>(to, lane_ % 8 * 8 < columns ? 128 : 0, s.k, 1);
      } else {
        store_state<8, false>(to, lane_ % 8 * 8 < columns ? 128 : 0, s.k, s.v);
      }
      mbarrier_arrive(stages_.state_taken());
      to += s.chunk;
      parity ^= 1;
    }
  }

  // Rows of kLanes pieces of 16 bytes, a multiple of 16 rows.
  template <int kLanes, bool kInVectors>
  __device__ __forceinline__ void store_state(std::uint16_t* to, int rows, std::int64_t pitch,
                                              std::int64_t inner) const {
    constexpr int kBatch = 4;
    const int piece = lane_ % kLanes;
    to += lane_ / kLanes * pitch + piece * 8 * inner;
#pragma unroll 1
    for (int row = lane_ / kLanes; row < rows; row += kBatch * 32 / kLanes) {
      uint4 pieces[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = row + i * 32 / kLanes;
        pieces[i] = load_shared<uint4>(stages_.memory +
                                       static_cast<std::uint32_t>(Shape::kState + piece / 8 * Shape::kStatePanel +
                                                                  at * 128 + (piece % 8 ^ at % 8) * 16));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        store(to, pieces[i], inner, kInVectors);
        to += 32 / kLanes * pitch;
      }
    }
  }

  static __device__ __forceinline__ void store(std::uint16_t* to, const uint4& pieces, std::int64_t inner,
                                               bool in_vectors) {
    if (in_vectors) {
      *reinterpret_cast<uint4*>(to) = pieces;
      return;
    }
    const std::uint32_t words[4] = {pieces.x, pieces.y, pieces.z, pieces.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i * inner] = static_cast<std::uint16_t>(words[i]);
      to[(2 * i + 1) * inner] = static_cast<std::uint16_t>(words[i] >> 16);
    }
  }

  const ChunkKdaFwdTask& t_;
  const HopperOutputs& outputs_;
  const Item& item_;
  const HopperStages& stages_;
  const int first_column_;
  const int lane_;
};

// A group of four warps with its columns of a state. Names as in advance.cuh: a lane has columns r and r + 8 of its
// warp's 16, and tokens 2c and 2c + 1 of every eight. kIsPlain: attn_out is written in vectors, and neither v_new nor h
// is asked for.
template <bool kIsPlain>
class HopperAdvancer {
 public:
  using Shape = HopperChainShape;

  __device__ HopperAdvancer(const ChunkKdaFwdTask& task, const HopperOutputs& outputs, const Item& item,
                            const HopperStages& stages, int first_column)
      : t_(task),
        outputs_(outputs),
        stages_(stages),
        memory_(stages.memory),
        lane_(static_cast<int>(thread_index()) % 32),
        warp_(static_cast<int>(thread_index()) / 32 % 4),
        first_column_(first_column),
        tokens_(is_inside() ? static_cast<int>(item.tokens) : 0),
        out_at_(static_cast<std::uint16_t*>(task.at.attn_out) +
                row_of(task.attn_out, item, item.head, lane_ / 2 - kBlock) +
                (column() + 8 * (lane_ % 2)) * task.attn_out.inner) {}

  __device__ __forceinline__ void run(const Item& item) {
    const int blocks = blocks_of(item);
    load_state(item);
    if (blocks > 0) {
      mbarrier_wait(stages_.full(0), 0);
      load_values<0>();
      int block = 0;
      unsigned parity = 0;
      const auto advance = [&](auto stage) {
        this->template step<stage.value>(item, block, blocks, parity);
        return ++block < blocks;
      };
      while (advance(Stage<0>{}) && advance(Stage<1>{}) && advance(Stage<2>{}) && advance(Stage<3>{})) parity ^= 1;
      if (kIsPlain) store_out(block);
    }
    store_state(item);
  }

 private:
  template <int kStage>
  using Stage = std::integral_constant<int, kStage>;

  struct Limits {
    int low = kBlock;
    int high = kBlock;
  };

  __device__ __forceinline__ int local_column() const { return 16 * warp_; }                // the warp's first
  __device__ __forceinline__ int column() const { return first_column_ + local_column(); }  // the same in the state
  __device__ __forceinline__ bool is_inside() const { return column() < t_.V; }             // V is a multiple of 16

  __device__ __forceinline__ void load_state(const Item& item) {
    const float* from = is_inside() ? t_.at.initial_state : nullptr;
    const StateStrides& s = t_.initial_state;
    if (from != nullptr) from += item.n * s.seq + item.head * s.head;
    for_state([&](float& h, int k, int v) { h = from == nullptr ? 0.0f : from[k * s.k + v * s.v]; });
    round(h_[0], rounded_[0]);
  }

  __device__ __forceinline__ void store_state(const Item& item) {
    if (t_.at.final_state == nullptr || !is_inside()) return;
    const StateStrides& s = t_.final_state;
    float* to = t_.at.final_state + item.n * s.seq + item.head * s.head;
    for_state([&](float h, int k, int v) { to[k * s.k + v * s.v] = h; });
  }

  // The state before a chunk, as its first block's products have rounded it, to shared memory.
  __device__ __forceinline__ void put_state(unsigned chunk) {
    mbarrier_wait(stages_.state_taken(), ~chunk & 1);
    const std::uint32_t state = memory_ + Shape::kState;
    const int row = lane_ % 8;
    if (outputs_.h_is_v_first) {
      const int column = local_column() + lane_ / 8 % 2 * 8 + row;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int piece = i % 4 * 2 + lane_ / 16;
        stmatrix4(state + static_cast<std::uint32_t>(i / 4 * Shape::kStatePanel + column * 128 + (piece ^ row) * 16),
                  rounded(i));
      }
    } else {
      const int piece = local_column() / 8 + lane_ / 8 % 2;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int channel = i * 16 + lane_ / 16 * 8 + row;
        stmatrix4_transposed(state + static_cast<std::uint32_t>(channel * 128 + (piece ^ row) * 16), rounded(i));
      }
    }
    mbarrier_arrive(stages_.state_put());
  }

  // The warp's 16 columns of a block's attn_out (part 0) or v_new (1), to shared memory.
  template <int kStage, int kPart>
  __device__ __forceinline__ void put_rows(const std::uint32_t (&pairs)[4]) {
    const int token = lane_ / 16 * 8 + lane_ % 8;
    const int piece = local_column() / 8 + lane_ / 8 % 2;
    stmatrix4_transposed(
        memory_ + static_cast<std::uint32_t>(Shape::kOutputs + (2 * kStage + kPart) * Shape::kOutputBytes +
                                             token * 128 + (piece ^ token % 8) * 16),
        pairs);
  }

  // Reads v of the block that has arrived in a stage.
  template <int kStage>
  __device__ __forceinline__ void load_values() {
    const int token = lane_ / 16 * 8 + lane_ % 8;
    const int piece = local_column() / 8 + lane_ / 8 % 2;
    ldmatrix4_transposed(
        stages_.at(kStage) + Shape::kValues + static_cast<std::uint32_t>(token * 128 + ((piece ^ token % 8) * 16)),
        values_);
  }

  // The block in a stage, whose v load_values() has read. Reads the next one's.
  template <int kStage>
  __device__ __forceinline__ void step(const Item& item, int block, int blocks, unsigned parity) {
    constexpr std::uint64_t kAt = kStage * Shape::kStageBytes >> 4;
    const std::uint32_t stage = stages_.at(kStage);
    const std::uint64_t pairs_operand = operand(memory_ + BlockImage::kKeys, 16, 1024, Swizzle::k128) + kAt;
    const std::uint64_t rest_operand =
        operand(memory_ + BlockImage::kRest, BlockImage::kRestPanel, 1024, Swizzle::k128) + kAt;
    const std::uint64_t qk_operand = operand(memory_ + BlockImage::kQk, 16, 256, Swizzle::k32) + kAt;
    const std::uint64_t solve_operand = operand(memory_ + BlockImage::kSolve, 16, 512, Swizzle::k64) + kAt;

    float decay[2][16];
    load_decay<0>(stage, decay[0]);
    load_decay<1>(stage, decay[1]);
    float2 beta[2];  // of this lane's tokens
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      beta[n] = load_shared<float2>(stage + static_cast<std::uint32_t>(BlockImage::kBeta + n * 32 + lane_ % 4 * 8));
    }
    float x[16];  // x over beta; then, negative, what the queries make of the state
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = low_bf16(values_[i]);
      x[2 * i + 1] = high_bf16(values_[i]);
    }
#pragma unroll
    for (int i = 8; i < 16; ++i) x[i] = 0;
    pin(x);
    pin(rounded_[0]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_n32_minus(x, rounded_[0] + 4 * k, pairs_operand + channels(k));
    wgmma_commit();
    wgmma_wait<1>();
    pin(h_[1]);
    round(h_[1], rounded_[1]);
    pin(rounded_[1]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_n32_minus(x, rounded_[1] + 4 * k, pairs_operand + channels(4 + k));
    wgmma_commit();
    // Asked for long before the answer is needed.
    constexpr int kNext = (kStage + 1) % Shape::kStages;
    const unsigned next_parity = kNext == 0 ? parity ^ 1 : parity;
    const bool is_next_there = mbarrier_test(stages_.full(kNext), next_parity);
    if (kIsPlain) store_out(block);
    wgmma_wait<2>();
    pin(h_[0]);
    decay_state(h_[0], decay[0]);
    wgmma_wait<0>();
    pin(x);

    float v_new[8];  // x first
#pragma unroll
    for (int i = 0; i < 8; ++i) v_new[i] = x[i] * (i % 2 == 0 ? beta[i / 4].x : beta[i / 4].y);
    float bounded[8];  // what is not finite is the largest number
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      bounded[i] = clamp(v_new[i]);
      largest = fmaxf(largest, fabsf(bounded[i]));
    }
    pin(v_new);
    pin(bounded);
    wgmma_fence();
    wgmma_tf32_n16(v_new, bounded[0], bounded[2], bounded[1], bounded[3], solve_operand);
    wgmma_tf32_n16(v_new, bounded[4], bounded[6], bounded[5], bounded[7], solve_operand + (32 >> 4));
    wgmma_commit();
    const bool is_finite = __all_sync(kAllLanes, largest < FLT_MAX);
    wgmma_wait<1>();
    pin(h_[1]);
    decay_state(h_[1], decay[1]);
    wgmma_wait<0>();
    pin(v_new);

    if (__builtin_expect(!is_finite, 0)) {
      poison(v_new, limits_of([&](int i) { return fabsf(bounded[i]) == FLT_MAX; }));
    }
    std::uint32_t pairs[4];
    pack(v_new, pairs);
    pin(h_[0]);
    pin(h_[1]);
    pin(pairs);
    wgmma_fence();
    wgmma_n64(h_[0], pairs, rest_operand);
    wgmma_commit();
    wgmma_n64(h_[1], pairs, rest_operand + (BlockImage::kRestPanel >> 4));
    wgmma_commit();
    std::uint32_t operand[4];
    clamp(pairs, operand);
    float out[8];
    pin(operand);
    pin(out);
    wgmma_fence();
    wgmma_n16(out, operand, qk_operand, 0);
    wgmma_commit();
    if constexpr (!kIsPlain) {
      if (t_.at.v_new != nullptr) put_rows<kStage, 1>(pairs);
      // Chunks have four or eight blocks.
      if (kStage == 0 && t_.at.h != nullptr && (t_.C == 64 || block % 8 == 0)) {
        put_state(static_cast<unsigned>(t_.C == 64 ? block / 4 : block / 8));
      }
    }
    if (block + 1 < blocks) {
      if (!is_next_there) mbarrier_wait(stages_.full(kNext), next_parity);
      load_values<kNext>();
    }
    const bool is_out_finite = all_finite(pairs);
    wgmma_wait<2>();
    pin(h_[0]);
    round(h_[0], rounded_[0]);
    wgmma_wait<0>();
    pin(h_[1]);
    pin(out);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] -= x[8 + i];
    if (__builtin_expect(!is_out_finite, 0)) {
      poison(out, limits_of([&](int i) { return (pairs[i / 2] >> (i % 2 * 16) & kExponent) == kExponent; }));
    }
    pack(out, out_);
    if constexpr (kIsPlain) {
      mbarrier_arrive(stages_.empty(kStage));
    } else {
      put_rows<kStage, 0>(out_);
      mbarrier_arrive(stages_.done(kStage));
    }
  }

  // attn_out of the block before `block`, if there is one.
  __device__ __forceinline__ void store_out(int block) {
    __syncwarp();
    const int at = lane_ / 16 * 8 + lane_ % 8;
    const int half = (lane_ / 8 % 2) ^ (at / 4 % 2);
    const std::uint32_t exchange =
        memory_ + static_cast<std::uint32_t>(Shape::kExchanges + warp_ * Shape::kExchangeBytes);
    stmatrix4_transposed(exchange + static_cast<std::uint32_t>(at * 32 + half * 16), out_);
    __syncwarp();
    const int row = lane_ / 2;
    const uint4 pieces =
        load_shared<uint4>(exchange + static_cast<std::uint32_t>(row * 32 + ((lane_ % 2) ^ (row / 4 % 2)) * 16));
    const int rows = block == 0 ? 0 : tokens_ - (block - 1) * kBlock;
    if (row < rows) *reinterpret_cast<uint4*>(out_at_) = pieces;
    out_at_ += kBlock * t_.attn_out.token;
  }

  // Descriptor units of 16 bytes to step k of the keys' and queries' 128 channels.
  static constexpr std::uint64_t channels(int k) { return (k / 4 * BlockImage::kPairPanel + k % 4 * 32) >> 4; }

  template <class F>
  __device__ __forceinline__ void for_state(const F& f) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      f(h_[i / 32][i % 32], i / 4 * 8 + lane_ % 4 * 2 + i % 2, column() + lane_ / 4 + i / 2 % 2 * 8);
    }
  }

  // f(element, token, column): the column within the warp's 16.
  template <class F>
  __device__ __forceinline__ void for_tokens(float (&x)[8], const F& f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) f(x[i], i / 4 * 8 + lane_ % 4 * 2 + i % 2, lane_ / 4 + i / 2 % 2 * 8);
  }

  static __device__ __forceinline__ void pack(const float* x, std::uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
  }

  static __device__ __forceinline__ void round(const float (&h)[32], std::uint32_t (&rounded)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) rounded[i] = pack_bf16(h[2 * i], h[2 * i + 1]);
  }

  // Of 16 channels, as stmatrix takes them.
  __device__ __forceinline__ std::uint32_t (&rounded(int i))[4] {
    return reinterpret_cast<std::uint32_t(&)[4]>(rounded_[i / 4][i % 4 * 4]);
  }

  // This lane's part of the decay of half the channels.
  template <int kHalf>
  __device__ __forceinline__ void load_decay(std::uint32_t stage, float (&decay)[16]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 d = load_shared<float4>(stage + static_cast<std::uint32_t>(BlockImage::kDecay + kHalf * 64 + i * 16 +
                                                                              lane_ % 4 * BlockImage::kDecayPitch));
      decay[4 * i] = d.x;
      decay[4 * i + 1] = d.y;
      decay[4 * i + 2] = d.z;
      decay[4 * i + 3] = d.w;
    }
  }

  static __device__ __forceinline__ void decay_state(float (&h)[32], const float (&decay)[16]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) h[i] *= decay[i / 4 * 2 + i % 2];
  }

  // What is not finite becomes the largest number: then the zeros of a triangular matrix keep it from earlier tokens.
  static __device__ __forceinline__ void clamp(const std::uint32_t (&from)[4], std::uint32_t (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(to[i]) : "r"(from[i]), "r"(0x7f7f7f7fu));
    }
  }

  static __device__ __forceinline__ float clamp(float x) {
    float r;
    asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(FLT_MAX));
    return r;
  }

  static constexpr std::uint32_t kExponent = 0x7f80u;  // of a bf16 number

  // Of the whole warp.
  static __device__ __forceinline__ bool all_finite(const std::uint32_t (&pairs)[4]) {
    // 0 times a finite number is 0 of either sign.
    const std::uint32_t even = times_zero(pairs[0], times_zero(pairs[1], 0));
    const std::uint32_t odd = times_zero(pairs[2], times_zero(pairs[3], 0));
    return __all_sync(kAllLanes, ((even | odd) & 0x7fff7fffu) == 0);
  }

  static __device__ __forceinline__ std::uint32_t times_zero(std::uint32_t pair, std::uint32_t sum) {
    std::uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(0u), "r"(sum));
    return r;
  }

  // The first tokens of this lane's two columns that are not finite; is_bad(i): element i is not.
  template <class F>
  __device__ __forceinline__ Limits limits_of(const F& is_bad) const {
    Limits limits;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!is_bad(i)) continue;
      int& limit = i / 2 % 2 == 0 ? limits.low : limits.high;
      limit = min(limit, i / 4 * 8 + lane_ % 4 * 2 + i % 2);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      limits.low = min(limits.low, __shfl_xor_sync(kAllLanes, limits.low, step));
      limits.high = min(limits.high, __shfl_xor_sync(kAllLanes, limits.high, step));
    }
    return limits;
  }

  __device__ __forceinline__ void poison(float (&x)[8], const Limits& limits) {
    for_tokens(x, [&](float& value, int token, int column) {
      if (token >= (column < 8 ? limits.low : limits.high)) value = __uint_as_float(0x7fffffffu);
    });
  }

  const ChunkKdaFwdTask& t_;
  const HopperOutputs& outputs_;
  const HopperStages& stages_;
  const std::uint32_t memory_;
  const int lane_;
  const int warp_;
  const int first_column_;
  const int tokens_;       // to be written
  std::uint16_t* out_at_;  // of this lane's part of the block before the one in hand
  float h_[2][32];         // of channels 0 to 63, and the rest
  std::uint32_t rounded_[2][16];
  std::uint32_t values_[4];  // v of the block in hand
  std::uint32_t out_[4];     // attn_out of the block before
};

// The columns that a group of four warps advances.
struct HopperColumns {
  Item item;
  int first;

  static __device__ __forceinline__ HopperColumns of(const ChunkKdaFwdTask& t, unsigned index) {
    const auto parts = static_cast<unsigned>(HopperChainShape::parts(t.V));
    const unsigned state = index / parts;
    const unsigned rank = state / static_cast<unsigned>(t.HV);
    const unsigned head = state - rank * static_cast<unsigned>(t.HV);
    return {item_of(t, t.is_packed ? t.sequences[rank].longest : rank, head),
            static_cast<int>(index - state * parts) * HopperChainShape::kColumns};
  }
};

template <bool kIsPlain>
__global__ void __launch_bounds__(HopperChainShape::kThreads, 2)
    hopper_chain_kernel(const __grid_constant__ ChunkKdaFwdTask task, const __grid_constant__ HopperValues values,
                        const __grid_constant__ HopperOutputs outputs) {
  extern __shared__ __align__(1024) std::byte chain_memory[];
  const HopperStages stages{shared_address(chain_memory)};
  stages.init(kIsPlain ? 128 : 2 * 32);
  __syncthreads();
  const auto [item, first_column] = HopperColumns::of(task, blockIdx.x);
  if (threadIdx.x >= 128) {
    keep_registers<HopperChainShape::other_registers(kIsPlain)>();
    const int warp = static_cast<int>(threadIdx.x - 128) / 32;
    if (warp == 0) {
      HopperLoader(task, values, item, stages, first_column).run();
    } else if (!kIsPlain) {
      HopperStorer(task, outputs, item, stages, first_column).run(warp - 1);
    }
  } else {
    take_registers<HopperChainShape::state_registers(kIsPlain)>();
    HopperAdvancer<kIsPlain>(task, outputs, item, stages, first_column).run(item);
  }
}

// Images and states at the same time, a multiprocessor for every block of threads. The first blocks, which wait for
// nobody, make the images that hopper_prepare has left. The others advance states, one or two groups each.
struct HopperOverlapShape {
  static constexpr int kThreads = 3 * 128;
  static constexpr int kPreparingWarps = kThreads / 32;
  static constexpr int kStagesBytes = (HopperChainShape::kPlainBytes + 1023) / 1024 * 1024;  // of a group
};

template <class Preparer>
__global__ void __launch_bounds__(HopperOverlapShape::kThreads, 1)
    hopper_overlap_kernel(const __grid_constant__ ChunkKdaFwdTask task, const __grid_constant__ HopperValues values,
                          const __grid_constant__ HopperOutputs outputs) {
  using Shape = HopperOverlapShape;
  extern __shared__ __align__(1024) std::byte overlap_memory[];
  const std::uint32_t memory = shared_address(overlap_memory);
  const auto preparers = static_cast<unsigned>(task.preparers);
  if (blockIdx.x < preparers) {
    const unsigned warp = threadIdx.x / 32;
    Preparer(task, memory + warp * Preparer::kBytes)
        .template run<Images::kLate>(early_images(task) + Shape::kPreparingWarps * blockIdx.x + warp,
                                     Shape::kPreparingWarps * preparers, all_images(task));
    return;
  }
  const auto groups = static_cast<unsigned>(task.groups);
  for (unsigned group = 0; group < groups; ++group) HopperStages{memory + group * Shape::kStagesBytes}.init(128);
  __syncthreads();
  // The same for all lanes, and known to be so: descriptors are to lie in uniform registers.
  const unsigned warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  const unsigned group = warp < 8 ? warp / 4 : warp - 8;
  const unsigned index = (blockIdx.x - preparers) * groups + group;
  const auto count = static_cast<unsigned>(task.N * task.HV) * static_cast<unsigned>(HopperChainShape::parts(task.V));
  const bool is_idle = group >= groups || index >= count;
  const HopperStages stages{memory + group * Shape::kStagesBytes};
  if (warp >= 8) {
    keep_registers<HopperChainShape::other_registers(true)>();
    if (is_idle) return;
    const auto [item, first_column] = HopperColumns::of(task, index);
    HopperLoader(task, values, item, stages, first_column).run();
  } else {
    take_registers<HopperChainShape::state_registers(true)>();
    if (is_idle) return;
    const auto [item, first_column] = HopperColumns::of(task, index);
    HopperAdvancer<true>(task, outputs, item, stages, first_column).run(item);
  }
}

}  // namespace kda::cuda
