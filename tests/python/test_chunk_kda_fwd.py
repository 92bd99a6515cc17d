"""chunk_kda_fwd through NumPy: numbers, the tuple, what is kept, every kind of argument."""

import dataclasses
import inspect
import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kda
from helpers import BFLOAT16, FLAGS, FULL, KEEP_ALL, PACKED, PLAIN, arguments, assert_same_bits
from kda import _cases, _score

NAMES = ("attn_out", "final_state", "gk", "Aqk", "Akk", "w", "u", "qg", "kg", "v_new", "h", "initial_state")
LAYOUTS = ("BSND", "BNSD", "TND", "NTD")


def case_in(layout, **changes):
    return dataclasses.replace(FULL, layout=layout, B=1 if layout in ("TND", "NTD") else 2, **changes)


def scores(call):
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    expected = kda.reference.chunk_kda_fwd(**call)
    outputs = {name: getattr(result, name) for name in expected}
    return _score.score_all(outputs, expected, call["chunk_size"], call["cu_seqlens"])


def test_signature_is_the_contract():
    signature = inspect.signature(kda.chunk_kda_fwd)
    required = ["q", "k", "v", "g", "beta", "scale"]
    defaults = {
        "chunk_size": 64,
        "layout": "BSND",
        "initial_state": None,
        "output_final_state": False,
        "cu_seqlens": None,
        "chunk_indices": None,
        "safe_gate": False,
        "lower_bound": None,
        "use_gate_in_kernel": False,
        "A_log": None,
        "dt_bias": None,
        "disable_recompute": False,
        "return_intermediate_states": False,
        "state_v_first": False,
        "state_products": "float32",
    }
    assert list(signature.parameters) == required + list(defaults)
    assert {n: p.default for n, p in signature.parameters.items() if n not in required} == defaults


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_outputs_against_float64(dtype, layout, state_v_first):
    call = arguments(case_in(layout, dtype=dtype, state_v_first=state_v_first))
    assert [score for score in scores(call) if not score.ok] == []


@pytest.mark.parametrize("wide", ["float32", "bfloat16"])
def test_packed_outputs_against_float64(wide):
    call = arguments(dataclasses.replace(PACKED, g_dtype=wide, beta_dtype=wide, chunk_size=128))
    assert [score for score in scores(call) if not score.ok] == []


def test_twelve_results_in_order():
    call = arguments(FULL)
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert isinstance(result, tuple)
    assert result._fields == NAMES
    shapes = [None if array is None else array.shape for array in result]
    tokens, state = (2, 4, 70), (2, 4, 32, 48)
    assert shapes == [
        (2, 70, 4, 48),
        state,
        (*tokens, 32),
        (*tokens, 64),
        (*tokens, 64),
        (*tokens, 32),
        (*tokens, 48),
        (*tokens, 32),
        (*tokens, 32),
        (*tokens, 48),
        (2, 2, 4, 32, 48),
        state,
    ]
    wide = {name for name, array in zip(NAMES, result, strict=True) if array.dtype == np.float32}
    assert wide == {"final_state", "gk", "initial_state"}
    assert all(array.dtype == BFLOAT16 for name, array in zip(NAMES, result, strict=True) if name not in wide)


@pytest.mark.parametrize(("layout", "shape"), [("BSND", (3, 4, 32, 48)), ("TND", (3, 4, 32, 48))])
def test_packed_states_have_no_batch(layout, shape):
    result = kda.chunk_kda_fwd(**arguments(dataclasses.replace(PACKED, layout=layout)), **KEEP_ALL)
    assert result.h.shape == shape
    assert result.final_state.shape == shape


@pytest.mark.parametrize("use_gate_in_kernel", [False, True])
@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)))
def test_what_is_kept(use_gate_in_kernel, flags):
    call = arguments(dataclasses.replace(FULL, use_gate_in_kernel=use_gate_in_kernel))
    output_final_state, disable_recompute, return_intermediate_states = flags
    result = kda.chunk_kda_fwd(**call, **dict(zip(FLAGS, flags, strict=True)))
    kept = {"attn_out", "Aqk", "Akk", "initial_state"}
    if output_final_state:
        kept.add("final_state")
    if not use_gate_in_kernel or disable_recompute:
        kept.add("gk")
    if disable_recompute:
        kept |= {"w", "u", "qg", "kg", "v_new"}
    if disable_recompute or return_intermediate_states:
        kept.add("h")
    assert {name for name in NAMES if getattr(result, name) is not None} == kept
    everything = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    for name in kept:
        assert getattr(result, name).tobytes() == getattr(everything, name).tobytes(), name


def test_initial_state_is_the_callers_object():
    call = arguments(FULL)
    assert kda.chunk_kda_fwd(**call).initial_state is call["initial_state"]
    assert kda.chunk_kda_fwd(**(call | {"initial_state": None})).initial_state is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strides", ["padded", "fused", "reversed", "inner"])
def test_strides_change_no_bit(layout, strides):
    case = case_in(layout)
    expected = kda.chunk_kda_fwd(**arguments(case), **KEEP_ALL)
    actual = kda.chunk_kda_fwd(**arguments(dataclasses.replace(case, strides=strides)), **KEEP_ALL)
    assert_same_bits(actual, expected)


def test_expanded_inputs():
    call = arguments(FULL)
    call["beta"] = np.broadcast_to(np.float32(0.5), call["beta"].shape)
    call["dt_bias"] = np.broadcast_to(np.float32(0.25), call["dt_bias"].shape)
    expected = kda.chunk_kda_fwd(**(call | {n: np.array(call[n]) for n in ("beta", "dt_bias")}), **KEEP_ALL)
    assert_same_bits(kda.chunk_kda_fwd(**call, **KEEP_ALL), expected)


def test_inputs_are_read_only():
    call = arguments(PACKED)
    arrays = {name: value for name, value in call.items() if isinstance(value, np.ndarray)}
    before = {name: array.tobytes() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert {name: array.tobytes() for name, array in arrays.items()} == before


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda values: np.array(values, np.int64),
        lambda values: np.array(values, np.int32),
        lambda values: np.repeat(np.array(values, np.int32), 2)[::2],
        lambda values: np.array(values[::-1])[::-1],
        lambda values: [np.int32(value) for value in values],
    ],
    ids=["list", "tuple", "int64", "int32", "strided", "reversed", "scalars"],
)
def test_metadata_of_any_kind(make):
    indices = [0, 0, 0, 1, 2, 0]
    call = arguments(PACKED)
    expected = kda.chunk_kda_fwd(**call)
    call |= {"cu_seqlens": make(call["cu_seqlens"]), "chunk_indices": make(indices)}
    assert_same_bits(kda.chunk_kda_fwd(**call), expected)


@pytest.mark.parametrize(
    "pairs", [[[0, 0], [0, 1], [2, 0]], ((0, 0), (0, 1), (2, 0)), np.array([[0, 0], [0, 1], [2, 0]])]
)
def test_chunk_indices_in_pairs(pairs):
    call = arguments(PACKED)
    assert_same_bits(kda.chunk_kda_fwd(**(call | {"chunk_indices": pairs})), kda.chunk_kda_fwd(**call))


@pytest.mark.parametrize("case", [dataclasses.replace(FULL, T=0), dataclasses.replace(FULL, B=0)], ids=["T=0", "B=0"])
def test_nothing_to_do(case):
    call = arguments(case)
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert result.attn_out.shape == (case.B, case.T, 4, 48)
    assert result.final_state.tobytes() == call["initial_state"].tobytes()


def test_empty_sequences_only():
    call = arguments(dataclasses.replace(PACKED, T=0, cu_seqlens=(0, 0, 0)))
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert result.final_state.tobytes() == call["initial_state"].tobytes()
    assert result.h.shape == (0, 4, 32, 48)


def test_numbers_of_numpy():
    call = arguments(PLAIN)
    expected = kda.chunk_kda_fwd(**call)
    call |= {"scale": np.float64(call["scale"]), "chunk_size": np.int32(64), "safe_gate": np.bool_(True)}
    assert_same_bits(kda.chunk_kda_fwd(**call), expected)


def test_lower_bound_none_is_minus_five():
    case = dataclasses.replace(FULL, safe_gate=True)
    expected = kda.chunk_kda_fwd(**arguments(case, lower_bound=-5.0))
    assert_same_bits(kda.chunk_kda_fwd(**arguments(case, lower_bound=None)), expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_change_no_bit(threads):
    call = arguments(FULL)
    expected = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    kda.set_num_threads(threads)
    try:
        assert kda.get_num_threads() == threads
        assert_same_bits(kda.chunk_kda_fwd(**call, **KEEP_ALL), expected)
    finally:
        kda.set_num_threads(None)


def test_calls_from_several_threads():
    calls = [arguments(dataclasses.replace(PACKED, seed=seed)) for seed in range(8)]
    expected = [kda.chunk_kda_fwd(**call, **KEEP_ALL) for call in calls]
    with ThreadPoolExecutor(8) as pool:
        actual = list(pool.map(lambda call: kda.chunk_kda_fwd(**call, **KEEP_ALL), calls * 4))
    for index, result in enumerate(actual):
        assert_same_bits(result, expected[index % len(calls)])


def test_other_python_threads_run_meanwhile():
    """A thread that wakes up often: held off for a whole call, it would be late once and by that much."""
    call = arguments(dataclasses.replace(FULL, T=2000, K=128, V=128))
    gaps, done = [], threading.Event()

    def watch():
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    kda.reference.chunk_kda_fwd(**call)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    assert max(gaps) < 0.7 * seconds
    assert len(gaps) > 5


def test_no_array_is_leaked():
    call = arguments(FULL)
    kda.chunk_kda_fwd(**call)
    before = {name: sys.getrefcount(value) for name, value in call.items()}
    for _ in range(10):
        kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert {name: sys.getrefcount(value) for name, value in call.items()} == before


def test_reference_without_intermediates():
    call = arguments(FULL)
    whole = kda.reference.chunk_kda_fwd(**call)
    short = kda.reference.chunk_kda_fwd(**call, intermediates=False)
    assert list(whole) == list(NAMES[:-1])
    assert list(short) == ["attn_out", "final_state"]
    assert all(array.dtype == np.float64 for array in whole.values())
    assert all(np.array_equal(short[name], whole[name]) for name in short)


def test_documented_example():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 128, 4, 128)).astype(np.float16) for _ in "qkv")
    k = (k / np.linalg.norm(k.astype(np.float32), axis=-1, keepdims=True)).astype(np.float16)
    g = -0.01 * rng.random((1, 128, 4, 128), np.float32)
    beta = rng.random((1, 128, 4), np.float32)
    result = kda.chunk_kda_fwd(q, k, v, g, beta, 128**-0.5, safe_gate=True)
    expected = kda.reference.chunk_kda_fwd(q, k, v, g, beta, 128**-0.5, safe_gate=True)
    assert _score.score("attn_out", result.attn_out, expected["attn_out"]).ok


def test_canonical_chunk_indices():
    assert _cases.canonical_chunk_indices((0, 65, 65, 70), 64) == [0, 0, 0, 1, 2, 0]
