// The C API as a stranger might use it: any order of calls, with live, destroyed, foreign, null and made-up handles.
// Every call succeeds or has one of the documented codes and a message.

#include "acl/acl.h"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "aclnnop/aclnn_chunk_kda_fwd.h"
#include "aclnnop/aclnn_kda_gate.h"
#include "aclnnop/aclnn_kda_gate_cumsum.h"
#include "fuzz/views.h"

namespace kda::fuzz {
namespace {

using Dims = std::vector<std::int64_t>;

enum class Kind { kTensor, kIntArray, kExecutor, kStream, kContext };

enum class Op { kFwd, kGate, kGateCumsum };

struct Execution {
  Op op = Op::kFwd;
  std::uint64_t workspace_bytes = 0;
  bool is_backed = false;  // by memory for every tensor, so that it may be run
};

void require_status(int status) {
  const char* message = status == 0 ? nullptr : aclGetRecentErrMsg();
  constexpr std::array kCodes{161001, 161002, 361001, 561101, 561103};
  const bool is_known = status == 0 || std::find(kCodes.begin(), kCodes.end(), status) != kCodes.end();
  require(is_known, "operators return documented codes, not " + std::to_string(status));
  require(status == 0 || (message != nullptr && *message != '\0'), "a failed call leaves a message");
}

void require_runtime(int status) {
  const char* message = status == 0 ? nullptr : aclGetRecentErrMsg();
  require(status != ACL_ERROR_INTERNAL_ERROR, "the runtime has no internal error");
  require(status == 0 || (message != nullptr && *message != '\0'), "a failed call leaves a message");
}

class Session {
 public:
  explicit Session(FuzzedDataProvider& draw) : draw_(draw) {}

  ~Session() {
    for (const auto& [handle, kind] : handles_) destroy(handle, kind);
    for (void* memory : device_memory_) static_cast<void>(aclrtFree(memory));
    for (void* memory : host_memory_) static_cast<void>(aclrtFreeHost(memory));
    static_cast<void>(aclFinalize());
    static_cast<void>(aclGetRecentErrMsg());
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  void step() {
    switch (draw_.ConsumeIntegralInRange(0, 11)) {
      case 0:
        create_tensor();
        break;
      case 1:
        create_int_array();
        break;
      case 2: {
        const Kind kind = draw_kind();
        const int status = destroy(pick(kind), kind);
        kind == Kind::kStream || kind == Kind::kContext ? require_runtime(status) : require_status(status);
        break;
      }
      case 3:
        require_status(aclSetAclOpExecutorRepeatable(static_cast<aclOpExecutor*>(pick(Kind::kExecutor))));
        break;
      case 4:
        plan_fwd();
        break;
      case 5:
        plan_gate();
        break;
      case 6:
        plan_gate_cumsum();
        break;
      case 7:
      case 8:
        execute();
        break;
      case 9:
        use_memory();
        break;
      default:
        use_runtime();
        break;
    }
  }

 private:
  Kind draw_kind() {
    return draw_.PickValueInArray({Kind::kTensor, Kind::kIntArray, Kind::kExecutor, Kind::kStream, Kind::kContext});
  }

  // Mostly a handle of this kind, perhaps destroyed; else null, one of any kind, or none at all.
  void* pick(Kind kind) {
    const int how = draw_.ConsumeIntegralInRange(0, 9);
    if (how == 9) return nullptr;
    if (how == 8) return reinterpret_cast<void*>(draw_.ConsumeIntegral<std::uintptr_t>());
    std::vector<void*> candidates;
    for (const auto& [handle, its_kind] : handles_) {
      if (how == 7 || its_kind == kind) candidates.push_back(handle);
    }
    if (candidates.empty()) return nullptr;
    return candidates[draw_.ConsumeIntegralInRange<std::size_t>(0, candidates.size() - 1)];
  }

  int destroy(void* handle, Kind kind) {
    switch (kind) {
      case Kind::kTensor:
        return aclDestroyTensor(static_cast<aclTensor*>(handle));
      case Kind::kIntArray:
        return aclDestroyIntArray(static_cast<aclIntArray*>(handle));
      case Kind::kExecutor:
        return aclDestroyAclOpExecutor(static_cast<aclOpExecutor*>(handle));
      case Kind::kStream:
        return aclrtDestroyStream(handle);
      case Kind::kContext:
        break;
    }
    return aclrtDestroyContext(handle);
  }

  // A row-major tensor with memory of its own.
  aclTensor* backed_tensor(aclDataType type, const Dims& dims) {
    TensorView view = TensorView::contiguous(nullptr, type == ACL_FLOAT ? Dtype::kFloat32 : Dtype::kBFloat16, dims);
    Extent extent;
    require(extent_of(view, 1 << 20, extent), "the calls of this file are small");
    blocks_.emplace_back(view, extent);
    blocks_.back().fill(view.dtype, [](std::int64_t i) { return 0.01 * static_cast<double>(i % 17) - 0.1; });
    aclTensor* tensor =
        aclCreateTensor(dims.data(), dims.size(), type, nullptr, 0, ACL_FORMAT_ND, dims.data(), dims.size(), view.data);
    require(tensor != nullptr, "a well-formed tensor can be made");
    handles_.emplace_back(tensor, Kind::kTensor);
    backed_[tensor] = true;
    return tensor;
  }

  // The tensor, or rarely another handle.
  const aclTensor* perhaps(aclTensor* tensor) {
    if (!rarely(draw_)) return tensor;
    return static_cast<const aclTensor*>(pick(Kind::kTensor));
  }
  const aclTensor* optional(aclDataType type, const Dims& dims) {
    return draw_.ConsumeBool() ? perhaps(backed_tensor(type, dims)) : nullptr;
  }

  void create_tensor() {
    std::array<std::int64_t, 16> dims{};
    std::array<std::int64_t, 16> strides{};
    for (std::int64_t& extent : dims)
      extent = draw_.ConsumeBool() ? draw_.ConsumeIntegralInRange(0, 70) : draw_wild(draw_);
    for (std::int64_t& stride : strides) stride = draw_wild(draw_);
    const auto rank = draw_.ConsumeBool() ? draw_.ConsumeIntegralInRange<std::uint64_t>(0, 9)
                                          : draw_.ConsumeIntegral<std::uint64_t>();
    aclTensor* tensor = aclCreateTensor(
        draw_.ConsumeBool() ? dims.data() : nullptr, rank,
        static_cast<aclDataType>(draw_.ConsumeIntegralInRange(-2, 45)), draw_.ConsumeBool() ? strides.data() : nullptr,
        draw_wild(draw_), static_cast<aclFormat>(draw_.ConsumeIntegralInRange(-1, 5)), nullptr,
        draw_.ConsumeIntegral<std::uint64_t>(), reinterpret_cast<void*>(draw_.ConsumeIntegral<std::uintptr_t>()));
    if (tensor == nullptr) return require(aclGetRecentErrMsg() != nullptr, "a failed call leaves a message");
    handles_.emplace_back(tensor, Kind::kTensor);
    backed_[tensor] = false;
  }

  aclIntArray* create_int_array() {
    std::vector<std::int64_t> values(draw_.ConsumeIntegralInRange<std::size_t>(0, 5));
    for (std::int64_t& value : values)
      value = draw_.ConsumeBool() ? draw_.ConsumeIntegralInRange(0, 70) : draw_wild(draw_);
    const bool is_null = rarely(draw_);
    aclIntArray* array = is_null ? aclCreateIntArray(nullptr, draw_.ConsumeIntegral<std::uint64_t>())
                                 : aclCreateIntArray(values.data(), values.size());
    if (array == nullptr) {
      require(aclGetRecentErrMsg() != nullptr, "a failed call leaves a message");
    } else {
      handles_.emplace_back(array, Kind::kIntArray);
    }
    return array;
  }

  const aclIntArray* cu_seqlens(std::int64_t tokens) {
    if (draw_.ConsumeIntegralInRange(0, 3) != 3) return nullptr;
    if (rarely(draw_)) return static_cast<const aclIntArray*>(pick(Kind::kIntArray));
    const std::array<std::int64_t, 3> ends{0, draw_.ConsumeIntegralInRange<std::int64_t>(0, tokens), tokens};
    aclIntArray* array = aclCreateIntArray(ends.data(), ends.size());
    handles_.emplace_back(array, Kind::kIntArray);
    return array;
  }

  const char* layout() {
    constexpr std::array<const char*, 10> kNames{"BSND", "BSND", "BSND", "BSND", "BNSD",
                                                 "TND",  "NTD",  "",     "bsnd", nullptr};
    return draw_.PickValueInArray(kNames);
  }

  double number(double usual) { return rarely(draw_) ? draw_.ConsumeFloatingPoint<double>() : usual; }

  std::int64_t chunk_size() { return rarely(draw_) ? draw_wild(draw_) : 64; }

  // Calls the first phase, and keeps what it makes.
  template <typename Phase>
  void plan(Op op, const std::vector<const aclTensor*>& tensors, const Phase& first_phase) {
    Execution execution{.op = op};
    aclOpExecutor* executor = nullptr;
    const bool has_size = !rarely(draw_);
    const bool has_executor = !rarely(draw_);
    const int status = first_phase(has_size ? &execution.workspace_bytes : nullptr, has_executor ? &executor : nullptr);
    require_status(status);
    require((status == 0) == (executor != nullptr), "a first phase hands out an executor when it succeeds");
    if (status != 0) return;
    execution.is_backed = std::all_of(tensors.begin(), tensors.end(),
                                      [&](const aclTensor* tensor) { return tensor == nullptr || backed_.at(tensor); });
    handles_.emplace_back(executor, Kind::kExecutor);
    executions_[executor] = execution;
  }

  void plan_fwd() {
    const std::int64_t B = draw_.ConsumeIntegralInRange(1, 2);
    const std::int64_t T = draw_.ConsumeIntegralInRange(0, 70);
    const std::int64_t H = draw_.ConsumeIntegralInRange(1, 2);
    const std::int64_t HV = H * draw_.ConsumeIntegralInRange(1, 2);
    constexpr std::int64_t K = 16;
    constexpr std::int64_t V = 32;
    constexpr std::int64_t C = 64;
    const std::int64_t chunks = (T + C - 1) / C;
    const auto half = [&](const Dims& dims) { return perhaps(backed_tensor(ACL_BF16, dims)); };
    const std::vector<const aclTensor*> t{
        half({B, T, H, K}),
        half({B, T, H, K}),
        half({B, T, HV, V}),
        half({B, T, HV, K}),
        half({B, T, HV}),
        optional(ACL_FLOAT, {HV}),
        optional(ACL_FLOAT, {HV * K}),
        optional(ACL_FLOAT, {B, HV, K, V}),
        half({B, T, HV, V}),
        optional(ACL_FLOAT, {B, HV, K, V}),
        optional(ACL_FLOAT, {B, HV, T, K}),
        half({B, HV, T, C}),
        half({B, HV, T, C}),
        optional(ACL_BF16, {B, HV, T, K}),
        optional(ACL_BF16, {B, HV, T, V}),
        optional(ACL_BF16, {B, HV, T, K}),
        optional(ACL_BF16, {B, HV, T, K}),
        optional(ACL_BF16, {B, HV, T, V}),
        optional(ACL_BF16, {B, chunks, HV, K, V}),
    };
    const aclIntArray* cu = cu_seqlens(T);
    const auto* indices = static_cast<const aclIntArray*>(rarely(draw_) ? pick(Kind::kIntArray) : nullptr);
    const char* name = layout();
    const double scale = number(0.25);
    const std::int64_t size = chunk_size();
    const bool safe_gate = draw_.ConsumeBool();
    const double lower_bound = number(-5);
    const bool use_gate = draw_.ConsumeBool();
    const bool v_first = rarely(draw_);
    plan(Op::kFwd, t, [&](std::uint64_t* bytes, aclOpExecutor** executor) {
      return aclnnChunkKdaFwdGetWorkspaceSize(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], cu, indices, name, scale,
                                              size, safe_gate, lower_bound, use_gate, v_first, t[8], t[9], t[10], t[11],
                                              t[12], t[13], t[14], t[15], t[16], t[17], t[18], bytes, executor);
    });
  }

  void plan_gate() {
    const std::int64_t T = draw_.ConsumeIntegralInRange(0, 40);
    const std::int64_t H = draw_.ConsumeIntegralInRange(1, 4);
    const std::int64_t D = draw_.ConsumeIntegralInRange(1, 70);
    const std::vector<const aclTensor*> t{perhaps(backed_tensor(ACL_BF16, {T, H, D})), optional(ACL_FLOAT, {H}),
                                          optional(ACL_FLOAT, {H * D}), perhaps(backed_tensor(ACL_FLOAT, {T, H, D}))};
    const bool has_bound = draw_.ConsumeBool();
    const double lower_bound = number(-5);
    plan(Op::kGate, t, [&](std::uint64_t* bytes, aclOpExecutor** executor) {
      return aclnnKdaGateGetWorkspaceSize(t[0], t[1], t[2], has_bound, lower_bound, t[3], bytes, executor);
    });
  }

  void plan_gate_cumsum() {
    const std::int64_t T = draw_.ConsumeIntegralInRange(0, 70);
    const std::int64_t HV = draw_.ConsumeIntegralInRange(1, 4);
    const std::int64_t K = draw_.ConsumeIntegralInRange(1, 40);
    const std::vector<const aclTensor*> t{perhaps(backed_tensor(ACL_BF16, {HV, T, K})), optional(ACL_FLOAT, {HV}),
                                          optional(ACL_FLOAT, {HV * K}), perhaps(backed_tensor(ACL_FLOAT, {HV, T, K}))};
    const aclIntArray* cu = cu_seqlens(T);
    const std::int64_t size = chunk_size();
    const bool use_gate = draw_.ConsumeBool();
    const bool safe_gate = draw_.ConsumeBool();
    const double lower_bound = number(-5);
    plan(Op::kGateCumsum, t, [&](std::uint64_t* bytes, aclOpExecutor** executor) {
      return aclnnKdaGateCumsumGetWorkspaceSize(t[0], t[1], t[2], cu, size, use_gate, safe_gate, lower_bound, t[3],
                                                bytes, executor);
    });
  }

  void execute() {
    auto* executor = static_cast<aclOpExecutor*>(pick(Kind::kExecutor));
    const auto found = executions_.find(executor);
    Execution execution;
    if (found != executions_.end()) execution = found->second;
    if (found != executions_.end() && !execution.is_backed) return;
    std::uint64_t bytes = execution.workspace_bytes;
    if (bytes != 0 && rarely(draw_)) bytes = draw_.ConsumeIntegralInRange<std::uint64_t>(0, bytes - 1);
    const auto workspace = std::make_unique<std::byte[]>(bytes);
    void* memory = rarely(draw_) ? nullptr : workspace.get();
    void* stream = draw_.ConsumeBool() ? nullptr : pick(Kind::kStream);
    const Op op = rarely(draw_) ? draw_.PickValueInArray({Op::kFwd, Op::kGate, Op::kGateCumsum}) : execution.op;
    switch (op) {
      case Op::kFwd:
        return require_status(aclnnChunkKdaFwd(memory, bytes, executor, stream));
      case Op::kGate:
        return require_status(aclnnKdaGate(memory, bytes, executor, stream));
      case Op::kGateCumsum:
        return require_status(aclnnKdaGateCumsum(memory, bytes, executor, stream));
    }
  }

  void use_memory() {
    std::vector<void*>& mine = draw_.ConsumeBool() ? device_memory_ : host_memory_;
    const bool is_device = &mine == &device_memory_;
    const std::size_t size = draw_.ConsumeBool() ? draw_.ConsumeIntegralInRange<std::size_t>(0, 600)
                                                 : std::numeric_limits<std::size_t>::max() -
                                                       draw_.ConsumeIntegralInRange<std::size_t>(0, 1024);
    if (draw_.ConsumeBool()) {
      void* memory = nullptr;
      void** where = rarely(draw_) ? nullptr : &memory;
      require_runtime(is_device ? aclrtMalloc(where, size, ACL_MEM_MALLOC_HUGE_FIRST) : aclrtMallocHost(where, size));
      if (memory != nullptr) mine.push_back(memory);
      return;
    }
    // One of either kind, perhaps freed before, or no memory of ours.
    const std::vector<void*>& from = draw_.ConsumeBool() ? device_memory_ : host_memory_;
    void* memory = from.empty() ? reinterpret_cast<void*>(draw_.ConsumeIntegral<std::uintptr_t>())
                                : from[draw_.ConsumeIntegralInRange<std::size_t>(0, from.size() - 1)];
    require_runtime(is_device ? aclrtFree(memory) : aclrtFreeHost(memory));
  }

  void use_runtime() {
    switch (draw_.ConsumeIntegralInRange(0, 10)) {
      case 0:
        return require_runtime(aclInit(nullptr));
      case 1:
        return require_runtime(aclFinalize());
      case 2:
        return require_runtime(aclrtSetDevice(draw_.ConsumeIntegralInRange(-1, 1)));
      case 3: {
        aclrtStream stream = nullptr;
        require_runtime(aclrtCreateStream(draw_.ConsumeBool() ? &stream : nullptr));
        if (stream != nullptr) handles_.emplace_back(stream, Kind::kStream);
        return;
      }
      case 4: {
        aclrtContext context = nullptr;
        require_runtime(
            aclrtCreateContext(draw_.ConsumeBool() ? &context : nullptr, draw_.ConsumeIntegralInRange(-1, 1)));
        if (context != nullptr) handles_.emplace_back(context, Kind::kContext);
        return;
      }
      case 5:
        return require_runtime(aclrtSynchronizeStream(pick(Kind::kStream)));
      case 6:
        return require_runtime(aclrtSetCurrentContext(pick(Kind::kContext)));
      case 7:
        static_cast<void>(aclGetRecentErrMsg());
        return;
      case 8:
        static_cast<void>(aclDataTypeSize(static_cast<aclDataType>(draw_.ConsumeIntegralInRange(-2, 45))));
        static_cast<void>(aclFloat16ToFloat(aclFloatToFloat16(draw_.ConsumeFloatingPoint<float>())));
        return;
      default:
        return copy_or_fill();
    }
  }

  void copy_or_fill() {
    std::array<std::byte, 64> to{};
    std::array<std::byte, 64> from{};
    const auto capacity = draw_.ConsumeIntegralInRange<std::size_t>(0, to.size());
    const auto count =
        draw_.ConsumeBool() ? draw_.ConsumeIntegralInRange<std::size_t>(0, 65) : draw_.ConsumeIntegral<std::size_t>();
    void* dst = rarely(draw_) ? nullptr : to.data();
    const void* src = rarely(draw_) ? nullptr : from.data();
    const auto kind = static_cast<aclrtMemcpyKind>(draw_.ConsumeIntegralInRange(0, 7));
    void* stream = pick(Kind::kStream);
    require_runtime(aclrtMemcpy(dst, capacity, src, count, kind));
    require_runtime(aclrtMemcpyAsync(dst, capacity, src, count, kind, stream));
    require_runtime(aclrtMemset(dst, capacity, 1, count));
    require_runtime(aclrtMemsetAsync(dst, capacity, 1, count, stream));
  }

  FuzzedDataProvider& draw_;
  std::vector<std::pair<void*, Kind>> handles_;  // all ever made
  std::map<const void*, bool> backed_;           // tensors: whether they have memory
  std::map<const void*, Execution> executions_;
  std::deque<Memory> blocks_;
  std::vector<void*> device_memory_, host_memory_;
};

}  // namespace
}  // namespace kda::fuzz

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  setenv("KDA_NUM_THREADS", "2", 1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider draw(data, size);
  kda::fuzz::Session session(draw);
  for (int i = 0; i < 64 && draw.remaining_bytes() > 0; ++i) session.step();
  return 0;
}
