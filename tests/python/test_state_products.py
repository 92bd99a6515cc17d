"""state_products: bfloat16 products with the state, through every door of Python."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kda
from helpers import FULL, KEEP_ALL, PACKED, PLAIN, arguments, as_bytes, assert_same_bits, to_torch
from kda._score import relative_error

INFO = kda.info()
HAS_THEM = INFO.cpu_instruction_set == "AVX3" and "avx512_bf16" in INFO.cpu_features
FROM_PRODUCTS = ("attn_out", "final_state", "v_new", "h")
LONGER = dataclasses.replace(FULL, name="longer", T=300, K=128, V=128)


def expected_products(asked):
    return asked if HAS_THEM else "float32"


@pytest.mark.parametrize("case", [PLAIN, PACKED, LONGER], ids=lambda case: case.name)
def test_they_are_off_by_default_and_within_their_error(case):
    call = arguments(case)
    exact = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert_same_bits(kda.chunk_kda_fwd(**call, **KEEP_ALL, state_products="float32"), exact)
    fast = kda.chunk_kda_fwd(**call, **KEEP_ALL, state_products="bfloat16")
    if not HAS_THEM:
        assert_same_bits(fast, exact)
        return
    assert fast.final_state.tobytes() != exact.final_state.tobytes()
    for name, a, b in zip(exact._fields[:-1], fast[:-1], exact[:-1], strict=True):
        if name in FROM_PRODUCTS:
            assert relative_error(a, b.astype(np.float64)) <= 5e-3, name
        else:
            assert a.tobytes() == b.tobytes(), name


def test_no_result_depends_on_the_threads():
    call = arguments(LONGER) | KEEP_ALL | {"state_products": "bfloat16"}
    expected = kda.chunk_kda_fwd(**call)
    try:
        kda.set_num_threads(1)
        assert_same_bits(kda.chunk_kda_fwd(**call), expected)
    finally:
        kda.set_num_threads(None)


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_supported_tells_which_ones(asked):
    call = arguments(FULL)
    assert kda.supported(**call, state_products=asked).state_products == expected_products(asked)
    plain = {name: call[name] for name in ("q", "k", "v", "beta")} | {"g": -abs(call["g"])}
    assert kda.supported.chunk_kda(**plain, state_products=asked).state_products == expected_products(asked)
    assert kda.supported(**call).state_products == "float32"
    assert kda.supported(**(call | {"chunk_size": 1})).state_products is None
    assert kda.supported.kda_gate_cumsum(call["g"], 64).state_products is None


def test_where_the_cpu_has_none_the_bits_are_those_of_float32():
    if "AVX2" not in INFO.cpu_instruction_sets:
        pytest.skip("the other instruction set of this test is AVX2")
    code = (
        "import kda, helpers\n"
        "call = helpers.arguments(helpers.FULL) | helpers.KEEP_ALL\n"
        "print(kda.supported(**call, state_products='bfloat16').state_products)\n"
        "fast = kda.chunk_kda_fwd(**call, state_products='bfloat16')\n"
        "helpers.assert_same_bits(fast, kda.chunk_kda_fwd(**call))\n"
    )
    environment = os.environ | {"KDA_CPU_ISA": "AVX2", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("float32\n", "")


def chunk_kda_calls():
    """Return a call of chunk_kda, and the call of chunk_kda_fwd that must have its bits."""
    call = arguments(LONGER)
    plain = {name: call[name] for name in ("q", "k", "v", "beta", "initial_state")} | {"g": -abs(call["g"])}
    return plain | {"output_final_state": True}, plain | {"scale": LONGER.K**-0.5, "output_final_state": True}


def test_chunk_kda_has_the_same_bits():
    call, forward = chunk_kda_calls()
    o, state = kda.chunk_kda(**call, state_products="bfloat16")
    expected = kda.chunk_kda_fwd(**forward, state_products="bfloat16")
    assert o.tobytes() == expected.attn_out.tobytes()
    assert state.tobytes() == expected.final_state.tobytes()


def direct_call(module):
    """Return the arguments of chunk_kda_fwd_direct, made by a module's function of float32 numbers."""
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.random((1, 2, 100, 128), dtype=np.float32) for _ in range(4))
    gk = kda.kda_gate_cumsum(-g, 64)
    beta = rng.random((1, 2, 100), dtype=np.float32)
    return (*(module(x) for x in ((q * 0.1).astype("f2"), (k * 0.1).astype("f2"), v.astype("f2"), gk, beta)), 0.1, 64)


def test_chunk_kda_fwd_direct_has_them():
    exact, fast = (
        kda.chunk_kda_fwd_direct(*direct_call(np.asarray), state_products=name) for name in ("float32", "bfloat16")
    )
    assert relative_error(fast.final_state, exact.final_state.astype(np.float64)) <= 5e-3
    assert (fast.final_state.tobytes() != exact.final_state.tobytes()) == HAS_THEM


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("case", [PACKED, LONGER], ids=lambda case: case.name)
def test_every_torch_door_has_the_same_bits(torch, case):
    import kda.torch

    expected = kda.chunk_kda_fwd(**arguments(case), **KEEP_ALL, state_products="bfloat16")
    call = {name: to_torch(torch, value) for name, value in arguments(case).items()}
    call |= KEEP_ALL | {"state_products": "bfloat16"}
    assert_same_bits(kda.chunk_kda_fwd(**call), expected)
    assert_same_bits(kda.torch.chunk_kda_fwd(**call), expected)
    compiled = torch.compile(lambda **given: kda.chunk_kda_fwd(**given), fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(**call), expected)
    if call["cu_seqlens"] is not None:
        call["cu_seqlens"] = torch.tensor(call["cu_seqlens"])
    for made, wanted in zip(torch.ops.kda.chunk_kda_fwd(**call), expected[:-1], strict=True):
        assert as_bytes(made) == as_bytes(wanted)


def test_torch_doors_of_the_other_forms(torch):
    import kda.torch

    call = {name: to_torch(torch, value) for name, value in chunk_kda_calls()[0].items()}
    expected = kda.chunk_kda(**call, state_products="bfloat16")
    for door in (kda.torch.chunk_kda, torch.ops.kda.chunk_kda):
        made = door(**call, state_products="bfloat16")
        assert [as_bytes(x) for x in made[:2]] == [as_bytes(x) for x in expected]
    expected = kda.chunk_kda_fwd_direct(*direct_call(np.asarray), state_products="bfloat16")
    args = direct_call(torch.from_numpy)
    assert_same_bits(kda.torch.chunk_kda_fwd_direct(*args, state_products="bfloat16"), expected)
    made = torch.ops.kda.chunk_kda_fwd_direct(*args, state_products="bfloat16")
    assert as_bytes(made[0]) == as_bytes(expected.attn_out)


def test_refusals():
    call, forward = chunk_kda_calls()
    doors = [(kda.chunk_kda_fwd, (), forward), (kda.chunk_kda, (), call)]
    doors.append((kda.chunk_kda_fwd_direct, direct_call(np.asarray), {}))
    for function, args, kwargs in doors:
        start = f"^{function.__name__}: state_products: expected "
        with pytest.raises(ValueError, match=f"{start}float32 or bfloat16, got float16$"):
            function(*args, **kwargs, state_products="float16")
        with pytest.raises(TypeError, match=f"{start}a string, got None$"):
            function(*args, **kwargs, state_products=None)
    answer = kda.supported(**forward, state_products="int8")
    assert (answer.error, answer.state_products) == (ValueError, None)
