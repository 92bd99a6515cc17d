"""What the C API refuses that Python cannot ask for: outputs, handles, workspaces and executors."""

import contextlib
import re
import subprocess
import sys
from ctypes import byref, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import pytest

import c_door
from c_door import EXECUTOR_NULL, INVALID, LIBRARY, NULL_POINTER, RUNTIME_ERROR, SUCCESS, RefusedError
from helpers import BFLOAT16, PACKED, PLAIN, arguments
from kda._chunk_kda_fwd import OUTPUTS

SHAPE = (1, 5, 1, 16)


def made(*shape, dtype=BFLOAT16):
    return np.full(shape, np.nan, dtype)


def overlapping():
    return np.lib.stride_tricks.as_strided(made(1, 5, 1, 16), SHAPE, (160, 2, 32, 2))


# What is wrong, the changed outputs, status, argument; expected and given as regular expressions.
ILLEGAL_OUTPUTS = [
    ("no attn_out", {"attn_out": None}, NULL_POINTER, "attn_out", "a tensor", "none"),
    ("no Aqk", {"Aqk": None}, NULL_POINTER, "Aqk", "a tensor", "none"),
    ("no Akk", {"Akk": None}, NULL_POINTER, "Akk", "a tensor", "none"),
    ("attn_out dtype", {"attn_out": made(*SHAPE, dtype="f4")}, INVALID, "attn_out", "bfloat16", "float32"),
    ("state dtype", {"final_state": made(1, 1, 16, 16)}, INVALID, "final_state", "float32", "bfloat16"),
    ("gk dtype", {"gk": made(1, 1, 5, 16)}, INVALID, "gk", "float32", "bfloat16"),
    ("h int8", {"h": np.zeros((1, 1, 1, 16, 16), np.int8)}, INVALID, "h", "bfloat16", "int8"),
    ("attn_out tokens", {"attn_out": made(1, 6, 1, 16)}, INVALID, "attn_out", "1,5,1,16", "1,6,1,16"),
    ("Aqk width", {"Aqk": made(1, 1, 5, 128)}, INVALID, "Aqk", "1,1,5,64", "1,1,5,128"),
    ("w rank", {"w": made(1, 5, 16)}, INVALID, "w", "rank 4", "rank 3"),
    ("h chunks", {"h": made(1, 2, 1, 16, 16)}, INVALID, "h", "1,1,1,16,16", "1,2,1,16,16"),
    ("v_new shape", {"v_new": made(1, 1, 5, 32)}, INVALID, "v_new", "1,1,5,16", "1,1,5,32"),
    ("overlapping rows", {"attn_out": overlapping()}, INVALID, "attn_out", "memory of its own", "strides"),
]


def outputs_of(call, **changes):
    return c_door.make_outputs(call) | changes


@pytest.mark.parametrize(
    ("changes", "status", "name", "expected", "given"),
    [row[1:] for row in ILLEGAL_OUTPUTS],
    ids=[row[0] for row in ILLEGAL_OUTPUTS],
)
def test_illegal_outputs(changes, status, name, expected, given):
    call = arguments(PLAIN)
    with pytest.raises(RefusedError) as raised:
        c_door.chunk_kda_fwd(call, outputs_of(call, **changes))
    assert raised.value.status == status
    assert re.search(rf"^chunk_kda_fwd: {name}: expected .*({expected}).*, got .*({given})", str(raised.value))


def test_outputs_that_share_memory():
    call = arguments(PLAIN)
    with pytest.raises(RefusedError, match="attn_out: expected memory of its own, got memory shared with v$"):
        c_door.chunk_kda_fwd(call, outputs_of(call, attn_out=call["v"]))
    shared = made(1, 1, 5, 16)
    with pytest.raises(RefusedError, match="w: expected memory of its own, got memory shared with kg$") as raised:
        c_door.chunk_kda_fwd(call, outputs_of(call, w=shared, kg=shared))
    assert raised.value.status == INVALID


def test_null_layout():
    with pytest.raises(RefusedError, match="layout: expected BSND, BNSD, TND or NTD, got a null pointer") as raised:
        c_door.chunk_kda_fwd(arguments(PLAIN, layout=None), outputs_of(arguments(PLAIN)))
    assert raised.value.status == INVALID


def test_packed_h_with_and_without_batch():
    call = arguments(PACKED)
    made = c_door.chunk_kda_fwd(call, c_door.make_outputs(call))
    batched = c_door.make_outputs(call)
    batched["h"] = batched["h"][None]
    c_door.chunk_kda_fwd(call, batched)
    assert batched["h"].tobytes() == made["h"].tobytes()


@pytest.mark.parametrize("strides", ["padded", "inner"])
def test_strided_outputs(strides):
    call = arguments(PLAIN)
    expected = c_door.chunk_kda_fwd(call, c_door.make_outputs(call))
    outputs = {}
    for name, array in expected.items():
        wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), np.nan, array.dtype)
        outputs[name] = wide[..., ::2] if strides == "inner" else wide[..., : array.shape[-1]]
    c_door.chunk_kda_fwd(call, outputs)
    for name in OUTPUTS:
        assert outputs[name].tobytes() == expected[name].tobytes(), name
        wide = outputs[name].base
        assert np.isnan(wide.astype(np.float32)).sum() == wide.size // 2, name


@contextlib.contextmanager
def planned():
    """Give the handles of a gate call's first phase: (workspace size, executor, output)."""
    g, A_log, out = np.ones((3, 2, 4), np.float32), np.zeros(2, np.float32), np.full((3, 2, 4), np.nan, np.float32)
    size, executor = c_uint64(), c_void_p()
    with c_door.tensor(g) as g_handle, c_door.tensor(A_log) as A_log_handle, c_door.tensor(out) as out_handle:
        status = LIBRARY.aclnnKdaGateGetWorkspaceSize(
            g_handle, A_log_handle, None, False, 0.0, out_handle, byref(size), byref(executor)
        )
        assert status == SUCCESS, c_door.last_error()
    yield size.value, executor, out


def test_the_second_phase_needs_no_tensors():
    with planned() as (size, executor, out):
        assert LIBRARY.aclnnKdaGate(None, size, executor, None) == SUCCESS
    assert np.allclose(out, -np.log1p(np.e), rtol=1e-6)


def test_an_executor_serves_one_call():
    with planned() as (size, executor, _):
        assert LIBRARY.aclnnKdaGate(None, size, executor, None) == SUCCESS
        assert LIBRARY.aclnnKdaGate(None, size, executor, None) == INVALID
        assert (
            c_door.last_error()
            == "kda_gate: executor: expected a live executor, got one that is used up, destroyed or unknown"
        )
        assert c_door.last_error() is None
        assert LIBRARY.aclDestroyAclOpExecutor(executor) == INVALID


def test_a_null_executor():
    assert LIBRARY.aclnnKdaGate(None, 0, None, None) == EXECUTOR_NULL
    assert c_door.last_error() == "kda_gate: executor: expected a live executor, got a null pointer"


def test_an_executor_of_another_operator():
    with planned() as (size, executor, out):
        assert LIBRARY.aclnnKdaGateCumsum(None, size, executor, None) == INVALID
        assert "expected an executor of kda_gate_cumsum, got one of kda_gate" in c_door.last_error()
        assert LIBRARY.aclDestroyAclOpExecutor(executor) == SUCCESS
    assert np.isnan(out).all()


@pytest.mark.parametrize("given", ["null", "small"])
def test_a_workspace_that_does_not_suffice(given):
    call = arguments(PLAIN)
    outputs = c_door.make_outputs(call)
    plan = LIBRARY.aclnnChunkKdaFwdGetWorkspaceSize
    seen = []

    def spoiled(*handles):
        seen.append(plan(*handles))
        size = handles[-2]._obj
        seen.append(size.value)
        size.value = size.value - 1 if given == "small" else 0
        return seen[0]

    LIBRARY.aclnnChunkKdaFwdGetWorkspaceSize = spoiled
    try:
        with pytest.raises(RefusedError, match="chunk_kda_fwd: workspace: expected .*, got ") as raised:
            c_door.chunk_kda_fwd(call, outputs)
    finally:
        LIBRARY.aclnnChunkKdaFwdGetWorkspaceSize = plan
    assert seen[1] > 0
    assert raised.value.status == RUNTIME_ERROR
    assert all(np.isnan(array.astype(np.float32)).all() for array in outputs.values())


def test_destroyed_tensors():
    with c_door.tensor(np.zeros((3, 2, 4), np.float32)) as g:
        pass
    size, executor = c_uint64(77), c_void_p(88)
    plan = LIBRARY.aclnnKdaGateGetWorkspaceSize
    assert plan(g, None, None, True, -5.0, g, byref(size), byref(executor)) == INVALID
    assert "g: expected a live aclTensor, got one that is destroyed or unknown" in c_door.last_error()
    assert (size.value, executor.value) == (77, 88)
    assert LIBRARY.aclDestroyTensor(g) == INVALID


@pytest.mark.parametrize("missing", ["workspaceSize", "executor"])
def test_nowhere_to_store_the_plan(missing):
    size, executor = c_uint64(77), c_void_p(88)
    pointers = [None if missing == "workspaceSize" else byref(size), None if missing == "executor" else byref(executor)]
    assert LIBRARY.aclnnKdaGateGetWorkspaceSize(None, None, None, True, -5.0, None, *pointers) == NULL_POINTER
    assert c_door.last_error() == f"kda_gate: {missing}: expected where to store it, got a null pointer"


FORKING = """
import os, signal, threading, warnings
from ctypes import c_int64, c_uint64, c_void_p
from c_door import LIBRARY

warnings.simplefilter("ignore")
values, busy = (c_int64 * 2)(0, 70), True

def make_and_destroy():
    array = c_void_p(LIBRARY.aclCreateIntArray(values, c_uint64(2)))
    return LIBRARY.aclDestroyIntArray(array)

def work():
    while busy:
        make_and_destroy()

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
statuses = []
for _ in range(100):
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        os._exit(make_and_destroy())
    statuses.append(os.waitpid(child, 0)[1])
    if statuses[-1] != 0:
        break
busy = False
for thread in threads:
    thread.join()
print(statuses[-1])
"""


def test_a_forked_child_can_use_what_the_parents_threads_use():
    done = subprocess.run(
        [sys.executable, "-c", FORKING], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"
