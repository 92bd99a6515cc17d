"""Operator inputs from safetensors files, and outputs into them."""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kda._chunk_kda_fwd import Arguments
from kda.cli.console import UserError

REQUIRED = ("q", "k", "v", "g", "beta")
OPTIONAL = ("A_log", "dt_bias", "initial_state", "cu_seqlens", "chunk_indices")
# Bytes of an element; others have no NumPy dtype, or none that an operator could mean.
_READABLE = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8}
_TEMPORARIES = itertools.count()


@dataclass(frozen=True)
class Attributes:
    """Attributes of a call as files and options give them; None where they do not."""

    layout: str | None = None
    scale: float | None = None
    chunk_size: int | None = None
    use_gate_in_kernel: bool | None = None
    safe_gate: bool | None = None
    lower_bound: float | None = None
    state_v_first: bool | None = None

    def given(self) -> dict[str, Any]:
        """Return what is given, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


def _parse_bool(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


def _parse_optional_float(text: str) -> float | None:
    return None if text.strip().lower() in ("none", "null") else float(text)


_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "layout": (str, "a string"),
    "scale": (float, "a number"),
    "chunk_size": (int, "an integer"),
    "use_gate_in_kernel": (_parse_bool, "true or false"),
    "safe_gate": (_parse_bool, "true or false"),
    "lower_bound": (_parse_optional_float, "a number"),
    "state_v_first": (_parse_bool, "true or false"),
}


def parse_metadata(metadata: Mapping[str, str]) -> Attributes:
    """Read the attributes of a call from a file's metadata; other keys are left alone. Raises UserError."""
    values = {}
    for name, (parse, expected) in _PARSERS.items():
        if name not in metadata:
            continue
        try:
            values[name] = parse(metadata[name])
        except (ValueError, KeyError, OverflowError):
            raise UserError(f"metadata {name}: expected {expected}, got {metadata[name]!r}") from None
    return Attributes(**values)


def read_arguments(path: Path, overrides: Attributes) -> Arguments:
    """Read a call of chunk_kda_fwd. Raises UserError for whatever is wrong with the file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError("not a regular file")
        with safe_open(path, framework="numpy") as file:
            attributes = parse_metadata(file.metadata() or {}).given() | overrides.given()
            tensors = _read_tensors(file)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    width = tensors["q"].shape[-1] if tensors["q"].ndim else 1
    attributes.setdefault("scale", max(width, 1) ** -0.5)
    return Arguments(**(tensors | attributes))


def _read_tensors(file: Any) -> dict[str, Any]:
    present = set(file.keys())
    missing = [name for name in REQUIRED if name not in present]
    if missing:
        raise UserError(f"tensor {missing[0]} is missing; needed are {', '.join(REQUIRED)}")
    names = [name for name in (*REQUIRED, *OPTIONAL) if name in present]
    require_memory(sum(_checked_bytes(file.get_slice(name), name) for name in names))
    return {name: file.get_tensor(name) for name in names}


def _checked_bytes(entry: Any, name: str) -> int:
    dtype, shape = str(entry.get_dtype()), [int(extent) for extent in entry.get_shape()]
    if dtype not in _READABLE:
        raise UserError(f"tensor {name}: expected a dtype of {', '.join(_READABLE)}, got {dtype}")
    return math.prod(shape) * _READABLE[dtype]


def require_memory(size: int) -> None:
    """Refuse what would not fit, while that is still cheap: a file of holes can name any size. Raises UserError."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > available:
        raise UserError(f"{size} bytes are needed, and this machine has {available} bytes of memory")


def check_output(output: Path, source: Path | None) -> None:
    """Refuse an output that would destroy the input, or a device. Raises UserError."""
    try:
        if not output.exists():
            return
        if not output.is_file():
            raise UserError(f"output {output} exists and is not a regular file")
        if source is not None and source.exists() and output.samefile(source):
            raise UserError(f"output {output} is the input file")
    except OSError as error:
        raise UserError(f"output {output}: {error.strerror}") from None


def _resolved(output: Path) -> Path:
    """Return where an output is to be, links followed. Raises UserError."""
    try:
        target = Path(os.path.realpath(output))
    except OSError as error:  # the current folder is gone
        raise UserError(f"output {output} cannot be written: {error.strerror}") from None
    if target.is_symlink():
        raise UserError(f"output {output} cannot be written: its symbolic links lead in a circle")
    return target


@contextmanager
def new_file(output: Path) -> Iterator[Path]:
    """Give a file beside `output` to write to, and put it in `output`'s place when the block succeeds.

    It is made at once, so that a folder that takes no files is known before anything is computed. Raises UserError.
    """
    target = _resolved(output)
    temporary = target.with_name(f".kda-{os.getpid()}-{next(_TEMPORARIES)}.tmp")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise UserError(f"output {output} cannot be written: {error.strerror}") from None
    try:
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise UserError(f"output {output} cannot be written: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UserError(f"output {output} cannot be written: {error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def new_files(source: Path | None, *outputs: Path | None) -> Iterator[list[Path | None]]:
    """Give files to write to, as `new_file`, for the outputs that are named, none of which may be `source`.

    Raises UserError.
    """
    named = [output for output in outputs if output is not None]
    for output in named:
        check_output(output, source)
    if len({_resolved(output) for output in named}) < len(named):
        raise UserError(f"output {named[-1]} is named twice")
    with ExitStack() as stack:
        yield [None if output is None else stack.enter_context(new_file(output)) for output in outputs]


def write(path: Path, tensors: Mapping[str, npt.NDArray[Any]], attributes: Arguments, state_products: str) -> None:
    """Write outputs under their names, with the attributes and the products that made them."""
    metadata = {name: _text(getattr(attributes, name)) for name in _PARSERS if getattr(attributes, name) is not None}
    metadata["state_products"] = state_products
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
