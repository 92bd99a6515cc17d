"""The operators in torch's dispatcher: schemas, kernels that call the Python functions, and shapes for tracing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch

import kda
from kda import _arrays
from kda._arguments import fail
from kda._chunk_kda_fwd import OUTPUTS, kept_names

NAMESPACE = "kda"

Tensor: TypeAlias = torch.Tensor

_FLOAT32_OUTPUTS = ("final_state", "gk")
_DIRECT_OUTPUTS = tuple(name for name in OUTPUTS if name != "gk")


class Operator(NamedTuple):
    """One operator: its schema, its kernel for every device, and a function that only makes its outputs' shapes."""

    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]

    @property
    def name(self) -> str:
        """The operator's name, without the namespace."""
        return self.schema.partition("(")[0]


class _Sizes(NamedTuple):
    """The sizes of a call. Plain or symbolic integers."""

    batch: tuple[Any, ...]
    """`(B,)`, or nothing in rank-3 layouts."""
    T: Any
    HV: Any
    K: Any
    V: Any
    N: Any


def _sizes(op: str, q: Tensor, v: Tensor, layout: str, cu_seqlens: Tensor | None) -> _Sizes:
    if layout not in ("BSND", "BNSD", "TND", "NTD"):
        fail(ValueError, op, "layout", "BSND, BNSD, TND or NTD", layout)
    rank = len(layout)
    for name, tensor in (("q", q), ("v", v)):
        if tensor.dim() != rank:
            fail(ValueError, op, name, f"rank {rank} for layout {layout}", f"rank {tensor.dim()}")
    tokens, heads = (-2, -3) if layout in ("BNSD", "NTD") else (-3, -2)
    batch = tuple(v.shape[:-3])
    sequences = (*batch, 1)[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _Sizes(batch, v.shape[tokens], v.shape[heads], q.shape[-1], v.shape[-1], sequences)


def _chunks(sizes: _Sizes, chunk_size: int, cu_seqlens: Tensor | None) -> Any:
    """Return NC. Of packed sequences it depends on the numbers in cu_seqlens, which tracing does not have."""
    if cu_seqlens is not None:
        return torch.library.get_ctx().new_dynamic_size()
    return (sizes.T + chunk_size - 1) // chunk_size


def _dtype_of(name: str, q: Tensor) -> torch.dtype:
    return torch.float32 if name in _FLOAT32_OUTPUTS else q.dtype


def _with_placeholders(names: Sequence[str], results: Sequence[Tensor | None], q: Tensor) -> tuple[Tensor, ...]:
    """Replace None by what it is in the dispatcher: a tensor of shape [0]."""
    return tuple(
        q.new_empty(0, dtype=_dtype_of(name, q)) if result is None else result
        for name, result in zip(names, results, strict=True)
    )


def _fakes(names: Sequence[str], shapes: Mapping[str, tuple[Any, ...]], q: Tensor) -> tuple[Tensor, ...]:
    """Make outputs without values; those without a shape are not kept."""
    return tuple(q.new_empty(shapes.get(name, (0,)), dtype=_dtype_of(name, q)) for name in names)


def _output_shapes(sizes: _Sizes, chunk_size: int, *, state_v_first: bool) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of every output but h."""
    batch, T, HV, K, V, N = sizes
    state = (V, K) if state_v_first else (K, V)
    head_major = {"gk": K, "Aqk": chunk_size, "Akk": chunk_size, "w": K, "u": V, "qg": K, "kg": K, "v_new": V}
    shapes: dict[str, tuple[Any, ...]] = {name: (*batch, HV, T, last) for name, last in head_major.items()}
    return shapes | {"attn_out": (*batch, T, HV, V), "final_state": (N, HV, *state)}


def _chunk_kda_fwd(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return _with_placeholders(OUTPUTS, kda.chunk_kda_fwd(q, *args, **kwargs)[:-1], q)


def _fake_chunk_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    chunk_size: int = 64,
    layout: str = "BSND",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    *,
    state_products: str = "float32",
) -> tuple[Tensor, ...]:
    sizes = _sizes("chunk_kda_fwd", q, v, layout, cu_seqlens)
    shapes = _output_shapes(sizes, chunk_size, state_v_first=state_v_first)
    kept = kept_names(
        output_final_state=output_final_state,
        use_gate_in_kernel=use_gate_in_kernel,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
    )
    if "h" in kept:
        batch = sizes.batch if cu_seqlens is None else ()
        shapes["h"] = (*batch, _chunks(sizes, chunk_size, cu_seqlens), *shapes["final_state"][1:])
    return _fakes(OUTPUTS, {name: shapes[name] for name in kept}, q)


def _chunk_kda(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    attn_out, final_state, *h = kda.chunk_kda(q, *args, **kwargs)
    return _with_placeholders(("attn_out", "final_state", "h"), (attn_out, final_state, *(h or [None])), q)


def _fake_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
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
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    state_products: str = "float32",
) -> tuple[Tensor, ...]:
    sizes = _sizes("chunk_kda", q, v, "BSND", cu_seqlens)
    all_shapes = _output_shapes(sizes, chunk_size, state_v_first=state_v_first)
    shapes = {"attn_out": all_shapes["attn_out"]}
    if output_final_state:
        shapes["final_state"] = all_shapes["final_state"]
    if return_intermediate_states:
        batch = sizes.batch if cu_seqlens is None else (1,)
        shapes["h"] = (*batch, _chunks(sizes, chunk_size, cu_seqlens), *all_shapes["final_state"][1:])
    return _fakes(("attn_out", "final_state", "h"), shapes, q)


def _chunk_kda_fwd_direct(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    result = kda.chunk_kda_fwd_direct(q, *args, **kwargs)
    return _with_placeholders(_DIRECT_OUTPUTS, [getattr(result, name) for name in _DIRECT_OUTPUTS], q)


def _fake_chunk_kda_fwd_direct(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    beta: Tensor,
    scale: float,
    chunk_size: int,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    safe_gate: bool = False,
    state_products: str = "float32",
) -> tuple[Tensor, ...]:
    sizes = _sizes("chunk_kda_fwd_direct", q, v, "BNSD", None)
    shapes = _output_shapes(sizes, chunk_size, state_v_first=False)
    shapes["h"] = (*sizes.batch, _chunks(sizes, chunk_size, None), *shapes["final_state"][1:])
    if not output_final_state:
        del shapes["final_state"]
    return _fakes(_DIRECT_OUTPUTS, shapes, q)


def _fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    lower_bound: float | None = None,
) -> Any:
    return kda.fused_kda_gate(g, A_log, dt_bias, output_dtype or torch.float32, lower_bound)


def _fake_fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    return g.new_empty(g.shape, dtype=output_dtype or torch.float32)


def _kda_gate_cumsum(g: Tensor, *args: Any, **kwargs: Any) -> Any:
    return kda.kda_gate_cumsum(g, *args, **kwargs)


def _fake_kda_gate_cumsum(g: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return g.new_empty(g.shape, dtype=torch.float32)


OPERATORS = (
    Operator(
        "chunk_kda_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, int chunk_size=64,"
        ' str layout="BSND", Tensor? initial_state=None, bool output_final_state=False, Tensor? cu_seqlens=None,'
        " Tensor? chunk_indices=None, bool safe_gate=False, float? lower_bound=None, bool use_gate_in_kernel=False,"
        " Tensor? A_log=None, Tensor? dt_bias=None, bool disable_recompute=False,"
        ' bool return_intermediate_states=False, bool state_v_first=False, *, str state_products="float32") ->'
        " (Tensor attn_out, Tensor final_state, Tensor gk, Tensor Aqk, Tensor Akk, Tensor w, Tensor u, Tensor qg,"
        " Tensor kg, Tensor v_new, Tensor h)",
        _chunk_kda_fwd,
        _fake_chunk_kda_fwd,
    ),
    Operator(
        "chunk_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, Tensor? initial_state=None,"
        " bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False,"
        " bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, bool safe_gate=False,"
        " float? lower_bound=None, bool disable_recompute=False, bool return_intermediate_states=False,"
        " bool state_v_first=False, Tensor? cu_seqlens=None, Tensor? cu_seqlens_cpu=None, *, Tensor? A_log=None,"
        ' Tensor? dt_bias=None, int chunk_size=64, str state_products="float32") -> (Tensor o, Tensor final_state,'
        " Tensor h)",
        _chunk_kda,
        _fake_chunk_kda,
    ),
    Operator(
        "chunk_kda_fwd_direct(Tensor q, Tensor k, Tensor v, Tensor gk, Tensor beta, float scale, int chunk_size, *,"
        " Tensor? initial_state=None, bool output_final_state=True, bool safe_gate=False,"
        ' str state_products="float32") -> (Tensor attn_out, Tensor final_state, Tensor Aqk, Tensor Akk, Tensor w,'
        " Tensor u, Tensor qg, Tensor kg, Tensor v_new, Tensor h)",
        _chunk_kda_fwd_direct,
        _fake_chunk_kda_fwd_direct,
    ),
    Operator(
        "fused_kda_gate(Tensor g, Tensor? A_log, Tensor? dt_bias=None, ScalarType? output_dtype=None,"
        " float? lower_bound=None) -> Tensor",
        _fused_kda_gate,
        _fake_fused_kda_gate,
    ),
    Operator(
        "kda_gate_cumsum(Tensor g, int chunk_size, *, Tensor? A_log=None, Tensor? dt_bias=None,"
        " Tensor? cu_seqlens=None, bool use_gate_in_kernel=False, bool safe_gate=False, float? lower_bound=None)"
        " -> Tensor",
        _kda_gate_cumsum,
        _fake_kda_gate_cumsum,
    ),
)


def _refusing_gradients(operator: Operator, parameters: Sequence[str]) -> Callable[..., Any]:
    """Make the kernel that autograd asks: it refuses tensors that want a gradient, and passes everything else on.

    Without it an operator without a backward would cut the graph in silence, under torch.compile too, where no kernel
    of ours sees the tensors.
    """
    overload = getattr(getattr(torch.ops, NAMESPACE), operator.name).default

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for name, value in chain(zip(parameters, args, strict=False), kwargs.items()):
                if isinstance(value, Tensor) and value.requires_grad:
                    # Raises, with the message that every other door has.
                    _arrays.describe(operator.name, name, value)
        # torch.library.custom_op does the same; there is no public name for it.
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    return kernel


def _register(library: Any) -> None:
    namespace = getattr(torch.ops, NAMESPACE)
    tags = (torch.Tag.pt2_compliant_tag,)
    for operator in OPERATORS:
        # Registered already when a second copy of this module is loaded.
        if hasattr(namespace, operator.name):
            continue
        library.define(operator.schema, tags=tags)
        library.impl(operator.name, operator.kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{operator.name}", operator.fake, lib=library)
        parameters = [argument.name for argument in getattr(namespace, operator.name).default._schema.arguments]
        library.impl(operator.name, _refusing_gradients(operator, parameters), "Autograd")


# The registrations live as long as this object.
_Library: Any = torch.library.Library
LIBRARY = _Library(NAMESPACE, "FRAGMENT")
_register(LIBRARY)
