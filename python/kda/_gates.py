"""The gate operators: from Python arguments to checked calls of the extension, and from their outputs to arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kda import _arrays, _kda
from kda._arguments import as_bool, as_float, as_int
from kda._chunk_kda_fwd import DEFAULT_LOWER_BOUND, Array
from kda._threads import planned_threads
from kda._torch_ops import traceable


def prepare_gate(
    op: str,
    g: Array,
    A_log: Array | None,
    dt_bias: Array | None = None,
    output_dtype: Any = np.float32,
    lower_bound: float | None = None,
) -> _kda.KdaGateCall:
    """Check a call of `fused_kda_gate` that names itself `op`."""
    return _kda.KdaGateCall(
        op,
        _describe(op, g, A_log, dt_bias),
        _arrays.dtype_name(op, "output_dtype", output_dtype),
        None if lower_bound is None else as_float(op, "lower_bound", lower_bound),
    )


def prepare_gate_cumsum(
    op: str,
    g: Array,
    chunk_size: int,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    cu_seqlens: Array | None = None,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
) -> _kda.KdaGateCumsumCall:
    """Check a call of `kda_gate_cumsum` that names itself `op`."""
    return _kda.KdaGateCumsumCall(
        op,
        _describe(op, g, A_log, dt_bias),
        as_int(op, "chunk_size", chunk_size),
        as_bool(op, "use_gate_in_kernel", use_gate_in_kernel),
        as_bool(op, "safe_gate", safe_gate),
        as_float(op, "lower_bound", DEFAULT_LOWER_BOUND if lower_bound is None else lower_bound),
        _arrays.describe_integers(op, "cu_seqlens", cu_seqlens),
    )


def execute(
    op: str, call: _kda.KdaGateCall | _kda.KdaGateCumsumCall, g: Array, num_threads: int | None = None
) -> Array:
    """Allocate the output in g's library and compute it."""
    kind = _arrays.kind_of(op, "g", g)
    shape, dtype = call.output()
    made = _arrays.new(kind, op, "out", shape, dtype, like=g)
    threads = planned_threads() if num_threads is None else num_threads
    call.execute(kind.describe(op, "out", made), threads, kind.stream(g))
    return kind.finish(made, dtype, g)


@traceable
def fused_kda_gate(
    g: Array,
    A_log: Array | None,
    dt_bias: Array | None = None,
    output_dtype: Any = np.float32,
    lower_bound: float | None = None,
) -> Array:
    """Turn raw gates into gates, the natural logarithm of the decay per step.

    With `x = g + dt_bias`:

        -exp(A_log) * softplus(x)                  without lower_bound
        lower_bound * sigmoid(exp(A_log) * x)      with lower_bound

    in float32, rounded once at the end, without overflow or loss of relative accuracy for any finite x; `exp(A_log)` is
    bounded by the largest float32. Arrays are those of `chunk_kda_fwd`: any library, any strides, no copies.

    Args:
        g: `[...,H,D]`, rank 2 to 8; float32, float16 or bfloat16.
        A_log: `[H]`, float32; may be None, which is 0, with `lower_bound`.
        dt_bias: `[H*D]` or `[H,D]`, float32; None is 0.
        output_dtype: float32, float16 or bfloat16, as a dtype of NumPy, ml_dtypes, torch or JAX, or by its name.
        lower_bound: of the bounded gate; any finite number.

    Returns:
        An array of g's kind and shape, and of `output_dtype`.

    Raises:
        TypeError: a required argument is None, or one has a type or dtype that is not taken.
        ValueError: a shape or lower_bound is wrong, or a tensor requires grad while grad mode is on.
        RuntimeError: there is no backend for the arrays' device.
        MemoryError: the output does not fit into memory.
    """
    op = "fused_kda_gate"
    return execute(op, prepare_gate(op, g, A_log, dt_bias, output_dtype, lower_bound), g)


def naive_kda_gate(
    g: Array,
    A_log: Array | None,
    dt_bias: Array | None = None,
    output_dtype: Any = np.float32,
    lower_bound: float | None = None,
) -> Array:
    """Compute what `fused_kda_gate` computes, slowly: the plain formula in float64, to compare with.

    The float64 result is rounded to float32, and from there to `output_dtype`.

    Args:
        g: this and all that follow as for `fused_kda_gate`. Computed on the CPU, wherever they are.
        A_log: see `g`.
        dt_bias: see `g`.
        output_dtype: see `g`.
        lower_bound: see `g`.

    Returns:
        An array of g's kind and shape, and of `output_dtype`.

    Raises:
        TypeError: as `fused_kda_gate`.
        ValueError: as `fused_kda_gate`.
        RuntimeError: as `fused_kda_gate`.
        MemoryError: as `fused_kda_gate`.
    """
    op = "naive_kda_gate"
    A_log, dt_bias = _arrays.on_host(op, "A_log", A_log), _arrays.on_host(op, "dt_bias", dt_bias)
    call = prepare_gate(op, _arrays.on_host(op, "g", g), A_log, dt_bias, output_dtype, lower_bound)
    _, dtype = call.output()
    return _arrays.kind_of(op, "g", g).adopt(_rounded_bits(call.reference(), dtype), dtype, g)


@traceable
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
) -> Array:
    """Sum the gates of `chunk_kda_fwd` within every chunk, over ln 2; bit for bit its gk.

        gk_i = (sum over j <= i, same chunk, of gate_j) / ln 2

    Symbols and arrays are those of `chunk_kda_fwd`. Chunks never cross a sequence boundary.

    Args:
        g: `[B,HV,T,K]` or `[HV,T,K]`, K in 1..256; float32, float16 or bfloat16: the gate (natural log), or with
            `use_gate_in_kernel` what it is made from.
        chunk_size: 32, 64 or 128.
        A_log: `[HV]`, float32; required with `use_gate_in_kernel`.
        dt_bias: `[HV*K]`, float32.
        cu_seqlens: `[N+1]` integers from 0 to T, non-decreasing: packed sequences. List, int32 or int64 array. Needs
            B = 1; N <= 1024.
        use_gate_in_kernel: make the gate from `x = g + dt_bias`: `-exp(A_log) * softplus(x)`, or with `safe_gate`
            `lower_bound * sigmoid(exp(A_log) * x)`.
        safe_gate: with `use_gate_in_kernel`, the bounded gate.
        lower_bound: of the bounded gate, in [-5, 0); None: -5.

    Returns:
        gk, float32, an array of g's kind and shape.

    Raises:
        TypeError: a required argument is None, or one has a type or dtype that is not taken.
        ValueError: a shape, range or metadata is wrong, or a tensor requires grad while grad mode is on.
        RuntimeError: there is no backend for the arrays' device.
        MemoryError: the output does not fit into memory.
    """
    op = "kda_gate_cumsum"
    call = prepare_gate_cumsum(
        op, g, chunk_size, A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens, use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate, lower_bound=lower_bound,
    )  # fmt: skip
    return execute(op, call, g)


def _describe(op: str, g: Array, A_log: Array | None, dt_bias: Array | None) -> tuple[Any, ...]:
    named = {"g": g, "A_log": A_log, "dt_bias": dt_bias}
    return tuple(_arrays.describe(op, name, array) for name, array in named.items())


def _rounded_bits(numbers: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[Any]:
    """Round to float32, from there to the dtype, and return the bits."""
    with np.errstate(over="ignore"):
        single = numbers.astype(np.float32)
        if dtype == "float16":
            return single.astype(np.float16).view(np.uint16)
    bits = single.view(np.uint32)
    if dtype == "float32":
        return bits
    # To nearest, ties to even; a NaN keeps its upper half, and stays one.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.asarray(np.where(np.isnan(single), quiet, rounded), np.uint16)
