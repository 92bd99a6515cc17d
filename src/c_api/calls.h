#pragma once

// The boundary that no exception crosses: runs the body of a C function, and turns what it throws into a status and the
// thread's error message.

#include <exception>
#include <string>
#include <string_view>

#include "core/error.h"

namespace kda::c_api {

// An error with a status that no ErrorKind stands for.
class CodedError : public std::exception {
 public:
  CodedError(int code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] int code() const noexcept { return code_; }
  [[nodiscard]] const char* what() const noexcept override { return message_.c_str(); }

 private:
  int code_;
  std::string message_;
};

// Throws CodedError.
[[noreturn]] void fail_with(int code, Argument argument, std::string_view expected, std::string_view got);

// Remember the message of the exception that is being handled, and return its status: aclnn's or acl's.
[[nodiscard]] int report_operator_error() noexcept;
[[nodiscard]] int report_runtime_error() noexcept;

// 0, or an aclnn status.
template <typename Body>
[[nodiscard]] int operator_call(Body body) noexcept {
  try {
    body();
    return 0;
  } catch (...) {
    return report_operator_error();
  }
}

// 0, or an acl error.
template <typename Body>
[[nodiscard]] int runtime_call(Body body) noexcept {
  try {
    body();
    return 0;
  } catch (...) {
    return report_runtime_error();
  }
}

}  // namespace kda::c_api
