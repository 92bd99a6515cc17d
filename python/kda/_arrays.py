"""Arrays of any library: how the extension sees them, and results of the caller's own kind.

The extension reads memory through the forms that `bindings/array.h` lists. torch is never imported here: a tensor
cannot exist before its library is loaded.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Protocol

import numpy as np

from kda import _kda, _torch_ops
from kda._arguments import fail

# For messages; the extension alone decides what is accepted.
_ANY_ARRAY = "an array (NumPy, torch, or any with __dlpack__)"
_ANY_DTYPE = "dtype float32, float16 or bfloat16"


class ArrayKind(Protocol):
    """What one array library needs: describe inputs, make outputs."""

    def describe(self, op: str, name: str, array: Any) -> Any:
        """Return the form of `array` that the extension reads. Copies nothing."""

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """Return uninitialised memory for one result, on `like`'s device, that `describe` takes."""

    def finish(self, array: Any, dtype: str, like: Any) -> Any:
        """Turn what `empty` made, now filled, into an array of `like`'s library."""

    def adopt(self, bits: np.ndarray[Any, Any], dtype: str, like: Any) -> Any:
        """Turn the bits of float32 (uint32), float16 or bfloat16 (uint16) into an array of `like`'s library."""


class NumpyKind:
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
        return np.empty(shape, _numpy_dtype(dtype, like))

    def finish(self, array: Any, dtype: str, like: Any) -> Any:
        """Return `array`."""
        return array

    def adopt(self, bits: np.ndarray[Any, Any], dtype: str, like: Any) -> Any:
        """Return the memory of `bits` as another dtype."""
        return bits.view(_numpy_dtype(dtype, like))


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
        if array.layout is not self._torch.strided:
            fail(TypeError, op, name, "a strided tensor", f"one with layout {array.layout}")
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


class DlpackKind:
    """Any other library of the array API, such as JAX: arrays in and out by DLPack."""

    def describe(self, op: str, name: str, array: Any) -> Any:
        """Return the array itself; the extension calls its `__dlpack__`."""
        return array

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """Return host memory as a NumPy array of the same width, and the dtype's name."""
        width = np.uint16 if dtype in ("bfloat16", "float16") else np.uint32
        return np.empty(shape, width), dtype

    def finish(self, array: Any, dtype: str, like: Any) -> Any:
        """Hand the memory to `like`'s library, which shares it or copies it as it likes."""
        return _namespace(like).from_dlpack(_kda.exported(array[0], dtype))

    def adopt(self, bits: np.ndarray[Any, Any], dtype: str, like: Any) -> Any:
        """Hand the memory to `like`'s library."""
        return self.finish((bits, dtype), dtype, like)


_NUMPY = NumpyKind()
_DLPACK = DlpackKind()
_torch_kind: TorchKind | None = None


def kind_of(op: str, name: str, array: Any) -> ArrayKind:
    """Return the kind of an array argument. Raises TypeError for anything that is no array."""
    global _torch_kind
    if isinstance(array, np.ndarray):
        return _NUMPY
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
