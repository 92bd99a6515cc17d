"""`kda verify`: the case lists against the float64 reference."""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

import kda
from kda import _cases, _gate_cases, _gates, reference
from kda._cases import Case, CaseError
from kda._chunk_kda_fwd import OUTPUTS, STATE_PRODUCTS, Arguments, compute, kept_names
from kda._gate_cases import GateCase, GateCumsumCase
from kda._score import (
    BFLOAT16_PRODUCTS_SLACK,
    BFLOAT16_PRODUCTS_SLACK_OF_REPEATED_KEYS,
    GPU_SLACK,
    GPU_SLACK_OF_KEYS_ALIKE,
    Score,
    score,
    score_all,
    score_gate,
)
from kda._supported import supported
from kda.cli.backend import CPU, Target, parse_target
from kda.cli.console import UserError, one_line, progress, stdout

_SHOWN_FAILURES = 30

AnyCase: TypeAlias = Case | GateCase | GateCumsumCase


class Verdict(NamedTuple):
    """The scores of a case's outputs, and what else is wrong."""

    scores: list[Score]
    problems: list[str]


class Operator(NamedTuple):
    """How the cases of one operator are read and run."""

    parse: Callable[[Any], AnyCase]
    judge: Callable[[Any, Target, str], Verdict]
    """Of a case, where it runs, and the products with the state that are asked for."""
    outputs: tuple[str, ...]


@dataclass
class Outcome:
    """What came of one case: the score of every output, and what else is wrong."""

    operator: str
    case: AnyCase
    scores: list[Score] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Everything that is wrong, a line each."""
        missed = [f"{s.output}: error {s.error:.3e}, bound {s.bound:.3e}" for s in self.scores if not s.ok]
        return missed + self.problems


def verify(
    path: Path | None,
    filters: Sequence[str],
    threads: int | None,
    backend: str = "cpu",
    state_products: str = "float32",
) -> bool:
    """Run the cases and report. Returns whether all of them passed. Raises UserError."""
    target = parse_target(backend)
    check_state_products(state_products)
    cases = select(load(path), filters)
    start = time.perf_counter()
    outcomes = run_all(cases, threads or len(os.sched_getaffinity(0)), target, state_products)
    return _report(outcomes, time.perf_counter() - start)


def load(path: Path | None) -> list[Outcome]:
    """Read a case file, whose name tells the operator, or all that the package carries. Raises UserError."""
    if path is not None:
        return _load(path.stem if path.stem in OPERATORS else "chunk_kda_fwd", path)
    return [outcome for operator in OPERATORS for outcome in _load(operator, _cases.default_path(operator))]


def _load(operator: str, path: Path) -> list[Outcome]:
    try:
        return [Outcome(operator, case) for case in _cases.load_with(OPERATORS[operator].parse, path)]
    except CaseError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def select(cases: Iterable[Outcome], filters: Sequence[str]) -> list[Outcome]:
    """Return the cases that match any of the filters, or all without filters. Raises UserError when none is left."""
    selected = [one for one in cases if not filters or any(matches(one.case.name, text) for text in filters)]
    if not selected:
        raise UserError(f"no case matches {', '.join(filters)}" if filters else "the file has no cases")
    return selected


def matches(name: str, text: str) -> bool:
    """Whether a case's name has the text in it, or fits it as a pattern."""
    return fnmatch.fnmatchcase(name, text) if any(c in text for c in "*?[") else text in name


def check_state_products(name: str) -> None:
    """Refuse what is no name of products with the state. Raises UserError."""
    if name not in STATE_PRODUCTS:
        raise UserError(f"--state-products: expected {' or '.join(STATE_PRODUCTS)}, got {name!r}")


def run_all(
    cases: Sequence[Outcome], threads: int, target: Target = CPU, state_products: str = "float32"
) -> Sequence[Outcome]:
    """Run `threads` cases at a time, each on one thread, and fill in the outcomes."""
    with progress() as bar, ThreadPoolExecutor(threads) as pool:
        task = bar.add_task("cases", total=len(cases))
        futures = [pool.submit(run_case, case, target, state_products) for case in cases]
        try:
            for future in as_completed(futures):
                future.result()
                bar.advance(task)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return cases


def run_case(outcome: Outcome, target: Target = CPU, state_products: str = "float32") -> None:
    """Run one case."""
    try:
        outcome.scores, outcome.problems = OPERATORS[outcome.operator].judge(outcome.case, target, state_products)
    except Exception as error:  # one broken case must not hide the others
        outcome.problems = [f"{type(error).__name__}: {error}"]


def _judge_chunk_kda_fwd(case: Case, target: Target, state_products: str) -> Verdict:
    """Compare every output with the reference, and what the public call keeps with these outputs, bit for bit."""
    arguments = _cases.make_arguments(case)
    placed = target.place(arguments)
    made = compute(placed, OUTPUTS, num_threads=1, state_products=state_products)
    outputs = {name: target.fetch(array) for name, array in made.items()}
    used = supported(**placed._asdict(), state_products=state_products).state_products
    slack = _slack(case, target, used)
    scores = score_all(outputs, reference.compute(arguments), case.chunk_size, case.cu_seqlens, slack)
    return Verdict(scores, _check_public_call(case, placed, outputs, target, state_products))


def _slack(case: Case, target: Target, state_products: str | None) -> float:
    if state_products == "bfloat16":
        return BFLOAT16_PRODUCTS_SLACK_OF_REPEATED_KEYS if case.keys == "repeated" else BFLOAT16_PRODUCTS_SLACK
    if target.device is None:
        return 0
    return GPU_SLACK if case.keys == "random" else GPU_SLACK_OF_KEYS_ALIKE


def _judge_gate(case: GateCase, target: Target, _: str) -> Verdict:
    op = "fused_kda_gate"
    arguments = _gate_cases.make_gate_arguments(case)
    placed = target.place(arguments)
    made = target.fetch(_gates.execute(op, _gates.prepare_gate(op, **placed), placed["g"], 1))
    return Verdict(score_gate(made, _gates.prepare_gate(op, **arguments).reference()), [])


def _judge_gate_cumsum(case: GateCumsumCase, target: Target, _: str) -> Verdict:
    op = "kda_gate_cumsum"
    arguments = _gate_cases.make_gate_cumsum_arguments(case)
    placed = target.place(arguments)
    made = target.fetch(_gates.execute(op, _gates.prepare_gate_cumsum(op, **placed), placed["g"], 1))
    return Verdict([score("gk", made, _gates.prepare_gate_cumsum(op, **arguments).reference())], [])


OPERATORS = {
    "chunk_kda_fwd": Operator(_cases.parse, _judge_chunk_kda_fwd, OUTPUTS),
    "kda_gate": Operator(_gate_cases.parse_gate, _judge_gate, ("max abs", "mean abs", "max rel")),
    "kda_gate_cumsum": Operator(_gate_cases.parse_gate_cumsum, _judge_gate_cumsum, ("gk",)),
}


def _check_public_call(
    case: Case, arguments: Arguments, outputs: dict[str, Any], target: Target, state_products: str
) -> list[str]:
    result = kda.chunk_kda_fwd(**(arguments._asdict() | case.keep_flags), state_products=state_products)
    kept = kept_names(use_gate_in_kernel=case.use_gate_in_kernel, **case.keep_flags)
    problems = []
    for name in OUTPUTS:
        array = getattr(result, name)
        if (array is not None) != (name in kept):
            problems.append(f"{name}: {'not kept' if array is None else 'kept'} against the contract")
        elif array is not None and not _same_bits(target.fetch(array), outputs[name]):
            problems.append(f"{name}: other bits when other outputs are asked for")
    if result.initial_state is not arguments.initial_state:
        problems.append("initial_state: not the caller's object")
    return problems


def _same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _report(outcomes: Sequence[Outcome], seconds: float) -> bool:
    console = stdout()
    for operator in OPERATORS:
        own = [outcome for outcome in outcomes if outcome.operator == operator]
        if own:
            console.print(_worst_table(operator, own))
    failed = [outcome for outcome in outcomes if outcome.failures]
    if failed:
        _print_failures(console, failed)
    console.print(f"{len(outcomes)} cases in {seconds:.1f} s")
    console.print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    return not failed


def _worst_table(operator: str, outcomes: Sequence[Outcome]) -> Table:
    """Per output, the case that came closest to its bound or went furthest beyond."""
    table = Table("output", "error", "bound", "used", title=f"{operator}: worst errors of {len(outcomes)} cases")
    table.add_column("case", overflow="fold")
    for name in OPERATORS[operator].outputs:
        scored = [(score, outcome.case) for outcome in outcomes for score in outcome.scores if score.output == name]
        if not scored:
            continue
        worst, case = max(scored, key=lambda pair: _used(pair[0]))
        table.add_row(name, f"{worst.error:.2e}", f"{worst.bound:.2e}", f"{_used(worst):.0%}", case.name)
    return table


def _used(score: Score) -> float:
    if score.bound:
        return score.error / score.bound
    return 0.0 if score.error == 0 else float("inf")


def _print_failures(console: Console, failed: list[Outcome]) -> None:
    table = Table(title="failures")
    table.add_column("case", overflow="fold")
    table.add_column("what is wrong", overflow="fold")
    for outcome in failed[:_SHOWN_FAILURES]:
        table.add_row(outcome.case.name, one_line("; ".join(outcome.failures)))
    console.print(table)
    if len(failed) > _SHOWN_FAILURES:
        console.print(f"and {len(failed) - _SHOWN_FAILURES} more")
