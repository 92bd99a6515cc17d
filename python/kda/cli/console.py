"""Output to the terminal, and errors that are the user's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_LONGEST_ERROR = 500


class UserError(Exception):
    """Something that the user can put right: shown as one line."""


@contextmanager
def user_errors(command: str) -> Iterator[None]:
    """Turn a UserError or a lack of memory into one line on stderr and exit code 2."""
    try:
        yield
    except UserError as error:
        message = str(error)
    except MemoryError as error:
        message = f"not enough memory: {error}" if str(error) else "not enough memory"
    except KeyboardInterrupt:
        print(f"kda {command}: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    else:
        return
    print(f"kda {command}: {one_line(message)}", file=sys.stderr)
    raise typer.Exit(2)


@contextmanager
def output_errors() -> Iterator[None]:
    """Turn what stdout does not take, a full disk above all, into one line on stderr and exit code 2.

    A closed pipe is not meant: whoever read it has seen enough, and typer ends in silence.
    """
    try:
        yield
    except OSError as error:
        what = error if error.filename else f"stdout cannot be written: {error.strerror or error}"
        with suppress(OSError):
            print(f"kda: {one_line(str(what))}", file=sys.stderr)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            _give_up_when_full(stream)
        raise SystemExit(2) from None


def _give_up_when_full(stream: TextIO) -> None:
    """Drop what a stream cannot take: the interpreter would try again at its end, complain, and exit with 120."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what the library refuses into a UserError; its messages say it all."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(str(error)) from None


def one_line(message: str) -> str:
    """Return a message without line breaks and control characters, which files may have put into it."""
    joined = " ".join(message.split())
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined)
    if len(clean) <= _LONGEST_ERROR:
        return clean
    half = _LONGEST_ERROR // 2
    return f"{clean[:half]} ... {clean[-half:]}"


def stdout() -> Console:
    """Return a console that leaves text as it is."""
    return Console(highlight=False, markup=False, emoji=False)


@contextmanager
def progress() -> Iterator[Progress]:
    """Show progress on stderr while the block runs, and leave nothing behind."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        yield shown
