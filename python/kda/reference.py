"""The operators in float64, straight from their formulas: slow, and the measure of every number of this library."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kda._chunk_kda import prepare_chunk_kda
from kda._chunk_kda_fwd import OUTPUTS, Arguments, Array, prepare
from kda._gates import prepare_gate, prepare_gate_cumsum

__all__ = ["chunk_kda", "chunk_kda_fwd", "fused_kda_gate", "kda_gate_cumsum"]


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
    cu_seqlens: Array | None = None,
    chunk_indices: Array | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    state_v_first: bool = False,
    *,
    intermediates: bool = True,
) -> dict[str, npt.NDArray[np.float64]]:
    """Compute every output of `kda.chunk_kda_fwd` in float64.

    attn_out and final_state come from the token recurrence, everything else from the formulas of the chunked form.

    Args:
        q: this and all that follow as for `kda.chunk_kda_fwd`.
        k: see `q`.
        v: see `q`.
        g: see `q`.
        beta: see `q`.
        scale: see `q`.
        chunk_size: see `q`.
        layout: see `q`.
        initial_state: see `q`.
        cu_seqlens: see `q`.
        chunk_indices: see `q`.
        safe_gate: see `q`.
        lower_bound: see `q`.
        use_gate_in_kernel: see `q`.
        A_log: see `q`.
        dt_bias: see `q`.
        state_v_first: see `q`.
        intermediates: make all eleven outputs; without, attn_out and final_state only.

    Returns:
        NumPy arrays under the outputs' names, in the shapes of `kda.chunk_kda_fwd`.

    Raises:
        TypeError: as `kda.chunk_kda_fwd`.
        ValueError: as `kda.chunk_kda_fwd`.
        RuntimeError: as `kda.chunk_kda_fwd`.
        MemoryError: as `kda.chunk_kda_fwd`.
    """
    arguments = Arguments(
        q, k, v, g, beta, scale, chunk_size, layout, initial_state, cu_seqlens, chunk_indices, safe_gate, lower_bound,
        use_gate_in_kernel, A_log, dt_bias, state_v_first,
    )  # fmt: skip
    return compute(arguments, intermediates=intermediates)


def compute(arguments: Arguments, *, intermediates: bool = True) -> dict[str, npt.NDArray[np.float64]]:
    """Compute the outputs in float64."""
    arrays = prepare(arguments).reference(intermediates)
    return {name: array for name, array in zip(OUTPUTS, arrays, strict=True) if array is not None}


def chunk_kda(*args: Any, **kwargs: Any) -> dict[str, npt.NDArray[np.float64]]:
    """Compute what `kda.chunk_kda` returns in float64.

    Args:
        *args: those of `kda.chunk_kda`.
        **kwargs: those of `kda.chunk_kda`.

    Returns:
        NumPy arrays "o", "final_state" and "h", in the shapes of `kda.chunk_kda`, whatever the flags ask for.

    Raises:
        TypeError: as `kda.chunk_kda`.
        ValueError: as `kda.chunk_kda`.
        RuntimeError: as `kda.chunk_kda`.
        MemoryError: as `kda.chunk_kda`.
    """
    arrays = dict(zip(OUTPUTS, prepare_chunk_kda(*args, **kwargs).call.reference(True), strict=True))
    made = {"o": arrays["attn_out"], "final_state": arrays["final_state"], "h": arrays["h"]}
    return {name: array for name, array in made.items() if array is not None}


def fused_kda_gate(
    g: Array, A_log: Array | None, dt_bias: Array | None = None, lower_bound: float | None = None
) -> npt.NDArray[np.float64]:
    """Compute the gates of `kda.fused_kda_gate` in float64.

    Args:
        g: this and all that follow as for `kda.fused_kda_gate`.
        A_log: see `g`.
        dt_bias: see `g`.
        lower_bound: see `g`.

    Returns:
        A NumPy array of g's shape.

    Raises:
        TypeError: as `kda.fused_kda_gate`.
        ValueError: as `kda.fused_kda_gate`.
        RuntimeError: as `kda.fused_kda_gate`.
        MemoryError: as `kda.fused_kda_gate`.
    """
    return prepare_gate("fused_kda_gate", g, A_log, dt_bias, lower_bound=lower_bound).reference()


def kda_gate_cumsum(
    g: Array,
    chunk_size: int,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    cu_seqlens: Array | None = None,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
) -> npt.NDArray[np.float64]:
    """Compute `kda.kda_gate_cumsum` in float64.

    Args:
        g: this and all that follow as for `kda.kda_gate_cumsum`.
        chunk_size: see `g`.
        A_log: see `g`.
        dt_bias: see `g`.
        cu_seqlens: see `g`.
        use_gate_in_kernel: see `g`.
        safe_gate: see `g`.
        lower_bound: see `g`.

    Returns:
        A NumPy array of g's shape.

    Raises:
        TypeError: as `kda.kda_gate_cumsum`.
        ValueError: as `kda.kda_gate_cumsum`.
        RuntimeError: as `kda.kda_gate_cumsum`.
        MemoryError: as `kda.kda_gate_cumsum`.
    """
    call = prepare_gate_cumsum(
        "kda_gate_cumsum", g, chunk_size, A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel, safe_gate=safe_gate, lower_bound=lower_bound,
    )  # fmt: skip
    return call.reference()
