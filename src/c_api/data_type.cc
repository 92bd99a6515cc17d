#include "c_api/data_type.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <string_view>

#include "acl/acl_base.h"

namespace kda::c_api {
namespace {

struct DataType {
  int value;
  std::string_view name;
  std::size_t bytes;  // 0: not a whole number, or not fixed
};

constexpr std::array kDataTypes{
    DataType{ACL_FLOAT, "float32", 4},
    DataType{ACL_FLOAT16, "float16", 2},
    DataType{ACL_INT8, "int8", 1},
    DataType{ACL_INT32, "int32", 4},
    DataType{ACL_UINT8, "uint8", 1},
    DataType{ACL_INT16, "int16", 2},
    DataType{ACL_UINT16, "uint16", 2},
    DataType{ACL_UINT32, "uint32", 4},
    DataType{ACL_INT64, "int64", 8},
    DataType{ACL_UINT64, "uint64", 8},
    DataType{ACL_DOUBLE, "float64", 8},
    DataType{ACL_BOOL, "bool", 1},
    DataType{ACL_STRING, "string", 0},
    DataType{ACL_COMPLEX64, "complex64", 8},
    DataType{ACL_COMPLEX128, "complex128", 16},
    DataType{ACL_BF16, "bfloat16", 2},
    DataType{ACL_INT4, "int4", 0},
    DataType{ACL_UINT1, "uint1", 0},
    DataType{ACL_COMPLEX32, "complex32", 4},
    DataType{ACL_HIFLOAT8, "hifloat8", 1},
    DataType{ACL_FLOAT8_E5M2, "float8_e5m2", 1},
    DataType{ACL_FLOAT8_E4M3FN, "float8_e4m3fn", 1},
    DataType{ACL_FLOAT8_E8M0, "float8_e8m0", 1},
    DataType{ACL_FLOAT6_E3M2, "float6_e3m2", 0},
    DataType{ACL_FLOAT6_E2M3, "float6_e2m3", 0},
    DataType{ACL_FLOAT4_E2M1, "float4_e2m1", 0},
    DataType{ACL_FLOAT4_E1M2, "float4_e1m2", 0},
};

const DataType* find(int data_type) noexcept {
  const auto* found = std::find_if(kDataTypes.begin(), kDataTypes.end(),
                                   [&](const DataType& known) { return known.value == data_type; });
  return found == kDataTypes.end() ? nullptr : found;
}

}  // namespace

std::optional<Dtype> dtype_of(int data_type) noexcept {
  switch (data_type) {
    case ACL_FLOAT:
      return Dtype::kFloat32;
    case ACL_FLOAT16:
      return Dtype::kFloat16;
    case ACL_BF16:
      return Dtype::kBFloat16;
    case ACL_DOUBLE:
      return Dtype::kFloat64;
    case ACL_INT32:
      return Dtype::kInt32;
    case ACL_INT64:
      return Dtype::kInt64;
    default:
      return std::nullopt;
  }
}

std::string data_type_name(int data_type) {
  const DataType* known = find(data_type);
  return known != nullptr ? std::string(known->name) : "aclDataType " + std::to_string(data_type);
}

}  // namespace kda::c_api

size_t aclDataTypeSize(aclDataType dataType) {
  const auto* known = kda::c_api::find(static_cast<int>(dataType));
  return known != nullptr ? known->bytes : 0;
}

float aclFloat16ToFloat(aclFloat16 value) {
  const std::uint32_t sign = (value & 0x8000U) << 16;
  const std::uint32_t magnitude = value & 0x7fffU;
  if (magnitude >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
  if (magnitude >= 0x400U) return std::bit_cast<float>(sign | ((magnitude << 13) + (112U << 23)));
  // Subnormal: a multiple of 2^-24, which float holds exactly.
  const float absolute = static_cast<float>(magnitude) * 0x1p-24F;
  return sign != 0 ? -absolute : absolute;
}

aclFloat16 aclFloatToFloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  std::uint32_t half = 0;
  if (magnitude > 0x7f800000U) {
    half = 0x7e00U | (magnitude >> 13 & 0x3ffU);
  } else if (magnitude >= 0x477ff000U) {  // 65520: rounds beyond the largest finite number
    half = 0x7c00U;
  } else if (magnitude >= 0x38800000U) {  // 2^-14: normal
    half = (magnitude - (112U << 23) + 0xfffU + (magnitude >> 13 & 1U)) >> 13;
  } else {
    // Adding 1/2 leaves multiples of 2^-24 in the mantissa, rounded by the addition itself.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    half = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5F);
  }
  return static_cast<aclFloat16>(sign | half);
}
