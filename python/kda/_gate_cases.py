"""The cases of `kda_gate.json` and `kda_gate_cumsum.json`, and their inputs, as README.md beside them says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kda._cases import (
    DTYPES,
    CaseError,
    Generator,
    Shape,
    check_fields,
    integers,
    number,
    of_type,
    one_of,
)

_DTYPES = ("bfloat16", "float16", "float32")
_CHOICES = {
    "dtype": _DTYPES,
    "output_dtype": _DTYPES,
    "dt_bias": ("none", "flat", "matrix"),
    "gate": ("random", "wide"),
}


@dataclass(frozen=True)
class GateCase:
    """One case of kda_gate."""

    name: str
    shape: Shape
    seed: int = 1
    dtype: str = "bfloat16"
    output_dtype: str = "float32"
    A_log: bool = True
    dt_bias: str = "none"
    lower_bound: float | None = None
    gate: str = "random"
    gate_scale: float = 1.0


@dataclass(frozen=True)
class GateCumsumCase:
    """One case of kda_gate_cumsum."""

    name: str
    shape: Shape
    seed: int = 1
    dtype: str = "float32"
    chunk_size: int = 64
    cu_seqlens: tuple[int, ...] | None = None
    use_gate_in_kernel: bool = False
    safe_gate: bool = False
    lower_bound: float = -5.0
    dt_bias: bool = False
    gate_scale: float = 1.0


def parse_gate(given: Any) -> GateCase:
    """Make a case of kda_gate from its JSON object. Raises CaseError."""
    return GateCase(**_parsed(given, GateCase, 2))


def parse_gate_cumsum(given: Any) -> GateCumsumCase:
    """Make a case of kda_gate_cumsum from its JSON object. Raises CaseError."""
    return GateCumsumCase(**_parsed(given, GateCumsumCase, 3))


def _parsed(given: Any, case: type[Any], least_rank: int) -> dict[str, Any]:
    defaults = check_fields(given, case)
    values = {name: _parse_field(name, value, defaults[name]) for name, value in given.items()}
    if len(values["shape"]) < least_rank or min(values["shape"]) < 0:
        raise CaseError(f"shape: expected {least_rank} extents or more, got {given['shape']!r}")
    return values


def _parse_field(name: str, value: Any, default: Any) -> Any:
    if value is None and default is None:
        return None
    if name in ("shape", "cu_seqlens"):
        return integers(name, value)
    if name in ("lower_bound", "gate_scale"):
        return number(name, value)
    if isinstance(default, str):
        return one_of(name, value, _CHOICES[name])
    return of_type(name, value, str if name == "name" else type(default))


def make_gate_arguments(case: GateCase) -> dict[str, Any]:
    """Return the arguments of the case's call of `kda.fused_kda_gate`."""
    H, D = case.shape[-2:]
    random = Generator(case.seed, "g")
    g = case.gate_scale * (_wide(random.bits(case.shape)) if case.gate == "wide" else 2 * random.normal(case.shape))
    bias = None if case.dt_bias == "none" else _dt_bias(case.seed, (H * D,))
    return {
        "g": _rounded(g, case.dtype),
        "A_log": _rates(case.seed, H) if case.A_log else None,
        "dt_bias": bias.reshape(H, D) if bias is not None and case.dt_bias == "matrix" else bias,
        "output_dtype": DTYPES[case.output_dtype],
        "lower_bound": case.lower_bound,
    }


def make_gate_cumsum_arguments(case: GateCumsumCase) -> dict[str, Any]:
    """Return the arguments of the case's call of `kda.kda_gate_cumsum`."""
    HV, _, K = case.shape[-3:]
    random = Generator(case.seed, "g")
    if case.use_gate_in_kernel:
        g = case.gate_scale * 2 * random.normal(case.shape)
    else:
        uniform = random.uniform(case.shape)
        g = case.gate_scale * -(uniform * uniform)
    return {
        "g": _rounded(g, case.dtype),
        "chunk_size": case.chunk_size,
        "A_log": _rates(case.seed, HV) if case.use_gate_in_kernel else None,
        "dt_bias": _dt_bias(case.seed, (HV * K,)) if case.dt_bias else None,
        "cu_seqlens": None if case.cu_seqlens is None else list(case.cu_seqlens),
        "use_gate_in_kernel": case.use_gate_in_kernel,
        "safe_gate": case.safe_gate,
        "lower_bound": case.lower_bound,
    }


def _wide(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return magnitudes from 2^-24 to 2^8, of either sign."""
    magnitude = 1 + np.asarray(bits >> np.uint64(40), np.float64) * 2.0**-24
    exponent = np.asarray((bits >> np.uint64(8)) & np.uint64(31), np.int64) - 24
    return np.where(bits & np.uint64(1), -1.0, 1.0) * np.ldexp(magnitude, exponent)


def _rates(seed: int, heads: int) -> npt.NDArray[np.float32]:
    return np.asarray(1.5 * Generator(seed, "A_log").uniform((heads,)) - 0.5, np.float32)


def _dt_bias(seed: int, shape: Shape) -> npt.NDArray[np.float32]:
    return np.asarray(0.5 * Generator(seed, "dt_bias").normal(shape), np.float32)


def _rounded(numbers: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[Any]:
    return numbers.astype(np.float32).astype(DTYPES[dtype])
