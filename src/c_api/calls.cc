#include "c_api/calls.h"

#include <new>
#include <utility>

#include "acl/acl_base.h"
#include "kda/status.h"

namespace kda::c_api {
namespace {

struct LastError {
  std::string message;
  std::string handed_out;  // what aclGetRecentErrMsg returned last
  bool present = false;
};

thread_local LastError last_error;

int report(int code, const char* message) noexcept {
  try {
    last_error.message = message;
  } catch (const std::bad_alloc&) {
    last_error.message.clear();
  }
  last_error.present = true;
  return code;
}

int operator_status(ErrorKind kind) noexcept { return static_cast<int>(Error(kind, {}).status()); }

int runtime_status(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kMissing:
    case ErrorKind::kDtype:
    case ErrorKind::kValue:
      return ACL_ERROR_INVALID_PARAM;
    case ErrorKind::kOutOfMemory:
      return ACL_ERROR_BAD_ALLOC;
    case ErrorKind::kUnavailable:
      return ACL_ERROR_RT_FAILURE;
    case ErrorKind::kInternal:
      break;
  }
  return ACL_ERROR_INTERNAL_ERROR;
}

// To be called while an exception is being handled.
int report_exception(int (*status)(ErrorKind) noexcept) noexcept {
  try {
    throw;
  } catch (const CodedError& error) {
    return report(error.code(), error.what());
  } catch (const Error& error) {
    return report(status(error.kind()), error.what());
  } catch (const std::bad_alloc&) {
    return report(status(ErrorKind::kOutOfMemory), "kda: memory: expected enough, got less");
  } catch (const std::exception& error) {
    return report(status(ErrorKind::kInternal), error.what());
  } catch (...) {
    return report(status(ErrorKind::kInternal), "kda: internal: expected no exception, got one of unknown type");
  }
}

}  // namespace

void fail_with(int code, Argument argument, std::string_view expected, std::string_view got) {
  try {
    fail(ErrorKind::kValue, argument, expected, got);
  } catch (const Error& error) {
    throw CodedError(code, error.what());
  }
}

int report_operator_error() noexcept { return report_exception(operator_status); }

int report_runtime_error() noexcept { return report_exception(runtime_status); }

}  // namespace kda::c_api

const char* aclGetRecentErrMsg() {
  kda::c_api::LastError& last = kda::c_api::last_error;
  if (!last.present) return nullptr;
  last.present = false;
  std::swap(last.message, last.handed_out);
  return last.handed_out.c_str();
}
