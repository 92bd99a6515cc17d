"""Time chunk_kda_fwd beside PyTorch forms of the same operator, in one run, on the same inputs.

The PyTorch forms are what one would write for a CPU without this library, in float32: 64 tokens at a time with batched
matrix products over the heads, or token by token. Heads are spread over threads, each of which runs its own products:
faster than threads within every product. Both are checked against the float64 reference before they are timed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
import typer
from rich.table import Table

from kda import _cases, reference
from kda._chunk_kda_fwd import Arguments
from kda._info import info
from kda._score import relative_error
from kda.cli import bench, files
from kda.cli.console import UserError, output_errors, progress, stdout, user_errors

try:
    import torch
except ModuleNotFoundError:
    raise SystemExit("compare_torch.py: needs torch: pip install torch") from None

Tensor: TypeAlias = torch.Tensor

CHUNK = 64
# Chunks of heads at a time: fewer leave too little work for each operation, more do not fit into a cache.
BATCH = 16
OUTPUTS = ("attn_out", "final_state")
_CHECKED_TOKENS = 200
_CHECKED_HEADS = 2
_LARGEST_ERROR = 1e-5


class Heads(NamedTuple):
    """The inputs of some heads of one sequence: `[T,heads,...]`, as the operator gets them, of any strides."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    """`[heads,K,V]`."""

    def part(self, heads: slice) -> Heads:
        """Return the inputs of some of the heads."""
        of_rows = (x[:, heads] for x in self[:5])
        of_heads = (None if x is None else x[heads] for x in self[5:])
        return Heads(*of_rows, *of_heads)


@dataclasses.dataclass(frozen=True)
class Call:
    """A dense call with one sequence and as many value heads as q/k heads."""

    inputs: Heads
    scale: float
    lower_bound: float | None

    def gate(self, g: Tensor, inputs: Heads) -> Tensor:
        """Return the natural logarithm of the decays of `g [rows,heads,K]`, in float32."""
        x = g.float()
        if inputs.A_log is None:
            return x
        rate = inputs.A_log.exp()[:, None]
        if inputs.dt_bias is not None:
            x = x + inputs.dt_bias
        if self.lower_bound is None:
            return -rate * torch.nn.functional.softplus(x)
        return self.lower_bound * torch.sigmoid(rate * x)


Form: TypeAlias = Callable[[Call, Heads, Tensor, Tensor], None]


def chunked(call: Call, inputs: Heads, out: Tensor, state: Tensor) -> None:
    """Compute `out [T,heads,V]`, in its dtype, and `state [heads,K,V]`, 64 tokens at a time.

    What does not depend on the state is computed for several chunks at once where there are few heads.
    """
    _start(state, inputs)
    tokens, heads, width = inputs.v.shape
    sums = torch.ones(CHUNK, CHUNK).tril_()
    step = CHUNK * max(1, BATCH // heads)
    for first in range(0, tokens, step):
        rows = slice(first, first + step)
        q, k, v, beta = (_in_chunks(x[rows]) for x in (inputs.q, inputs.k, inputs.v, inputs.beta))
        gate = _in_chunks(call.gate(inputs.g[rows], inputs))
        gk = torch.bmm(sums.expand(len(gate), CHUNK, CHUNK), gate)
        qk, kk = _products_within(q, k, gk)
        decay = gk.exp()
        # (I + A) [u, w] = beta [v, k exp(gk)], solved for both at once.
        right = torch.cat((v, k * decay), dim=-1).mul_(beta.unsqueeze(-1))
        solved = torch.linalg.solve_triangular(kk.mul_(beta.unsqueeze(-1)), right, upper=False, unitriangular=True)
        u, w = solved.split((width, k.shape[-1]), dim=-1)
        qg = q.mul_(decay)
        last = gk[:, -1:]
        rest = k.mul_((last - gk).exp_()).transpose(1, 2)
        decay = last.exp().transpose(1, 2)
        for chunk in range(len(gate) // heads):
            own = slice(chunk * heads, (chunk + 1) * heads)
            v_new = torch.baddbmm(u[own], w[own], state, alpha=-1)
            made = torch.bmm(qg[own], state).baddbmm_(qk[own], v_new).mul_(call.scale).transpose(0, 1)
            part = out[first + chunk * CHUNK :][:CHUNK]
            part.copy_(made[: len(part)])
            state.mul_(decay[own]).baddbmm_(rest[own], v_new)


def _start(state: Tensor, inputs: Heads) -> None:
    if inputs.initial_state is None:
        state.zero_()
    else:
        state.copy_(inputs.initial_state)


def _in_chunks(rows: Tensor) -> Tensor:
    """Return `[rows,heads,...]` as `[chunks * heads,64,...]` in float32; rows of 0 behind change nothing."""
    chunks, rest = -(-len(rows) // CHUNK), -len(rows) % CHUNK
    if rest:
        rows = torch.cat((rows, rows.new_zeros(rest, *rows.shape[1:])))
    made = torch.empty(chunks, rows.shape[1], CHUNK, *rows.shape[2:])
    made.copy_(rows.view(chunks, CHUNK, *rows.shape[1:]).transpose(1, 2))
    return made.flatten(0, 1)


def _products_within(q: Tensor, k: Tensor, gk: Tensor) -> tuple[Tensor, Tensor]:
    """Return `sum_d q_i k_j E_ij` for j <= i and `sum_d k_i k_j E_ij` for j < i, `[...,64,64]`, 0 elsewhere.

    By halves: the second half of the rows against the first half of the columns, with the gates relative to the row
    between them, and so on within either half. No exponent is positive.
    """
    qk, kk = q.new_zeros(len(q), CHUNK, CHUNK), q.new_zeros(len(q), CHUNK, CHUNK)
    half = CHUNK // 2
    while half:
        q_parts, k_parts, parts = (x.unflatten(1, (-1, 2 * half)) for x in (q, k, gk))
        anchor = parts[:, :, half - 1 : half]
        right = (anchor - parts[:, :, :half]).exp_().mul_(k_parts[:, :, :half])
        decay = (parts[:, :, half:] - anchor).exp_()
        left = torch.cat((q_parts[:, :, half:] * decay, k_parts[:, :, half:] * decay), dim=2)
        both = left @ right.transpose(2, 3)
        for whole, made in ((qk, both[:, :, :half]), (kk, both[:, :, half:])):
            squares = whole.unflatten(2, (-1, 2 * half)).unflatten(1, (-1, 2 * half)).diagonal(0, 1, 3)
            squares.permute(0, 3, 1, 2)[:, :, half:, :half] = made
        half //= 2
    qk.diagonal(0, 1, 2).copy_((q * k).sum(-1))
    return qk, kk


def recurrent(call: Call, inputs: Heads, out: Tensor, state: Tensor) -> None:
    """Compute `out [T,heads,V]`, in its dtype, and `state [heads,K,V]`, token by token."""
    _start(state, inputs)
    q, k, v, beta = (x.float() for x in (inputs.q, inputs.k, inputs.v, inputs.beta))
    decay = call.gate(inputs.g, inputs).exp().unsqueeze(-1)
    q, k, v, beta = (q * call.scale).unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2), beta[..., None, None]
    made = torch.empty_like(v)
    for t in range(len(q)):
        state.mul_(decay[t])
        error = torch.baddbmm(v[t], k[t], state, alpha=-1).mul_(beta[t])
        state.baddbmm_(k[t].transpose(1, 2), error)
        torch.bmm(q[t], state, out=made[t])
    out.copy_(made.squeeze(2))


FORMS: dict[str, Form] = {"chunked": chunked, "recurrent": recurrent}


def make_call(arguments: Arguments) -> Call:
    """Return a case's inputs as tensors that share their memory. Raises UserError for what the forms do not take."""
    a = arguments
    if a.layout != "BSND" or len(a.q) != 1 or a.cu_seqlens is not None or a.state_v_first:
        raise UserError("the PyTorch forms take layout BSND, one sequence and no state_v_first")
    if a.q.shape[2] != a.v.shape[2]:
        raise UserError("the PyTorch forms take as many value heads as q/k heads")
    A_log, dt_bias = (a.A_log, a.dt_bias) if a.use_gate_in_kernel else (None, None)
    if dt_bias is not None:
        dt_bias = dt_bias.reshape(-1, a.q.shape[-1])
    state = None if a.initial_state is None else a.initial_state[0]
    heads = Heads(*(_tensor(x[0]) for x in (a.q, a.k, a.v, a.g, a.beta)), *map(_tensor, (A_log, dt_bias, state)))
    scale = a.q.shape[-1] ** -0.5 if a.scale is None else a.scale
    return Call(heads, scale, a.lower_bound if a.safe_gate else None)


def _tensor(array: Any) -> Any:
    if array is None:
        return None
    if array.dtype == np.dtype(_cases.DTYPES["bfloat16"]):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def run(form: Form, call: Call, threads: int, pool: ThreadPoolExecutor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a call of a form, heads spread over the pool's threads, for attn_out `[T,H,V]`, final_state `[H,K,V]`."""
    inputs = call.inputs
    tokens, heads, width = inputs.v.shape
    out = torch.empty(tokens, heads, width, dtype=inputs.v.dtype)
    state = torch.empty(heads, inputs.k.shape[-1], width)
    bounds = [heads * i // threads for i in range(threads + 1)]
    parts = [slice(begin, end) for begin, end in pairwise(bounds) if begin < end]

    def one(part: slice) -> None:
        with torch.inference_mode():
            form(call, inputs.part(part), out[:, part], state[part])

    def every() -> tuple[Tensor, Tensor]:
        for done in [pool.submit(one, part) for part in parts]:
            done.result()
        return out, state

    return every


def new_pool(threads: int) -> ThreadPoolExecutor:
    """Return threads that each compute alone."""
    return ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))


def check(case: _cases.Case, pool: ThreadPoolExecutor, threads: int) -> dict[str, float]:
    """Return each form's larger relative error in float32 against float64, on few tokens and heads of the case."""
    few = bench.scaled(case, min(case.T, _CHECKED_TOKENS), min(case.HV, _CHECKED_HEADS))
    arguments = bench.make_arguments(few)
    call = make_call(arguments)
    expected = reference.compute(arguments, intermediates=False)
    call = dataclasses.replace(call, inputs=call.inputs._replace(v=call.inputs.v.float()))
    errors = {}
    for name, form in FORMS.items():
        out, state = run(form, call, threads, pool)()
        pairs = ((out[None], expected["attn_out"]), (state[None], expected["final_state"]))
        errors[name] = max(relative_error(actual.numpy(), wanted) for actual, wanted in pairs)
        if not errors[name] < _LARGEST_ERROR:
            raise UserError(f"{case.name}: the {name} form is wrong by {errors[name]:.1e}, and is not timed")
    return errors


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Medians over the rounds."""

    program: str
    tokens: int
    heads: int
    milliseconds: float
    token_heads_per_second: float
    speed_of_kda: float
    """How many times faster chunk_kda_fwd was in the same run."""
    error: float | None
    """Of a PyTorch form, relative to float64, in float32."""


def measure(case: _cases.Case, threads: int, rounds: int) -> list[Measurement]:
    """Time chunk_kda_fwd, which computes attn_out and final_state, and the forms, in turns."""
    with new_pool(threads) as pool:
        errors = check(case, pool, threads)
        arguments = bench.make_arguments(case)
        call = make_call(arguments)
        works: dict[str, Callable[[], object]] = {"kda": bench.operator(arguments, OUTPUTS, threads)}
        works |= {name: run(form, call, threads, pool) for name, form in FORMS.items()}
        seconds = bench.alternate(list(works.values()), rounds)
    return [
        Measurement(
            program=name,
            tokens=case.T,
            heads=case.HV,
            milliseconds=1e3 * taken,
            token_heads_per_second=case.T * case.HV / taken,
            speed_of_kda=taken / seconds[0],
            error=errors.get(name),
        )
        for name, taken in zip(works, seconds, strict=True)
    ]


def compare(
    tokens: Annotated[str, typer.Option(metavar="T,T,...", help="Numbers of tokens.")] = "512,2048",
    heads: Annotated[str, typer.Option(metavar="H,H,...", help="Numbers of heads.")] = "32,4",
    threads: Annotated[int | None, typer.Option(min=1, max=4096, metavar="N", help="CPU threads, of all.")] = None,
    case_name: Annotated[str, typer.Option("--case", help="The case of tests/op_cases that is scaled.")] = (
        "matrix_bf16_BSND_activated_V128_C64"
    ),
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Measurements of each, for the median.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures.")] = None,
) -> None:
    """Time chunk_kda_fwd beside PyTorch forms of the same operator, in one run, on the same inputs."""
    with user_errors("compare_torch"):
        sizes = [(T, H) for T in bench.parse_sizes("--tokens", tokens) for H in bench.parse_sizes("--heads", heads)]
        case = next((case for case in _cases.load(_cases.default_path()) if case.name == case_name), None)
        if case is None:
            raise UserError(f"--case: there is no case {case_name}")
        used = bench.default_threads(threads)
        measurements: list[Measurement] = []
        with files.new_files(None, json_file) as (json_target,):
            with progress() as bar:
                task = bar.add_task("sizes", total=len(sizes))
                for T, H in sizes:
                    measurements += measure(bench.scaled(case, T, H), used, rounds)
                    bar.advance(task)
            if json_target is not None:
                report = {
                    "version": info().version,
                    "torch": torch.__version__,
                    "cpu": info().cpu,
                    "instruction_set": info().cpu_instruction_set,
                    "case": case.name,
                    "threads": used,
                    "measurements": [dataclasses.asdict(measurement) for measurement in measurements],
                }
                json_target.write_text(json.dumps(report, indent=1) + "\n")
        stdout().print(_table(measurements, f"{case.name}, {used} threads, torch {torch.__version__}"))
        stdout().print("of kda: the time over that of chunk_kda_fwd; error: of attn_out and final_state in float32")


def _table(measurements: Sequence[Measurement], title: str) -> Table:
    table = Table(title=title)
    for name in ("T", "heads", "program", "ms", "ktok*heads/s", "of kda", "error"):
        table.add_column(name, justify="left" if name == "program" else "right")
    for m in measurements:
        table.add_row(
            str(m.tokens),
            str(m.heads),
            m.program if m.program == "kda" else f"torch {m.program}",
            f"{m.milliseconds:.2f}",
            f"{m.token_heads_per_second / 1e3:.0f}",
            f"{m.speed_of_kda:.2f}",
            "" if m.error is None else f"{m.error:.0e}",
        )
    return table


if __name__ == "__main__":
    with output_errors():
        typer.run(compare)
