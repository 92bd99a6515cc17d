"""Where a command computes: on the CPU, or on a GPU with arrays of our own there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kda import _kda
from kda._chunk_kda_fwd import Arguments
from kda._device import DeviceArray
from kda._info import info
from kda.cli.console import UserError, refusals

_AnyArguments = TypeVar("_AnyArguments", Arguments, dict[str, Any])


@dataclass(frozen=True)
class Target:
    """A backend, and which of its devices."""

    name: str
    device: int | None = None
    """None: the CPU."""

    def place(self, arguments: _AnyArguments) -> _AnyArguments:
        """Return the arguments of a call with every NumPy array where the call is to run."""
        if self.device is None:
            return arguments
        if isinstance(arguments, dict):
            return {name: self._placed(value) for name, value in arguments.items()}
        return Arguments(*map(self._placed, arguments))

    def fetch(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a result as a NumPy array."""
        return array.to_numpy() if isinstance(array, DeviceArray) else array

    def allocator(self) -> Callable[[int], tuple[Any, int]] | None:
        """Return what gives a workspace to one call after the other; None on the CPU."""
        if self.device is None:
            return None
        device, memory = self.device, dict[int, _kda.DeviceMemory]()

        def allocate(size: int) -> tuple[Any, int]:
            if size not in memory:
                memory[size] = _kda.DeviceMemory(device, size)
            return memory[size], memory[size].address

        return allocate

    def wait(self) -> None:
        """Wait until everything is computed."""
        if self.device is not None:
            _kda.synchronize(self.device, 0)

    def _placed(self, value: Any) -> Any:
        if self.device is None or not isinstance(value, np.ndarray) or value.dtype.kind == "i":
            return value  # integers are metadata, which stays on the host
        return DeviceArray.from_numpy(value, self.device)


CPU = Target("cpu")


def parse_target(text: str) -> Target:
    """Read "cpu", "cuda" or "cuda:1", and refuse what is unknown or missing. Raises UserError."""
    name, colon, index = text.partition(":")
    with refusals():
        found = {backend.name: backend for backend in info().backends}
    if name not in found or (colon and (name == "cpu" or not index.isdecimal())):
        raise UserError(f"--backend: expected one of {', '.join(found)}, or cuda and a device as in cuda:1, got {text}")
    if not found[name].available:
        raise UserError(f"--backend {name} is not available: {found[name].detail}")
    return CPU if name == "cpu" else Target(name, int(index or 0))
