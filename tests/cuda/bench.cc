// Times chunk_kda_fwd (graph replays between events, median of several) and kda_gate (launches between events, beside
// copies of as many bytes) on device 0. Prints tables, and JSON lines to a file.
//
//     kda_cuda_bench [JSON FILE [PART OF A CASE'S NAME]]

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "kda/chunk_kda_fwd.h"
#include "kda/info.h"
#include "kda/kda_gate.h"

namespace {

using namespace kda;

// Softplus gates: mild, but for one channel in `every` (none if 0), which decays by about `strength` a step.
struct Softplus {
  int every;
  float strength;
};

struct BenchCase {
  const char* name;
  std::int64_t B, T, H;
  std::vector<std::int64_t> cu_seqlens;
  double floor_ms;     // every byte once, at 4.25 TB/s
  double flashkda_ms;  // public kernels on the same card, measured beforehand
  double fla_ms;
  std::int64_t K = 128, V = 128, C = 64;
  std::optional<Softplus> softplus{};  // bounded gates if absent
  Dtype dtype = Dtype::kBFloat16;      // of q, k and v
  Layout layout = Layout::kBSND;
  std::int64_t group = 1;   // value heads of a key head
  bool is_generic = false;  // forced off the Hopper path
};

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// 16-bit elements.
std::uint16_t rounded(float x, Dtype dtype) {
  if (dtype == Dtype::kFloat16) return __half_as_ushort(__float2half_rn(x));

  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
}

// Device memory filled by repeating one block of random numbers in [low, high).
class Random {
 public:
  Random() {
    std::uint64_t state = 88172645463325252ull;
    unit_.resize(kBlock);
    for (float& x : unit_) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      x = static_cast<float>(state >> 40) * 0x1p-24f;
    }
  }

  void fill(void* data, Dtype dtype, std::int64_t count, float low, float high) const {
    std::vector<std::byte> block(kBlock * size_of(dtype));
    for (std::size_t i = 0; i < kBlock; ++i) {
      const float x = low + (high - low) * unit_[i];
      if (dtype == Dtype::kFloat32) {
        reinterpret_cast<float*>(block.data())[i] = x;
      } else {
        reinterpret_cast<std::uint16_t*>(block.data())[i] = rounded(x, dtype);
      }
    }
    auto* to = static_cast<std::byte*>(data);
    for (auto left = static_cast<std::size_t>(count) * size_of(dtype); left > 0;) {
      const std::size_t part = std::min(left, block.size());
      check(cudaMemcpy(to, block.data(), part, cudaMemcpyHostToDevice), "fill");
      to += part;
      left -= part;
    }
  }

 private:
  static constexpr std::size_t kBlock = (1u << 22) - 3;
  std::vector<float> unit_;
};

class DeviceTensors {
 public:
  ~DeviceTensors() {
    for (void* data : memory_) cudaFree(data);
  }
  TensorView make(TensorView view) {
    check(
        cudaMalloc(&view.data, std::max<std::size_t>(static_cast<std::size_t>(view.numel()) * size_of(view.dtype), 1)),
        "cudaMalloc");
    memory_.push_back(view.data);
    return view;
  }
  TensorView make(Dtype dtype, std::initializer_list<std::int64_t> shape) {
    return make(TensorView::contiguous(nullptr, dtype, shape, {DeviceType::kCuda, 0}));
  }

 private:
  std::vector<void*> memory_;
};

double median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// g is -1 in the mean, and softplus(x) is x where x is large.
void strengthen(const TensorView& dt_bias, const Softplus& softplus) {
  std::vector<float> bias(static_cast<std::size_t>(dt_bias.numel()));
  const std::size_t bytes = bias.size() * sizeof(float);
  check(cudaMemcpy(bias.data(), dt_bias.data, bytes, cudaMemcpyDeviceToHost), "dt_bias");
  for (std::size_t i = 0; i < bias.size(); i += static_cast<std::size_t>(softplus.every))
    bias[i] = softplus.strength + 1;
  check(cudaMemcpy(dt_bias.data, bias.data(), bytes, cudaMemcpyHostToDevice), "dt_bias");
}

using OutputList = std::vector<TensorView ChunkKdaFwdOutputs::*>;

const OutputList kStates = {&ChunkKdaFwdOutputs::v_new, &ChunkKdaFwdOutputs::h};
const OutputList kIntermediates = {&ChunkKdaFwdOutputs::gk, &ChunkKdaFwdOutputs::Aqk,   &ChunkKdaFwdOutputs::Akk,
                                   &ChunkKdaFwdOutputs::w,  &ChunkKdaFwdOutputs::u,     &ChunkKdaFwdOutputs::qg,
                                   &ChunkKdaFwdOutputs::kg, &ChunkKdaFwdOutputs::v_new, &ChunkKdaFwdOutputs::h};

// attn_out and final_state, and these too.
double time_plan(const BenchCase& c, const Random& random, const OutputList& more) {
  DeviceTensors tensors;
  ChunkKdaFwdInputs in;
  ChunkKdaFwdAttributes attributes;
  const std::int64_t N = c.cu_seqlens.empty() ? c.B : static_cast<std::int64_t>(c.cu_seqlens.size()) - 1;
  const std::int64_t HV = c.H * c.group;
  const auto make = [&](Dtype dtype, std::int64_t heads, std::int64_t width) {
    const bool is_sequence_major = c.layout == Layout::kBSND;
    return tensors.make(dtype, {c.B, is_sequence_major ? c.T : heads, is_sequence_major ? heads : c.T, width});
  };
  in.q = make(c.dtype, c.H, c.K);
  in.k = make(c.dtype, c.H, c.K);
  in.v = make(c.dtype, HV, c.V);
  in.g = make(Dtype::kBFloat16, HV, c.K);
  in.beta = c.layout == Layout::kBSND ? tensors.make(Dtype::kBFloat16, {c.B, c.T, HV})
                                      : tensors.make(Dtype::kBFloat16, {c.B, HV, c.T});
  in.A_log = tensors.make(Dtype::kFloat32, {HV});
  in.dt_bias = tensors.make(Dtype::kFloat32, {HV * c.K});
  in.initial_state = tensors.make(Dtype::kFloat32, {N, HV, c.K, c.V});
  for (const TensorView* view : {&in.q, &in.k, &in.v, &in.beta})
    random.fill(view->data, view->dtype, view->numel(), -1, 1);
  random.fill(in.g.data, in.g.dtype, in.g.numel(), -5, 3);
  for (const TensorView* view : {&in.A_log, &in.dt_bias, &in.initial_state}) {
    random.fill(view->data, view->dtype, view->numel(), -0.5, 0.5);
  }
  if (c.softplus && c.softplus->every > 0) strengthen(in.dt_bias, *c.softplus);
  attributes.scale = 0.08838834764831845;
  attributes.chunk_size = c.C;
  attributes.layout = c.layout;
  attributes.use_gate_in_kernel = true;
  attributes.safe_gate = !c.softplus;
  attributes.fusions.qk_l2norm = true;
  attributes.fusions.beta = BetaActivation::kSigmoid;
  if (!c.cu_seqlens.empty()) attributes.cu_seqlens = c.cu_seqlens;
  const ChunkKdaFwdOutputs shapes = chunk_kda_fwd_outputs(in, attributes);
  ChunkKdaFwdOutputs out;
  out.attn_out = tensors.make(shapes.attn_out);
  out.final_state = tensors.make(shapes.final_state);
  for (const auto output : more) out.*output = tensors.make(shapes.*output);
  if (c.is_generic) setenv("KDA_CUDA_PATH", "generic", 1);
  const ChunkKdaFwdPlan plan(in, out, attributes);
  if (c.is_generic) unsetenv("KDA_CUDA_PATH");
  void* workspace = nullptr;
  check(cudaMalloc(&workspace, plan.workspace_bytes() + 1), "workspace");

  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  plan.execute(in, out, {workspace, plan.workspace_bytes()}, stream);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  constexpr int kWarmUp = 3;
  for (int i = 0; i < kWarmUp + 15; ++i) {
    check(cudaEventRecord(begin, stream), "event");
    check(cudaGraphLaunch(executable, stream), "launch");
    check(cudaEventRecord(end, stream), "event");
    check(cudaStreamSynchronize(stream), "replay");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= kWarmUp) times.push_back(ms);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaFree(workspace);
  return median(times);
}

// Two events and what lies between them.
class Stopwatch {
 public:
  Stopwatch() {
    check(cudaEventCreate(&begin_), "event");
    check(cudaEventCreate(&end_), "event");
  }
  ~Stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // Milliseconds of one f(), the median of `repeats` after `warm_up`.
  template <class F>
  double time(int warm_up, int repeats, const F& f) {
    std::vector<float> times;
    for (int i = 0; i < warm_up + repeats; ++i) {
      check(cudaEventRecord(begin_), "event");
      f();
      check(cudaEventRecord(end_), "event");
      check(cudaEventSynchronize(end_), "event");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin_, end_), "event");
      if (i >= warm_up) times.push_back(ms);
    }
    return median(times);
  }

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

struct GateTimes {
  double gate_ms;
  double copy_ms;  // of a copy that reads and writes as many bytes in all
  double bytes;
};

GateTimes time_gate(std::int64_t T, Dtype out_dtype, bool is_bounded, const Random& random) {
  constexpr std::int64_t kHeads = 16, kChannels = 128;
  DeviceTensors tensors;
  KdaGateInputs in;
  in.g = tensors.make(Dtype::kBFloat16, {T, kHeads, kChannels});
  in.A_log = tensors.make(Dtype::kFloat32, {kHeads});
  in.dt_bias = tensors.make(Dtype::kFloat32, {kHeads * kChannels});
  random.fill(in.g.data, in.g.dtype, in.g.numel(), -5, 3);
  random.fill(in.A_log.data, in.A_log.dtype, in.A_log.numel(), -0.5, 0.5);
  random.fill(in.dt_bias.data, in.dt_bias.dtype, in.dt_bias.numel(), -0.5, 0.5);
  const TensorView out = tensors.make(out_dtype, {T, kHeads, kChannels});
  KdaGateAttributes attributes;
  if (is_bounded) attributes.lower_bound = -5.0;
  const KdaGatePlan plan(in, out, attributes);
  const std::size_t bytes = static_cast<std::size_t>(out.numel()) * (size_of(in.g.dtype) + size_of(out_dtype));
  void* from = tensors.make(Dtype::kBFloat16, {static_cast<std::int64_t>(bytes / 4)}).data;
  void* to = tensors.make(Dtype::kBFloat16, {static_cast<std::int64_t>(bytes / 4)}).data;
  Stopwatch stopwatch;
  GateTimes times{};
  times.bytes = static_cast<double>(bytes);
  times.gate_ms = stopwatch.time(10, 100, [&] { plan.execute(in, out); });
  times.copy_ms =
      stopwatch.time(10, 100, [&] { check(cudaMemcpyAsync(to, from, bytes / 2, cudaMemcpyDeviceToDevice), "copy"); });
  return times;
}

void bench_gates(const Random& random, std::FILE* json, const std::string& wanted) {
  std::printf("\n%-42s %9s %9s %9s %9s\n", "bf16 in, H 16, D 128", "ms", "copy ms", "GB/s", "of copy");
  for (const std::int64_t T : {std::int64_t{131072}, std::int64_t{2048}}) {
    for (const Dtype out_dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      for (const bool is_bounded : {false, true}) {
        const std::string name = "kda_gate T " + std::to_string(T) + ", out " + std::string(name_of(out_dtype)) +
                                 (is_bounded ? ", bounded" : ", softplus");
        if (name.find(wanted) == std::string::npos) continue;
        const GateTimes t = time_gate(T, out_dtype, is_bounded, random);
        const double rate = t.bytes / t.gate_ms * 1e-6;
        std::printf("%-42s %9.4f %9.4f %9.0f %9.3f\n", name.c_str(), t.gate_ms, t.copy_ms, rate, t.copy_ms / t.gate_ms);
        if (json == nullptr) continue;
        std::fprintf(json, "{\"case\": \"%s\", \"ms\": %.5f, \"copy_ms\": %.5f, \"gb_s\": %.0f}\n", name.c_str(),
                     t.gate_ms, t.copy_ms, rate);
      }
    }
  }
}

// Gigabytes per second, read and written, of a copy within the device.
double copy_rate() {
  constexpr std::int64_t kBytes = std::int64_t{2} << 30;
  DeviceTensors tensors;
  void* from = tensors.make(Dtype::kBFloat16, {kBytes / 2}).data;
  void* to = tensors.make(Dtype::kBFloat16, {kBytes / 2}).data;
  const double ms =
      Stopwatch().time(1, 7, [&] { check(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice), "copy"); });
  return 2.0 * kBytes / ms * 1e-6;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<BenchCase> cases = {
      {"T8192_H96", 1, 8192, 96, {}, 0.237, 1.402, 2.606},
      {"packed6_H96", 1, 8192, 96, {0, 1300, 1847, 3895, 4858, 5129, 8192}, 0.237, 1.387, 2.651},
      {"packed8x1024_H96", 1, 8192, 96, {0, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192}, 0.237, 1.192, 2.622},
      {"T8192_H64", 1, 8192, 64, {}, 0.158, 1.194, 1.732},
      {"T4096_H32", 1, 4096, 32, {}, 0.040, 0.507, 0.524},
      {"T32768_H32", 1, 32768, 32, {}, 0.316, 3.838, 3.857},
      {"T512_H64", 1, 512, 64, {}, 0.010, 0.107, 0.151},
      {"B8_T2048_H32", 8, 2048, 32, {}, 0.158, 0.788, 1.920},
      {"K256_V256_T4096_H32", 1, 4096, 32, {}, 0, 0, 0, 256, 256, 64},
      {"K64_V64_T8192_H96", 1, 8192, 96, {}, 0, 0, 0, 64, 64, 64},
      {"K128_V256_T4096_H32", 1, 4096, 32, {}, 0, 0, 0, 128, 256, 64},
      {"K128_V64_T8192_H96", 1, 8192, 96, {}, 0, 0, 0, 128, 64, 64},
  };
  const auto changed = [](const char* name, std::int64_t T, std::int64_t H, const auto& change) {
    BenchCase c{name, 1, T, H, {}, 0, 0, 0};
    change(c);
    return c;
  };
  const std::vector<BenchCase> changed_cases = {
      changed("T8192_H96 fp16", 8192, 96, [](BenchCase& c) { c.dtype = Dtype::kFloat16; }),
      changed("T8192_H96 generic", 8192, 96, [](BenchCase& c) { c.is_generic = true; }),
      changed("T4096_H32 generic", 4096, 32, [](BenchCase& c) { c.is_generic = true; }),
      changed("T4096_H8_HV32", 4096, 8, [](BenchCase& c) { c.group = 4; }),
      changed("T4096_H8_HV32 fp16", 4096, 8, [](BenchCase& c) { c.group = 4, c.dtype = Dtype::kFloat16; }),
      changed("T4096_H32 C128", 4096, 32, [](BenchCase& c) { c.C = 128; }),
      changed("T4096_H32 C128 fp16", 4096, 32, [](BenchCase& c) { c.C = 128, c.dtype = Dtype::kFloat16; }),
      changed("T4096_H32 BNSD", 4096, 32, [](BenchCase& c) { c.layout = Layout::kBNSD; }),
      changed("T4096_H32 BNSD fp16", 4096, 32,
              [](BenchCase& c) { c.layout = Layout::kBNSD, c.dtype = Dtype::kFloat16; }),
      changed("K96_V96_T4096_H32", 4096, 32, [](BenchCase& c) { c.K = c.V = 96; }),
  };
  const auto softplus_case = [](const char* name, Softplus softplus) {
    return BenchCase{name, 1, 8192, 96, {}, 0.237, 0, 0, 128, 128, 64, softplus};
  };
  const std::vector<BenchCase> softplus_cases = {
      softplus_case("softplus_mild", {0, 0}),
      softplus_case("softplus_half_12", {2, 12}),
      softplus_case("softplus_half_1000", {2, 1000}),
      softplus_case("softplus_5%_12", {20, 12}),
  };
  std::FILE* json = argc > 1 ? std::fopen(argv[1], "w") : nullptr;
  std::string device;
  for (const BackendInfo& backend : backends()) {
    if (backend.name == "cuda") device = backend.detail;
  }
  const double rate = copy_rate();
  std::printf("%s, copy %.0f GB/s\n%-32s %9s %9s %9s %9s\n", device.c_str(), rate, "case", "ms", "FlashKDA", "FLA",
              "floor");
  const Random random;
  const std::string wanted = argc > 2 ? argv[2] : "";
  const auto report = [&](const std::string& name, const BenchCase& c, double ms) {
    std::printf("%-32s %9.4f %9.3f %9.3f %9.3f\n", name.c_str(), ms, c.flashkda_ms, c.fla_ms, c.floor_ms);
    std::fflush(stdout);
    if (json == nullptr) return;
    std::fprintf(
        json,
        "{\"device\": \"%s\", \"copy_gb_s\": %.0f, \"case\": \"%s\", \"ms\": %.4f, \"flashkda_ms\": %.3f, \"fla_ms\": "
        "%.3f, \"floor_ms\": %.3f}\n",
        device.c_str(), rate, name.c_str(), ms, c.flashkda_ms, c.fla_ms, c.floor_ms);
  };
  const auto time = [&](const std::string& name, const BenchCase& c, const OutputList& more) {
    if (name.find(wanted) != std::string::npos) report(name, c, time_plan(c, random, more));
  };
  for (const BenchCase& c : cases) time(c.name, c, {});
  for (const BenchCase& c : changed_cases) time(c.name, c, {});
  time("T8192_H96 generic v_new, h", changed_cases[1], kStates);
  time("T8192_H96 v_new, h", cases[0], kStates);
  time("T8192_H96 all outputs", cases[0], kIntermediates);
  for (const BenchCase& c : softplus_cases) time(c.name, c, {});
  for (const BenchCase& c : softplus_cases) time(std::string(c.name) + " all outputs", c, kIntermediates);
  bench_gates(random, json, wanted);
  if (json != nullptr) std::fclose(json);
  return 0;
}
