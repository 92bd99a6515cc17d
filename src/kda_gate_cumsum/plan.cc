#include <array>

#include "core/planning.h"
#include "cpu/float_environment.h"
#include "kda_gate_cumsum/backend.h"
#include "kda_gate_cumsum/problem.h"

namespace kda {
namespace {

using MakeKernel = std::unique_ptr<KdaGateCumsumKernel>(const KdaGateCumsumProblem&, const PlanOptions&);

constexpr std::array kBackends{
    Backend<MakeKernel>{"cpu", DeviceType::kCpu, cpu::make_kda_gate_cumsum},
    Backend<MakeKernel>{"cuda", DeviceType::kCuda, cuda::make_kda_gate_cumsum},
};

}  // namespace

struct KdaGateCumsumPlan::Impl {
  Impl(const KdaGateCumsumInputs& given_inputs, const TensorView& given_gk, const KdaGateCumsumAttributes& attributes,
       const PlanOptions& options)
      : problem(make_problem(given_inputs, &given_gk, attributes)),
        inputs(inputs_read(given_inputs, problem.gate_mode)),
        gk(given_gk),
        backend(&backend_for<MakeKernel>(kBackends, problem.device, {kKdaGateCumsumName, "g"})) {
    check_options(kKdaGateCumsumName, options);
    if (gk.numel() != 0) kernel = backend->make_kernel(problem, options);
  }

  KdaGateCumsumProblem problem;
  KdaGateCumsumInputs inputs;  // metadata only, as gk: an execution brings its own data
  TensorView gk;
  const Backend<MakeKernel>* backend;
  std::unique_ptr<KdaGateCumsumKernel> kernel;  // null when there is nothing to write
};

KdaGateCumsumPlan::KdaGateCumsumPlan(const KdaGateCumsumInputs& inputs, const TensorView& gk,
                                     const KdaGateCumsumAttributes& attributes, const PlanOptions& options)
    : impl_(guard_memory(kKdaGateCumsumName, "plan", [&] {
        const cpu::DefaultFloatEnvironment environment;
        return std::make_unique<Impl>(inputs, gk, attributes, options);
      })) {}

KdaGateCumsumPlan::~KdaGateCumsumPlan() = default;
KdaGateCumsumPlan::KdaGateCumsumPlan(KdaGateCumsumPlan&&) noexcept = default;
KdaGateCumsumPlan& KdaGateCumsumPlan::operator=(KdaGateCumsumPlan&&) noexcept = default;

const KdaGateCumsumPlan::Impl& KdaGateCumsumPlan::held() const { return kda::held(kKdaGateCumsumName, impl_); }

void KdaGateCumsumPlan::execute(const KdaGateCumsumInputs& given_inputs, const TensorView& gk, Workspace /*workspace*/,
                                Stream stream) const {
  const Impl& plan = held();
  const KdaGateCumsumInputs inputs = inputs_read(given_inputs, plan.problem.gate_mode);
  require_planned({kKdaGateCumsumName, "g"}, plan.inputs.g, inputs.g);
  require_planned({kKdaGateCumsumName, "A_log"}, plan.inputs.A_log, inputs.A_log);
  require_planned({kKdaGateCumsumName, "dt_bias"}, plan.inputs.dt_bias, inputs.dt_bias);
  require_planned({kKdaGateCumsumName, "gk"}, plan.gk, gk);
  check_pointers(inputs, gk);
  const cpu::DefaultFloatEnvironment environment;
  if (plan.kernel) plan.kernel->run(pointers_of(inputs, gk), stream);
}

std::size_t KdaGateCumsumPlan::workspace_bytes() const noexcept { return 0; }

std::span<const WorkspaceRegion> KdaGateCumsumPlan::workspace_regions() const noexcept { return {}; }

int KdaGateCumsumPlan::launches() const { return held().kernel ? held().kernel->launches() : 0; }

std::string_view KdaGateCumsumPlan::backend() const { return held().backend->name; }

int KdaGateCumsumPlan::num_threads() const { return held().kernel ? held().kernel->num_threads() : 1; }

void kda_gate_cumsum(const KdaGateCumsumInputs& inputs, const TensorView& gk, const KdaGateCumsumAttributes& attributes,
                     const PlanOptions& options) {
  KdaGateCumsumPlan(inputs, gk, attributes, options).execute(inputs, gk);
}

}  // namespace kda
