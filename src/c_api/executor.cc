#include "c_api/executor.h"

#include <new>
#include <string>

#include "c_api/calls.h"
#include "c_api/registry.h"
#include "c_api/stream.h"
#include "core/error.h"
#include "kda/status.h"

namespace kda::c_api {
namespace {

auto& executors() { return registry<aclOpExecutor*, Executor>(); }

void require_executor(Argument argument, const aclOpExecutor* handle) {
  if (handle != nullptr) return;
  fail_with(static_cast<int>(Status::kExecutorNull), argument, "a live executor", "a null pointer");
}

[[noreturn]] void fail_unknown(Argument argument) {
  fail(ErrorKind::kValue, argument, "a live executor", "one that is used up, destroyed or unknown");
}

// Takes the executor of this operator out of circulation unless it is repeatable.
std::shared_ptr<const Executor> claim(std::string_view op, const aclOpExecutor* handle) {
  const Argument argument{op, "executor"};
  require_executor(argument, handle);
  std::shared_ptr<const Executor> executor =
      executors().take_if(handle, [&](const Executor& found) { return found.op() == op && !found.is_repeatable(); });
  if (executor == nullptr) fail_unknown(argument);
  if (executor->op() != op) {
    fail(ErrorKind::kValue, argument, "an executor of " + std::string(op), "one of " + std::string(executor->op()));
  }
  return executor;
}

}  // namespace

aclOpExecutor* register_executor(const std::shared_ptr<Executor>& executor) {
  try {
    return executors().add(executor);
  } catch (const std::bad_alloc&) {
    fail_with(static_cast<int>(Status::kExecutorCreationFailed), {executor->op(), "executor"}, "memory for one",
              "none");
  }
}

aclnnStatus execute(std::string_view op, void* workspace, std::uint64_t workspace_size, aclOpExecutor* executor,
                    aclrtStream stream) {
  return operator_call([&] {
    const std::shared_ptr<const Executor> call = claim(op, executor);
    call->run({workspace, workspace_size}, stream_on({op, "stream"}, stream, call->device()));
  });
}

}  // namespace kda::c_api

using namespace kda::c_api;

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
  return operator_call([&] {
    constexpr kda::Argument kArgument{"aclSetAclOpExecutorRepeatable", "executor"};
    require_executor(kArgument, executor);
    const std::shared_ptr<Executor> found = executors().find(executor);
    if (found == nullptr) fail_unknown(kArgument);
    found->make_repeatable();
  });
}

aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  return operator_call([&] {
    constexpr kda::Argument kArgument{"aclDestroyAclOpExecutor", "executor"};
    require_executor(kArgument, executor);
    if (executors().take(executor) == nullptr) fail_unknown(kArgument);
  });
}

aclnnStatus aclnnInit(const char* /*configPath*/) { return 0; }

aclnnStatus aclnnFinalize() { return 0; }
