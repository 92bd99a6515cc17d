"""The operators as torch operators: importing this module registers `torch.ops.kda.*`.

`torch.ops.kda.chunk_kda_fwd`, `chunk_kda`, `chunk_kda_fwd_direct`, `fused_kda_gate` and `kda_gate_cumsum` take and
return tensors only, have fake implementations, and are what `torch.compile` and `torch.export` can see. An output that
is not kept is a tensor of shape `[0]`; metadata is a tensor. The functions of this module call them and have the
arguments and results of the functions of `kda` with the same names: they are the ones to call in code that is compiled
with `fullgraph=True`.

All are the forward pass only. A tensor that requires grad is refused while grad mode is on; `torch.no_grad()`,
`torch.inference_mode()` and the inside of `autograd.Function.forward` are fine.

Importing `kda` does not import torch. Nothing is registered before this module is imported: by the statement
`import kda.torch`, or because a tensor was given to a function of `kda`. Needs torch 2.4.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from kda._chunk_kda import _DEPRECATED, _refuse_foreign
from kda._chunk_kda_fwd import OUTPUTS, ChunkKdaFwdResult, kept_names

if not hasattr(torch.library, "register_fake"):
    raise ImportError(f"kda.torch: expected torch 2.4 or later, got {torch.__version__}")

from kda.torch import _ops

__all__ = ["chunk_kda", "chunk_kda_fwd", "chunk_kda_fwd_direct", "fused_kda_gate", "kda_gate_cumsum"]

Tensor = torch.Tensor
# A tensor, a list, or a NumPy array.
Metadata = Any

# Loading `_ops` registered them.
_operators = getattr(torch.ops, _ops.NAMESPACE)


def _as_tensor(values: Metadata | None) -> Tensor | None:
    if values is None or isinstance(values, Tensor):
        return values
    # What an empty list holds is not known; anything else keeps its dtype, for the operator to judge.
    return torch.as_tensor(values) if len(values) else torch.empty(0, dtype=torch.int64)


def chunk_kda_fwd(
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
    cu_seqlens: Metadata | None = None,
    chunk_indices: Metadata | None = None,
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
) -> ChunkKdaFwdResult:
    """Compute `kda.chunk_kda_fwd`, with its arguments, results and errors, through `torch.ops.kda.chunk_kda_fwd`."""
    results = _operators.chunk_kda_fwd(
        q, k, v, g, beta, scale, chunk_size, layout, initial_state, output_final_state, _as_tensor(cu_seqlens),
        _as_tensor(chunk_indices), safe_gate, lower_bound, use_gate_in_kernel, A_log, dt_bias, disable_recompute,
        return_intermediate_states, state_v_first, state_products=state_products,
    )  # fmt: skip
    kept = kept_names(
        output_final_state=output_final_state,
        use_gate_in_kernel=use_gate_in_kernel,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
    )
    found = [result if name in kept else None for name, result in zip(OUTPUTS, results, strict=True)]
    return ChunkKdaFwdResult._make([*found, initial_state])


def chunk_kda(
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
    cu_seqlens: Metadata | None = None,
    cu_seqlens_cpu: Metadata | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    state_products: str = "float32",
    cp_context: None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Compute `kda.chunk_kda`, with its arguments, results and errors, through `torch.ops.kda.chunk_kda`."""
    if _DEPRECATED in kwargs and not state_v_first:
        # A compiler has no use for warnings, and stops at them.
        if not torch.compiler.is_compiling():
            warnings.warn(f"chunk_kda: {_DEPRECATED} is now called state_v_first", DeprecationWarning, stacklevel=2)
        state_v_first = kwargs.pop(_DEPRECATED)
    _refuse_foreign(kwargs | {"cp_context": cp_context})
    o, final_state, h = _operators.chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, disable_recompute,
        return_intermediate_states, state_v_first, _as_tensor(cu_seqlens), _as_tensor(cu_seqlens_cpu), A_log=A_log,
        dt_bias=dt_bias, chunk_size=chunk_size, state_products=state_products,
    )  # fmt: skip
    kept_state = final_state if output_final_state else None
    return (o, kept_state, h) if return_intermediate_states else (o, kept_state)


def chunk_kda_fwd_direct(
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
) -> ChunkKdaFwdResult:
    """Compute `kda.chunk_kda_fwd_direct` through `torch.ops.kda.chunk_kda_fwd_direct`.

    The operator returns ten tensors, all but gk and initial_state; here the caller's objects are put in their places.
    """
    attn_out, final_state, *others = _operators.chunk_kda_fwd_direct(
        q, k, v, gk, beta, scale, chunk_size, initial_state=initial_state, output_final_state=output_final_state,
        safe_gate=safe_gate, state_products=state_products,
    )  # fmt: skip
    return ChunkKdaFwdResult._make([attn_out, final_state if output_final_state else None, gk, *others, initial_state])


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
    lower_bound: float | None = None,
) -> Tensor:
    """Compute `kda.fused_kda_gate`, with its arguments, result and errors, through `torch.ops.kda.fused_kda_gate`."""
    result: Tensor = _operators.fused_kda_gate(g, A_log, dt_bias, output_dtype, lower_bound)
    return result


def kda_gate_cumsum(
    g: Tensor,
    chunk_size: int,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Metadata | None = None,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
) -> Tensor:
    """Compute `kda.kda_gate_cumsum`, with its arguments, result and errors, through `torch.ops.kda.kda_gate_cumsum`."""
    result: Tensor = _operators.kda_gate_cumsum(
        g, chunk_size, A_log=A_log, dt_bias=dt_bias, cu_seqlens=_as_tensor(cu_seqlens),
        use_gate_in_kernel=use_gate_in_kernel, safe_gate=safe_gate, lower_bound=lower_bound,
    )  # fmt: skip
    return result
