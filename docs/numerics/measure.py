"""Measures what the page on numerics claims, and writes its tables and pictures into a folder: measure.py [FOLDER].

Every method works in float32 (or rounds its operands further, where it says so) and is scored against float64 by the
relative Frobenius norm of the difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import matplotlib as mpl
import ml_dtypes
import numpy as np
import numpy.typing as npt
from matplotlib import pyplot as plt

import kda

Array: TypeAlias = npt.NDArray[np.floating]
ROWS = (16, 32, 64, 128)
BLOCK = 16
CHUNK = 64
CHANNELS = 128


def relative_error(got: Array, exact: Array) -> float:
    """Return the relative Frobenius norm of the difference; infinity when anything is not finite."""
    if not np.isfinite(got).all():
        return np.inf
    norm = float(np.linalg.norm(exact))
    return float(np.linalg.norm(got.astype(np.float64) - exact)) / (norm if norm else 1.0)


# The inverse of I + A.


def forward_substitution(A: Array) -> Array:
    """Row i of the inverse from the rows above it."""
    X = np.eye(len(A), dtype=A.dtype)
    for i in range(1, len(A)):
        X[i, :i] = -(A[i, :i] @ X[:i, :i])
    return X


def blocks_of_16(A: Array) -> Array:
    """Forward substitution by blocks of 16 rows: what this library does."""
    n = len(A)
    X = np.zeros_like(A)
    for first in range(0, n, BLOCK):
        rows = slice(first, first + BLOCK)
        seed = np.zeros((BLOCK, n), A.dtype)
        seed[:, rows] = np.eye(BLOCK, dtype=A.dtype)
        seed -= A[rows, :first] @ X[:first]
        for i in range(1, BLOCK):
            seed[i] -= A[first + i, first : first + i] @ seed[:i]
        X[rows] = seed
    return X


def doubling_product(A: Array) -> Array:
    """(I - A)(I + A^2)(I + A^4)...: exact on paper, as A is nilpotent."""
    identity = np.eye(len(A), dtype=A.dtype)
    X, power = identity - A, A
    for _ in range(int(np.log2(len(A))) - 1):
        power = power @ power
        X = X @ (identity + power)
    return X


def doubling_product_half(A: Array) -> Array:
    """The same with the operands of every product rounded to float16, as matrix units take them."""

    def half(x: Array) -> Array:
        return x.astype(np.float16).astype(np.float32)

    identity = np.eye(len(A), dtype=A.dtype)
    X, power = identity - A, A
    for _ in range(int(np.log2(len(A))) - 1):
        power = half(power) @ half(power)
        X = half(X) @ half(identity + power)
    return X


def naive_series(A: Array) -> Array:
    """I - A + A^2 - A^3 + ..., term by term."""
    X = np.eye(len(A), dtype=A.dtype)
    term = X
    for _ in range(len(A) - 1):
        term = -(term @ A)
        X = X + term
    return X


INVERSES: dict[str, Callable[[Array], Array]] = {
    "forward substitution": forward_substitution,
    "blocks of 16 (this library)": blocks_of_16,
    "naive series": naive_series,
    "doubling product": doubling_product,
    "doubling product, fp16 operands": doubling_product_half,
}


def lower_triangle(keys: str, n: int) -> Array:
    """Return A in float32, n rows: random keys, keys of cosine 0.75, or one repeated key with slow decay."""
    rng = np.random.default_rng(7)
    k = rng.standard_normal((n, CHANNELS))
    if keys == "correlated":
        k = k + 3**0.5 * rng.standard_normal(CHANNELS)
    if keys == "repeated":
        k = np.repeat(k[:1], n, 0)
    k = k / np.linalg.norm(k, axis=1, keepdims=True)
    beta = np.full((n, 1), 0.9997) if keys == "repeated" else rng.random((n, 1))
    decay = np.exp(-1e-4 * np.subtract.outer(np.arange(n), np.arange(n)))
    return np.tril(beta * (k @ k.T) * decay, -1).astype(np.float32)


def inverse_errors() -> dict[str, dict[str, list[float]]]:
    """Return, per kind of keys and method, the error at each number of rows, by the strictly lower part."""
    errors: dict[str, dict[str, list[float]]] = {}
    for keys in ("random", "correlated", "repeated"):
        errors[keys] = {name: [] for name in INVERSES}
        for n in ROWS:
            A = lower_triangle(keys, n)
            exact = np.tril(forward_substitution(A.astype(np.float64)), -1)
            with np.errstate(all="ignore"):
                for name, inverse in INVERSES.items():
                    errors[keys][name].append(relative_error(np.tril(inverse(A), -1), exact))
    return errors


# The pairs q_i k_j E_ij of a chunk.


def cumulative(gate: Array) -> Array:
    """Return gk, in base 2."""
    return np.cumsum(gate, 0, dtype=gate.dtype) * gate.dtype.type(1 / np.log(2))


def per_step_decays(q: Array, k: Array, gate: Array) -> Array:
    """Products of the steps' decays in blocks of 16 rows, and of the blocks' between them: what this library does."""
    pairs = np.zeros((len(q), len(q)), q.dtype)
    step = np.exp(gate)
    carried = k.copy()  # each key times the decay from its row to the current one
    for first in range(0, len(q), BLOCK):
        rows = slice(first, first + BLOCK)
        decayed = q[rows] * np.cumprod(step[rows], 0, dtype=q.dtype)
        pairs[rows, :first] = decayed @ carried[:first].T
        for i in range(first, first + BLOCK):
            carried[first:i] *= step[i]
            pairs[i, first : i + 1] = carried[first : i + 1] @ q[i]
        carried[:first] *= np.exp(gate[rows].sum(0, dtype=q.dtype))
    return pairs


def differences(q: Array, k: Array, gate: Array) -> Array:
    """exp2(gk_i - gk_j) for every pair."""
    gk = cumulative(gate)
    pairs = np.zeros((len(q), len(q)), q.dtype)
    for i in range(len(q)):
        pairs[i, : i + 1] = (k[: i + 1] * np.exp2(gk[i] - gk[: i + 1])) @ q[i]
    return pairs


def _anchored(q: Array, k: Array, gate: Array, size: int, limit: float = np.inf) -> Array:
    gk = cumulative(gate)
    pairs = np.zeros((len(q), len(q)), q.dtype)
    for first in range(0, len(q), size):
        rows = slice(first, first + size)
        anchor = gk[first]
        decayed = q[rows] * np.exp2(gk[rows] - anchor)
        columns = k[: first + size] * np.exp2(np.minimum(anchor - gk[: first + size], q.dtype.type(limit)))
        pairs[rows, : first + size] = decayed @ columns.T
    return np.tril(pairs)


def anchor_per_chunk(q: Array, k: Array, gate: Array) -> Array:
    """exp2(gk_i - r) times exp2(r - gk_j) with one r for the chunk, its first row."""
    return _anchored(q, k, gate, len(q))


def anchor_per_16(q: Array, k: Array, gate: Array) -> Array:
    """The same with one r for every 16 rows, their first."""
    return _anchored(q, k, gate, BLOCK)


def anchor_per_16_clamped(q: Array, k: Array, gate: Array) -> Array:
    """The same with exponents clamped at 2^126."""
    return _anchored(q, k, gate, BLOCK, 126.0)


PAIRS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "per-step decays (this library)": per_step_decays,
    "differences of gk": differences,
    "one anchor per 16 rows": anchor_per_16,
    "one anchor per 16 rows, clamped": anchor_per_16_clamped,
    "one anchor per chunk": anchor_per_chunk,
}
GATES = (-0.01, -0.1, -1.0, -3.0, -5.0, -6.0, -8.0, -12.0, -100.0, -1000.0, -np.inf)


def make_gates(where: str, gate: float) -> Array:
    """Return gates of a chunk: `gate` in the odd channels of every row, or in all of row 7 alone; else -0.01."""
    gates = np.full((CHUNK, CHANNELS), -0.01, np.float32)
    if where == "half of the channels":
        gates[:, 1::2] = gate
    else:
        gates[7] = gate
    return gates


def pair_errors() -> dict[str, dict[str, list[float]]]:
    """Return, per place of the strong gate and method, the error at each of GATES."""
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((CHUNK, CHANNELS)).astype(np.float32) for _ in range(2))
    errors: dict[str, dict[str, list[float]]] = {}
    for where in ("half of the channels", "one row"):
        errors[where] = {name: [] for name in PAIRS}
        for gate in GATES:
            gates = make_gates(where, gate)
            exact = per_step_decays(*(x.astype(np.float64) for x in (q, k, gates)))
            with np.errstate(all="ignore"):
                for name, method in PAIRS.items():
                    errors[where][name].append(relative_error(method(q, k, gates), exact))
    return errors


# The library on the same kinds of input.


def library_errors() -> list[tuple[str, float, float, float]]:
    """Return, per input, the error of attn_out, of the exact attn_out merely rounded to its dtype, and of the state."""
    T, H, K, V = 1000, 2, CHANNELS, 128
    rng = np.random.default_rng(11)

    def unit(x: Array) -> Array:
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(ml_dtypes.bfloat16)

    q, k = (unit(rng.standard_normal((1, T, H, K))) for _ in range(2))
    v = rng.standard_normal((1, T, H, V)).astype(ml_dtypes.bfloat16)
    beta = rng.random((1, T, H), np.float32)
    g = -(rng.random((1, T, H, K), np.float32) ** 2)
    correlated = unit(rng.standard_normal((1, T, H, K)) + 3**0.5 * rng.standard_normal((1, 1, H, K)))
    repeated = np.repeat(k[:, :1], T, 1)
    half = np.where(np.arange(K) % 2 == 1, np.float32(-12), g)
    strong, reset = g.copy(), g.copy()
    strong[:, 3::7] = -1000
    reset[:, 3::7] = -np.inf
    near_one = np.full_like(beta, 0.9997)
    inputs = {
        "random": (k, g, beta),
        "correlated keys (cosine 0.75)": (correlated, g, beta),
        "one repeated key, beta 0.9997, gates of -1e-4": (repeated, np.full_like(g, -1e-4), near_one),
        "one repeated key, beta 0.9997, no decay": (repeated, np.zeros_like(g), near_one),
        "half of the channels decay by e^-12 per token": (k, half, beta),
        "every 7th token decays by e^-1000": (k, strong, beta),
        "every 7th token is a reset (-inf)": (k, reset, beta),
    }
    rows = []
    for name, (keys, gates, betas) in inputs.items():
        call = {"q": q, "k": keys, "v": v, "g": gates, "beta": betas, "scale": K**-0.5}
        got = kda.chunk_kda_fwd(**call, output_final_state=True)
        exact = kda.reference.chunk_kda_fwd(**call)
        rounded = exact["attn_out"].astype(ml_dtypes.bfloat16).astype(np.float64)
        rows.append(
            (
                name,
                relative_error(got.attn_out.astype(np.float64), exact["attn_out"]),
                relative_error(rounded, exact["attn_out"]),
                relative_error(got.final_state, exact["final_state"]),
            )
        )
    return rows


# Tables and pictures.


def figure(error: float) -> str:
    """Return an error as the tables show it."""
    return "not finite" if error == np.inf else f"{error:.1e}"


def table(headings: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def by_method(first: str, labels: list[str], errors: dict[str, list[float]]) -> str:
    """Return a table with one column per method."""
    rows = zip(labels, *errors.values(), strict=True)
    return table([first, *errors], [[label, *map(figure, found)] for label, *found in rows])


def draw(path: Path, errors: dict[str, dict[str, list[float]]], ticks: list[str], label: str) -> None:
    """Draw one panel per kind of input; what is not finite is a cross at the top."""
    top = 1e12
    size = (4.2 * len(errors), 4.8)
    drawing, panels = plt.subplots(1, len(errors), figsize=size, sharey=True, layout="constrained")
    for axes, (kind, methods) in zip(panels, errors.items(), strict=True):
        for number, (name, found) in enumerate(methods.items()):
            values = np.clip(found, 1e-9, None)
            finite = np.where(np.isfinite(values), values, np.nan)
            line = axes.plot(finite, marker="o", markersize=4, label=name)[0]
            lost = np.flatnonzero(~np.isfinite(values))
            axes.plot(lost, [top / 10**number] * len(lost), "x", color=line.get_color())
        axes.set(title=kind, xlabel=label, yscale="log", ylim=(1e-9, top * 10))
        axes.set_xticks(range(len(ticks)), ticks, rotation=90 if len(ticks) > 5 else 0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative error")
    drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    drawing.savefig(path, metadata={"Date": None})
    plt.close(drawing)


def main(folder: Path) -> None:
    """Measure and write."""
    mpl.use("Agg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kda"})
    tables = folder / "tables"
    tables.mkdir(parents=True, exist_ok=True)
    inverse = inverse_errors()
    for keys, errors in inverse.items():
        (tables / f"inverse_{keys}.md").write_text(by_method("rows", [str(n) for n in ROWS], errors))
    keys_named = {"random": "random keys", "correlated": "cosine 0.75", "repeated": "one repeated key"}
    draw(folder / "inverse.svg", {keys_named[k]: e for k, e in inverse.items()}, [str(n) for n in ROWS], "rows")
    pairs = pair_errors()
    gates = [f"{gate:g}" for gate in GATES]
    for where, errors in pairs.items():
        (tables / f"exponents_{where.split()[0]}.md").write_text(by_method("gate", gates, errors))
    draw(folder / "exponents.svg", pairs, gates, "gate")
    headings = ["input", "attn_out", "its rounding alone", "final_state"]
    rows = [
        [name, f"{error:.3e}", f"{rounding:.3e}", f"{state:.1e}"] for name, error, rounding, state in library_errors()
    ]
    (tables / "library.md").write_text(table(headings, rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
