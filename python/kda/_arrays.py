"""Arrays of any library: how the extension sees them, and results of the caller's own kind.

The extension reads memory through the forms that `bindings/array.h` lists. torch is never imported here: a tensor
cannot exist before its library is loaded.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from kda import _kda, _torch_ops
from kda._arguments import fail
from kda._device import DeviceArray

# For messages; the extension alone decides what is accepted.
_ANY_ARRAY = "an array (NumPy, torch, or any with __dlpack__)"
_ANY_DTYPE = "dtype float32, float16 or bfloat16"


# What DLPack calls a CUDA device, and CUDA's legacy default stream.
_DLPACK_CUDA = 2
_LEGACY_STREAM = 1


class ArrayKind(Protocol):
    """What one array library needs: describe inputs, make outputs, and on a GPU its stream and memory."""

    def describe(self, op: str, name: str, array: Any) -> Any:
        """Return the form of `array` that the extension reads. Copies nothing."""

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """Return uninitialised memory for one result, on `like`'s device, that `describe` takes."""

    def finish(self, array: Any, dtype: str, like: Any) -> Any:
        """Turn what `empty` made, now filled, into an array of `like`'s library."""

    def adopt(self, bits: np.ndarray[Any, Any], dtype: str, like: Any) -> Any:
        """Turn the bits of float32 (uint32), float16 or bfloat16 (uint16) into an array like `like`, on its device."""

    def on_host(self, array: Any) -> Any:
        """Return the array, or a copy in the CPU's memory of one that is elsewhere."""

    def stream(self, like: Any) -> int:
        """Return the stream of `like`'s device that the library computes on; 0 on the CPU."""

    def allocator(self, like: Any) -> Callable[[int], tuple[Any, int]] | None:
        """Return what allocates bytes on `like`'s device, as an owner and an address; None: the extension does."""


def _lines(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an uninitialised array that begins with a cache line, as NumPy's own seldom do.

    Whole lines are written past the caches, and JAX takes them without a copy.
    """
    line = 64
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + line, np.uint8)
    start = -memory.__array_interface__["data"][0] % line
    return memory[start : start + size].view(dtype).reshape(shape)


class _NoStreams:
    """What a library has whose work is all on the CPU, or on the legacy default stream."""

    def stream(self, like: Any) -> int:
        """Return 0."""
        return 0

    def allocator(self, like: Any) -> Callable[[int], tuple[Any, int]] | None:
        """Return None."""
        return None


class NumpyKind(_NoStreams):
    """NumPy arrays; bfloat16 is the dtype that ml_dtypes registers."""

    def describe(self, op: str, name: str, array: Any) -> Any:
        """Return the array, and the dtype's name for bfloat16, which the buffer protocol cannot name."""
        if isinstance(array, np.ma.MaskedArray):
            fail(TypeError, op, name, "an array without a mask", "a masked array")
        if _is_bfloat16(array.dtype):
            return array.view(np.uint16), "bfloat16"
        return array, None

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """Return a NumPy array."""
        return _lines(shape, np.dtype(_numpy_dtype(dtype, like)))

    def finish(self, array: Any, dtype: str, like: Any) -> Any:
        """Return `array`."""
        return array

    def adopt(self, bits: np.ndarray[Any, Any], dtype: str, like: Any) -> Any:
        """Return the memory of `bits` as another dtype."""
        return bits.view(_numpy_dtype(dtype, like))

    def on_host(self, array: Any) -> Any:
        """Return the array."""
        return array


class TorchKind:
    """torch tensors, read through their address and strides: several times faster than DLPack, and of every version."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        names = ("float32", "float16", "bfloat16", "float64", "int32", "int64")
        self._dtypes = {name: getattr(torch, name) for name in names}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}

    def describe(self, op: str, name: str, array: Any) -> Any:
        """Return address, dtype, shape and strides; refuse what has no plain memory or wants a gradient."""
        if array.requires_grad and self._torch.is_grad_enabled():
            expected = (
                "a tensor that does not require grad, or torch.no_grad(), or a call inside autograd.Function.forward"
            )
            fail(
                ValueError,
                op,
                name,
                expected,
                "one that requires grad, of which this operator is the forward pass only",
            )
        if array.layout is not self._torch.strided or array.is_nested:
            kind = "a nested one" if array.is_nested else f"one with layout {array.layout}"
            fail(TypeError, op, name, "a strided tensor", kind)
        if array.is_neg():
            fail(
                TypeError,
                op,
                name,
                "a tensor with its signs in memory (resolve_neg())",
                "one with its negative bit set",
            )
        try:
            address = array.data_ptr()
        except RuntimeError:
            # What torch.func.vmap and others pass around.
            fail(TypeError, op, name, "a tensor with memory of its own", f"a {type(array).__name__} without")
        device = array.device
        dtype = self._names.get(array.dtype) or str(array.dtype).removeprefix("torch.")
        return array, address, dtype, tuple(array.shape), array.stride(), device.type, device.index or 0

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """Return a contiguous tensor on `like`'s device."""
        return self._torch.empty(shape, dtype=self._dtypes[dtype], device=like.device)

    def finish(self, array: Any, dtype: str, like: Any) -> Any:
        """Return `array`."""
        return array

    def adopt(self, bits: np.ndarray[Any, Any], dtype: str, like: Any) -> Any:
        """Return the memory of `bits` as a tensor, on `like`'s device."""
        signed = bits.view(np.int16 if bits.itemsize == 2 else np.int32)
        return self._torch.from_numpy(signed).view(self._dtypes[dtype]).to(like.device)

    def on_host(self, array: Any) -> Any:
        """Return a tensor on the CPU."""
        return array.cpu()

    def stream(self, like: Any) -> int:
        """Return the current stream of `like`'s device."""
        return int(self._torch.cuda.current_stream(like.device).cuda_stream) if like.is_cuda else 0

    def allocator(self, like: Any) -> Callable[[int], tuple[Any, int]] | None:
        """Allocate tensors: torch hands what is let go only to later work of the same stream, so nobody has to wait."""
        if not like.is_cuda:
            return None

        def allocate(size: int) -> tuple[Any, int]:
            memory = self._torch.empty(size, dtype=self._torch.uint8, device=like.device)
            return memory, memory.data_ptr()

        return allocate


class DlpackKind(_NoStreams):
    """Any other library of the array API, such as JAX and CuPy: arrays in and out by DLPack.

    On a GPU the library makes its arrays ready for the legacy default stream, on which they are read; results are in
    memory of our own, and complete when they are handed over.
    """

    def describe(self, op: str, name: str, array: Any) -> Any:
        """Return the array itself, whose `__dlpack__` the extension calls, or on a GPU what that returned."""
        if _cuda_device(array) is None:
            return array
        try:
            return array.__dlpack__(stream=_LEGACY_STREAM)
        except Exception:
            # The extension asks again, and says what came of it.
            return array

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """Return memory in a form that the extension reads: on the host a NumPy array of the same width, and dtype."""
        device = _cuda_device(like)
        if device is not None:
            return DeviceArray(shape, dtype, device).parts
        width = np.uint16 if dtype in ("bfloat16", "float16") else np.uint32
        return _lines(shape, np.dtype(width)), dtype

    def finish(self, array: Any, dtype: str, like: Any) -> Any:
        """Hand the memory to `like`'s library, which shares it or copies it as it likes."""
        device = _cuda_device(like)
        if device is not None:
            _kda.synchronize(device, 0)
        return _namespace(like).from_dlpack(_kda.exported(array))

    def adopt(self, bits: np.ndarray[Any, Any], dtype: str, like: Any) -> Any:
        """Hand the memory to `like`'s library."""
        device = _cuda_device(like)
        if device is None:
            return self.finish((bits, dtype), dtype, like)
        return self.finish(_DEVICE.adopt_on(device, bits, dtype).parts, dtype, like)

    def on_host(self, array: Any) -> Any:
        """Return a NumPy array for an array on a GPU."""
        if _cuda_device(array) is None:
            return array
        return array.get() if hasattr(array, "get") else np.asarray(array)


class DeviceKind(_NoStreams):
    """Our own arrays on a GPU."""

    def describe(self, op: str, name: str, array: DeviceArray) -> Any:
        """Return address, dtype, shape and strides."""
        return array.parts

    def empty(self, shape: tuple[int, ...], dtype: str, like: DeviceArray) -> DeviceArray:
        """Return an array on `like`'s device."""
        return DeviceArray(shape, dtype, like.device)

    def finish(self, array: DeviceArray, dtype: str, like: DeviceArray) -> DeviceArray:
        """Return `array`."""
        return array

    def adopt(self, bits: np.ndarray[Any, Any], dtype: str, like: DeviceArray) -> DeviceArray:
        """Return a copy of the memory on `like`'s device."""
        return self.adopt_on(like.device, bits, dtype)

    def adopt_on(self, device: int, bits: np.ndarray[Any, Any], dtype: str) -> DeviceArray:
        """Return a copy of the memory."""
        made = DeviceArray(bits.shape, dtype, device)
        made.fill_from(bits)
        return made

    def on_host(self, array: DeviceArray) -> np.ndarray[Any, Any]:
        """Return a copy in the host's memory."""
        return array.to_numpy()


_NUMPY = NumpyKind()
_DEVICE = DeviceKind()
_DLPACK = DlpackKind()
_torch_kind: TorchKind | None = None


def kind_of(op: str, name: str, array: Any) -> ArrayKind:
    """Return the kind of an array argument. Raises TypeError for anything that is no array."""
    global _torch_kind
    if isinstance(array, np.ndarray):
        return _NUMPY
    if isinstance(array, DeviceArray):
        return _DEVICE
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if _torch_kind is None:
            _torch_kind = TorchKind(torch)
            _torch_ops.register(torch)
        return _torch_kind
    if array is None:
        fail(TypeError, op, name, _ANY_ARRAY, "None")
    if isinstance(array, type) or not hasattr(array, "__dlpack__"):
        fail(TypeError, op, name, _ANY_ARRAY, type(array).__name__)
    return _DLPACK


def new(kind: ArrayKind, op: str, name: str, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """Return memory for an output. Raises MemoryError, whatever `like`'s library calls a size that cannot be had."""
    try:
        return kind.empty(shape, dtype, like)
    except (MemoryError, RuntimeError, ValueError) as error:
        size = ",".join(map(str, shape))
        raise MemoryError(f"{op}: {name}: expected memory for {dtype} [{size}], got too little") from error


def describe(op: str, name: str, array: Any | None) -> Any | None:
    """Return the form of an array argument that the extension reads; None stays None."""
    return None if array is None else kind_of(op, name, array).describe(op, name, array)


def on_host(op: str, name: str, array: Any | None) -> Any | None:
    """Return an array argument in the CPU's memory; None stays None."""
    return None if array is None else kind_of(op, name, array).on_host(array)


def describe_integers(op: str, name: str, values: Any | None) -> Any | None:
    """Return what the extension reads integers from: a list, or an array as `describe` gives it; None stays None."""
    if isinstance(values, (list, tuple, range)):
        return list(values)
    return describe(op, name, values)


def is_on_cpu(values: Any) -> bool:
    """Tell whether integers, a sequence or an array of any library, can be read without copying from a device."""
    if hasattr(values, "device") and hasattr(values.device, "type"):
        return bool(values.device.type == "cpu")
    if isinstance(values, np.ndarray) or not hasattr(values, "__dlpack_device__"):
        return True
    return bool(values.__dlpack_device__()[0] == 1)


def dtype_name(op: str, name: str, dtype: Any) -> str:
    """Return the name of a dtype of NumPy, ml_dtypes, torch or JAX, or given by its name. Raises TypeError."""
    if isinstance(dtype, str) and dtype in ("float32", "float16", "bfloat16"):
        return dtype
    if type(dtype).__module__ == "torch":
        found = str(dtype).removeprefix("torch.")
    elif dtype is None:
        found = "None"
    else:
        try:
            converted = np.dtype(dtype)
        except (TypeError, ValueError):
            fail(TypeError, op, name, _ANY_DTYPE, repr(dtype) if isinstance(dtype, str) else type(dtype).__name__)
        found = converted.name if converted.isnative else converted.str
    if found not in ("float32", "float16", "bfloat16"):
        fail(TypeError, op, name, _ANY_DTYPE, found)
    return found


def _cuda_device(array: Any) -> int | None:
    """Return the index of the CUDA device that an array with `__dlpack__` is on; None: it is elsewhere."""
    try:
        kind, index = array.__dlpack_device__()
    except Exception:
        # No such method, or nothing that has memory: the extension says what is wrong with it.
        return None
    return int(index) if kind == _DLPACK_CUDA else None


def _is_bfloat16(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "V" and dtype.type.__name__ == "bfloat16" and dtype.isnative


def _numpy_dtype(name: str, like: Any) -> Any:
    """Return a dtype by name; bfloat16 is `like`'s where it can be, since only ml_dtypes has another."""
    if name != "bfloat16":
        return np.dtype(name)
    return like.dtype if _is_bfloat16(like.dtype) else np.dtype(importlib.import_module("ml_dtypes").bfloat16)


def _namespace(array: Any) -> Any:
    """Return the module whose `from_dlpack` makes arrays of `array`'s library."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[type(array).__module__.partition(".")[0]]
