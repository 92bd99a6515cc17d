// The reader of the tests' data refuses every file that lies.

#include "support/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

namespace kda::testing {
namespace {

constexpr const char* kGood = R"({"a":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]}})";

std::string file_of(const std::string& header, const std::string& data, std::uint64_t header_bytes) {
  std::string file(sizeof header_bytes, '\0');
  std::memcpy(file.data(), &header_bytes, sizeof header_bytes);
  return file + header + data;
}

SafeTensors parse(const std::string& file) { return parse_safetensors(std::as_bytes(std::span(file)), "file"); }

SafeTensors parse_entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  const std::string header =
      R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  return parse(file_of(header, "12345678", header.size()));
}

TEST(Safetensors, ReadsWhatItHolds) {
  const SafeTensors file = parse(file_of(kGood, "12345678", std::strlen(kGood)));
  ASSERT_EQ(file.tensors.count("a"), 1U);
  EXPECT_EQ(file.tensors.at("a").numel(), 4);
  EXPECT_EQ(std::memcmp(file.tensors.at("a").data, "12345678", 8), 0);
  EXPECT_EQ(parse_entry("F32", "[0,7]", "[4,4]").tensors.at("a").numel(), 0);
}

TEST(Safetensors, RefusesALyingLength) {
  for (const std::uint64_t length : {std::strlen(kGood) + 9, std::size_t{1} << 63, ~std::size_t{0}, std::size_t{3}}) {
    EXPECT_THROW(static_cast<void>(parse(file_of(kGood, "12345678", length))), std::runtime_error) << length;
  }
  EXPECT_THROW(static_cast<void>(parse("1234567")), std::runtime_error);
  EXPECT_THROW(static_cast<void>(parse("")), std::runtime_error);
}

TEST(Safetensors, RefusesLyingTensors) {
  const auto refuses = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    EXPECT_THROW(static_cast<void>(parse_entry(dtype, shape, offsets)), std::runtime_error) << shape << offsets;
  };
  refuses("F16", "[2,2]", "[8,16]");
  refuses("F16", "[2,2]", "[8,0]");
  refuses("F16", "[2,2]", "[-8,0]");
  refuses("F16", "[2,2]", "[0.5,8.5]");
  refuses("F16", "[2,2]", "[18446744073709551608,0]");
  refuses("F16", "[2,2]", "[0]");
  refuses("F16", "[2,2]", "{}");
  refuses("F16", "[-2,-2]", "[0,8]");
  refuses("F16", "[4294967296,4294967296,4294967296]", "[0,0]");
  refuses("F16", "[2,3]", "[0,8]");
  refuses("F16", "[1]", "[1,3]");
  refuses("F8", "[8]", "[0,8]");
  refuses("F16", "[1,1,1,1,1,1,1,1,4]", "[0,8]");
}

TEST(Safetensors, RefusesHeadersThatAreNone) {
  for (const std::string header : {"", "{", "[]", "null", "5", R"({"a":5})", R"({"__metadata__":{"a":1}})", "\xff"}) {
    EXPECT_THROW(static_cast<void>(parse(file_of(header, "", header.size()))), std::runtime_error) << header;
  }
}

}  // namespace
}  // namespace kda::testing
