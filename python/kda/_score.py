"""Errors against float64, and the bounds on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_FLOAT32_BOUND = 1e-5
_ROUNDING_FACTOR = 1.05
_INTERMEDIATE_SLACK = 1e-5
_GATE_ROUNDING_FACTOR = 1.001
_GATE_SLACK = 2.0**-22
_SMALLEST_REFERENCE = 1e-37
# Errors are relative to this at least: what is all smaller comes from decays that are 0 in fp32, but for subnormals.
_SMALLEST_NORM = 1e-30

# What outputs that pass through a GPU's products of rounded operands may be off beyond their own rounding: as a rule,
# and where keys are alike.
GPU_SLACK = 5e-3
GPU_SLACK_OF_KEYS_ALIKE = 1.5e-2
# The same for the CPU's bfloat16 products with the state: as a rule, and where one key repeats.
BFLOAT16_PRODUCTS_SLACK = 5e-3
BFLOAT16_PRODUCTS_SLACK_OF_REPEATED_KEYS = 3.5e-2
_THROUGH_PRODUCTS = ("attn_out", "final_state", "v_new", "h")


@dataclass(frozen=True)
class Score:
    """The error of one output, and what is allowed."""

    output: str
    error: float
    """As `relative_error` has it; inf for a wrong NaN."""
    rounding: float
    """The error of the float64 result rounded to the output's dtype."""
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the bound is kept. Where the reference has a NaN, both are special, and it is not."""
        return math.isfinite(self.error) and self.error <= self.bound


def relative_error(actual: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> float:
    """Return the relative Frobenius norm of the difference, absolute where `expected` is 0.

    It is relative to 1e-30 per element at least. Infinities are compared by mask; inf when the masks differ or there is
    a NaN.
    """
    got = actual.astype(np.float64)
    if got.shape != expected.shape or np.isnan(got).any() or np.isnan(expected).any():
        return math.inf
    finite = np.isfinite(expected)
    if not finite.all():
        if not np.array_equal(got[~finite], expected[~finite]):
            return math.inf
        got, expected = got[finite], expected[finite]
    if not np.isfinite(got).all():
        return math.inf
    difference, norm = float(np.linalg.norm(got - expected)), float(np.linalg.norm(expected))
    return difference / max(norm, _SMALLEST_NORM * math.sqrt(expected.size)) if norm else difference


def _wanted(actual: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> tuple[Any, Any]:
    """Return `expected` rounded to float32 and then to the dtype of `actual`, and what `actual` should be.

    That is `expected`, but an infinity where rounding makes it one.
    """
    with np.errstate(over="ignore"):
        rounded = expected.astype(np.float32).astype(actual.dtype).astype(np.float64)
    return rounded, np.where(np.isinf(rounded), rounded, expected)


def score_gate(actual: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> list[Score]:
    """Score an output of kda_gate element by element."""
    rounded, wanted = _wanted(actual, expected)
    errors, rounding = _elementwise_errors(actual, wanted), _elementwise_errors(rounded, wanted)
    finite = np.abs(wanted[np.isfinite(wanted)])
    slack = {"max abs": finite.max(initial=0), "mean abs": finite.sum() / max(wanted.size, 1), "max rel": 1.0}
    return [
        Score(name, errors[name], rounding[name], _GATE_ROUNDING_FACTOR * rounding[name] + _GATE_SLACK * float(size))
        for name, size in slack.items()
    ]


def _elementwise_errors(actual: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the three errors of kda_gate; all inf when there is a NaN, or infinities differ."""
    got = actual.astype(np.float64)
    special = ~(np.isfinite(got) & np.isfinite(expected))
    if not np.array_equal(got[special], expected[special]):
        return dict.fromkeys(("max abs", "mean abs", "max rel"), math.inf)
    got, expected = np.where(special, 0, got), np.where(special, 0, expected)
    errors = np.abs(got - expected)
    relative = errors / np.maximum(np.abs(expected), _SMALLEST_REFERENCE)
    return {
        "max abs": float(errors.max(initial=0)),
        "mean abs": float(errors.sum()) / max(errors.size, 1),
        "max rel": float(relative.max(initial=0)),
    }


def score(output: str, actual: npt.NDArray[Any], expected: npt.NDArray[np.float64], slack: float = 0) -> Score:
    """Score one output by its name. Akk is taken whole; `score_all` knows its triangle. `slack`: see there."""
    rounded, wanted = _wanted(actual, expected)
    rounding = relative_error(rounded, wanted)
    if actual.dtype == np.float32:
        bound = _FLOAT32_BOUND
    else:
        bound = _ROUNDING_FACTOR * rounding + (0 if output == "attn_out" else _INTERMEDIATE_SLACK)
    bound += slack if output in _THROUGH_PRODUCTS else 0
    return Score(output, relative_error(actual, wanted), rounding, bound)


def score_all(
    outputs: Mapping[str, npt.NDArray[Any]],
    reference: Mapping[str, npt.NDArray[np.float64]],
    chunk_size: int,
    cu_seqlens: Sequence[int] | None,
    slack: float = 0,
) -> list[Score]:
    """Score every output against the float64 reference. `slack` is what rounded products may be off beyond that."""
    return [
        score_akk(actual, reference[name], chunk_size, cu_seqlens)
        if name == "Akk"
        else score(name, actual, reference[name], slack)
        for name, actual in outputs.items()
    ]


def score_akk(
    actual: npt.NDArray[Any], expected: npt.NDArray[np.float64], chunk_size: int, cu_seqlens: Sequence[int] | None
) -> Score:
    """Score Akk by its strictly lower part; its diagonal must be exactly 1 and its upper part exactly 0."""
    rows = rows_in_chunk(actual.shape[-2], chunk_size, cu_seqlens)[:, None]
    columns = np.arange(chunk_size)[None, :]
    lower = np.broadcast_to(columns < rows, actual.shape)
    unit = np.broadcast_to(columns == rows, actual.shape)
    result = score("Akk", actual[lower], expected[lower])
    if not np.array_equal(actual[~lower].astype(np.float64), unit[~lower].astype(np.float64)):
        return Score("Akk", math.inf, result.rounding, result.bound)
    return result


def rows_in_chunk(tokens: int, chunk_size: int, cu_seqlens: Sequence[int] | None) -> npt.NDArray[np.int64]:
    """Return, for every token, how many tokens of its chunk come before it."""
    starts = np.zeros(1, np.int64) if cu_seqlens is None else np.asarray(cu_seqlens[:-1], np.int64)
    positions = np.arange(tokens)
    sequence = np.searchsorted(starts, positions, side="right") - 1
    return (positions - starts[sequence]) % chunk_size
