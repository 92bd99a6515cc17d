// Plans chunk_kda_fwd once, runs it twice (the second call continues from the first one's state) and prints some
// numbers.

#include <kda/kda.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr std::int64_t B = 1, T = 200, H = 2, HV = 4, K = 64, V = 128;

// A bfloat16 is the upper half of a float32.
std::uint16_t to_bf16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
}

float to_float(std::uint16_t value) {
  const std::uint32_t bits = std::uint32_t{value} << 16;
  float result = 0;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

std::vector<std::uint16_t> made_up_rows(std::int64_t count, float frequency) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = to_bf16(0.15F * std::sin(frequency * static_cast<float>(i)));
  return values;
}

void run() {
  const std::vector<std::uint16_t> q = made_up_rows(B * T * H * K, 0.7F);
  const std::vector<std::uint16_t> k = made_up_rows(B * T * H * K, 1.3F);
  const std::vector<std::uint16_t> v = made_up_rows(B * T * HV * V, 2.9F);
  const std::vector<float> g(B * T * HV * K, -0.002F);
  const std::vector<float> beta(B * T * HV, 0.5F);
  std::vector<float> state(B * HV * K * V, 0.0F);
  std::vector<float> next_state(state.size());
  std::vector<std::uint16_t> attn_out(B * T * HV * V);

  using kda::Dtype;
  using kda::TensorView;
  kda::ChunkKdaFwdInputs inputs;
  inputs.q = TensorView::contiguous(q.data(), Dtype::kBFloat16, {B, T, H, K});
  inputs.k = TensorView::contiguous(k.data(), Dtype::kBFloat16, {B, T, H, K});
  inputs.v = TensorView::contiguous(v.data(), Dtype::kBFloat16, {B, T, HV, V});
  inputs.g = TensorView::contiguous(g.data(), Dtype::kFloat32, {B, T, HV, K});
  inputs.beta = TensorView::contiguous(beta.data(), Dtype::kFloat32, {B, T, HV});
  inputs.initial_state = TensorView::contiguous(state.data(), Dtype::kFloat32, {B, HV, K, V});

  kda::ChunkKdaFwdOutputs outputs;
  outputs.attn_out = TensorView::contiguous(attn_out.data(), Dtype::kBFloat16, {B, T, HV, V});
  outputs.final_state = TensorView::contiguous(next_state.data(), Dtype::kFloat32, {B, HV, K, V});

  kda::ChunkKdaFwdAttributes attributes;
  attributes.scale = 1.0 / std::sqrt(static_cast<double>(K));

  const kda::ChunkKdaFwdPlan plan(inputs, outputs, attributes);
  std::vector<std::byte> memory(plan.workspace_bytes());
  const kda::Workspace workspace{memory.data(), memory.size()};
  std::printf("kda %s, %s backend (%s), %lld chunks, %zu bytes of workspace\n", kda::version(), plan.backend().data(),
              kda::cpu_instruction_set().c_str(), static_cast<long long>(plan.dims().NC), plan.workspace_bytes());

  for (int call = 0; call < 2; ++call) {
    plan.execute(inputs, outputs, workspace);
    std::printf("call %d: attn_out[0,%lld,0,:4] = %.5f %.5f %.5f %.5f, final_state[0,0,0,0] = %.5f\n", call,
                static_cast<long long>(T - 1), to_float(attn_out[(T - 1) * HV * V]),
                to_float(attn_out[(T - 1) * HV * V + 1]), to_float(attn_out[(T - 1) * HV * V + 2]),
                to_float(attn_out[(T - 1) * HV * V + 3]), next_state[0]);
    std::swap(inputs.initial_state.data, outputs.final_state.data);
    state.swap(next_state);
  }

  // What is not legal is refused with a message, before anything is written.
  attributes.chunk_size = 32;
  try {
    kda::chunk_kda_fwd(inputs, outputs, attributes);
  } catch (const kda::Error& error) {
    std::printf("refused (status %d): %s\n", static_cast<int>(error.status()), error.what());
  }
}

}  // namespace

int main() {
  try {
    run();
  } catch (const kda::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
