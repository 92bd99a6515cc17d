"""`kda bench`: chunk_kda_fwd beside a matrix product and a copy, in one run.

A time alone says little on a machine that others use too; its ratio to what the same machine does at the same moment
with matrix products (NumPy's BLAS, float32) and with memory does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.table import Table

from kda import _arrays, _cases
from kda._cases import Case
from kda._chunk_kda_fwd import OP, OUTPUTS, Arguments, prepare
from kda._info import info
from kda._supported import supported
from kda._threads import get_num_threads
from kda.cli import files, plotting
from kda.cli.backend import CPU, Target, parse_target
from kda.cli.console import UserError, progress, refusals, stdout
from kda.cli.verify import check_state_products, matches

# The cases that are timed unless others are named, and what a server asks for of them, and what the whole contract is.
DEFAULT_CASES = tuple(f"matrix_bf16_BSND_{gate}_V128_C64" for gate in ("activated", "softplus", "bounded"))
OUTPUT_SETS = {"serving": ("attn_out", "final_state"), "all": OUTPUTS}

# Cases that differ from the first default case in one respect, and are compared with it per unit of nominal work.
_LENGTHS = [37 * i % 79 + 1 for i in range(200)]
SHAPES: dict[str, dict[str, Any]] = {
    "V256": {"V": 256},
    "K64": {"K": 64},
    "chunk128": {"chunk_size": 128},
    "fp16": {"dtype": "float16"},
    "groups_of_4": {"HV": 4},
    "packed_200": {"T": sum(_LENGTHS), "cu_seqlens": (0, *accumulate(_LENGTHS))},
}

Work: TypeAlias = Callable[[], object]

# The kernels of OpenBLAS for an instruction set that is not the machine's best.
_OPENBLAS_CORES = {"AVX2": "Haswell", "SSE4": "Nehalem"}

# A BLAS's threads keep their CPUs busy for some time after a product.
_SETTLING_SECONDS = 0.05
# What a measurement of short calls adds up to, and what goes before it: a CPU that slept is slow for a while.
_SAMPLE_SECONDS = 0.02
_GENERATED_TOKENS = 512
_COPIED_BYTES = 1 << 28
# Calls of one measurement on a GPU, which works on one while the next is on its way.
_CALLS = 20


@dataclass(frozen=True)
class Settings:
    """What is to be measured."""

    threads: int
    tokens: tuple[int, ...]
    heads: tuple[int, ...]
    filters: tuple[str, ...]
    rounds: int
    sgemm_size: int
    shapes: bool = False
    scaling: bool = False
    state_products: str = "float32"


@dataclass(frozen=True)
class Measurement:
    """Medians over the rounds. Rates are by nominal work: see `flops`. None: not measured, on a GPU."""

    case: str
    tokens: int
    heads: int
    outputs: str
    milliseconds: float
    token_heads_per_second: float
    gflops: float
    flops_per_byte: float
    sgemm_gflops: float | None = None
    copy_gbytes_per_second: float | None = None
    ratio_to_sgemm: float | None = None
    ratio_to_bandwidth_floor: float | None = None
    ratio_to_usual_shape: float | None = None
    """Rate by nominal work over that of K = V = 128, chunks of 64, bf16 and dense, measured in turns with it."""
    ratio_to_one_thread: float | None = None
    """Rate over that of the same call on one thread, measured in turns with it."""


def bench(settings: Settings, backend: str, json_file: Path | None, plot_file: Path | None) -> None:
    """Measure, print a table, and write the files that are asked for. Raises UserError."""
    target = parse_target(backend)
    if target != CPU and plot_file is not None:
        raise UserError(f"--plot: expected none with --backend {backend}, got {plot_file}")
    if target != CPU and settings.scaling:
        raise UserError(f"--scaling: expected none with --backend {backend}")
    check_state_products(settings.state_products)
    if plot_file is not None:
        plotting.figure_type()  # refuses now rather than after the measurements
    if target == CPU:
        restart_with_threads(settings.threads)
    usual, cases = _select(settings)
    conditions = _conditions(settings, backend, target)
    measurements: list[Measurement] = []
    runs = [
        (case, T, H, name) for case in cases for T in settings.tokens for H in settings.heads for name in OUTPUT_SETS
    ]
    with files.new_files(None, json_file, plot_file) as (json_target, plot_target):
        with progress() as bar:
            task = bar.add_task("cases", total=len(runs))
            for case, T, H, name in runs:
                compared = None if usual is None else scaled(usual, T, H)
                measurements.append(_measure(scaled(case, T, H), name, settings, compared, target))
                bar.advance(task)
        if json_target is not None:
            _write_json(json_target, measurements, settings, conditions)
        if plot_target is not None:
            _plot(plot_target, measurements)
    for case in cases:
        stdout().print(_table(case.name, [m for m in measurements if m.case == case.name]))
    stdout().print(f"backend {conditions['backend']}, state products {conditions['state_products']}")
    if target == CPU:
        stdout().print(f"NumPy's BLAS: {conditions['blas']}")
        stdout().print(
            "of sgemm: rate by nominal work over NumPy's sgemm; of copy: the time that copying inputs and outputs takes"
        )


def restart_with_threads(threads: int) -> None:
    """Run this process anew unless its BLAS has as many threads, and the right kernels.

    These are the BLAS's own choice, but for an instruction set that is not the machine's best: then those for that set.
    """
    wanted = {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with refusals():
        used, best = info().cpu_instruction_set, info().cpu_instruction_sets[0]
    if used != best and used in _OPENBLAS_CORES:
        wanted["OPENBLAS_CORETYPE"] = _OPENBLAS_CORES[used]
    unwanted = {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} & os.environ.keys() - wanted.keys()
    if not unwanted and all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    environment = {name: value for name, value in os.environ.items() if name not in unwanted} | wanted
    os.execve(sys.executable, [sys.executable, "-m", "kda", *sys.argv[1:]], environment)  # noqa: S606 - this very command


def _select(settings: Settings) -> tuple[Case | None, list[Case]]:
    """Return the cases to time, and the one to compare each of them with."""
    cases = _cases.load(_cases.default_path())
    if settings.shapes:
        if settings.filters:
            raise UserError("--shapes has cases of its own: expected no --filter")
        usual = next(case for case in cases if case.name == DEFAULT_CASES[0])
        return usual, [dataclasses.replace(usual, name=name, **fields) for name, fields in SHAPES.items()]
    if not settings.filters:
        return None, [case for case in cases if case.name in DEFAULT_CASES]
    selected = [case for case in cases if any(matches(case.name, text) for text in settings.filters)]
    if not selected:
        raise UserError(f"no case matches {', '.join(settings.filters)}")
    empty = next((case.name for case in selected if case.cu_seqlens is not None and case.T == 0), None)
    if empty is not None:
        raise UserError(f"{empty}: sequences without tokens cannot be scaled")
    return None, selected


def scaled(case: Case, tokens: int, heads: int) -> Case:
    """Return the case with other sizes; value heads keep their ratio to the query heads, sequences theirs to T."""
    group = case.HV // case.H
    bounds = case.cu_seqlens
    return dataclasses.replace(
        case,
        B=1,
        T=tokens,
        H=max(1, heads // group),
        HV=max(1, heads // group) * group,
        cu_seqlens=None if bounds is None else tuple(bound * tokens // case.T for bound in bounds),
    )


def make_arguments(case: Case) -> Arguments:
    """Return the case's inputs; those of many tokens repeat their first ones, which takes less time to make."""
    short = dataclasses.replace(case, T=min(case.T, _GENERATED_TOKENS), strides="contiguous")
    arguments = _cases.make_arguments(short)
    axis = {"BSND": 1, "BNSD": 2, "TND": 0, "NTD": 1}[case.layout]
    repeats = -(-case.T // short.T) if short.T else 1
    rows: dict[str, Any] = {
        name: np.concatenate([getattr(arguments, name)] * repeats, axis=axis).take(range(case.T), axis=axis)
        for name in ("q", "k", "v", "g", "beta")
    }
    return arguments._replace(**rows)


def flops(case: Case) -> float:
    """Return the nominal work: the five products within a chunk and the three with the state, in full."""
    within = 2 * case.chunk_size * (3 * case.K + 2 * case.V)
    return case.T * case.HV * (within + 6 * case.K * case.V)


def _measure(case: Case, output_set: str, settings: Settings, usual: Case | None, target: Target) -> Measurement:
    arguments = make_arguments(case)
    cases = [case] if usual is None else [case, usual]
    threads = [settings.threads] * len(cases)
    if settings.scaling:
        cases.append(case)
        threads.append(1)
    names, products = OUTPUT_SETS[output_set], settings.state_products
    calls = [operator(make_arguments(c), names, used, target, products) for c, used in zip(cases, threads, strict=True)]
    moved = bytes_moved(arguments, names)
    if target == CPU:
        with ThreadPoolExecutor(settings.threads) as pool:
            works = [_sgemm(settings.sgemm_size), _copy(settings.threads, pool), *calls]
            sgemm_seconds, copy_seconds, *seconds = alternate(works, settings.rounds)
    else:
        seconds = [_time_calls(call, settings.rounds, target) for call in calls]
    rates = [flops(c) / taken for c, taken in zip(cases, seconds, strict=True)]
    measured = Measurement(
        case=case.name,
        tokens=case.T,
        heads=case.HV,
        outputs=output_set,
        milliseconds=1e3 * seconds[0],
        token_heads_per_second=case.T * case.HV / seconds[0],
        gflops=rates[0] / 1e9,
        flops_per_byte=flops(case) / moved,
        ratio_to_usual_shape=None if usual is None else rates[0] / rates[1],
        ratio_to_one_thread=rates[0] / rates[-1] if settings.scaling else None,
    )
    if target != CPU:
        return measured
    copy_rate = 2 * _COPIED_BYTES / copy_seconds
    sgemm_rate = 2 * settings.sgemm_size**3 / sgemm_seconds
    return dataclasses.replace(
        measured,
        sgemm_gflops=sgemm_rate / 1e9,
        copy_gbytes_per_second=copy_rate / 1e9,
        ratio_to_sgemm=rates[0] / sgemm_rate,
        ratio_to_bandwidth_floor=moved / copy_rate / seconds[0],
    )


def _time_calls(call: Work, rounds: int, target: Target) -> float:
    """Return the median time of a call among several in a row."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        target.wait()
        times.append((time.perf_counter() - start) / _CALLS)
    return statistics.median(times[1:])


def alternate(works: Sequence[Work], rounds: int) -> list[float]:
    """Return each one's median time, taken in turns so that a change of the machine's speed meets all of them."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, taken in zip(works, times, strict=True):
            time.sleep(_SETTLING_SECONDS)
            repeats = max(1, int(_SAMPLE_SECONDS / _seconds_of(work, 1)))
            if repeats > 1:
                _seconds_of(work, repeats)
            taken.append(_seconds_of(work, repeats) / repeats)
    return [statistics.median(taken) for taken in times]


def _seconds_of(work: Work, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return time.perf_counter() - start


def operator(
    arguments: Arguments,
    names: tuple[str, ...],
    threads: int,
    target: Target = CPU,
    state_products: str = "float32",
) -> Work:
    """Return a planned call that computes the named outputs, their memory being there already. Raises UserError."""
    with refusals():
        placed = target.place(arguments)
        call = prepare(placed, state_products=state_products)
    specs = dict(zip(OUTPUTS, call.outputs(), strict=True))
    kind = _arrays.kind_of(OP, "q", placed.q)
    arrays = {name: kind.empty(*specs[name], like=placed.q) for name in names}
    views = tuple(kind.describe(OP, name, arrays[name]) if name in arrays else None for name in OUTPUTS)
    allocate = target.allocator()

    def execute() -> None:
        call.execute(views, threads, 0, allocate)

    return execute


def bytes_moved(arguments: Arguments, names: tuple[str, ...]) -> int:
    """Return the bytes of a call's large inputs, in NumPy arrays, and of the named outputs."""
    inputs = (getattr(arguments, name) for name in ("q", "k", "v", "g", "beta", "initial_state"))
    specs = dict(zip(OUTPUTS, prepare(arguments).outputs(), strict=True))
    kind = _arrays.kind_of(OP, "q", arguments.q)
    outputs = (kind.empty(*specs[name], like=arguments.q) for name in names)
    return sum(array.nbytes for array in (*inputs, *outputs) if array is not None)


def _sgemm(size: int) -> Work:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    out = np.empty_like(a)

    def multiply() -> None:
        np.matmul(a, b, out=out)

    return multiply


def _copy(threads: int, pool: ThreadPoolExecutor) -> Work:
    source = np.ones(_COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))

    def copy() -> None:
        for done in [pool.submit(np.copyto, *part) for part in parts]:
            done.result()

    return copy


def _table(case: str, measurements: Sequence[Measurement]) -> Table:
    columns: dict[str, Callable[[Measurement], str]] = {
        "T": lambda m: str(m.tokens),
        "heads": lambda m: str(m.heads),
        "outputs": lambda m: m.outputs,
        "ms": lambda m: f"{m.milliseconds:.3f}",
        "ktok*heads/s": lambda m: f"{m.token_heads_per_second / 1e3:.0f}",
        "GFLOP/s": lambda m: f"{m.gflops:.0f}",
        "of sgemm": lambda m: f"{m.ratio_to_sgemm:.2f}",
        "of copy": lambda m: f"{m.ratio_to_bandwidth_floor:.2f}",
    }
    if measurements[0].ratio_to_sgemm is None:
        del columns["of sgemm"], columns["of copy"]
    if measurements[0].ratio_to_usual_shape is not None:
        # Tokens per second say little where the work per token differs.
        del columns["ktok*heads/s"]
        columns["of K=V=128"] = lambda m: f"{m.ratio_to_usual_shape:.2f}"
    if measurements[0].ratio_to_one_thread is not None:
        columns["of 1 thread"] = lambda m: f"{m.ratio_to_one_thread:.2f}"
    # Nine columns and their padding are too wide for most terminals.
    table = Table(title=case, padding=(0, 1 if len(columns) < 9 else 0))
    for name in columns:
        table.add_column(name, justify="left" if name == "outputs" else "right", no_wrap=True)
    for measurement in measurements:
        table.add_row(*(show(measurement) for show in columns.values()))
    return table


def _conditions(settings: Settings, backend: str, target: Target) -> dict[str, str]:
    """Return what is measured on and with."""
    found = info()
    usual = next(case for case in _cases.load(_cases.default_path()) if case.name == DEFAULT_CASES[0])
    call = target.place(_cases.make_arguments(dataclasses.replace(usual, T=1)))
    products = supported(**call._asdict(), state_products=settings.state_products).state_products
    return {
        "version": found.version,
        "date": time.strftime("%Y-%m-%d"),
        "cpu": found.cpu,
        "instruction_set": found.cpu_instruction_set,
        "backend": f"{backend}: {next(one.detail for one in found.backends if backend.startswith(one.name))}",
        "state_products": str(products),
        "blas": _blas(),
    }


def _blas() -> str:
    """Return what NumPy's BLAS says of itself: its kernels decide what "of sgemm" means."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return "unknown: that needs threadpoolctl"
    found = [one for one in threadpool_info() if one["user_api"] == "blas"]
    if not found:
        return "unknown"
    kernels = found[0].get("architecture", "kernels of its own choice")
    return f"{found[0]['internal_api']} {found[0]['version']} ({kernels}, {found[0]['num_threads']} threads)"


def _write_json(
    path: Path, measurements: Sequence[Measurement], settings: Settings, conditions: dict[str, str]
) -> None:
    report = conditions | {
        "settings": dataclasses.asdict(settings),
        "measurements": [dataclasses.asdict(measurement) for measurement in measurements],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _plot(path: Path, measurements: Sequence[Measurement]) -> None:
    """Draw the rates under the roof of memory and sgemm."""
    from matplotlib.ticker import LogFormatter

    sgemm = statistics.median(m.sgemm_gflops for m in measurements if m.sgemm_gflops is not None)
    copy = statistics.median(m.copy_gbytes_per_second for m in measurements if m.copy_gbytes_per_second is not None)
    figure = plotting.new_figure(8, 5)
    axes = figure.subplots()
    intensities = np.geomspace(1, 4096, 200)
    axes.loglog(intensities, np.minimum(copy * intensities, sgemm), color="black", label="copy rate, sgemm rate")
    for name, marker in zip(OUTPUT_SETS, "os", strict=True):
        shown = [m for m in measurements if m.outputs == name]
        axes.loglog(
            [m.flops_per_byte for m in shown], [m.gflops for m in shown], marker, label=f"outputs: {name}", alpha=0.6
        )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(LogFormatter())
        axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
    axes.set_xlabel("nominal work per byte of input and attn_out (FLOP/byte)")
    axes.set_ylabel("GFLOP/s by nominal work")
    axes.set_title(f"chunk_kda_fwd, {info().cpu}, {info().cpu_instruction_set}")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150, format="png")


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """Read positive numbers, by comma. Raises UserError."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(0 < size <= 2**31 for size in sizes):
        raise UserError(f"{option}: expected positive numbers, by comma, got {text!r}")
    return sizes


def default_threads(threads: int | None) -> int:
    """Return the number given, or what a call would use."""
    return threads or get_num_threads()
