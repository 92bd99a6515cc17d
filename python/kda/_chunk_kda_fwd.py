"""chunk_kda_fwd: from Python arguments to a checked call of the extension, and from its outputs to arrays."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, NamedTuple, TypeAlias

from kda import _arrays, _kda
from kda._arguments import as_bool, as_float, as_int, as_str, fail
from kda._threads import planned_threads
from kda._torch_ops import traceable

OP = "chunk_kda_fwd"
OUTPUTS = _kda.CHUNK_KDA_FWD_OUTPUTS
DEFAULT_LOWER_BOUND = -5.0
STATE_PRODUCTS = ("float32", "bfloat16")

Array: TypeAlias = Any
"""A NumPy array, a torch tensor, or any array with `__dlpack__`."""


class Arguments(NamedTuple):
    """What decides the numbers: every argument of `chunk_kda_fwd` but those that choose what is kept."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    scale: float | None
    chunk_size: int = 64
    layout: str = "BSND"
    initial_state: Array | None = None
    cu_seqlens: Array | None = None
    chunk_indices: Array | None = None
    safe_gate: bool = False
    lower_bound: float | None = None
    use_gate_in_kernel: bool = False
    A_log: Array | None = None
    dt_bias: Array | None = None
    state_v_first: bool = False


class Form(NamedTuple):
    """What a Python function makes of the operator: its name, and what happens to inputs on the way in."""

    op: str = OP
    scale_is_optional: bool = False
    """None is `K ** -0.5`."""
    qk_l2norm: bool = False
    beta: Literal["none", "sigmoid", "twice_sigmoid"] = "none"
    any_lower_bound: bool = False
    """A lower_bound may be any finite number, and A_log may be left out with it."""
    g_is_gk: bool = False
    h_has_batch: bool = False
    """With cu_seqlens h is `[1,NC,...]`."""
    cu_seqlens_may_be_on_gpu: bool = False
    """Then the kernels read it there, and NC is an upper bound."""

    def name_of(self, argument: str) -> str:
        """Return what the function calls an argument."""
        return "gk" if self.g_is_gk and argument == "g" else argument


CHUNK_KDA_FWD = Form()


def prepare(arguments: Arguments, form: Form = CHUNK_KDA_FWD, state_products: str = "float32") -> _kda.ChunkKdaFwdCall:
    """Check everything that can be checked without computing. Raises what `chunk_kda_fwd` raises."""
    a, op = arguments, form.op
    tensors = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    lower_bound = DEFAULT_LOWER_BOUND if a.lower_bound is None else a.lower_bound
    if as_str(op, "state_products", state_products) not in STATE_PRODUCTS:
        fail(ValueError, op, "state_products", " or ".join(STATE_PRODUCTS), state_products)
    return _kda.ChunkKdaFwdCall(
        op,
        tuple(_arrays.describe(op, form.name_of(name), getattr(a, name)) for name in tensors),
        as_str(op, "layout", a.layout),
        None if a.scale is None and form.scale_is_optional else as_float(op, "scale", a.scale),
        as_int(op, "chunk_size", a.chunk_size),
        as_bool(op, "use_gate_in_kernel", a.use_gate_in_kernel),
        as_bool(op, "safe_gate", a.safe_gate),
        as_float(op, "lower_bound", lower_bound),
        as_bool(op, "state_v_first", a.state_v_first),
        _arrays.describe_integers(op, "cu_seqlens", a.cu_seqlens),
        _arrays.describe_integers(op, "chunk_indices", a.chunk_indices),
        form.qk_l2norm,
        form.beta,
        form.any_lower_bound,
        form.g_is_gk,
        form.h_has_batch,
        form.cu_seqlens_may_be_on_gpu,
        state_products,
    )


def compute(
    arguments: Arguments,
    names: Collection[str] = OUTPUTS,
    num_threads: int | None = None,
    state_products: str = "float32",
) -> dict[str, Array]:
    """Compute the named outputs, as arrays of q's kind, in the order of `OUTPUTS`."""
    call = prepare(arguments, state_products=state_products)
    return execute(call, arguments.q, names, planned_threads() if num_threads is None else num_threads)


def execute(call: _kda.ChunkKdaFwdCall, q: Array, names: Collection[str], num_threads: int) -> dict[str, Array]:
    """Allocate the named outputs in q's library and compute them."""
    kind = _arrays.kind_of(OP, "q", q)
    specs = dict(zip(OUTPUTS, call.outputs(), strict=True))
    made = {name: _arrays.new(kind, OP, name, *specs[name], like=q) for name in OUTPUTS if name in names}
    views = tuple(kind.describe(OP, name, made[name]) if name in made else None for name in OUTPUTS)
    call.execute(views, num_threads, kind.stream(q), kind.allocator(q))
    return {name: kind.finish(array, specs[name][1], q) for name, array in made.items()}


def kept_names(
    *,
    output_final_state: bool = False,
    use_gate_in_kernel: bool = False,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
) -> tuple[str, ...]:
    """Return the outputs that a call with these flags keeps, in the order of `OUTPUTS`."""
    kept = {"attn_out", "Aqk", "Akk"}
    if output_final_state:
        kept.add("final_state")
    if disable_recompute or not use_gate_in_kernel:
        kept.add("gk")
    if disable_recompute:
        kept |= {"w", "u", "qg", "kg", "v_new"}
    if disable_recompute or return_intermediate_states:
        kept.add("h")
    return tuple(name for name in OUTPUTS if name in kept)


class ChunkKdaFwdResult(NamedTuple):
    """The results of `chunk_kda_fwd`; None where a result was not kept."""

    attn_out: Array
    final_state: Array | None
    gk: Array | None
    Aqk: Array
    Akk: Array
    w: Array | None
    u: Array | None
    qg: Array | None
    kg: Array | None
    v_new: Array | None
    h: Array | None
    initial_state: Array | None


@traceable
def chunk_kda_fwd(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: float,
    chunk_size: int = 64,
    layout: str = "BSND",
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_indices: Array | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    *,
    state_products: str = "float32",
) -> ChunkKdaFwdResult:
    """Compute the chunked forward pass of Kimi Delta Attention.

    Per token and value head, with a state `S` of `K x V`:

        S = diag(exp(gate)) S;  S += beta k (v - S^T k)^T;  attn_out = scale S^T q

    Symbols: `B` batch, `T` tokens (of all sequences together with `cu_seqlens`), `H` query/key heads, `HV` value heads,
    `K` and `V` head dimensions, `C` chunk_size, `N` sequences, `NC` chunks. Value head `j` reads query/key head
    `j // (HV // H)`. Legal: K and V multiples of 16 in 16..256, 0 < H <= HV <= 128, HV % H == 0.

    Arrays may be NumPy (bfloat16 by ml_dtypes), torch, JAX, CuPy or any with `__dlpack__`, on the CPU or all on one
    GPU, with any strides; none is copied or written. Results are of q's kind and on its device; torch's are computed on
    the current stream, which is not waited for. Shapes below are for layout BSND; BNSD swaps the middle two axes, TND
    and NTD are BSND and BNSD without `B`.

    Args:
        q: `[B,T,H,K]`, float16 or bfloat16.
        k: `[B,T,H,K]`, q's dtype.
        v: `[B,T,HV,V]`, q's dtype.
        g: `[B,T,HV,K]`, float32 or bfloat16: the gate (natural log), or with `use_gate_in_kernel` what it is made from.
        beta: `[B,T,HV]`, float32 or bfloat16.
        scale: multiplies attn_out and Aqk; usually `K ** -0.5`.
        chunk_size: 64 or 128.
        layout: "BSND", "BNSD", "TND" or "NTD"; of q, k, v, g and beta only.
        initial_state: `[N,HV,K,V]`, or `[N,HV,V,K]` with `state_v_first`; float32.
        output_final_state: keep final_state.
        cu_seqlens: `[N+1]` integers from 0 to T, non-decreasing: packed sequences. List, int32 or int64 array. Needs
            B = 1; N <= 1024.
        chunk_indices: `[2*NC]` or `[NC,2]` integers, pairs (sequence, chunk within it) in order; checked, not needed.
        safe_gate: with `use_gate_in_kernel`, the bounded gate.
        lower_bound: of the bounded gate, in [-5, 0); None: -5.
        use_gate_in_kernel: make the gate from `x = g + dt_bias`: `-exp(A_log) * softplus(x)`, or with `safe_gate`
            `lower_bound * sigmoid(exp(A_log) * x)`.
        A_log: `[HV]`, float32; required with `use_gate_in_kernel`.
        dt_bias: `[HV*K]`, float32.
        disable_recompute: keep gk, w, u, qg, kg, v_new and h.
        return_intermediate_states: keep h.
        state_v_first: states are `[...,V,K]` instead of `[...,K,V]`.
        state_products: "bfloat16" multiplies with the state in bfloat16, summed in float32, on CPUs that have
            AVX512_BF16: about three quarters of the time, with a relative error of attn_out, final_state, v_new and h
            of typically 2e-3, at most 5e-3, but up to 3.5e-2 where one and the same key repeats with little decay.
            Elsewhere, on GPUs too, it changes nothing; `kda.supported` tells.

    Returns:
        A tuple of twelve, None where a result is not kept. In rank-3 layouts the shapes lack `B`.

        - attn_out `[B,T,HV,V]`, q's dtype
        - final_state, as initial_state, float32 (`output_final_state`)
        - gk `[B,HV,T,K]`, float32: the gate summed within the chunk, over ln 2 (unless `use_gate_in_kernel`)
        - Aqk, Akk `[B,HV,T,C]`, q's dtype
        - w `[B,HV,T,K]`, u `[B,HV,T,V]`, qg, kg `[B,HV,T,K]`, v_new `[B,HV,T,V]`, q's dtype (`disable_recompute`)
        - h `[B,NC,HV,K,V]` (`[NC,HV,K,V]` with `cu_seqlens`), q's dtype: the state before each chunk
        - initial_state: the very object that was given

    Raises:
        TypeError: a required argument is None, or one has a type or dtype that is not taken.
        ValueError: a shape, range, layout or metadata is wrong, or a tensor requires grad while grad mode is on.
        RuntimeError: there is no backend for the arrays' device.
        MemoryError: outputs or workspace do not fit into memory.
    """
    kept = kept_names(
        output_final_state=as_bool(OP, "output_final_state", output_final_state),
        use_gate_in_kernel=as_bool(OP, "use_gate_in_kernel", use_gate_in_kernel),
        disable_recompute=as_bool(OP, "disable_recompute", disable_recompute),
        return_intermediate_states=as_bool(OP, "return_intermediate_states", return_intermediate_states),
    )
    arguments = Arguments(
        q, k, v, g, beta, scale, chunk_size, layout, initial_state, cu_seqlens, chunk_indices, safe_gate, lower_bound,
        use_gate_in_kernel, A_log, dt_bias, state_v_first,
    )  # fmt: skip
    results = compute(arguments, kept, state_products=state_products)
    return ChunkKdaFwdResult._make((*(results.get(name) for name in OUTPUTS), initial_state))
