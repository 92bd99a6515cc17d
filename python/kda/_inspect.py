"""What the gates and keys of a call look like, and what of it is known to break kernels.

Everything is computed in float64 (the gates as the operator makes them, in float32), a few chunks at a time. Symbols
are those of `kda.chunk_kda_fwd`; a block is 16 rows of a chunk.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kda import _gates
from kda._chunk_kda_fwd import DEFAULT_LOWER_BOUND, Arguments

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]

BLOCK = 16
LN2 = math.log(2)
# Half-lives in tokens: bins of half a decade, and one beyond either end. The last one holds gates of 0.
HALF_LIFE_EDGES: Floats = 10.0 ** np.arange(-2, 5.25, 0.5)

# exp(-87.34) is float32's smallest normal number, exp(88.72) its largest.
SPAN_LIMIT = 87.0
_SMALLEST_NORMAL = -87.3365448
# From 1024 on float32 resolves gk to 1.2e-4 only.
_GK_LIMIT = 1024.0
# A decay above 1 - 2^-9 is 1 in bfloat16.
_ONE_IN_BFLOAT16 = math.log1p(-(2.0**-9))
# What is looked at in one piece, and by how many threads at most: a few 10 MB each, and NumPy holds the GIL in between.
_TOKENS_AT_A_TIME = 2048
_THREADS = 8

Severity: TypeAlias = Literal["fault", "warning", "note"]


class Kind(NamedTuple):
    """A kind of finding: where its value passes the limit."""

    severity: Severity
    limit: float
    parts: str
    """What is counted: "tokens", "blocks" (of 16 rows) or "chunks"."""
    what: str
    """What was found, of `value`."""
    consequence: str


KINDS = {
    "gate_not_finite": Kind(
        "fault", 0, "tokens", "the gate is NaN or +inf", "attn_out is NaN from here to the end of the sequence"
    ),
    "input_not_finite": Kind("fault", 0, "tokens", "not finite", "what depends on it is NaN or inf, in this head"),
    "gate_positive": Kind(
        "warning", 0, "tokens", "a gate of {value:+.3g}: the state grows", "legal, but without an accuracy promise"
    ),
    "gate_reset": Kind(
        "warning", 0, "tokens", "a gate of -inf", "kernels that subtract cumulative gates make NaN of -inf minus -inf"
    ),
    "decay_underflow": Kind(
        "warning",
        -_SMALLEST_NORMAL,
        "tokens",
        "one step decays by e^-{value:.4g}, less than any normal float32",
        "the decay is 0 or subnormal: kernels that divide by it make NaN, and subnormal numbers are slow",
    ),
    "span_block": Kind(
        "warning",
        SPAN_LIMIT,
        "blocks",
        "the gates of 16 rows span {value:.4g} nats",
        "one anchor per 16 rows overflows float32: NaN, or with clamped exponents silently wrong numbers",
    ),
    "span_chunk": Kind(
        "warning",
        SPAN_LIMIT,
        "chunks",
        "the gates of a chunk span {value:.4g} nats",
        "exp(gk_i) exp(-gk_j), anchored once per chunk, overflows float32",
    ),
    "gk_resolution": Kind(
        "warning",
        _GK_LIMIT,
        "chunks",
        "gk reaches -{value:.5g} before gates that still matter",
        "float32 resolves such sums to 1.2e-4 or worse: kernels that subtract them get the later decays wrong by that",
    ),
    "keys_alike": Kind(
        "warning",
        0.5,
        "chunks",
        "keys have a mean |cosine| of {value:.3f} within a chunk",
        "(I + A) is far from I: inverses by products of powers of A lose digits, the more the nearer beta is to 1 or 2",
    ),
    "doubling_block": Kind(
        "warning",
        1e-3,
        "blocks",
        "(I - A)(I + A^2)(I + A^4)... of 16 rows is wrong by {value:.2g} in float32",
        "kernels that invert 16 rows so are wrong here; forward substitution is not",
    ),
    "doubling_chunk": Kind(
        "warning",
        1e-3,
        "chunks",
        "(I - A)(I + A^2)(I + A^4)... of a chunk is wrong by {value:.2g} in float32",
        "kernels that invert a chunk so are wrong here; forward substitution is not",
    ),
    "ill_conditioned": Kind(
        "warning",
        1e3,
        "chunks",
        "I + A has a condition number of {value:.3g}",
        "an inverse with tf32 or 16-bit operands loses three digits or more, float32 loses some",
    ),
    "expansion": Kind(
        "warning",
        2.02,
        "tokens",
        "beta |k|^2 is {value:.3g}",
        "above 2 every write makes the state larger along its key: it diverges unless decay outweighs it",
    ),
    "beta_outside": Kind(
        "note", 0, "tokens", "beta lies {value:.3g} outside [0, 1]", "error bounds are promised within [0, 1]"
    ),
    "decay_one_in_bfloat16": Kind(
        "note",
        0.01,
        "gates",
        "{value:.1%} of the decays are 1 when rounded to bfloat16",
        "kernels that keep decays in bfloat16 never forget here",
    ),
}


@dataclass(frozen=True)
class Finding:
    """Something that is known to break kernels, or a result."""

    kind: str
    head: int
    """The value head; the q/k head where `tensor` is q or k."""
    tensor: str
    """What it was found in: an input's name, or "gate"."""
    value: float
    count: int
    """How many tokens, blocks, chunks or gates are beyond the limit, of `total`."""
    total: int
    sequence: int | None = None
    tokens: tuple[int, int] | None = None
    """Those of the worst place, the second one exclusive, counted along the file's token axis."""
    channel: int | None = None

    @property
    def severity(self) -> Severity:
        """How bad it is: a fault makes NaN everywhere, a warning breaks other kernels, a note is good to know."""
        return KINDS[self.kind].severity


@dataclass(frozen=True)
class KeyReport:
    """The keys of one q/k head."""

    head: int
    smallest_norm: float
    largest_norm: float
    neighbour_cosine: float
    """Mean cosine of keys that follow each other within a chunk."""
    cosine: Floats
    """`[NC]`: mean |cosine| of the pairs of keys within each chunk."""
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class HeadReport:
    """The gates of one value head, and its systems (I + A)."""

    head: int
    key_head: int
    smallest_gate: float
    largest_gate: float
    histogram: Integers
    """How many gates have a half-life in each bin of `HALF_LIFE_EDGES`."""
    growing: int
    """How many are above 0; these are in no bin."""
    half_lives: Floats
    """`[K]`: ln 2 over the mean of each channel's -gate, in tokens; inf for a channel that does not decay."""
    beta: tuple[float, float, float]
    """Smallest, mean, largest."""
    span_block: Floats
    """`[NC, C/16]`: the most that any channel's cumulative gate varies within 16 rows."""
    span_chunk: Floats
    """`[NC]`: the same within a chunk."""
    condition_block: Floats
    """`[NC, C/16]`: the condition number of the block's own (I + A), in the infinity norm."""
    condition: Floats
    """`[NC]`: of the chunk's (I + A)."""
    doubling_block: Floats
    """`[NC, C/16]`: the relative error of the doubling product's strictly lower part in float32."""
    doubling: Floats
    """`[NC]`: the same for the chunk."""
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """All of a call."""

    chunk_size: int
    chunks: Chunks
    keys: tuple[KeyReport, ...]
    heads: tuple[HeadReport, ...]

    @property
    def findings(self) -> list[Finding]:
        """Those of all heads, faults first, then by kind and from the worst on."""
        every = [finding for keys in self.keys for finding in keys.findings]
        every += [finding for head in self.heads for finding in head.findings]
        order = {kind: place for place, kind in enumerate(KINDS)}
        return sorted(every, key=lambda finding: (order[finding.kind], -finding.value, finding.head))


class Chunks:
    """The chunks of all sequences, in order."""

    def __init__(self, tokens: int, batch: int, cu_seqlens: Any | None, chunk_size: int) -> None:
        """Cut `batch` sequences of `tokens`, or those that `cu_seqlens` bounds."""
        self.size = chunk_size
        if cu_seqlens is None:
            bounds = [(b, 0, tokens) for b in range(batch)]
        else:
            marks = [int(mark) for mark in np.asarray(cu_seqlens)]
            bounds = [(0, begin, end) for begin, end in pairwise(marks)]
        table = [
            (n, b, first, min(chunk_size, end - first))
            for n, (b, begin, end) in enumerate(bounds)
            for first in range(begin, end, chunk_size)
        ]
        columns = np.array(table, np.int64).reshape(-1, 4).T
        self.sequence, self.batch, self.first, self.rows = columns
        self.sequences = len(bounds)

    def __len__(self) -> int:
        return len(self.first)

    def parts(self) -> Iterator[Part]:
        """Yield a few chunks at a time."""
        step = _TOKENS_AT_A_TIME // self.size
        for start in range(0, len(self), step):
            at = slice(start, start + step)
            offsets = np.arange(self.size)
            valid = offsets < self.rows[at, None]
            yield Part(start, self.batch[at, None], self.first[at, None] + np.where(valid, offsets, 0), valid)


class Part(NamedTuple):
    """A few chunks: which rows they are of `[B,T,heads,...]`. Rows beyond a tail repeat the first one."""

    start: int
    batch: Integers
    tokens: Integers
    valid: npt.NDArray[np.bool_]

    def take(self, array: npt.NDArray[Any], head: int) -> npt.NDArray[Any]:
        """Return the rows `[n,C,...]` of one head."""
        return np.asarray(array[self.batch, self.tokens, head])

    def numbers(self, array: npt.NDArray[Any], head: int) -> Floats:
        """Return the rows of one head with 0 beyond a tail and for whatever is not finite."""
        rows = self.take(array, head).astype(np.float64)
        valid = self.valid.reshape(self.valid.shape + (1,) * (rows.ndim - 2))
        return np.where(valid & np.isfinite(rows), rows, 0.0)


class _Peak:
    """The largest value of a kind in one head, where it is, and how many pass the limit."""

    def __init__(self, kind: str, head: int, tensor: str) -> None:
        self._of = (kind, head, tensor)
        self._limit = KINDS[kind].limit
        self._value, self._count, self._total = -math.inf, 0, 0
        self._place: tuple[int, int, int] | None = None
        self._channel: int | None = None

    def add(self, part: Part, values: Floats, channels: npt.NDArray[Any] | None = None) -> None:
        """Take in `values [n, C / rows]`, each of so many rows."""
        rows = part.valid.shape[1] // values.shape[1]
        shown = np.where(part.valid[:, ::rows], values, -np.inf)
        self._count += int((shown > self._limit).sum())
        self._total += int(part.valid[:, ::rows].sum())
        at = int(np.argmax(shown))
        if shown.flat[at] > self._value:
            self._value = float(shown.flat[at])
            chunk, place = divmod(at, values.shape[1])
            self._place = part.start + chunk, place * rows, rows
            self._channel = None if channels is None else int(channels.flat[at])

    def findings(self, chunks: Chunks) -> tuple[Finding, ...]:
        """Return the finding, if there is one."""
        if self._count == 0 or self._place is None:
            return ()
        chunk, offset, rows = self._place
        first = int(chunks.first[chunk])
        tokens = first + offset, first + min(offset + rows, int(chunks.rows[chunk]))
        kind, head, tensor = self._of
        return (
            Finding(
                kind, head, tensor, self._value, self._count, self._total,
                int(chunks.sequence[chunk]), tokens, self._channel,
            ),
        )  # fmt: skip


def inspect(arguments: Arguments, step: Callable[[], None] = lambda: None) -> Report:
    """Look at a call that `prepare` takes; its arrays are NumPy's. Calls `step` after each head, of q/k and of v."""
    a = arguments
    q, k, v, g, beta = (_token_major(array, a.layout) for array in (a.q, a.k, a.v, a.g, a.beta))
    chunks = Chunks(k.shape[1], k.shape[0], a.cu_seqlens, a.chunk_size)
    keys, heads = [], []
    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for key_report in pool.map(lambda head: _inspect_keys(q, k, head, chunks), range(k.shape[2])):
            keys.append(key_report)
            step()
        for head_report in pool.map(lambda head: _inspect_head(a, (k, v, g, beta), head, chunks), range(v.shape[2])):
            heads.append(head_report)
            step()
    return Report(a.chunk_size, chunks, tuple(keys), tuple(heads))


def _token_major(array: npt.NDArray[Any], layout: str) -> npt.NDArray[Any]:
    """View an input as `[B,T,heads,...]`."""
    if layout in ("TND", "NTD"):
        array = array[None]
    return array.swapaxes(1, 2) if layout in ("BNSD", "NTD") else array


def _not_finite(peak: _Peak, part: Part, array: npt.NDArray[Any], head: int) -> None:
    bad = ~np.isfinite(part.take(array, head).astype(np.float32))
    rows = bad.reshape(*bad.shape[:2], -1)
    peak.add(part, np.asarray(rows.any(axis=-1), np.float64), rows.argmax(axis=-1) if bad.ndim > 2 else None)


@np.errstate(all="ignore")
def _inspect_keys(q: npt.NDArray[Any], k: npt.NDArray[Any], head: int, chunks: Chunks) -> KeyReport:
    bad = {"q": _Peak("input_not_finite", head, "q"), "k": _Peak("input_not_finite", head, "k")}
    alike = _Peak("keys_alike", head, "k")
    cosines = np.zeros(len(chunks))
    smallest, largest, neighbours, pairs = math.inf, 0.0, 0.0, 0
    earlier = np.tri(chunks.size, k=-1, dtype=bool)
    for part in chunks.parts():
        _not_finite(bad["q"], part, q, head)
        _not_finite(bad["k"], part, k, head)
        rows = part.numbers(k, head)
        norms = np.linalg.norm(rows, axis=-1)
        smallest = min(smallest, float(norms[part.valid].min()))
        largest = max(largest, float(norms.max()))
        unit = rows / np.where(norms > 0, norms, 1.0)[..., None]
        cosine = unit @ unit.swapaxes(1, 2)
        counted = earlier & part.valid[:, :, None] & part.valid[:, None, :]
        mean = np.where(counted, np.abs(cosine), 0).sum((1, 2)) / np.maximum(counted.sum((1, 2)), 1)
        cosines[part.start : part.start + len(mean)] = mean
        alike.add(part, mean[:, None])
        following = np.diagonal(cosine, -1, 1, 2)[part.valid[:, 1:]]
        neighbours, pairs = neighbours + float(following.sum()), pairs + following.size
    findings = [finding for peak in (*bad.values(), alike) for finding in peak.findings(chunks)]
    return KeyReport(
        head, 0.0 if len(chunks) == 0 else smallest, largest, neighbours / max(pairs, 1), cosines, tuple(findings)
    )


@np.errstate(all="ignore")
def _inspect_head(a: Arguments, inputs: tuple[npt.NDArray[Any], ...], head: int, chunks: Chunks) -> HeadReport:
    k, v, g, beta = inputs
    key_head = head // (v.shape[2] // k.shape[2])
    tensors = {"v": v, "beta": beta}
    peaks = {name: _Peak("input_not_finite", head, name) for name in tensors}
    peaks |= {kind: _Peak(kind, head, "gate") for kind in KINDS if kind.startswith(("gate", "decay_u", "span", "gk"))}
    peaks |= {kind: _Peak(kind, head, "beta") for kind in ("beta_outside", "expansion")}
    peaks |= {kind: _Peak(kind, head, "k") for kind in ("doubling_block", "doubling_chunk", "ill_conditioned")}
    gates, betas, systems = _Gates(k.shape[-1]), _Range(), _Systems(len(chunks), chunks.size)
    spans = np.zeros((len(chunks), chunks.size // BLOCK)), np.zeros(len(chunks))
    for part in chunks.parts():
        at = slice(part.start, part.start + len(part.valid))
        for name, array in tensors.items():
            _not_finite(peaks[name], part, array, head)
        made = _activated(a, part.take(g, head), head)
        gates.add(made[part.valid])
        gate = _look_at_gates(peaks, part, made)
        spans[0][at], spans[1][at] = _look_at_spans(peaks, part, gate)
        write, keys = part.numbers(beta, head), part.numbers(k, key_head)
        betas.add(write[part.valid])
        peaks["beta_outside"].add(part, np.maximum(-write, write - 1.0))
        peaks["expansion"].add(part, write * (keys * keys).sum(axis=-1))
        systems.add(at, gate, keys, write)
        peaks["doubling_block"].add(part, systems.doubling_block[at])
        peaks["doubling_chunk"].add(part, systems.doubling[at, None])
        peaks["ill_conditioned"].add(part, systems.condition[at, None])
    findings = [finding for peak in peaks.values() for finding in peak.findings(chunks)]
    return HeadReport(
        head, key_head, gates.range.smallest, gates.range.largest, gates.histogram, gates.growing, gates.half_lives(),
        (betas.smallest, betas.mean, betas.largest), *spans, systems.condition_block, systems.condition,
        systems.doubling_block, systems.doubling, (*findings, *gates.findings(head), *_not_finite_elsewhere(a, head)),
    )  # fmt: skip


def _not_finite_elsewhere(a: Arguments, head: int) -> list[Finding]:
    """Look at what has no tokens: A_log, dt_bias and initial_state."""

    def found(name: str, rows: npt.NDArray[Any], sequence: int | None = None) -> list[Finding]:
        bad = ~np.isfinite(rows.astype(np.float32))
        count = int(bad.sum())
        return [Finding("input_not_finite", head, name, 1.0, count, bad.size, sequence)] if count else []

    findings = []
    if a.use_gate_in_kernel:
        findings += found("A_log", a.A_log[head : head + 1])  # type: ignore[index]
        if a.dt_bias is not None:
            findings += found("dt_bias", a.dt_bias.reshape(-1, a.g.shape[-1])[head])
    if a.initial_state is not None:
        for n, state in enumerate(a.initial_state):
            findings += found("initial_state", state[head], n)
    return findings


def _activated(a: Arguments, g: npt.NDArray[Any], head: int) -> npt.NDArray[np.float32]:
    """Return the gates `[n,C,K]` that the operator makes of `g`, natural logarithm."""
    if not a.use_gate_in_kernel:
        return g.astype(np.float32)
    bound = None
    if a.safe_gate:
        bound = DEFAULT_LOWER_BOUND if a.lower_bound is None else a.lower_bound
    width = g.shape[-1]
    bias = None if a.dt_bias is None else a.dt_bias.reshape(-1)[head * width : (head + 1) * width]
    rows = np.ascontiguousarray(g)[..., None, :]
    made = _gates.fused_kda_gate(rows, a.A_log[head : head + 1], bias, lower_bound=bound)  # type: ignore[index]
    return np.asarray(made)[..., 0, :]


def _look_at_gates(peaks: dict[str, _Peak], part: Part, gate: npt.NDArray[np.float32]) -> Floats:
    """Look at single gates. Returns them in float64, 0 beyond a tail and where they are NaN or +inf."""

    def add(kind: str, values: npt.NDArray[Any]) -> None:
        peaks[kind].add(part, values.max(axis=-1).astype(np.float64), values.argmax(axis=-1))

    legal = (gate < np.inf) & part.valid[..., None]
    add("gate_not_finite", ~(gate < np.inf))
    add("gate_reset", np.isneginf(gate))
    finite = np.where(legal, gate, 0.0).astype(np.float64)
    add("gate_positive", finite)
    add("decay_underflow", -np.where(np.isneginf(finite), 0, finite))
    return finite


def _look_at_spans(peaks: dict[str, _Peak], part: Part, gate: Floats) -> tuple[Floats, Floats]:
    """Look at cumulative gates. Returns the spans of the blocks `[n, C/16]` and of the chunks `[n]`."""
    blocks, block_channels = _span(gate.reshape(len(gate), -1, BLOCK, gate.shape[-1]))
    chunks, chunk_channels = _span(gate)
    peaks["span_block"].add(part, blocks, block_channels)
    peaks["span_chunk"].add(part, chunks[:, None], chunk_channels[:, None])
    sums = _largest_sums(gate, part)
    peaks["gk_resolution"].add(part, sums.max(axis=-1)[:, None] / LN2, sums.argmax(axis=-1)[:, None])
    return blocks, chunks


def _span(gate: Floats) -> tuple[Floats, npt.NDArray[Any]]:
    """Return the largest difference of cumulative gates over axis -2, and its channel; inf after a reset.

    The first row's own gate plays no part: it decays what comes before.
    """
    total = np.zeros_like(gate[..., 0, :])
    high, low = np.zeros_like(total), np.zeros_like(total)
    # Row by row, which goes through memory as it lies; NumPy's own sums along this axis do not.
    for i in range(1, gate.shape[-2]):
        total += gate[..., i, :]
        np.maximum(high, total, out=high)
        np.minimum(low, total, out=low)
    spans = high - low
    return np.asarray(spans.max(axis=-1)), spans.argmax(axis=-1)


def _largest_sums(gate: Floats, part: Part) -> Floats:
    """Return the largest finite sum of gates `[n,K]`, by its size, that a step follows which is not lost."""
    total, largest = np.zeros_like(gate[:, 0]), np.zeros_like(gate[:, 0])
    for i in range(1, gate.shape[1]):
        total += gate[:, i - 1]
        follows = (gate[:, i] > _SMALLEST_NORMAL) & part.valid[:, i, None] & np.isfinite(total)
        np.maximum(largest, np.abs(total), out=largest, where=follows)
    return largest


class _Range:
    """Smallest, mean and largest of numbers; 0 without any."""

    def __init__(self) -> None:
        self.smallest, self.largest = 0.0, 0.0
        self._sum, self._count = 0.0, 0

    def add(self, numbers: npt.NDArray[Any]) -> None:
        """Take in numbers, none of them NaN."""
        if numbers.size == 0:
            return
        low, high = float(numbers.min()), float(numbers.max())
        self.smallest = low if self._count == 0 else min(self.smallest, low)
        self.largest = high if self._count == 0 else max(self.largest, high)
        self._sum += float(numbers.sum(dtype=np.float64))
        self._count += numbers.size

    @property
    def mean(self) -> float:
        """Their mean."""
        return self._sum / max(self._count, 1)


class _Gates:
    """How the gates of one head are distributed. What is NaN or +inf is left out."""

    def __init__(self, width: int) -> None:
        self.range = _Range()
        self.histogram: Integers = np.zeros(len(HALF_LIFE_EDGES) + 1, np.int64)
        self.growing = 0
        self._rounded_to_one = 0
        self._sums, self._counts = np.zeros(width), np.zeros(width, np.int64)

    def add(self, gate: npt.NDArray[np.float32]) -> None:
        """Take in rows `[rows,K]`."""
        legal = gate < np.inf
        self._sums += np.where(legal, gate, 0).sum(axis=0, dtype=np.float64)
        self._counts += legal.sum(axis=0)
        numbers = gate[legal]
        self.range.add(numbers)
        self.growing += int((numbers > 0).sum())
        decaying = np.abs(numbers[numbers <= 0].astype(np.float64))
        half_lives = LN2 / decaying
        # How many are in the bins from each edge on: fewer steps than to look for the bin of each.
        from_edges = [int(np.count_nonzero(half_lives >= edge)) for edge in HALF_LIFE_EDGES]
        self.histogram -= np.diff([half_lives.size, *from_edges, 0])
        self._rounded_to_one += int(((numbers < 0) & (numbers > _ONE_IN_BFLOAT16)).sum())

    def half_lives(self) -> Floats:
        """Return those of the channels `[K]`; inf for one that does not decay."""
        rate = -self._sums / np.maximum(self._counts, 1)
        return np.where(rate > 0, LN2 / np.where(rate > 0, rate, 1), np.inf)

    def findings(self, head: int) -> tuple[Finding, ...]:
        """Return what concerns all gates together."""
        total = int(self._counts.sum())
        share = self._rounded_to_one / max(total, 1)
        if share <= KINDS["decay_one_in_bfloat16"].limit:
            return ()
        return (Finding("decay_one_in_bfloat16", head, "gate", share, self._rounded_to_one, total),)


class _Systems:
    """The unit lower triangular systems (I + A) of one head."""

    def __init__(self, chunks: int, size: int) -> None:
        self.condition_block, self.condition = np.ones((chunks, size // BLOCK)), np.ones(chunks)
        self.doubling_block, self.doubling = np.zeros((chunks, size // BLOCK)), np.zeros(chunks)

    def add(self, at: slice, gate: Floats, keys: Floats, beta: Floats) -> None:
        """Take in the chunks `at`: gates and keys `[n,C,K]` and beta `[n,C]`."""
        A = lower_part(gate, keys, beta)
        inverse = invert(A)
        self.condition[at], self.doubling[at] = _condition(A, inverse), doubling_error(A, inverse)
        # The inverse of a diagonal block is the diagonal block of the inverse.
        blocks = [np.stack([x[:, b : b + BLOCK, b : b + BLOCK] for b in range(0, A.shape[-1], BLOCK)], 1) for x in
                  (A, inverse)]  # fmt: skip
        self.condition_block[at], self.doubling_block[at] = _condition(*blocks), doubling_error(*blocks)


def lower_part(gate: Floats, keys: Floats, beta: Floats) -> Floats:
    """Return A `[n,C,C]`, strictly lower: `A_ij = beta_i sum_d k_i k_j E_ij`.

    No exponent is positive unless a gate is, and a reset needs no care: between blocks of 16 rows a decay has two
    factors, from column j to the end of its block or of a later one, and from there to row i.
    """
    n, size, width = keys.shape
    blocks = (n * (size // BLOCK), BLOCK, width)
    within, carried, reached = _within_blocks(np.exp(gate).reshape(blocks), keys.reshape(blocks))
    within, carried, reached = within.reshape(n, size, BLOCK), carried.reshape(keys.shape), reached.reshape(keys.shape)
    A = np.zeros((n, size, size))
    for start in range(0, size, BLOCK):
        rows = slice(start, start + BLOCK)
        A[:, rows, rows] = within[:, rows]
        A[:, rows, :start] = (keys[:, rows] * reached[:, rows]) @ carried[:, :start].swapaxes(1, 2)
        carried[:, :start] *= reached[:, None, start + BLOCK - 1]
    A *= beta[..., None]
    return A


def _within_blocks(decay: Floats, keys: Floats) -> tuple[Floats, Floats, Floats]:
    """Return what `lower_part` needs of blocks `[m,16,K]`, without beta.

    That is their own parts of A `[m,16,16]`; their keys, decayed to their ends; the decays of their rows from their
    beginnings on. Each key is carried down the rows and multiplied by their decays, as the recurrence does.
    """
    m, size, _ = keys.shape
    A = np.zeros((m, size, size))
    carried, reached = np.zeros_like(keys), np.empty_like(keys)
    for i in range(size):
        carried[:, :i] *= decay[:, i, None]
        A[:, i, :i] = (carried[:, :i] @ keys[:, i, :, None])[..., 0]
        carried[:, i] = keys[:, i]
        reached[:, i] = decay[:, i] * reached[:, i - 1] if i else decay[:, i]
    return A, carried, reached


def invert(A: Floats) -> Floats:
    """Return (I + A)^{-1} of strictly lower matrices `[n,C,C]`, by forward substitution."""
    inverse: Floats = np.broadcast_to(np.eye(A.shape[-1]), A.shape).copy()
    for i in range(1, A.shape[-1]):
        inverse[:, i, :i] = -(A[:, i, None, :i] @ inverse[:, :i, :i])[:, 0]
    return inverse


def _condition(A: Floats, inverse: Floats) -> Floats:
    """Return the condition numbers of I + A in the infinity norm."""
    norms = (1 + np.abs(A).sum(axis=-1).max(axis=-1)) * np.abs(inverse).sum(axis=-1).max(axis=-1)
    return np.where(np.isfinite(norms), norms, np.inf)


def _lower_product(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the product of lower triangular matrices, by parts that are too small for a BLAS to wake its threads."""
    half = a.shape[-1] // 2
    if half < 64:
        return a @ b
    top, bottom = slice(0, half), slice(half, None)
    product = np.zeros_like(a)
    product[..., top, top] = a[..., top, top] @ b[..., top, top]
    product[..., bottom, bottom] = a[..., bottom, bottom] @ b[..., bottom, bottom]
    product[..., bottom, top] = a[..., bottom, top] @ b[..., top, top] + a[..., bottom, bottom] @ b[..., bottom, top]
    return product


def doubling_error(A: Floats, inverse: Floats) -> Floats:
    """Return how wrong `(I - A)(I + A^2)(I + A^4)...` is in float32.

    The relative Frobenius norm over the strictly lower part; 0 where that is 0, inf where the product is not finite.
    """
    size = A.shape[-1]
    unit = np.eye(size, dtype=np.float32)
    power = -A.astype(np.float32)
    product = unit + power
    covered = 2
    while covered < size:
        power = _lower_product(power, power)
        product = _lower_product(product, unit + power)
        covered *= 2
    lower = np.tri(size, k=-1, dtype=bool)
    difference = np.where(lower, product.astype(np.float64) - inverse, 0)
    error: Any = np.linalg.norm(difference, axis=(-2, -1))
    norm = np.linalg.norm(np.where(lower, inverse, 0), axis=(-2, -1))
    relative: Floats = np.asarray(error / np.where(norm > 0, norm, 1))
    return np.where(np.isfinite(relative), relative, np.inf)


def quantiles(numbers: Floats, shares: Sequence[float]) -> list[float]:
    """Return quantiles without interpolation, which infinities do not take; 0 of nothing."""
    ordered = np.sort(numbers, axis=None)
    return [float(ordered[round(share * (ordered.size - 1))]) if ordered.size else 0.0 for share in shares]
