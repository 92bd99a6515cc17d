"""The commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kda import __version__
from kda.cli import bench as bench_command
from kda.cli import info as info_command
from kda.cli import inspect as inspect_command
from kda.cli import run as run_command
from kda.cli import verify as verify_command
from kda.cli.console import stdout, user_errors
from kda.cli.files import Attributes

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Backend = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, or one of several GPUs as in cuda:1.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, max=4096, metavar="N", help="CPU threads.")]
InputFile = Annotated[Path, typer.Argument(metavar="INPUT", help="A safetensors file of operator inputs.")]
Layout = Annotated[str | None, typer.Option(help="BSND, BNSD, TND or NTD.")]
Scale = Annotated[float | None, typer.Option(help="Default: K ** -0.5.")]
ChunkSize = Annotated[int | None, typer.Option(help="64 or 128.")]
UseGateInKernel = Annotated[bool | None, typer.Option(help="Make the gate from g.")]
SafeGate = Annotated[bool | None, typer.Option(help="The bounded gate.")]
LowerBound = Annotated[float | None, typer.Option(help="Of the bounded gate, in [-5, 0).")]
StateVFirst = Annotated[bool | None, typer.Option(help="States are [..., V, K].")]
StateProducts = Annotated[
    str, typer.Option(metavar="FORMAT", help="float32, or bfloat16: faster and less exact, where the CPU has it.")
]


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        stdout().print(f"kda {__version__}")
        raise typer.Exit()


@app.callback()
def kda_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Kimi Delta Attention operators on this machine."""


@app.command()
def run(
    input_file: InputFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The safetensors file to write.")],
    backend: Backend = "cpu",
    threads: Threads = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with the float64 reference.")] = False,
    outputs: Annotated[str | None, typer.Option(metavar="NAMES", help="Outputs, by comma. Default: all.")] = None,
    state_products: StateProducts = "float32",
    layout: Layout = None,
    scale: Scale = None,
    chunk_size: ChunkSize = None,
    use_gate_in_kernel: UseGateInKernel = None,
    safe_gate: SafeGate = None,
    lower_bound: LowerBound = None,
    state_v_first: StateVFirst = None,
) -> None:
    """Compute chunk_kda_fwd on the tensors of a file.

    Reads q, k, v, g and beta, and A_log, dt_bias, initial_state, cu_seqlens and chunk_indices where present. Attributes
    come from the file's metadata; an option overrides its own. Exit code 1: a bound of --check was missed; 2: anything
    is wrong with files or arguments.
    """
    overrides = Attributes(
        layout=layout,
        scale=scale,
        chunk_size=chunk_size,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
    )
    with user_errors("run"):
        passed = run_command.run(input_file, output, overrides, backend, threads, outputs, state_products, check=check)
    raise typer.Exit(0 if passed else 1)


@app.command()
def inspect(
    input_file: InputFile,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw them.")] = None,
    layout: Layout = None,
    scale: Scale = None,
    chunk_size: ChunkSize = None,
    use_gate_in_kernel: UseGateInKernel = None,
    safe_gate: SafeGate = None,
    lower_bound: LowerBound = None,
    state_v_first: StateVFirst = None,
) -> None:
    """Show what a layer's gates and keys look like, and what of it breaks kernels.

    Reads what `kda run` reads. Per value head: the decays of single steps, the half-lives of the channels, and how far
    cumulative gates span; how alike the keys are; how well (I + A), the system of a chunk, is conditioned. Names heads
    and tokens where other kernels have been seen to fail. Exit code 2: anything is wrong with files or arguments.
    """
    overrides = Attributes(
        layout=layout,
        scale=scale,
        chunk_size=chunk_size,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
    )
    with user_errors("inspect"):
        inspect_command.show(input_file, overrides, json_file, plot_file)


@app.command()
def verify(
    cases: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A case file, named like the package's own.")
    ] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", metavar="TEXT", help="Only cases with TEXT (or a pattern with * and ?) in their names."
        ),
    ] = None,
    backend: Backend = "cpu",
    threads: Threads = None,
    state_products: StateProducts = "float32",
) -> None:
    """Run the cases of every operator and compare every output with the float64 reference.

    The name of a case file tells the operator: kda_gate.json, kda_gate_cumsum.json, or chunk_kda_fwd.json and any
    other. Exit code 1: a case failed; 2: there is no such file, or no such case.
    """
    with user_errors("verify"):
        passed = verify_command.verify(cases, filters or [], threads, backend, state_products)
    raise typer.Exit(0 if passed else 1)


@app.command()
def bench(
    backend: Backend = "cpu",
    threads: Threads = None,
    tokens: Annotated[str, typer.Option(metavar="T,T,...", help="Numbers of tokens.")] = "512,2048,8192",
    heads: Annotated[str, typer.Option(metavar="H,H,...", help="Numbers of value heads.")] = "32,4",
    filters: Annotated[
        list[str] | None, typer.Option("--filter", metavar="TEXT", help="Other cases, as for verify; with other sizes.")
    ] = None,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="Other shapes, each beside K = V = 128 per unit of nominal work.")
    ] = False,
    state_products: StateProducts = "float32",
    scaling: Annotated[bool, typer.Option("--scaling", help="Compare with one thread, too.")] = False,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Measurements of each, for the median.")] = 7,
    sgemm_size: Annotated[int, typer.Option(min=1, max=16384, help="Rows of the matrices compared with.")] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw a roofline.")] = None,
) -> None:
    """Time chunk_kda_fwd, on the CPU beside a float32 matrix product and a copy in the same run.

    The cases are those of tests/op_cases, scaled to other numbers of tokens and heads.

    The matrix product is limited to the instruction set that KDA_CPU_ISA names.
    """
    with user_errors("bench"):
        settings = bench_command.Settings(
            threads=bench_command.default_threads(threads),
            tokens=bench_command.parse_sizes("--tokens", tokens),
            heads=bench_command.parse_sizes("--heads", heads),
            filters=tuple(filters or ()),
            rounds=rounds,
            sgemm_size=sgemm_size,
            shapes=shapes,
            scaling=scaling,
            state_products=state_products,
        )
        bench_command.bench(settings, backend, json_file, plot_file)


@app.command()
def info() -> None:
    """Show version, CPU features, threads and backends."""
    with user_errors("info"):
        info_command.show()
