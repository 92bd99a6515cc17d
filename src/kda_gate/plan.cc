#include <array>

#include "core/planning.h"
#include "cpu/float_environment.h"
#include "kda_gate/backend.h"
#include "kda_gate/problem.h"

namespace kda {
namespace {

using MakeKernel = std::unique_ptr<KdaGateKernel>(const KdaGateProblem&, const PlanOptions&);

constexpr std::array kBackends{
    Backend<MakeKernel>{"cpu", DeviceType::kCpu, cpu::make_kda_gate},
    Backend<MakeKernel>{"cuda", DeviceType::kCuda, cuda::make_kda_gate},
};

}  // namespace

struct KdaGatePlan::Impl {
  Impl(const KdaGateInputs& given_inputs, const TensorView& given_out, const KdaGateAttributes& attributes,
       const PlanOptions& options)
      : problem(make_problem(given_inputs, &given_out, attributes)),
        inputs(given_inputs),
        out(given_out),
        backend(&backend_for<MakeKernel>(kBackends, problem.device, {kKdaGateName, "g"})) {
    check_options(kKdaGateName, options);
    if (out.numel() != 0) kernel = backend->make_kernel(problem, options);
  }

  KdaGateProblem problem;
  KdaGateInputs inputs;  // metadata only, as out: an execution brings its own data
  TensorView out;
  const Backend<MakeKernel>* backend;
  std::unique_ptr<KdaGateKernel> kernel;  // null when there is nothing to write
};

KdaGatePlan::KdaGatePlan(const KdaGateInputs& inputs, const TensorView& out, const KdaGateAttributes& attributes,
                         const PlanOptions& options)
    : impl_(guard_memory(kKdaGateName, "plan", [&] {
        const cpu::DefaultFloatEnvironment environment;
        return std::make_unique<Impl>(inputs, out, attributes, options);
      })) {}

KdaGatePlan::~KdaGatePlan() = default;
KdaGatePlan::KdaGatePlan(KdaGatePlan&&) noexcept = default;
KdaGatePlan& KdaGatePlan::operator=(KdaGatePlan&&) noexcept = default;

const KdaGatePlan::Impl& KdaGatePlan::held() const { return kda::held(kKdaGateName, impl_); }

void KdaGatePlan::execute(const KdaGateInputs& inputs, const TensorView& out, Workspace /*workspace*/,
                          Stream stream) const {
  const Impl& plan = held();
  require_planned({kKdaGateName, "g"}, plan.inputs.g, inputs.g);
  require_planned({kKdaGateName, "A_log"}, plan.inputs.A_log, inputs.A_log);
  require_planned({kKdaGateName, "dt_bias"}, plan.inputs.dt_bias, inputs.dt_bias);
  require_planned({kKdaGateName, "out"}, plan.out, out);
  check_pointers(inputs, out);
  const cpu::DefaultFloatEnvironment environment;
  if (plan.kernel) plan.kernel->run(pointers_of(inputs, out), stream);
}

std::size_t KdaGatePlan::workspace_bytes() const noexcept { return 0; }

std::span<const WorkspaceRegion> KdaGatePlan::workspace_regions() const noexcept { return {}; }

int KdaGatePlan::launches() const { return held().kernel ? held().kernel->launches() : 0; }

std::string_view KdaGatePlan::backend() const { return held().backend->name; }

int KdaGatePlan::num_threads() const { return held().kernel ? held().kernel->num_threads() : 1; }

void kda_gate(const KdaGateInputs& inputs, const TensorView& out, const KdaGateAttributes& attributes,
              const PlanOptions& options) {
  KdaGatePlan(inputs, out, attributes, options).execute(inputs, out);
}

}  // namespace kda
