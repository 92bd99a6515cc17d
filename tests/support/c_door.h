#pragma once

// Calls of the C API in C++ clothes: handles that destroy themselves, and the arguments of one call as a value that
// tests can change.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_chunk_kda_fwd.h"
#include "kda/chunk_kda_fwd.h"
#include "support/run_case.h"

namespace kda::testing {

[[nodiscard]] aclDataType acl_type(Dtype dtype);

using CTensor = std::shared_ptr<aclTensor>;
using CIntArray = std::shared_ptr<aclIntArray>;

// What a TensorView cannot say.
struct CTensorOptions {
  std::optional<aclDataType> data_type;
  aclFormat format = ACL_FORMAT_ND;
  std::int64_t offset = 0;  // tensorData is that many elements before the view's data
};

// Null for an absent view.
[[nodiscard]] CTensor make_c_tensor(const TensorView& view, const CTensorOptions& options = {});
[[nodiscard]] CIntArray make_c_int_array(std::span<const std::int64_t> values);

// The message that aclGetRecentErrMsg returns; empty when there is none.
[[nodiscard]] std::string take_error();

// Arguments of aclnnChunkKdaFwdGetWorkspaceSize. Tensors are named as in kChunkKdaFwdOutputNames and ChunkKdaFwdInputs.
struct CArguments {
  std::map<std::string, CTensor> tensors;
  CIntArray cu_seqlens;
  CIntArray chunk_indices;
  const char* layout = "BSND";
  double scale = 1;
  std::int64_t chunk_size = 64;
  bool safe_gate = false;
  double lower_bound = -5;
  bool use_gate_in_kernel = false;
  bool state_v_first = false;
};

[[nodiscard]] CArguments make_c_arguments(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs,
                                          const ChunkKdaFwdAttributes& attributes,
                                          const std::map<std::string, CTensorOptions>& options = {});

// The first phase.
[[nodiscard]] aclnnStatus plan(const CArguments& arguments, std::uint64_t* workspace_size, aclOpExecutor** executor);

// Both phases, with as much workspace as the first asks for.
[[nodiscard]] aclnnStatus call(const CArguments& arguments);

}  // namespace kda::testing
