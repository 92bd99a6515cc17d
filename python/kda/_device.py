"""Arrays in the memory of a GPU that this package allocated: results for libraries that have DLPack, and files."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np

from kda import _kda


def _bits(dtype: str) -> np.dtype[Any]:
    """Return the unsigned integers that have the bits of a dtype."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else f"u{np.dtype(dtype).itemsize}")


class DeviceArray:
    """A contiguous array on a CUDA device. Work on it goes through the device's legacy default stream."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: int) -> None:
        """Allocate. Raises RuntimeError, MemoryError."""
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self._memory = _kda.DeviceMemory(device, math.prod(shape) * _bits(dtype).itemsize)

    @classmethod
    def from_numpy(cls, array: np.ndarray[Any, Any], device: int) -> DeviceArray:
        """Copy an array to a device."""
        made = cls(array.shape, array.dtype.name, device)
        made.fill_from(array)
        return made

    def fill_from(self, array: np.ndarray[Any, Any]) -> None:
        """Copy the elements of an array of as many bytes."""
        self._memory.copy_from_host(np.ascontiguousarray(array).view(_bits(self.dtype)))

    def to_numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy in the host's memory, after all work on the legacy default stream; bfloat16 by ml_dtypes."""
        bits = np.empty(self.shape, _bits(self.dtype))
        self._memory.copy_to_host(bits)
        if self.dtype != "bfloat16":
            return bits.view(self.dtype)
        return bits.view(importlib.import_module("ml_dtypes").bfloat16)

    @property
    def parts(self) -> tuple[Any, ...]:
        """What the extension reads: owner, address, dtype, shape, strides, device type and index."""
        strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return self._memory, self._memory.address, self.dtype, self.shape, strides, "cuda", self.device
