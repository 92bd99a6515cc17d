"""`kda info`: what this installation is and can do."""

from __future__ import annotations

from rich.table import Table

from kda._info import info
from kda.cli.console import refusals, stdout


def show() -> None:
    """Print version, CPU features, threads and backends. Raises UserError."""
    with refusals():
        found = info()
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("version", found.version)
    table.add_row("CPU", found.cpu)
    table.add_row("CPU features", " ".join(found.cpu_features))
    table.add_row("instruction set", found.cpu_instruction_set)
    table.add_row("available", ", ".join(found.cpu_instruction_sets))
    table.add_row("threads", str(found.num_threads))
    for backend in found.backends:
        table.add_row(f"backend {backend.name}", f"{'found' if backend.available else 'missing'}: {backend.detail}")
    stdout().print(table)
