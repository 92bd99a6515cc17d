"""chunk_kda, the form of the operator that flash-linear-attention (FLA) gives its users, and chunk_kda_fwd_direct."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from kda import _arrays, _kda
from kda._arguments import as_bool, as_float, described, fail
from kda._chunk_kda_fwd import OUTPUTS, Arguments, Array, ChunkKdaFwdResult, Form, execute, prepare
from kda._threads import planned_threads
from kda._torch_ops import traceable

OP = "chunk_kda"
DIRECT_OP = "chunk_kda_fwd_direct"
# FLA's arguments that are not ours, and the values with which they ask for nothing.
_FOREIGN: dict[str, Any] = {"cp_context": None, "use_graph": False, "max_num_seqs": None}
_DEPRECATED = "transpose_state_layout"


class Prepared(NamedTuple):
    """A checked call, and the outputs that it is to make."""

    call: _kda.ChunkKdaFwdCall
    outputs: tuple[str, ...]


@traceable
def chunk_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    chunk_size: int = 64,
    state_products: str = "float32",
    cp_context: None = None,
    **kwargs: Any,
) -> tuple[Array, ...]:
    """Compute Kimi Delta Attention as FLA's function of this name does, forward only.

    Formulas, symbols, ranges and arrays are those of `chunk_kda_fwd`, layout BSND. Normalising q and k, beta's sigmoid
    and the gate cost no pass of their own.

    Args:
        q: `[B,T,H,K]`, float16 or bfloat16.
        k: `[B,T,H,K]`, q's dtype.
        v: `[B,T,HV,V]`, q's dtype.
        g: `[B,T,HV,K]`, float32 or bfloat16: the gate (natural log), or with `use_gate_in_kernel` what it is made from.
        beta: `[B,T,HV]`, float32 or bfloat16.
        scale: multiplies o; None: `K ** -0.5`.
        initial_state: `[N,HV,K,V]`, or `[N,HV,V,K]` with `state_v_first`; float32.
        output_final_state: return the final state.
        use_qk_l2norm_in_kernel: divide q and k by `sqrt(sum of squares along K + 1e-6)`, in float32.
        use_gate_in_kernel: make the gate from `x = g + dt_bias`: `-exp(A_log) * softplus(x)`, or, if and only if
            `lower_bound` is given, `lower_bound * sigmoid(exp(A_log) * x)`.
        use_beta_sigmoid_in_kernel: take `sigmoid(beta)` for beta.
        allow_neg_eigval: take `2 * sigmoid(beta)` instead; needs `use_beta_sigmoid_in_kernel`.
        safe_gate: with `use_gate_in_kernel`, insist on a `lower_bound` in [-5, 0). Changes no number.
        lower_bound: of the gate; any finite number.
        disable_recompute: a hint for a backward pass; without effect.
        return_intermediate_states: return h too.
        state_v_first: states are `[...,V,K]` instead of `[...,K,V]`.
        cu_seqlens: `[N+1]` integers from 0 to T, non-decreasing: packed sequences. List, int32 or int64 array. Needs
            B = 1; N <= 1024. Beside tensors on a GPU it may be there too: then it is never waited for, a captured CUDA
            graph can be replayed with other numbers in it, and nobody checks them: each counts as raised to those
            before it and lowered to T, and what belongs to no sequence is not written.
        cu_seqlens_cpu: the same numbers in the CPU's memory, where `cu_seqlens` is elsewhere; they are checked, and
            used instead.
        A_log: `[HV]`, float32; with `use_gate_in_kernel` required unless `lower_bound` is given, when None is 0.
        dt_bias: `[HV*K]`, float32; None is 0.
        chunk_size: 64 or 128.
        state_products: as for `chunk_kda_fwd`; not one of FLA's arguments.
        cp_context: context parallelism is not supported.
        **kwargs: `transpose_state_layout`, the deprecated name of `state_v_first`; anything else is refused.

    Returns:
        `(o, final_state)`, or `(o, final_state, h)` with `return_intermediate_states`, of q's kind:

        - o `[B,T,HV,V]`, q's dtype
        - final_state, as initial_state, float32; None unless `output_final_state`
        - h `[B,NC,HV,K,V]`, `[1,NC,HV,K,V]` with `cu_seqlens`, q's dtype: the state before each chunk

    Raises:
        TypeError: a required argument is None, has a type or dtype that is not taken, or a name that is not known.
        ValueError: a shape, range, combination or metadata is wrong, or a tensor requires grad while grad mode is on.
        RuntimeError: there is no backend for the arrays' device.
        MemoryError: outputs or workspace do not fit into memory.
    """
    if _DEPRECATED in kwargs:
        warnings.warn(f"{OP}: {_DEPRECATED} is now called state_v_first", DeprecationWarning, stacklevel=3)
    prepared = prepare_chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, disable_recompute,
        return_intermediate_states, state_v_first, cu_seqlens, cu_seqlens_cpu, A_log=A_log, dt_bias=dt_bias,
        chunk_size=chunk_size, state_products=state_products, cp_context=cp_context, **kwargs,
    )  # fmt: skip
    results = execute(prepared.call, q, prepared.outputs, planned_threads())
    o, final_state = results["attn_out"], results.get("final_state")
    return (o, final_state, results["h"]) if "h" in results else (o, final_state)


def prepare_chunk_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    chunk_size: int = 64,
    state_products: str = "float32",
    **kwargs: Any,
) -> Prepared:
    """Check a call of `chunk_kda` without computing. Raises what `chunk_kda` raises."""
    state_v_first = as_bool(OP, "state_v_first", state_v_first)
    if _DEPRECATED in kwargs:
        if state_v_first:
            fail(ValueError, OP, _DEPRECATED, "none, as state_v_first is given", described(kwargs[_DEPRECATED]))
        state_v_first = as_bool(OP, _DEPRECATED, kwargs.pop(_DEPRECATED))
    _refuse_foreign(kwargs)
    use_gate_in_kernel = as_bool(OP, "use_gate_in_kernel", use_gate_in_kernel)
    safe_gate = as_bool(OP, "safe_gate", safe_gate)
    if lower_bound is not None:
        lower_bound = as_float(OP, "lower_bound", lower_bound)
    if use_gate_in_kernel and safe_gate and (lower_bound is None or not -5 <= lower_bound < 0):
        fail(ValueError, OP, "lower_bound", "a number in [-5, 0), as safe_gate is set", described(lower_bound))
    as_bool(OP, "disable_recompute", disable_recompute)
    outputs = ["attn_out"]
    if as_bool(OP, "output_final_state", output_final_state):
        outputs.append("final_state")
    if as_bool(OP, "return_intermediate_states", return_intermediate_states):
        outputs.append("h")
    bounds = _sequence_bounds(cu_seqlens, cu_seqlens_cpu)
    if "h" in outputs and bounds is not None and not _arrays.is_on_cpu(bounds):
        expected = "False, or cu_seqlens_cpu too, as the shape of h follows from the numbers in cu_seqlens"
        fail(ValueError, OP, "return_intermediate_states", expected, "True")
    arguments = Arguments(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        chunk_size=chunk_size,
        initial_state=initial_state,
        cu_seqlens=bounds,
        safe_gate=use_gate_in_kernel and lower_bound is not None,
        lower_bound=lower_bound,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        state_v_first=state_v_first,
    )
    form = Form(
        op=OP,
        scale_is_optional=True,
        qk_l2norm=as_bool(OP, "use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        beta=_beta_activation(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        any_lower_bound=True,
        h_has_batch=True,
        cu_seqlens_may_be_on_gpu=True,
    )
    return Prepared(prepare(arguments, form, state_products), tuple(outputs))


def _refuse_foreign(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name not in _FOREIGN:
            fail(TypeError, OP, name, "no argument of this name", described(value))
        if value is not _FOREIGN[name]:
            fail(ValueError, OP, name, f"{_FOREIGN[name]}, as it is not supported", described(value))


def _beta_activation(sigmoid: Any, twice: Any) -> Any:
    sigmoid = as_bool(OP, "use_beta_sigmoid_in_kernel", sigmoid)
    if not as_bool(OP, "allow_neg_eigval", twice):
        return "sigmoid" if sigmoid else "none"
    if not sigmoid:
        fail(ValueError, OP, "allow_neg_eigval", "False, as use_beta_sigmoid_in_kernel is not set", "True")
    return "twice_sigmoid"


def _sequence_bounds(cu_seqlens: Any, cu_seqlens_cpu: Any) -> Any:
    """Return the bounds that the CPU can read, after comparing the two where it can read both."""
    if cu_seqlens_cpu is None:
        return cu_seqlens
    if cu_seqlens is None:
        fail(ValueError, OP, "cu_seqlens_cpu", "none, as cu_seqlens is absent", "some")

    def read(name: str, values: Any) -> list[int]:
        return _kda.integers(_arrays.describe_integers(OP, name, values), OP, name)

    bounds = read("cu_seqlens_cpu", cu_seqlens_cpu)
    if _arrays.is_on_cpu(cu_seqlens) and read("cu_seqlens", cu_seqlens) != bounds:
        fail(ValueError, OP, "cu_seqlens_cpu", "the values of cu_seqlens", "others")
    return bounds


@traceable
def chunk_kda_fwd_direct(
    q: Array,
    k: Array,
    v: Array,
    gk: Array,
    beta: Array,
    scale: float,
    chunk_size: int,
    *,
    initial_state: Array | None = None,
    output_final_state: bool = True,
    safe_gate: bool = False,
    state_products: str = "float32",
) -> ChunkKdaFwdResult:
    """Compute `chunk_kda_fwd` from gates that are summed already: a low-level entry for tests.

    Symbols, arrays and formulas are those of `chunk_kda_fwd`, layout BNSD. What follows a strong gate is lost in gk,
    where -inf minus -inf counts as 0: what `chunk_kda_fwd` promises on strong gates does not hold.

    Args:
        q: `[B,H,T,128]`, float16 or bfloat16.
        k: `[B,H,T,128]`, q's dtype.
        v: `[B,HV,T,128]` or `[B,HV,T,256]`, q's dtype.
        gk: `[B,HV,T,128]`, float32: the gate summed within each chunk, over ln 2, as `kda_gate_cumsum` makes it.
        beta: `[B,HV,T]`, float32.
        scale: multiplies attn_out and Aqk; usually `K ** -0.5`.
        chunk_size: 64 or 128.
        initial_state: `[B,HV,128,V]`, float32.
        output_final_state: make final_state.
        safe_gate: a hint, without effect.
        state_products: as for `chunk_kda_fwd`.

    Returns:
        The twelve results of `chunk_kda_fwd`, all of them; gk and initial_state are the very objects that were given,
        and final_state is None without `output_final_state`.

    Raises:
        TypeError: a required argument is None, or one has a type or dtype that is not taken.
        ValueError: a shape or range is wrong, or a tensor requires grad while grad mode is on.
        RuntimeError: there is no backend for the arrays' device.
        MemoryError: outputs or workspace do not fit into memory.
    """
    prepared = prepare_direct(
        q, k, v, gk, beta, scale, chunk_size, initial_state=initial_state, output_final_state=output_final_state,
        safe_gate=safe_gate, state_products=state_products,
    )  # fmt: skip
    results = execute(prepared.call, q, prepared.outputs, planned_threads())
    return ChunkKdaFwdResult(**({"final_state": None} | results), gk=gk, initial_state=initial_state)


def prepare_direct(
    q: Array,
    k: Array,
    v: Array,
    gk: Array,
    beta: Array,
    scale: float,
    chunk_size: int,
    *,
    initial_state: Array | None = None,
    output_final_state: bool = True,
    safe_gate: bool = False,
    state_products: str = "float32",
) -> Prepared:
    """Check a call of `chunk_kda_fwd_direct` without computing. Raises what `chunk_kda_fwd_direct` raises."""
    safe_gate = as_bool(DIRECT_OP, "safe_gate", safe_gate)
    arguments = Arguments(q, k, v, gk, beta, scale, chunk_size, "BNSD", initial_state, safe_gate=safe_gate)
    outputs = {"attn_out", "Aqk", "Akk", "w", "u", "qg", "kg", "v_new", "h"}
    if as_bool(DIRECT_OP, "output_final_state", output_final_state):
        outputs.add("final_state")
    call = prepare(arguments, Form(op=DIRECT_OP, g_is_gk=True), state_products)
    shapes = {name: shape for name, (shape, _) in zip(OUTPUTS, call.outputs(), strict=True)}
    K, V = shapes["w"][-1], shapes["u"][-1]
    if K != 128:
        fail(ValueError, DIRECT_OP, "q", "K = 128", f"K = {K}")
    if V not in (128, 256):
        fail(ValueError, DIRECT_OP, "v", "V = 128 or 256", f"V = {V}")
    return Prepared(call, tuple(outputs))
