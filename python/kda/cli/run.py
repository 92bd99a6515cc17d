"""`kda run`: one call on the tensors of a file."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
from rich.progress import Progress
from rich.table import Table

from kda import _arrays, _kda, reference
from kda._chunk_kda_fwd import OP, OUTPUTS, Arguments, prepare
from kda._score import BFLOAT16_PRODUCTS_SLACK, GPU_SLACK, Score, score_all
from kda.cli import files
from kda.cli.backend import Target, parse_target
from kda.cli.console import UserError, progress, refusals, stdout

_TIMED_RUNS = 5
_TIMED_SECONDS = 1.0


@dataclass(frozen=True)
class Timing:
    """The best of several runs."""

    seconds: float
    runs: int


def run(
    source: Path,
    output: Path,
    overrides: files.Attributes,
    backend: str,
    threads: int | None,
    outputs: str | None,
    state_products: str,
    *,
    check: bool,
) -> bool:
    """Compute, report and write. Returns whether every bound was kept. Raises UserError."""
    target = parse_target(backend)
    names = parse_outputs(outputs)
    computed = tuple(name for name in OUTPUTS if name in names or name == "attn_out")  # which cannot be left out
    files.check_output(output, source)
    with files.new_file(output) as temporary, progress() as bar:
        task = bar.add_task("reading", total=4 if check else 3)
        arguments = files.read_arguments(source, overrides)
        with refusals():
            placed = target.place(arguments)
            call = prepare(placed, state_products=state_products)
            plan = call.plan(tuple(name in computed for name in OUTPUTS), threads or 0)
            _step(bar, task, "computing")
            arrays, timing = _compute(call, placed, computed, threads or 0, plan, target)
            rows = math.prod(arrays["attn_out"].shape[:-1])
            arrays = {name: arrays[name] for name in names}
            if check:
                _step(bar, task, "computing the reference")
            scores = _check(arguments, arrays, _slack(plan)) if check else None
        _step(bar, task, "writing")
        files.write(temporary, arrays, arguments, plan["state_products"])
    _report(arguments, arrays, rows, timing, plan, scores)
    return scores is None or all(score.ok for score in scores)


def parse_outputs(text: str | None) -> tuple[str, ...]:
    """Read a list of outputs, in the contract's order; all of them by default. Raises UserError."""
    if text is None:
        return OUTPUTS
    given = [name.strip() for name in text.split(",")]
    unknown = [name for name in given if name not in OUTPUTS]
    if unknown:
        raise UserError(f"--outputs: expected names out of {', '.join(OUTPUTS)}, got {unknown[0]!r}")
    return tuple(name for name in OUTPUTS if name in given)


def _step(bar: Progress, task: Any, description: str) -> None:
    bar.update(task, advance=1, description=description)


def _compute(
    call: _kda.ChunkKdaFwdCall,
    arguments: Arguments,
    names: tuple[str, ...],
    threads: int,
    plan: _kda.PlanReport,
    target: Target,
) -> tuple[dict[str, npt.NDArray[Any]], Timing]:
    """Compute the outputs a few times over and take the time of the best run, memory being there already."""
    specs = dict(zip(OUTPUTS, call.outputs(), strict=True))
    files.require_memory(plan["workspace_bytes"] + sum(2 * math.prod(specs[name][0]) for name in names))
    kind = _arrays.kind_of(OP, "q", arguments.q)
    arrays = {name: kind.empty(*specs[name], like=arguments.q) for name in names}
    views = tuple(kind.describe(OP, name, arrays[name]) if name in arrays else None for name in OUTPUTS)
    allocate = target.allocator()
    times: list[float] = []
    while not times or (len(times) < _TIMED_RUNS and sum(times) < _TIMED_SECONDS):
        start = time.perf_counter()
        call.execute(views, threads, 0, allocate)
        target.wait()
        times.append(time.perf_counter() - start)
    return {name: target.fetch(array) for name, array in arrays.items()}, Timing(min(times), len(times))


def _slack(plan: _kda.PlanReport) -> float:
    if plan["state_products"] == "bfloat16":
        return BFLOAT16_PRODUCTS_SLACK
    return 0 if plan["backend"] == "cpu" else GPU_SLACK


def _check(arguments: Arguments, arrays: dict[str, npt.NDArray[Any]], slack: float) -> list[Score]:
    expected = reference.compute(arguments)
    cu_seqlens = arguments.cu_seqlens
    bounds = None if cu_seqlens is None else [int(bound) for bound in cu_seqlens]
    return score_all(arrays, expected, arguments.chunk_size, bounds, slack)


def _report(
    arguments: Arguments,
    arrays: dict[str, npt.NDArray[Any]],
    rows: int,
    timing: Timing,
    plan: _kda.PlanReport,
    scores: list[Score] | None,
) -> None:
    console = stdout()
    console.print(_inputs_table(arguments))
    console.print(_outputs_table(arrays, scores))
    runs = "one run" if timing.runs == 1 else f"best of {timing.runs} runs"
    console.print(
        f"backend {plan['backend']}, threads {plan['num_threads']}, state products {plan['state_products']}, "
        f"workspace {plan['workspace_bytes']:,} bytes"
    )
    console.print(f"time {timing.seconds * 1e3:.3f} ms ({runs}), {rows / timing.seconds:,.0f} tokens*heads/s")
    if scores is not None:
        missed = [score.output for score in scores if not score.ok]
        console.print(f"bounds missed: {', '.join(missed)}" if missed else "all outputs within their bounds")


def _inputs_table(arguments: Arguments) -> Table:
    table = Table("input", "dtype", "shape")
    for name in (*files.REQUIRED, *files.OPTIONAL):
        array = getattr(arguments, name)
        if array is not None:
            table.add_row(name, str(array.dtype), _shape(array))
    return table


def _outputs_table(arrays: dict[str, npt.NDArray[Any]], scores: list[Score] | None) -> Table:
    table = Table("output", "dtype", "shape")
    if scores is not None:
        for heading in ("error", "bound", ""):
            table.add_column(heading, justify="right")
    for index, (name, array) in enumerate(arrays.items()):
        row = [name, str(array.dtype), _shape(array)]
        if scores is not None:
            score = scores[index]
            row += [f"{score.error:.3e}", f"{score.bound:.3e}", "ok" if score.ok else "MISSED"]
        table.add_row(*row)
    return table


def _shape(array: npt.NDArray[Any]) -> str:
    return "[" + ",".join(map(str, array.shape)) + "]"
