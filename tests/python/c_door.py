"""The aclnn-shaped C API through ctypes, on the very library that the Python package has loaded."""

import ctypes
import os
from contextlib import ExitStack, contextmanager
from ctypes import POINTER, byref, c_bool, c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

import numpy as np

import kda
from helpers import BFLOAT16
from kda import _cases
from kda._chunk_kda_fwd import OUTPUTS, Arguments, prepare

SUCCESS, NULL_POINTER, INVALID, RUNTIME_ERROR, EXECUTOR_NULL = 0, 161001, 161002, 361001, 561103

# aclDataType of CANN.
DATA_TYPES = {
    np.dtype(dtype): code
    for dtype, code in [("f4", 0), ("f2", 1), ("i1", 2), ("i4", 3), ("u1", 4), ("i8", 9), ("f8", 11), ("?", 12)]
} | {BFLOAT16: 27}
FORMAT_ND = 2

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
ATTRIBUTE_TYPES = {
    "layout": c_char_p,
    "scale": c_double,
    "chunk_size": c_int64,
    "safe_gate": c_bool,
    "lower_bound": c_double,
    "use_gate_in_kernel": c_bool,
    "state_v_first": c_bool,
}
ATTRIBUTES = tuple(ATTRIBUTE_TYPES)


def _load():
    names = sorted(Path(kda._kda.__file__).parent.glob("libkda.so*"))
    library = ctypes.CDLL(os.fspath(names[0]))
    library.aclGetRecentErrMsg.restype = c_char_p
    library.aclCreateTensor.restype = c_void_p
    library.aclCreateTensor.argtypes = [
        c_void_p,
        c_uint64,
        c_int,
        c_void_p,
        c_int64,
        c_int,
        c_void_p,
        c_uint64,
        c_void_p,
    ]
    library.aclDestroyTensor.argtypes = [c_void_p]
    library.aclCreateIntArray.restype = c_void_p
    library.aclCreateIntArray.argtypes = [c_void_p, c_uint64]
    library.aclDestroyIntArray.argtypes = [c_void_p]
    library.aclDestroyAclOpExecutor.argtypes = [c_void_p]
    tail = [POINTER(c_uint64), POINTER(c_void_p)]
    library.aclnnChunkKdaFwdGetWorkspaceSize.argtypes = [
        *[c_void_p] * len(INPUTS),
        *[c_void_p] * 2,
        *ATTRIBUTE_TYPES.values(),
        *[c_void_p] * len(OUTPUTS),
        *tail,
    ]
    library.aclnnKdaGateGetWorkspaceSize.argtypes = [*[c_void_p] * 3, c_bool, c_double, c_void_p, *tail]
    library.aclnnKdaGateCumsumGetWorkspaceSize.argtypes = [
        *[c_void_p] * 4, c_int64, c_bool, c_bool, c_double, c_void_p, *tail
    ]  # fmt: skip
    for name in ("aclnnChunkKdaFwd", "aclnnKdaGate", "aclnnKdaGateCumsum"):
        getattr(library, name).argtypes = [c_void_p, c_uint64, c_void_p, c_void_p]
    return library


LIBRARY = _load()


def last_error():
    """Return the calling thread's message, and clear it."""
    message = LIBRARY.aclGetRecentErrMsg()
    return None if message is None else message.decode()


def _int64s(values):
    return (c_int64 * len(values))(*values)


def can_hold(array):
    """Tell whether an aclTensor can describe a NumPy array."""
    return (
        type(array) is np.ndarray
        and array.dtype in DATA_TYPES
        and all(stride % array.itemsize == 0 for stride in array.strides)
    )


@contextmanager
def tensor(array):
    """Give a handle for a NumPy array; null for None."""
    if array is None:
        yield None
        return
    strides = _int64s([stride // array.itemsize for stride in array.strides])
    shape = _int64s(array.shape)
    code = DATA_TYPES[array.dtype]
    rank = len(array.shape)
    handle = LIBRARY.aclCreateTensor(shape, rank, code, strides, 0, FORMAT_ND, shape, rank, array.ctypes.data)
    assert handle is not None, last_error()
    try:
        yield handle
    finally:
        assert LIBRARY.aclDestroyTensor(handle) == SUCCESS


@contextmanager
def int_array(values):
    """Give a handle for a list of integers; null for None."""
    if values is None:
        yield None
        return
    handle = LIBRARY.aclCreateIntArray(_int64s(values), len(values))
    assert handle is not None, last_error()
    try:
        yield handle
    finally:
        assert LIBRARY.aclDestroyIntArray(handle) == SUCCESS


class RefusedError(Exception):
    """A status that is not 0, and the message."""

    def __init__(self, status):
        self.status = status
        super().__init__(last_error())


def _run(name, arguments):
    """Both phases of an operator, with the workspace that the first one asks for."""
    size, executor = c_uint64(77), c_void_p(88)
    status = getattr(LIBRARY, f"{name}GetWorkspaceSize")(*arguments, byref(size), byref(executor))
    if status != SUCCESS:
        assert (size.value, executor.value) == (77, 88)
        raise RefusedError(status)
    workspace = np.empty(size.value, np.uint8)
    status = getattr(LIBRARY, name)(workspace.ctypes.data, size.value, executor, None)
    if status != SUCCESS:
        raise RefusedError(status)


def _with_handles(arrays, lists, run):
    """Call `run` with handles of the arrays and lists of integers."""
    with ExitStack() as stack:
        handles = [stack.enter_context(tensor(array)) for array in arrays]
        return run(handles, [stack.enter_context(int_array(values)) for values in lists])


def make_outputs(arguments, names=OUTPUTS):
    """Return arrays, full of NaN, for the named outputs of a legal call."""
    specs = dict(zip(OUTPUTS, prepare(Arguments(**arguments)).outputs(), strict=True))
    made = {}
    for name in names:
        shape, dtype = specs[name]
        made[name] = np.full(shape, np.nan, _cases.DTYPES[dtype])
    return made


def chunk_kda_fwd(arguments, outputs):
    """Fill `outputs` by aclnnChunkKdaFwd, from the arguments of kda.chunk_kda_fwd. Raises RefusedError."""
    values = {"layout": "BSND", "chunk_size": 64, "lower_bound": -5.0} | arguments
    layout = values["layout"]
    attributes = [layout if layout is None else layout.encode(), *(values.get(name, False) for name in ATTRIBUTES[1:])]
    inputs = [values.get(name) for name in INPUTS]

    def run(handles, lists):
        _run("aclnnChunkKdaFwd", [*handles[: len(INPUTS)], *lists, *attributes, *handles[len(INPUTS) :]])

    arrays = [*inputs, *(outputs.get(name) for name in OUTPUTS)]
    _with_handles(arrays, [values.get("cu_seqlens"), values.get("chunk_indices")], run)
    return outputs


def kda_gate(arguments, out):
    """Fill `out` by aclnnKdaGate, from the arguments of kda.fused_kda_gate. Raises RefusedError."""
    bound = arguments.get("lower_bound")
    arrays = [*(arguments.get(name) for name in ("g", "A_log", "dt_bias")), out]

    def run(handles, _):
        _run("aclnnKdaGate", [*handles[:3], bound is not None, bound or 0.0, handles[3]])

    _with_handles(arrays, [], run)
    return out


def kda_gate_cumsum(arguments, gk):
    """Fill `gk` by aclnnKdaGateCumsum, from the arguments of kda.kda_gate_cumsum. Raises RefusedError."""
    values = {"lower_bound": -5.0, "use_gate_in_kernel": False, "safe_gate": False} | arguments
    arrays = [*(values.get(name) for name in ("g", "A_log", "dt_bias")), gk]
    flags = (values["use_gate_in_kernel"], values["safe_gate"], values["lower_bound"])

    def run(handles, lists):
        _run("aclnnKdaGateCumsum", [*handles[:3], *lists, values["chunk_size"], *flags, handles[3]])

    _with_handles(arrays, [values.get("cu_seqlens")], run)
    return gk
