#include "support/c_door.h"

#include <array>
#include <vector>

namespace kda::testing {
namespace {

struct InputMember {
  const char* name;
  TensorView ChunkKdaFwdInputs::*member;
};

constexpr InputMember kInputs[] = {
    {"q", &ChunkKdaFwdInputs::q},
    {"k", &ChunkKdaFwdInputs::k},
    {"v", &ChunkKdaFwdInputs::v},
    {"g", &ChunkKdaFwdInputs::g},
    {"beta", &ChunkKdaFwdInputs::beta},
    {"A_log", &ChunkKdaFwdInputs::A_log},
    {"dt_bias", &ChunkKdaFwdInputs::dt_bias},
    {"initial_state", &ChunkKdaFwdInputs::initial_state},
};

// As many extents or strides as the rank says, even one that TensorView has no room for.
std::vector<std::int64_t> axes(const TensorView& view, const std::array<std::int64_t, kMaxRank>& values) {
  std::vector<std::int64_t> all(values.begin(), values.end());
  all.resize(static_cast<std::size_t>(view.rank), 1);
  return all;
}

void* before(void* data, std::int64_t bytes) {
  if (data == nullptr) return nullptr;
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(data) - static_cast<std::uintptr_t>(bytes));
}

}  // namespace

aclDataType acl_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
      return ACL_FLOAT16;
    case Dtype::kBFloat16:
      return ACL_BF16;
    case Dtype::kFloat64:
      return ACL_DOUBLE;
    case Dtype::kInt32:
      return ACL_INT32;
    case Dtype::kInt64:
      return ACL_INT64;
    case Dtype::kFloat32:
      break;
  }
  return ACL_FLOAT;
}

CTensor make_c_tensor(const TensorView& view, const CTensorOptions& options) {
  if (!view.present()) return nullptr;
  const std::vector<std::int64_t> dims = axes(view, view.shape);
  const std::vector<std::int64_t> strides = axes(view, view.strides);
  const auto offset_bytes = static_cast<std::int64_t>(static_cast<std::uint64_t>(options.offset) * size_of(view.dtype));
  aclTensor* tensor =
      aclCreateTensor(dims.data(), dims.size(), options.data_type.value_or(acl_type(view.dtype)), strides.data(),
                      options.offset, options.format, dims.data(), dims.size(), before(view.data, offset_bytes));
  return {tensor, aclDestroyTensor};
}

CIntArray make_c_int_array(std::span<const std::int64_t> values) {
  return {aclCreateIntArray(values.data(), values.size()), aclDestroyIntArray};
}

std::string take_error() {
  const char* message = aclGetRecentErrMsg();
  return message == nullptr ? std::string() : message;
}

CArguments make_c_arguments(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs,
                            const ChunkKdaFwdAttributes& attributes,
                            const std::map<std::string, CTensorOptions>& options) {
  CArguments arguments;
  const auto add = [&](const std::string& name, const TensorView& view) {
    const auto found = options.find(name);
    arguments.tensors[name] = make_c_tensor(view, found == options.end() ? CTensorOptions() : found->second);
  };
  for (const InputMember& input : kInputs) add(input.name, inputs.*input.member);
  for (std::size_t i = 0; i < kOutputViews.size(); ++i) {
    add(std::string(kChunkKdaFwdOutputNames[i]), outputs.*kOutputViews[i]);
  }
  if (attributes.cu_seqlens) arguments.cu_seqlens = make_c_int_array(*attributes.cu_seqlens);
  if (attributes.chunk_indices) arguments.chunk_indices = make_c_int_array(*attributes.chunk_indices);
  arguments.layout = name_of(attributes.layout).data();
  arguments.scale = attributes.scale.value_or(1);
  arguments.chunk_size = attributes.chunk_size;
  arguments.safe_gate = attributes.safe_gate;
  arguments.lower_bound = attributes.lower_bound;
  arguments.use_gate_in_kernel = attributes.use_gate_in_kernel;
  arguments.state_v_first = attributes.state_v_first;
  return arguments;
}

aclnnStatus plan(const CArguments& arguments, std::uint64_t* workspace_size, aclOpExecutor** executor) {
  const auto tensor = [&](const char* name) {
    const auto found = arguments.tensors.find(name);
    return found == arguments.tensors.end() ? nullptr : found->second.get();
  };
  return aclnnChunkKdaFwdGetWorkspaceSize(
      tensor("q"), tensor("k"), tensor("v"), tensor("g"), tensor("beta"), tensor("A_log"), tensor("dt_bias"),
      tensor("initial_state"), arguments.cu_seqlens.get(), arguments.chunk_indices.get(), arguments.layout,
      arguments.scale, arguments.chunk_size, arguments.safe_gate, arguments.lower_bound, arguments.use_gate_in_kernel,
      arguments.state_v_first, tensor("attn_out"), tensor("final_state"), tensor("gk"), tensor("Aqk"), tensor("Akk"),
      tensor("w"), tensor("u"), tensor("qg"), tensor("kg"), tensor("v_new"), tensor("h"), workspace_size, executor);
}

aclnnStatus call(const CArguments& arguments) {
  std::uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  const aclnnStatus status = plan(arguments, &workspace_size, &executor);
  if (status != ACL_SUCCESS) return status;
  GuardedMemory workspace(workspace_size);
  return aclnnChunkKdaFwd(workspace.data(), workspace_size, executor, nullptr);
}

}  // namespace kda::testing
