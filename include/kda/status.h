#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kda/export.h"

namespace kda {

// The numeric status of a call. The C API returns these values unchanged; they are the codes of Ascend's aclnn library.
enum class Status : std::int32_t {
  kSuccess = 0,
  kNullPointer = 161001,
  kInvalidArgument = 161002,
  kRuntimeFailure = 361001,
  kInternal = 561000,
  kExecutorCreationFailed = 561101,
  kExecutorNull = 561103,
};

// What went wrong, finer than Status: Python tells a wrong dtype (TypeError) from a wrong value (ValueError).
enum class ErrorKind : std::uint8_t {
  kMissing,      // a required tensor or pointer is absent
  kDtype,        // a tensor has a dtype the operator does not take
  kValue,        // shape, rank, range, layout, chunk size, metadata or aliasing
  kUnavailable,  // the backend is missing, a device failed, or the workspace does not suffice
  kOutOfMemory,
  kInternal,  // a fault of this library
};

// Thrown by every function of the C++ API that refuses its arguments. what() names the operator, the argument, what was
// expected and what was given; nothing has been computed or written.
class KDA_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}

  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

  [[nodiscard]] Status status() const noexcept {
    switch (kind_) {
      case ErrorKind::kMissing:
        return Status::kNullPointer;
      case ErrorKind::kDtype:
      case ErrorKind::kValue:
        return Status::kInvalidArgument;
      case ErrorKind::kUnavailable:
      case ErrorKind::kOutOfMemory:
        return Status::kRuntimeFailure;
      case ErrorKind::kInternal:
        break;
    }
    return Status::kInternal;
  }

 private:
  ErrorKind kind_;
};

}  // namespace kda
