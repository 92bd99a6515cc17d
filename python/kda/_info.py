"""What this installation is and can do."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from kda import _kda
from kda._threads import get_num_threads


@dataclass(frozen=True)
class Backend:
    """A backend: its name, whether this process can use it, and what it found or why it is missing."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True)
class Info:
    """What `info()` returns."""

    version: str
    cpu: str
    """Name of the processor, as far as the system tells."""
    cpu_features: tuple[str, ...]
    """Vector extensions that the system reports, in its own spelling."""
    cpu_instruction_set: str
    """The instruction set that the CPU backend uses in this process."""
    cpu_instruction_sets: tuple[str, ...]
    """All that this CPU and this build have in common, best first."""
    num_threads: int
    backends: tuple[Backend, ...]


# How the flags of vector extensions begin, on x86-64 and on ARM.
_VECTOR_FLAGS = ("sse4", "avx", "fma", "f16c", "amx", "asimd", "fphp", "sve", "bf16")


def _cpuinfo(key: str) -> str:
    """Return the first value of a key of /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def _cpu_flags() -> list[str]:
    return (_cpuinfo("flags") or _cpuinfo("Features")).split()


def info() -> Info:
    """Return version, processor, instruction sets, threads and backends of this process."""
    return Info(
        version=_kda.version(),
        cpu=_cpuinfo("model name") or platform.machine(),
        cpu_features=tuple(flag for flag in _cpu_flags() if flag.startswith(_VECTOR_FLAGS)),
        cpu_instruction_set=_kda.cpu_instruction_set(),
        cpu_instruction_sets=tuple(_kda.cpu_instruction_sets()),
        num_threads=get_num_threads(),
        backends=tuple(Backend(*backend) for backend in _kda.backends()),
    )
