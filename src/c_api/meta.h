#pragma once

// What aclTensor and aclIntArray stand for, and how operators read them.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "aclnn/acl_meta.h"
#include "core/error.h"
#include "kda/tensor.h"

namespace kda::c_api {

// A tensor as its creator described it; operators decide what of it is legal.
struct Tensor {
  TensorView view;  // data is where the view starts; dtype counts only when has_dtype
  int data_type = ACL_DT_UNDEFINED;
  int format = ACL_FORMAT_UNDEFINED;
  std::int64_t offset = 0;
  bool has_dtype = false;       // whether Dtype has a name for data_type
  bool is_addressable = false;  // whether data + offset is within 64 bits
};

using IntArray = std::vector<std::int64_t>;

// Reads the arguments of one operator. Throws Error.
class ArgumentReader {
 public:
  explicit constexpr ArgumentReader(std::string_view op) : op_(op) {}

  // Absent when the handle is null. dtypes says, for a message, what the argument may be.
  [[nodiscard]] TensorView tensor(std::string_view name, const aclTensor* handle, std::string_view dtypes) const;
  // As tensor(), but not null.
  [[nodiscard]] TensorView required(std::string_view name, const aclTensor* handle, std::string_view dtypes) const;
  // Null when the handle is null.
  [[nodiscard]] std::shared_ptr<const IntArray> int_array(std::string_view name, const aclIntArray* handle) const;
  void require_pointer(std::string_view name, const void* pointer) const;

 private:
  std::string_view op_;
};

[[nodiscard]] std::optional<std::span<const std::int64_t>> span_of(const std::shared_ptr<const IntArray>& array);

}  // namespace kda::c_api
