"""Sizes beyond memory: MemoryError, from a check or from an allocation that fails, and never a crash."""

import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kda
from helpers import BFLOAT16, FULL, KEEP_ALL, arguments, examples

MIB = 2**20


def boundless(tokens, heads=1, dim=16):
    """Return a call that names any number of tokens in next to no memory."""

    def array(width, dtype):
        return np.broadcast_to(np.full(1, -0.25, dtype), (1, tokens, heads, *width))

    rows = {name: array((dim,), BFLOAT16) for name in ("q", "k", "v")}
    return rows | {"g": array((dim,), BFLOAT16), "beta": array((), BFLOAT16), "scale": 1.0}


def in_child(body, limit=None):
    """Run `body` in a fork, whose memory may grow by `limit` bytes, and return its status: 0 when it returns true."""
    with warnings.catch_warnings():
        # Of Python and JAX, where other tests have left threads: the child does not use them.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        status = 1
        try:
            if limit is not None:
                size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + limit, resource.RLIM_INFINITY))
            status = 0 if body() else 2
        except MemoryError:
            status = 3
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("tokens", [2**46, 2**55])
def test_outputs_beyond_memory(tokens):
    call = boundless(tokens)
    with pytest.raises(
        MemoryError, match=rf"chunk_kda_fwd: attn_out: expected memory for bfloat16 \[1,{tokens},1,16\]"
    ):
        kda.chunk_kda_fwd(**call)
    with pytest.raises(MemoryError, match="chunk_kda_fwd: float64 reference: expected enough memory, got less"):
        kda.reference.chunk_kda_fwd(**call)
    g = call["g"]
    with pytest.raises(MemoryError, match="fused_kda_gate: out: expected memory for float32"):
        kda.fused_kda_gate(g, np.zeros(1, np.float32))
    with pytest.raises(MemoryError, match="kda_gate_cumsum: out: expected memory for float32"):
        kda.kda_gate_cumsum(g.swapaxes(1, 2), 64)


def test_sizes_beyond_64_bits():
    with pytest.raises((MemoryError, ValueError), match="chunk_kda_fwd: (attn_out|Aqk): expected"):
        kda.chunk_kda_fwd(**boundless(2**57))


def test_outputs_of_torch_beyond_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(MemoryError, match="fused_kda_gate: out: expected memory for float32"):
        kda.fused_kda_gate(torch.zeros(1, 1).expand(2**50, 16), torch.zeros(1).expand(2**50))


def test_a_million_tokens_in_little_memory():
    """No more than o, and a workspace that does not know the number of tokens."""
    tokens = 1_000_000
    o_bytes = tokens * 16 * 2
    call = boundless(tokens)

    def body():
        kda.set_num_threads(1)
        o, final_state = kda.chunk_kda(**call, output_final_state=True)
        return o.shape == (1, tokens, 1, 16) and bool(np.isfinite(final_state).all())

    assert in_child(body, o_bytes + 16 * MIB) == 0


def statuses_of_a_call(threads):
    """Return what becomes of a call in children whose memory may grow by 0 bytes, by 256 KiB, by twice that, ..."""
    call = arguments(FULL) | boundless(8000, heads=4, dim=128)
    call |= dict.fromkeys(("A_log", "dt_bias", "initial_state")) | {"use_gate_in_kernel": False}

    def body():
        kda.set_num_threads(threads)
        kda.chunk_kda_fwd(**call, **KEEP_ALL)
        return True

    return [in_child(body, limit) for limit in (0, *(2**n * MIB // 4 for n in range(13)))]


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_that_runs_out(threads):
    """Whatever allocation fails, in Python, NumPy or the library: MemoryError."""
    # A fresh process: what earlier tests have freed would do for the call.
    program = f"import test_limits; print(*test_limits.statuses_of_a_call({threads}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    assert done.returncode == 0, done.stderr
    statuses = [int(status) for status in done.stdout.split()]
    assert set(statuses) <= {0, 3}
    assert statuses[0] == 3
    assert statuses[-1] == 0


def test_workspace_beyond_memory():
    """A thousand threads' scratch, where there is room for the outputs alone."""
    program = """
import resource, sys
import ml_dtypes, numpy as np
import kda
def array(*shape): return np.broadcast_to(np.zeros(1, ml_dtypes.bfloat16), (1, 40000, 1, *shape))
q = array(256)
kda.set_num_threads(1000)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, resource.RLIM_INFINITY))
try:
    kda.chunk_kda(q, q, q, q, array(), scale=1.0)
except MemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "workspace" in done.stdout


@examples(40)
@given(tokens=st.integers(2**40, 2**62), threads=st.integers(1, 2**31 - 1))
def test_no_size_is_too_large_to_be_refused(tokens, threads):
    g = np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), (tokens, 1, 1), (0, 0, 0), writeable=False)
    kda.set_num_threads(threads)
    try:
        with pytest.raises((MemoryError, ValueError)):
            kda.fused_kda_gate(g, np.zeros(1, np.float32))
    finally:
        kda.set_num_threads(None)
