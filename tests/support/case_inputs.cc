#include "support/case_inputs.h"

#include <cmath>
#include <span>
#include <utility>

#include "support/dtypes.h"
#include "support/generator.h"

namespace kda::testing {
namespace {

template <typename ValueAt>
std::vector<float> fill(std::int64_t count, ValueAt value_at) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::int64_t e = 0; e < count; ++e) values[e] = static_cast<float>(value_at(e));
  return values;
}

// Unit vectors of width K from integers.
template <typename IntegerAt>
std::vector<float> unit_rows(const OpCase& c, IntegerAt integer_at) {
  std::vector<float> values(static_cast<std::size_t>(c.B * c.T * c.H * c.K));
  for (std::int64_t row = 0; row < c.B * c.T * c.H; ++row) {
    std::int64_t sum = 0;
    for (std::int64_t d = 0; d < c.K; ++d) sum += integer_at(row, d) * integer_at(row, d);
    const double norm = std::sqrt(static_cast<double>(sum));
    for (std::int64_t d = 0; d < c.K; ++d) {
      values[row * c.K + d] = static_cast<float>(static_cast<double>(integer_at(row, d)) / norm);
    }
  }
  return values;
}

std::vector<float> generate_keys(const OpCase& c) {
  const Generator own(c.seed, kK);
  const Generator base(c.seed, kBaseKeys);
  // The row of token 0 of the same batch and head.
  const auto first = [&c](std::int64_t row) { return row / (c.T * c.H) * (c.T * c.H) + row % c.H; };
  return unit_rows(c, [&](std::int64_t row, std::int64_t d) {
    switch (c.keys) {
      case Keys::kRepeated:
        return own.bell(first(row) * c.K + d);
      case Keys::kCorrelated:
        return 7 * base.bell(first(row) * c.K + d) + 4 * own.bell(row * c.K + d);
      case Keys::kRandom:
        break;
    }
    return own.bell(row * c.K + d);
  });
}

bool is_fixed(const OpCase& c, std::int64_t e) {
  if (!c.fixed_gate) return false;
  const std::int64_t token = e / (c.HV * c.K) % c.T;
  switch (c.fixed_gate->where) {
    case Where::kHalf:
      return e % c.K % 2 == 1;
    case Where::kSingle:
      return token % 7 == 3;
    case Where::kAll:
      break;
  }
  return true;
}

std::vector<float> generate_g(const OpCase& c) {
  const Generator random(c.seed, kG);
  return fill(c.B * c.T * c.HV * c.K, [&](std::int64_t e) {
    if (is_fixed(c, e)) return c.fixed_gate->value;
    if (c.linear_gate) return -(c.gate_scale * random.uniform(e));
    if (c.use_gate_in_kernel) return c.gate_scale * 2 * random.normal(e);
    const double u = random.uniform(e);
    return c.gate_scale * -(u * u);
  });
}

// A tensor of the layout's shape in memory of its own.
struct Placement {
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  std::int64_t first = 0;  // offset of element 0
  std::int64_t elements = 0;
};

bool is_head_major(Layout layout) { return layout == Layout::kBNSD || layout == Layout::kNTD; }

// Axes of [B,T,heads] or [B,T,heads,dim] in the layout's order.
template <typename T>
std::vector<T> in_layout_order(const OpCase& c, std::vector<T> axes) {
  if (is_head_major(c.layout)) std::swap(axes[1], axes[2]);
  if (c.is_rank3()) axes.erase(axes.begin());
  return axes;
}

Placement place(const OpCase& c, const std::vector<std::int64_t>& canonical_shape) {
  Placement p;
  p.shape = in_layout_order(c, canonical_shape);
  p.strides.resize(p.shape.size());
  std::int64_t pitch = c.strides == Strides::kInner ? 2 : 1;
  for (std::size_t axis = p.shape.size(); axis-- > 0;) {
    p.strides[axis] = pitch;
    pitch *= p.shape[axis];
    if (axis + 1 == p.shape.size() && c.strides == Strides::kPadded) pitch += 16;
  }
  p.elements = pitch;
  if (c.strides == Strides::kReversed && pitch != 0) {
    const std::size_t axis = (c.is_rank3() ? 0 : 1) + (is_head_major(c.layout) ? 1 : 0);
    p.first = (p.shape[axis] - 1) * p.strides[axis];
    p.strides[axis] = -p.strides[axis];
  }
  return p;
}

class Builder {
 public:
  Builder(const OpCase& c, CaseInputs& result) : case_(c), result_(result) {}

  // values are row-major in canonical_shape: [B,T,heads] or [B,T,heads,dim].
  TensorView token_tensor(const std::vector<float>& values, Dtype dtype,
                          const std::vector<std::int64_t>& canonical_shape) {
    const Placement p = place(case_, canonical_shape);
    const TensorView view =
        TensorView::strided(element(allocate(dtype, p.elements), dtype, p.first), dtype, p.shape, p.strides);
    write(values, canonical_shape, view);
    return view;
  }

  TensorView flat_tensor(const std::vector<float>& values, const std::vector<std::int64_t>& shape) {
    std::byte* data = allocate(Dtype::kFloat32, static_cast<std::int64_t>(values.size()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      store(data, Dtype::kFloat32, static_cast<std::int64_t>(i), values[i]);
    }
    return TensorView::contiguous(data, Dtype::kFloat32, shape);
  }

  // q, k and v side by side in the rows of one [B, T, 2 H K + HV V] buffer.
  void fused(const CaseValues& values) {
    const OpCase& c = case_;
    const std::int64_t width = 2 * c.H * c.K + c.HV * c.V;
    std::byte* data = allocate(c.dtype, c.B * c.T * width);
    const auto cut = [&](const std::vector<float>& from, std::int64_t first, std::int64_t heads, std::int64_t dim) {
      const std::vector<std::int64_t> shape = {c.B, c.T, heads, dim};
      const std::vector<std::int64_t> strides = {c.T * width, width, dim, 1};
      const TensorView view = TensorView::strided(element(data, c.dtype, first), c.dtype, in_layout_order(c, shape),
                                                  in_layout_order(c, strides));
      write(from, shape, view);
      return view;
    };
    result_.tensors.q = cut(values.q, 0, c.H, c.K);
    result_.tensors.k = cut(values.k, c.H * c.K, c.H, c.K);
    result_.tensors.v = cut(values.v, 2 * c.H * c.K, c.HV, c.V);
  }

 private:
  static std::byte* element(std::byte* data, Dtype dtype, std::int64_t index) {
    return data == nullptr ? nullptr : data + index * static_cast<std::int64_t>(size_of(dtype));
  }

  // All bytes 0xff: NaN in every floating dtype.
  std::byte* allocate(Dtype dtype, std::int64_t elements) {
    return result_.memory.emplace_back(static_cast<std::size_t>(elements) * size_of(dtype), std::byte{0xff}).data();
  }

  void write(const std::vector<float>& values, const std::vector<std::int64_t>& canonical_shape,
             const TensorView& view) {
    // The view's strides in the order of canonical_shape.
    std::vector<std::int64_t> strides(view.strides.begin(), view.strides.begin() + view.rank);
    if (case_.is_rank3()) strides.insert(strides.begin(), 0);
    if (is_head_major(case_.layout)) std::swap(strides[1], strides[2]);
    for (std::size_t e = 0; e < values.size(); ++e) {
      auto rest = static_cast<std::int64_t>(e);
      std::int64_t offset = 0;
      for (std::size_t axis = strides.size(); axis-- > 0;) {
        offset += rest % canonical_shape[axis] * strides[axis];
        rest /= canonical_shape[axis];
      }
      store(view.data, view.dtype, offset, values[e]);
    }
  }

  const OpCase& case_;
  CaseInputs& result_;
};

std::vector<float> transposed_states(const OpCase& c, const std::vector<float>& states) {
  std::vector<float> result(states.size());
  const std::int64_t size = c.K * c.V;
  for (std::int64_t e = 0; e < static_cast<std::int64_t>(states.size()); ++e) {
    result[e / size * size + e % c.V * c.K + e / c.V % c.K] = states[e];
  }
  return result;
}

std::vector<std::int64_t> canonical_chunk_indices(const OpCase& c) {
  std::vector<std::int64_t> pairs;
  for (std::int64_t n = 0; n < c.N(); ++n) {
    const std::int64_t tokens = (*c.cu_seqlens)[n + 1] - (*c.cu_seqlens)[n];
    for (std::int64_t chunk = 0; chunk * c.chunk_size < tokens; ++chunk) pairs.insert(pairs.end(), {n, chunk});
  }
  return pairs;
}

void set_attributes(const OpCase& c, CaseInputs& result) {
  ChunkKdaFwdAttributes& a = result.attributes;
  a.layout = c.layout;
  a.scale = c.scale.value_or(std::pow(static_cast<double>(c.K), -0.5));
  a.chunk_size = c.chunk_size;
  a.use_gate_in_kernel = c.use_gate_in_kernel;
  a.safe_gate = c.safe_gate;
  a.lower_bound = c.lower_bound;
  a.state_v_first = c.state_v_first;
  if (c.cu_seqlens) {
    result.cu_seqlens = *c.cu_seqlens;
    a.cu_seqlens = result.cu_seqlens;
  }
  if (c.chunk_indices) {
    result.chunk_indices = canonical_chunk_indices(c);
    a.chunk_indices = result.chunk_indices;
  }
}

}  // namespace

CaseValues generate(const OpCase& c) {
  CaseValues values;
  const Generator q(c.seed, kQ);
  const Generator v(c.seed, kV);
  const Generator beta(c.seed, kBeta);
  values.q = unit_rows(c, [&](std::int64_t row, std::int64_t d) { return q.bell(row * c.K + d); });
  values.k = generate_keys(c);
  values.v = fill(c.B * c.T * c.HV * c.V, [&](std::int64_t e) { return v.normal(e); });
  values.g = generate_g(c);
  values.beta = fill(c.B * c.T * c.HV, [&](std::int64_t e) { return c.fixed_beta ? *c.fixed_beta : beta.uniform(e); });
  if (c.use_gate_in_kernel) {
    const Generator A_log(c.seed, kALog);
    values.A_log = fill(c.HV, [&](std::int64_t e) { return 1.5 * A_log.uniform(e) - 0.5; });
  }
  if (c.dt_bias) {
    const Generator dt_bias(c.seed, kDtBias);
    values.dt_bias = fill(c.HV * c.K, [&](std::int64_t e) { return 0.5 * dt_bias.normal(e); });
  }
  if (c.initial_state) {
    const Generator state(c.seed, kInitialState);
    values.initial_state = fill(c.N() * c.HV * c.K * c.V, [&](std::int64_t e) { return 0.3 * state.normal(e); });
  }
  return values;
}

CaseInputs make_inputs(const OpCase& c, const CaseValues& values) {
  CaseInputs result;
  Builder builder(c, result);
  ChunkKdaFwdInputs& t = result.tensors;
  if (c.strides == Strides::kFused) {
    builder.fused(values);
  } else {
    t.q = builder.token_tensor(values.q, c.dtype, {c.B, c.T, c.H, c.K});
    t.k = builder.token_tensor(values.k, c.dtype, {c.B, c.T, c.H, c.K});
    t.v = builder.token_tensor(values.v, c.dtype, {c.B, c.T, c.HV, c.V});
  }
  t.g = builder.token_tensor(values.g, c.g_dtype, {c.B, c.T, c.HV, c.K});
  t.beta = builder.token_tensor(values.beta, c.beta_dtype, {c.B, c.T, c.HV});
  if (c.use_gate_in_kernel) t.A_log = builder.flat_tensor(values.A_log, {c.HV});
  if (c.dt_bias) t.dt_bias = builder.flat_tensor(values.dt_bias, {c.HV * c.K});
  if (c.initial_state && c.state_v_first) {
    t.initial_state = builder.flat_tensor(transposed_states(c, values.initial_state), {c.N(), c.HV, c.V, c.K});
  } else if (c.initial_state) {
    t.initial_state = builder.flat_tensor(values.initial_state, {c.N(), c.HV, c.K, c.V});
  }
  set_attributes(c, result);
  return result;
}

CaseInputs make_inputs(const OpCase& c) { return make_inputs(c, generate(c)); }

}  // namespace kda::testing
