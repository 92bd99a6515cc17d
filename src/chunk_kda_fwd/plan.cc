#include <algorithm>
#include <array>

#include "chunk_kda_fwd/arguments.h"
#include "chunk_kda_fwd/backend.h"
#include "chunk_kda_fwd/problem.h"
#include "core/planning.h"
#include "core/workspace.h"
#include "cpu/float_environment.h"
#include "kda/device.h"

namespace kda {
namespace {

using MakeKernel = std::unique_ptr<ChunkKdaFwdKernel>(const ChunkKdaFwdProblem&, const PlanOptions&);

constexpr std::array kBackends{
    Backend<MakeKernel>{"cpu", DeviceType::kCpu, cpu::make_chunk_kda_fwd},
    Backend<MakeKernel>{"cuda", DeviceType::kCuda, cuda::make_chunk_kda_fwd},
};

bool writes_nothing(const ChunkKdaFwdOutputs& outputs) noexcept {
  return std::all_of(kChunkKdaFwdOutputs.begin(), kChunkKdaFwdOutputs.end(),
                     [&](const OutputMember& output) { return output.of(outputs).numel() == 0; });
}

template <typename Owner, std::size_t count>
void require_planned(const std::array<TensorMember<Owner>, count>& members, const Owner& planned, const Owner& given) {
  for (const TensorMember<Owner>& member : members) {
    require_planned(member.argument(), member.of(planned), member.of(given));
  }
}

}  // namespace

struct ChunkKdaFwdPlan::Impl {
  Impl(const ChunkKdaFwdInputs& given_inputs, const ChunkKdaFwdOutputs& given_outputs,
       const ChunkKdaFwdAttributes& attributes, const PlanOptions& options)
      : problem(make_problem(given_inputs, &given_outputs, attributes)),
        inputs(inputs_read(given_inputs, problem.gate_mode)),
        outputs(given_outputs),
        backend(&backend_for<MakeKernel>(kBackends, problem.device, {kChunkKdaFwdName, "q"})) {
    check_options(kChunkKdaFwdName, options);
    if (!writes_nothing(outputs)) kernel = backend->make_kernel(problem, options);
    if (kernel) workspace_bytes = workspace_bytes_for(kernel->regions());
  }

  ChunkKdaFwdProblem problem;
  ChunkKdaFwdInputs inputs;  // metadata only, as outputs: an execution brings its own data
  ChunkKdaFwdOutputs outputs;
  const Backend<MakeKernel>* backend;
  std::unique_ptr<ChunkKdaFwdKernel> kernel;  // null when there is nothing to write
  std::size_t workspace_bytes = 0;
};

ChunkKdaFwdPlan::ChunkKdaFwdPlan(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs,
                                 const ChunkKdaFwdAttributes& attributes, const PlanOptions& options)
    : impl_(guard_memory(kChunkKdaFwdName, "plan", [&] {
        const cpu::DefaultFloatEnvironment environment;
        return std::make_unique<Impl>(inputs, outputs, attributes, options);
      })) {}

ChunkKdaFwdPlan::~ChunkKdaFwdPlan() = default;
ChunkKdaFwdPlan::ChunkKdaFwdPlan(ChunkKdaFwdPlan&&) noexcept = default;
ChunkKdaFwdPlan& ChunkKdaFwdPlan::operator=(ChunkKdaFwdPlan&&) noexcept = default;

const ChunkKdaFwdPlan::Impl& ChunkKdaFwdPlan::held() const { return kda::held(kChunkKdaFwdName, impl_); }

void ChunkKdaFwdPlan::execute(const ChunkKdaFwdInputs& given_inputs, const ChunkKdaFwdOutputs& outputs,
                              Workspace workspace, Stream stream) const {
  const Impl& plan = held();
  const ChunkKdaFwdInputs inputs = inputs_read(given_inputs, plan.problem.gate_mode);
  require_planned(kChunkKdaFwdInputs, plan.inputs, inputs);
  require_planned(kChunkKdaFwdOutputs, plan.outputs, outputs);
  check_pointers(inputs, outputs);
  if (!plan.kernel) return;
  std::byte* const memory = aligned_workspace(kChunkKdaFwdName, workspace, plan.workspace_bytes);
  check_workspace(inputs, outputs, workspace.data, plan.workspace_bytes);
  const cpu::DefaultFloatEnvironment environment;
  plan.kernel->run(pointers_of(inputs, outputs), memory, stream);
}

const ChunkKdaFwdDims& ChunkKdaFwdPlan::dims() const { return held().problem.dims; }

std::size_t ChunkKdaFwdPlan::workspace_bytes() const { return held().workspace_bytes; }

std::span<const WorkspaceRegion> ChunkKdaFwdPlan::workspace_regions() const {
  return held().kernel ? held().kernel->regions() : std::span<const WorkspaceRegion>();
}

int ChunkKdaFwdPlan::variant() const { return chunk_kda_fwd_variant(held().problem.dims); }

int ChunkKdaFwdPlan::launches() const { return held().kernel ? held().kernel->launches() : 0; }

std::string_view ChunkKdaFwdPlan::backend() const { return held().backend->name; }

int ChunkKdaFwdPlan::num_threads() const { return held().kernel ? held().kernel->num_threads() : 1; }

StateProducts ChunkKdaFwdPlan::state_products() const {
  return held().kernel ? held().kernel->state_products() : StateProducts::kFloat32;
}

void chunk_kda_fwd(const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs,
                   const ChunkKdaFwdAttributes& attributes, const PlanOptions& options) {
  const ChunkKdaFwdPlan plan(inputs, outputs, attributes, options);
  const std::size_t bytes = plan.workspace_bytes();
  if (inputs.q.device.type == DeviceType::kCuda) {
    const DeviceMemory memory(inputs.q.device, bytes, kChunkKdaFwdName);
    return plan.execute(inputs, outputs, {memory.data(), bytes});
  }
  const std::string name =
      guard_memory(kChunkKdaFwdName, "workspace", [&] { return "workspace of " + std::to_string(bytes) + " bytes"; });
  const auto memory =
      guard_memory(kChunkKdaFwdName, name, [&] { return std::make_unique_for_overwrite<std::byte[]>(bytes); });
  plan.execute(inputs, outputs, {memory.get(), bytes});
}

}  // namespace kda
