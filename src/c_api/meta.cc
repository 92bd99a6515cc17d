#include "c_api/meta.h"

#include <algorithm>
#include <limits>
#include <string>

#include "c_api/calls.h"
#include "c_api/data_type.h"
#include "c_api/registry.h"
#include "c_api/stream.h"
#include "core/checked.h"

namespace kda::c_api {
namespace {

auto& tensors() { return registry<aclTensor*, Tensor>(); }
auto& int_arrays() { return registry<aclIntArray*, IntArray>(); }

// Extents and strides as given; those of an impossible rank are left out, as the rank alone will be refused.
void set_axes(TensorView& view, const std::int64_t* dims, std::uint64_t rank, const std::int64_t* strides) {
  view.rank = static_cast<int>(std::min<std::uint64_t>(rank, std::numeric_limits<int>::max()));
  if (view.rank > kMaxRank) return;
  std::copy_n(dims, rank, view.shape.begin());
  if (strides != nullptr) {
    std::copy_n(strides, rank, view.strides.begin());
    return;
  }
  std::int64_t stride = 1;
  for (std::size_t axis = rank; axis-- > 0;) {
    view.strides[axis] = stride;
    stride = saturating_mul(stride, std::max<std::int64_t>(dims[axis], 1));
  }
}

void set_data(Tensor& tensor, void* data, std::int64_t offset) {
  tensor.offset = offset;
  const auto address = static_cast<Int128>(reinterpret_cast<std::uintptr_t>(data)) +
                       static_cast<Int128>(offset) * static_cast<Int128>(size_of(tensor.view.dtype));
  tensor.is_addressable = data == nullptr || (address >= 0 && address < Int128{1} << 64);
  if (data != nullptr && tensor.is_addressable) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the sum of a pointer and an offset that nobody vouches for
    tensor.view.data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
  }
}

std::shared_ptr<Tensor> make_tensor(const std::int64_t* dims, std::uint64_t rank, int data_type,
                                    const std::int64_t* strides, std::int64_t offset, int format, void* data) {
  if (rank != 0 && dims == nullptr) {
    fail(ErrorKind::kMissing, {"aclCreateTensor", "viewDims"}, std::to_string(rank) + " extents", "a null pointer");
  }
  auto tensor = std::make_shared<Tensor>();
  tensor->data_type = data_type;
  tensor->format = format;
  const std::optional<Dtype> dtype = dtype_of(data_type);
  tensor->has_dtype = dtype.has_value();
  tensor->view.dtype = dtype.value_or(Dtype::kFloat32);
  tensor->view.device = current_device();
  set_axes(tensor->view, dims, rank, strides);
  set_data(*tensor, data, offset);
  return tensor;
}

std::shared_ptr<IntArray> make_int_array(const std::int64_t* values, std::uint64_t size) {
  if (size != 0 && values == nullptr) {
    fail(ErrorKind::kMissing, {"aclCreateIntArray", "value"}, std::to_string(size) + " values", "a null pointer");
  }
  if (size > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) / sizeof(std::int64_t)) {
    fail(ErrorKind::kOutOfMemory, {"aclCreateIntArray", "size"}, "a number of values that memory can hold",
         std::to_string(size));
  }
  return std::make_shared<IntArray>(values, values + size);
}

template <typename Handle, typename Object>
void require_live(Argument argument, std::string_view kind, Handle handle, const std::shared_ptr<Object>& object) {
  if (object != nullptr) return;
  const bool is_null = handle == nullptr;
  fail(is_null ? ErrorKind::kMissing : ErrorKind::kValue, argument, "a live " + std::string(kind),
       is_null ? "a null pointer" : "one that is destroyed or unknown");
}

}  // namespace

TensorView ArgumentReader::tensor(std::string_view name, const aclTensor* handle, std::string_view dtypes) const {
  if (handle == nullptr) return {};
  const Argument argument{op_, name};
  const std::shared_ptr<const Tensor> tensor = tensors().find(handle);
  require_live(argument, "aclTensor", handle, tensor);
  if (tensor->format != ACL_FORMAT_ND) {
    fail(ErrorKind::kValue, argument, "format ACL_FORMAT_ND (2)", std::to_string(tensor->format));
  }
  if (!tensor->has_dtype) {
    fail(ErrorKind::kDtype, argument, "dtype " + std::string(dtypes), data_type_name(tensor->data_type));
  }
  if (!tensor->is_addressable) {
    fail(ErrorKind::kValue, argument, "addresses within 64 bits", "offset " + std::to_string(tensor->offset));
  }
  return tensor->view;
}

TensorView ArgumentReader::required(std::string_view name, const aclTensor* handle, std::string_view dtypes) const {
  if (handle == nullptr) fail(ErrorKind::kMissing, {op_, name}, "a tensor", "none");
  return tensor(name, handle, dtypes);
}

std::shared_ptr<const IntArray> ArgumentReader::int_array(std::string_view name, const aclIntArray* handle) const {
  if (handle == nullptr) return nullptr;
  std::shared_ptr<const IntArray> array = int_arrays().find(handle);
  require_live({op_, name}, "aclIntArray", handle, array);
  return array;
}

void ArgumentReader::require_pointer(std::string_view name, const void* pointer) const {
  if (pointer == nullptr) fail(ErrorKind::kMissing, {op_, name}, "where to store it", "a null pointer");
}

std::optional<std::span<const std::int64_t>> span_of(const std::shared_ptr<const IntArray>& array) {
  if (array == nullptr) return std::nullopt;
  return std::span(*array);
}

}  // namespace kda::c_api

using namespace kda::c_api;

aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t* stride,
                           int64_t offset, aclFormat format, const int64_t* /*storageDims*/,
                           uint64_t /*storageDimsNum*/, void* tensorData) {
  aclTensor* handle = nullptr;
  const int failed = operator_call([&] {
    handle = tensors().add(make_tensor(viewDims, viewDimsNum, static_cast<int>(dataType), stride, offset,
                                       static_cast<int>(format), tensorData));
  });
  return failed != 0 ? nullptr : handle;
}

aclnnStatus aclDestroyTensor(const aclTensor* tensor) {
  return operator_call([&] {
    require_live({"aclDestroyTensor", "tensor"}, "aclTensor", tensor, tensors().take(tensor));
  });
}

aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size) {
  aclIntArray* handle = nullptr;
  const int failed = operator_call([&] { handle = int_arrays().add(make_int_array(value, size)); });
  return failed != 0 ? nullptr : handle;
}

aclnnStatus aclDestroyIntArray(const aclIntArray* array) {
  return operator_call([&] {
    require_live({"aclDestroyIntArray", "array"}, "aclIntArray", array, int_arrays().take(array));
  });
}
