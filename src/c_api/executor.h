#pragma once

// What an aclOpExecutor stands for: a planned call of one operator with all that its second phase needs.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "acl/acl_rt.h"
#include "aclnn/aclnn_base.h"
#include "kda/plan.h"
#include "kda/tensor.h"

namespace kda::c_api {

class Executor {
 public:
  Executor(std::string_view op, const Device& device) : op_(op), device_(device) {}
  virtual ~Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  [[nodiscard]] std::string_view op() const noexcept { return op_; }
  [[nodiscard]] const Device& device() const noexcept { return device_; }
  [[nodiscard]] bool is_repeatable() const noexcept { return is_repeatable_; }
  void make_repeatable() noexcept { is_repeatable_ = true; }

  [[nodiscard]] virtual std::size_t workspace_bytes() const noexcept = 0;
  virtual void run(Workspace workspace, Stream stream) const = 0;

 private:
  std::string_view op_;
  Device device_;
  std::atomic<bool> is_repeatable_ = false;
};

template <typename Plan, typename Inputs, typename Outputs>
class PlannedCall final : public Executor {
 public:
  PlannedCall(std::string_view op, const Device& device, Plan plan, const Inputs& inputs, const Outputs& outputs)
      : Executor(op, device), plan_(std::move(plan)), inputs_(inputs), outputs_(outputs) {}

  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return plan_.workspace_bytes(); }
  void run(Workspace workspace, Stream stream) const override { plan_.execute(inputs_, outputs_, workspace, stream); }

 private:
  Plan plan_;
  Inputs inputs_;
  Outputs outputs_;
};

// Throws CodedError when there is no memory for it.
[[nodiscard]] aclOpExecutor* register_executor(const std::shared_ptr<Executor>& executor);

// The end of a first phase: hands out the plan, for tensors of the device, as an executor.
template <typename Plan, typename Inputs, typename Outputs>
void publish(std::string_view op, const Device& device, Plan plan, const Inputs& inputs, const Outputs& outputs,
             std::uint64_t* workspace_size, aclOpExecutor** executor) {
  const std::size_t bytes = plan.workspace_bytes();
  *executor = register_executor(
      std::make_shared<PlannedCall<Plan, Inputs, Outputs>>(op, device, std::move(plan), inputs, outputs));
  *workspace_size = bytes;
}

// The second phase of every operator.
[[nodiscard]] aclnnStatus execute(std::string_view op, void* workspace, std::uint64_t workspace_size,
                                  aclOpExecutor* executor, aclrtStream stream);

}  // namespace kda::c_api
