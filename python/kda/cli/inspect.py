"""`kda inspect`: what a layer's gates and keys look like, and what of it breaks kernels."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from kda._chunk_kda_fwd import prepare
from kda._info import info
from kda._inspect import HALF_LIFE_EDGES, KINDS, Finding, Report, inspect, quantiles
from kda.cli import files, plotting
from kda.cli.console import one_line, progress, refusals, stdout
from kda.cli.inspect_plot import draw

_BARS = "·▁▂▃▄▅▆▇█"
_PLAIN_BARS = ".12345678"
_SHOWN_FINDINGS = 6


def show(source: Path, overrides: files.Attributes, json_file: Path | None, plot_file: Path | None) -> None:
    """Look at a file, print what is there, and write the files that are asked for. Raises UserError."""
    if plot_file is not None:
        plotting.figure_type()
    with files.new_files(source, json_file, plot_file) as (json_target, plot_target):
        arguments = files.read_arguments(source, overrides)
        with refusals():
            prepare(arguments)
        axis = 1 if arguments.layout in ("BNSD", "NTD") else 2
        axis -= arguments.q.ndim == 3
        with progress() as bar:
            task = bar.add_task("heads", total=arguments.k.shape[axis] + arguments.v.shape[axis])
            report = inspect(arguments, lambda: bar.advance(task))
        if json_target is not None:
            json_target.write_text(json.dumps(_as_json(report), indent=1, allow_nan=False) + "\n")
        if plot_target is not None:
            draw(plot_target, report, one_line(source.name))
    _print(report)


def _print(report: Report) -> None:
    console = stdout()
    unicode = console.encoding.lower().startswith("utf")
    rows = int(report.chunks.rows.sum())
    console.print(
        f"tokens {rows:,}, sequences {report.chunks.sequences}, chunks of {report.chunk_size} tokens "
        f"{len(report.chunks):,}, q/k heads {len(report.keys)}, value heads {len(report.heads)}"
    )
    console.print(_gates_table(report))
    console.print(_half_lives_table(report, _BARS if unicode else _PLAIN_BARS))
    console.print(_keys_table(report))
    console.print(_systems_table(report))
    findings = report.findings
    for kind in KINDS:
        own = [finding for finding in findings if finding.kind == kind]
        if own:
            console.print(f"{own[0].severity}: {KINDS[kind].consequence}", soft_wrap=True)
            for finding in own[:_SHOWN_FINDINGS]:
                console.print(f"  {one_line(describe(finding, report))}", soft_wrap=True)
            if len(own) > _SHOWN_FINDINGS:
                console.print(f"  and {len(own) - _SHOWN_FINDINGS} more")
    counts = [(sum(finding.severity == name for finding in findings), name) for name in ("fault", "warning", "note")]
    said = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count)
    console.print(said or "nothing that is known to break kernels")


def describe(finding: Finding, report: Report) -> str:
    """Return a finding in words: head, tokens, what, how often."""
    kind = KINDS[finding.kind]
    parts = [f"{'q/k head' if finding.tensor == 'q' or finding.kind == 'keys_alike' else 'head'} {finding.head}"]
    if finding.kind == "input_not_finite":
        parts.append(finding.tensor)
    if finding.sequence is not None and report.chunks.sequences > 1:
        parts.append(f"sequence {finding.sequence}")
    if finding.tokens is not None:
        first, end = finding.tokens
        parts.append(f"token {first}" if end - first == 1 else f"tokens {first} to {end - 1}")
    if finding.channel is not None:
        parts.append(f"channel {finding.channel}")
    unit = kind.parts if finding.tokens is not None or finding.kind != "input_not_finite" else "elements"
    what = kind.what.format(value=finding.value)
    return f"{', '.join(parts)}: {what} ({finding.count:,} of {finding.total:,} {unit})"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _gates_table(report: Report) -> Table:
    title = "gates per step, and the most that their sums span within 16 rows and within a chunk (nats)"
    table = _table(title, "head", "smallest", "largest", "span of 16 rows", "span of a chunk")
    for head in report.heads:
        spans = _largest(head.span_block), _largest(head.span_chunk)
        table.add_row(str(head.head), *map(_short, (head.smallest_gate, head.largest_gate, *spans)))
    return table


def _half_lives_table(report: Report, bars: str) -> Table:
    low, high = HALF_LIFE_EDGES[0], HALF_LIFE_EDGES[-1]
    title = f"half-lives in tokens: of steps, two bars to a factor of 10 from {low:g} to {high:g}; of channels"
    table = _table(title, "head", "steps", "10 %", "median", "90 %")
    for head in report.heads:
        channels = map(_short, quantiles(head.half_lives, (0.1, 0.5, 0.9)))
        table.add_row(str(head.head), sparkline(head.histogram.tolist(), bars), *channels)
    return table


def _keys_table(report: Report) -> Table:
    title = "keys: length, cosine of neighbours, mean |cosine| within a chunk"
    table = _table(title, "q/k head", "shortest", "longest", "neighbours", "chunks", "worst chunk")
    for keys in report.keys:
        mean = float(keys.cosine.mean()) if keys.cosine.size else 0.0
        numbers = (keys.smallest_norm, keys.largest_norm, keys.neighbour_cosine, mean, _largest(keys.cosine))
        table.add_row(str(keys.head), *(f"{number:.3f}" for number in numbers))
    return table


def _systems_table(report: Report) -> Table:
    title = "I + A: largest condition numbers, largest errors of the doubling product in float32"
    table = _table(title, "head", "beta: min", "mean", "max", "cond. 16", "chunk", "error 16", "chunk")
    for head in report.heads:
        worst = (head.condition_block, head.condition, head.doubling_block, head.doubling)
        table.add_row(str(head.head), *map(_short, head.beta), *(_short(_largest(numbers)) for numbers in worst))
    return table


def sparkline(counts: Sequence[int], bars: str) -> str:
    """Return a bar per count, as high as the square root of its share of the largest: rare ones are seen too."""
    top = max(counts, default=0)
    steps = len(bars) - 1
    return "".join(bars[math.ceil(steps * math.sqrt(count / top))] if count else bars[0] for count in counts)


def _largest(numbers: Any) -> float:
    return float(np.max(numbers, initial=0.0))


def _short(number: float) -> str:
    return f"{number:.2e}" if 0 < abs(number) < 1e-3 else f"{number:.3g}"


def _as_json(report: Report) -> dict[str, Any]:
    made = {
        "version": info().version,
        "chunk_size": report.chunk_size,
        "half_life_edges": HALF_LIFE_EDGES,
        "chunks": {name: getattr(report.chunks, name) for name in ("sequence", "first", "rows")},
        "key_heads": [_fields(keys) for keys in report.keys],
        "heads": [_fields(head) for head in report.heads],
        "findings": [
            dataclasses.asdict(finding)
            | {"severity": finding.severity, "message": describe(finding, report)}
            | {"consequence": KINDS[finding.kind].consequence}
            for finding in report.findings
        ],
    }
    return {name: _plain(value) for name, value in made.items()}


def _fields(part: Any) -> dict[str, Any]:
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.name != "findings"}


def _plain(value: Any) -> Any:
    """Turn arrays into lists, and what JSON has no number for into its name."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
