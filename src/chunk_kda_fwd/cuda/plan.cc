// chunk_kda_fwd on a CUDA device, the part that needs no CUDA: workspace, schedule, task.

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string_view>
#include <vector>

#include "chunk_kda_fwd/arguments.h"
#include "chunk_kda_fwd/backend.h"
#include "chunk_kda_fwd/cuda/hopper_image.h"
#include "chunk_kda_fwd/cuda/image.h"
#include "chunk_kda_fwd/cuda/task.h"
#include "core/checked.h"
#include "core/workspace.h"
#include "cuda/loader.h"

namespace kda::cuda {
namespace {

constexpr std::int64_t kBlock = 16;

// What KDA_CUDA_PATH asks for: to keep off the Hopper path; or there, to make all images before states advance, or some
// meanwhile wherever that can be.
enum class Path { kBest, kGeneric, kApart, kOverlapped };

Path wanted_path() {
  const char* name = std::getenv("KDA_CUDA_PATH");
  const std::string_view path = name == nullptr ? "" : name;
  if (path == "generic") return Path::kGeneric;
  if (path == "apart") return Path::kApart;
  if (path == "overlapped") return Path::kOverlapped;
  return Path::kBest;
}

bool generic_is_forced() { return wanted_path() == Path::kGeneric; }

bool takes_hopper_path(const ChunkKdaFwdProblem& p, const DeviceInfo& device) {
  return device.major == 9 && device.minor == 0 && p.dims.K == 128 && p.dtype == Dtype::kBFloat16 &&
         p.gate_mode != GateMode::kAccumulated && !generic_is_forced();
}

// Chunks of 64 need 105 KB of shared memory, which 8.0 and 9.0 have; chunks of 128 need 222 KB, which only 9.0 has.
bool takes_tensor_extras(const ChunkKdaFwdProblem& p, const DeviceInfo& device) {
  const bool fits = device.minor == 0 && (p.dims.C == 64 || device.major == 9);
  return p.dims.K <= 128 && fits && !generic_is_forced();
}

std::vector<PackedSequence> packed_sequences(const ChunkKdaFwdProblem& p) {
  std::vector<PackedSequence> table;
  if (p.cu_seqlens.empty()) return table;
  std::vector<std::int64_t> order(static_cast<std::size_t>(p.dims.N));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return p.sequence(a).tokens > p.sequence(b).tokens; });
  std::int64_t first_block = 0;
  for (std::int64_t n = 0; n < p.dims.N; ++n) {
    const Sequence s = p.sequence(n);
    table.push_back({s.first_token, s.tokens, s.first_chunk, first_block, order[static_cast<std::size_t>(n)]});
    first_block += ceil_div(s.tokens, kBlock);
  }
  return table;
}

// Of all sequences together; at most, where their lengths are not known.
std::int64_t blocks_of(const ChunkKdaFwdProblem& p) {
  if (p.has_device_cu_seqlens) return p.dims.T / kBlock + p.dims.N;
  if (!p.is_packed()) return p.dims.N * ceil_div(p.dims.T, kBlock);
  std::int64_t blocks = 0;
  for (std::int64_t n = 0; n < p.dims.N; ++n) blocks += ceil_div(p.sequence(n).tokens, kBlock);
  return blocks;
}

// Decides how many multiprocessors make images while the others advance states, and which: those that come before a
// state wants them. Times are what an H200 takes (docs/cuda.md); how long a call takes depends on them, results do not.
void overlap(ChunkKdaFwdTask& t) {
  constexpr double kImage = 0.0081;          // us, while all multiprocessors make images
  constexpr double kLateImage = 1.0;         // us of one multiprocessor while others advance states
  constexpr double kSteps[] = {0.45, 0.72};  // us, one or two groups on a multiprocessor
  constexpr double kStart = 35;              // us that a state loses in waiting for its first images
  constexpr std::int64_t kLead = 1;          // blocks made before in any case
  const Path path = wanted_path();
  // Sequences of several lengths have no common order of time.
  if (!t.is_hopper || path == Path::kApart || t.blocks < 2 * t.N || (t.is_packed && t.N > 1)) return;
  const std::int64_t states = t.N * t.HV * ceil_div(std::int64_t{t.V}, std::int64_t{kStateColumns});
  const std::int64_t multiprocessors = t.multiprocessors;
  if (states > 2 * multiprocessors) return;
  const std::int64_t blocks = t.blocks / t.N;
  const auto steps = static_cast<double>(blocks);
  const auto images = static_cast<double>(t.blocks * t.HV);
  double best = kImage * images + steps * kSteps[states > multiprocessors ? 1 : 0];
  if (path == Path::kOverlapped) best = std::numeric_limits<double>::infinity();
  t.by_sequences = divisor(t.N);
  for (int groups = 1; groups <= 2; ++groups) {
    const std::int64_t preparers = multiprocessors - ceil_div(states, std::int64_t{groups});
    if (preparers <= 0) continue;
    const double chain = steps * kSteps[groups - 1];
    const double late = std::min(1.0, chain * static_cast<double>(preparers) / (kLateImage * images));
    const std::int64_t head = std::clamp(blocks - static_cast<std::int64_t>(late * steps), kLead, blocks - 1);
    const double total = kImage * images * static_cast<double>(head) / steps + chain + kStart;
    if (total >= best) continue;
    best = total;
    t.preparers = static_cast<int>(preparers);
    t.groups = groups;
    t.head_blocks = static_cast<int>(head);
  }
}

ChunkKdaFwdTask make_task(const ChunkKdaFwdProblem& p, const DeviceInfo& device) {
  ChunkKdaFwdTask t{};
  t.device = p.device.index;
  t.K = static_cast<int>(p.dims.K);
  t.V = static_cast<int>(p.dims.V);
  t.C = static_cast<int>(p.dims.C);
  t.HV = p.dims.HV;
  t.N = p.dims.N;
  t.T = p.dims.T;
  // A caller's bound may be any number; there are never more chunks than that.
  t.NC = p.has_device_cu_seqlens ? std::min(p.dims.NC, p.dims.T / p.dims.C + p.dims.N) : p.dims.NC;
  t.group = p.group();
  t.dtype = p.dtype;
  t.g_dtype = p.g_dtype;
  t.beta_dtype = p.beta_dtype;
  t.gate_mode = p.gate_mode;
  t.beta_activation = p.beta_activation;
  t.qk_l2norm = p.qk_l2norm;
  t.is_packed = p.is_packed();
  t.vector_inputs = steps_by(p.q, 8) && steps_by(p.k, 8) && steps_by(p.g, 8) && steps_by(p.v, 8);
  t.vector_outputs = steps_by(p.attn_out, 8);
  t.scale = p.scale;
  t.lower_bound = p.lower_bound;
  t.q = p.q;
  t.k = p.k;
  t.v = p.v;
  t.g = p.g;
  t.beta = p.beta;
  t.A_log_stride = p.A_log_stride;
  t.dt_bias_stride = p.dt_bias_stride;
  t.initial_state = p.initial_state;
  t.attn_out = p.attn_out;
  t.gk = p.gk;
  t.Aqk = p.Aqk;
  t.Akk = p.Akk;
  t.w = p.w;
  t.u = p.u;
  t.qg = p.qg;
  t.kg = p.kg;
  t.v_new = p.v_new;
  t.final_state = p.final_state;
  t.h = p.h;
  // Few states leave multiprocessors idle: then two blocks of threads share each, column by column the same arithmetic.
  const bool few = p.dims.N * p.dims.HV * 2 <= device.multiprocessors;
  const int widest = t.K > 128 || few ? 64 : 128;
  t.panels = (t.V + widest - 1) / widest;
  t.is_hopper = takes_hopper_path(p, device);
  t.image_groups = image_groups(t.K);
  t.has_tensor_extras = takes_tensor_extras(p, device);
  t.cu_seqlens_dtype = p.cu_seqlens_dtype;
  t.cu_seqlens_stride = p.cu_seqlens_stride;
  t.blocks = blocks_of(p);
  t.by_heads = divisor(t.HV);
  if (!t.is_packed) t.by_blocks = divisor(ceil_div(p.dims.T, kBlock));
  t.multiprocessors = device.multiprocessors;
  overlap(t);
  return t;
}

class CudaChunkKdaFwd final : public ChunkKdaFwdKernel {
 public:
  CudaChunkKdaFwd(const ChunkKdaFwdProblem& problem, const Api& api, const DeviceInfo& device)
      : api_(&api),
        task_(make_task(problem, device)),
        sequences_(packed_sequences(problem)),
        has_extras_(problem.has_gk || problem.has_Aqk || problem.has_Akk || problem.has_w || problem.has_u ||
                    problem.has_qg || problem.has_kg) {
    WorkspaceBuilder builder;
    const std::int64_t image_bytes = task_.is_hopper ? BlockImage::kBytes : Image{task_.image_groups}.bytes();
    images_at_ = builder.add("blocks", {task_.blocks, task_.HV, image_bytes}, 1);
    made_at_ = builder.add("images there", {task_.preparers > 0 ? task_.blocks : 0, task_.HV}, sizeof(unsigned));
    sequences_at_ = builder.add("sequences", {task_.is_packed ? task_.N : 0}, sizeof(PackedSequence));
    regions_ = builder.take();
  }

  [[nodiscard]] std::span<const WorkspaceRegion> regions() const noexcept override { return regions_; }
  [[nodiscard]] int launches() const noexcept override {
    constexpr std::size_t kEntriesPerLaunch = 64;
    const auto uploads = static_cast<int>((sequences_.size() + kEntriesPerLaunch - 1) / kEntriesPerLaunch);
    const int tables = task_.is_packed && sequences_.empty() ? 1 : uploads;
    return tables + 2 + (has_extras_ ? 1 : 0);
  }
  [[nodiscard]] int num_threads() const noexcept override { return 1; }

  void run(const ChunkKdaFwdPointers& pointers, std::byte* workspace, Stream stream) const override {
    ChunkKdaFwdTask task = task_;
    task.at = pointers;
    task.images = workspace + images_at_;
    if (task.preparers > 0) task.made = reinterpret_cast<unsigned*>(workspace + made_at_);
    if (task.is_packed) task.sequences = reinterpret_cast<PackedSequence*>(workspace + sequences_at_);
    if (!sequences_.empty()) task.host_sequences = sequences_.data();
    Failure failure;
    if (!api_->chunk_kda_fwd(task, stream, &failure)) fail(kChunkKdaFwdName, failure);
  }

 private:
  const Api* api_;
  ChunkKdaFwdTask task_;
  std::vector<PackedSequence> sequences_;
  bool has_extras_;
  std::size_t images_at_ = 0;
  std::size_t made_at_ = 0;
  std::size_t sequences_at_ = 0;
  std::vector<WorkspaceRegion> regions_;
};

}  // namespace

std::unique_ptr<ChunkKdaFwdKernel> make_chunk_kda_fwd(const ChunkKdaFwdProblem& problem, const PlanOptions&) {
  require_device(kChunkKdaFwdName, problem.device);
  const DeviceInfo device = describe(kChunkKdaFwdName, problem.device);
  return std::make_unique<CudaChunkKdaFwd>(problem, api(kChunkKdaFwdName), device);
}

}  // namespace kda::cuda
