"""fused_kda_gate, naive_kda_gate and kda_gate_cumsum."""

import inspect
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import kda
from helpers import BFLOAT16, FULL, PACKED, arguments, as_bytes, to_torch
from kda import _score

F32 = np.dtype(np.float32)
F16 = np.dtype(np.float16)


def raw(*shape, dtype=np.float32, scale=4.0):
    return (scale * np.random.default_rng(1).standard_normal(shape)).astype(np.float32).astype(dtype)


def gate_call(dtype=np.float32, **changes):
    return {"g": raw(3, 5, 4, 24, dtype=dtype), "A_log": raw(4, scale=0.5), "dt_bias": raw(96, scale=0.5)} | changes


def assert_scores(actual, expected):
    missed = [score for score in _score.score_gate(np.asarray(actual), expected) if not score.ok]
    assert missed == []


def reference(call):
    return kda.reference.fused_kda_gate(**{name: value for name, value in call.items() if name != "output_dtype"})


def test_signatures_are_the_contract():
    expected = ["g", "A_log", "dt_bias", "output_dtype", "lower_bound"]
    for function in (kda.fused_kda_gate, kda.naive_kda_gate):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == expected
        assert parameters["output_dtype"].default is np.float32
    cumsum = inspect.signature(kda.kda_gate_cumsum).parameters
    assert list(cumsum) == [
        "g", "chunk_size", "A_log", "dt_bias", "cu_seqlens", "use_gate_in_kernel", "safe_gate", "lower_bound"
    ]  # fmt: skip
    assert [p.kind is p.KEYWORD_ONLY for p in cumsum.values()] == [False] * 2 + [True] * 6


@pytest.mark.parametrize("dtype", [F32, F16, BFLOAT16], ids=str)
@pytest.mark.parametrize("output_dtype", [F32, F16, BFLOAT16], ids=str)
@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5, 2.0])
@pytest.mark.parametrize("function", [kda.fused_kda_gate, kda.naive_kda_gate])
def test_gate_against_float64(function, dtype, output_dtype, lower_bound):
    call = gate_call(dtype, output_dtype=output_dtype, lower_bound=lower_bound)
    result = function(**call)
    assert type(result) is np.ndarray
    assert (result.dtype, result.shape) == (output_dtype, call["g"].shape)
    assert_scores(result, reference(call))


def test_the_reference_is_the_formula():
    call = gate_call()
    x = call["g"].astype("f8") + call["dt_bias"].reshape(4, 24)
    rate = np.exp(call["A_log"].astype("f8"))[:, None]
    assert np.allclose(reference(call), -rate * np.logaddexp(0, x), rtol=1e-12)
    bounded = -3 / (1 + np.exp(-rate * x))
    assert np.allclose(reference(call | {"lower_bound": -3}), bounded, rtol=1e-12)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_output_dtypes_of_any_library(name):
    call = gate_call()
    expected = kda.fused_kda_gate(**call, output_dtype=name)
    numpy_type = getattr(np, name, None) or getattr(ml_dtypes, name)
    dtypes = [numpy_type, np.dtype(numpy_type)]
    for library in ("torch", "jax.numpy"):
        if module := optional(library):
            dtypes.append(getattr(module, name))
    for dtype in dtypes:
        result = kda.fused_kda_gate(**call, output_dtype=dtype)
        assert result.dtype == expected.dtype == np.dtype(numpy_type)
        assert result.tobytes() == expected.tobytes()


def optional(name):
    try:
        return __import__(name, fromlist=["_"])
    except ModuleNotFoundError:
        return None


@pytest.mark.parametrize("name", ["float64", "int32", "uint8"])
def test_torch_output_dtypes_that_are_none(name):
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=f"fused_kda_gate: output_dtype: expected .*bfloat16, got {name}"):
        kda.fused_kda_gate(**gate_call(), output_dtype=getattr(torch, name))


@pytest.mark.parametrize("function", [kda.fused_kda_gate, kda.naive_kda_gate])
@pytest.mark.parametrize("output_dtype", ["float32", "float16", "bfloat16"])
def test_torch_has_the_bits_of_numpy(function, output_dtype):
    torch = pytest.importorskip("torch")
    call = gate_call(BFLOAT16)
    tensors = {name: to_torch(torch, value) for name, value in call.items()}
    result = function(**tensors, output_dtype=getattr(torch, output_dtype))
    assert type(result) is torch.Tensor
    assert result.dtype == getattr(torch, output_dtype)
    assert as_bytes(result) == function(**call, output_dtype=output_dtype).tobytes()


@pytest.mark.parametrize("function", [kda.fused_kda_gate, kda.naive_kda_gate])
@pytest.mark.parametrize("output_dtype", ["float32", "float16", "bfloat16"])
def test_jax_has_the_bits_of_numpy(function, output_dtype):
    jax = pytest.importorskip("jax")
    call = gate_call(BFLOAT16)
    arrays = {name: jax.numpy.asarray(value) for name, value in call.items()}
    result = function(**arrays, output_dtype=getattr(jax.numpy, output_dtype))
    assert isinstance(result, jax.Array)
    assert result.dtype == output_dtype
    assert as_bytes(result) == function(**call, output_dtype=output_dtype).tobytes()


def test_torch_gradients_are_refused_while_grad_mode_is_on():
    torch = pytest.importorskip("torch")
    g, A_log = torch.ones(2, 4, requires_grad=True), torch.zeros(2)
    with pytest.raises(ValueError, match="fused_kda_gate: g: expected .*no_grad.*, got one that requires grad"):
        kda.fused_kda_gate(g, A_log)
    with torch.no_grad():
        assert kda.fused_kda_gate(g, A_log).shape == (2, 4)


@pytest.mark.parametrize("shape", [(0, 4, 24), (3, 0, 4, 24), (2, 1, 0, 4, 24)])
@pytest.mark.parametrize("function", [kda.fused_kda_gate, kda.naive_kda_gate])
def test_no_elements(function, shape):
    call = gate_call(g=np.zeros(shape, BFLOAT16))
    assert function(**call).shape == shape
    if torch := optional("torch"):
        assert function(**{name: to_torch(torch, value) for name, value in call.items()}).shape == shape


def test_any_strides():
    call = gate_call()
    expected = kda.fused_kda_gate(**call).tobytes()
    g = call["g"]
    wide = np.full((*g.shape[:-1], 2 * g.shape[-1]), np.nan, np.float32)
    wide[..., ::2] = g
    for view in (wide[..., ::2], np.flip(np.ascontiguousarray(np.flip(g, 1)), 1), np.asfortranarray(g)):
        assert kda.fused_kda_gate(**(call | {"g": view})).tobytes() == expected
    matrix = np.asfortranarray(call["dt_bias"].reshape(4, 24))
    assert kda.fused_kda_gate(**(call | {"dt_bias": matrix})).tobytes() == expected


def test_rates_may_be_absent_with_a_bound():
    call = gate_call(A_log=None, lower_bound=-5)
    assert kda.fused_kda_gate(**call).tobytes() == kda.fused_kda_gate(**(call | {"A_log": np.zeros(4, "f4")})).tobytes()


@pytest.mark.parametrize("x", [-1e4, -200, -88, -20, -17, -1e-30, 0, 1e-30, 20, 88, 1e4, 3e38])
def test_extreme_gates_keep_their_accuracy(x):
    call = {"g": np.full((1, 2, 8), x, np.float32), "A_log": np.float32([-1, 1])}
    for bound in (None, -5.0):
        assert_scores(kda.fused_kda_gate(**call, lower_bound=bound), reference(call | {"lower_bound": bound}))


def test_naive_rounds_like_ml_dtypes():
    numbers = raw(1000, 1, 1, scale=100.0)
    call = {"g": numbers, "A_log": np.zeros(1, np.float32)}
    single = reference(call).astype(np.float32)
    for dtype in (F32, F16, BFLOAT16):
        assert kda.naive_kda_gate(**call, output_dtype=dtype).tobytes() == single.astype(dtype).tobytes()


def test_naive_keeps_nan_and_inf():
    call = {"g": np.float32([[np.nan, np.inf, -np.inf, 1]]), "A_log": np.zeros(1, np.float32)}
    for dtype in (F32, F16, BFLOAT16):
        naive, fused = (f(**call, output_dtype=dtype).astype("f4") for f in (kda.naive_kda_gate, kda.fused_kda_gate))
        assert np.array_equal(np.isnan(naive), [[True, False, False, False]])
        assert np.isneginf(naive[0, 1])
        assert np.allclose(naive, fused, rtol=1e-6, atol=0, equal_nan=True)


def cumsum_call(case, **changes):
    call = arguments(case)
    names = ("g", "A_log", "dt_bias", "cu_seqlens", "use_gate_in_kernel", "safe_gate", "lower_bound", "chunk_size")
    picked = {name: call[name] for name in names}
    return picked | {"g": np.swapaxes(call["g"], 1, 2)} | changes


@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("chunk_size", [64, 128])
@pytest.mark.parametrize("safe_gate", [False, True])
def test_cumsum_has_the_bits_of_the_operator(case, chunk_size, safe_gate):
    call = arguments(case, chunk_size=chunk_size, safe_gate=safe_gate)
    gk = kda.kda_gate_cumsum(**cumsum_call(case, chunk_size=chunk_size, safe_gate=safe_gate))
    assert gk.tobytes() == kda.chunk_kda_fwd(**call, disable_recompute=True).gk.tobytes()


@pytest.mark.parametrize("chunk_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [F32, F16, BFLOAT16], ids=str)
def test_cumsum_against_float64(chunk_size, dtype):
    call = {"g": -np.abs(raw(2, 3, 150, 7, dtype=dtype)), "chunk_size": chunk_size}
    gk, expected = kda.kda_gate_cumsum(**call), kda.reference.kda_gate_cumsum(**call)
    assert (gk.dtype, gk.shape) == (F32, call["g"].shape)
    assert _score.score("gk", gk, expected).ok
    starts = np.arange(0, 150, chunk_size)
    sums = [np.cumsum(call["g"][:, :, s : s + chunk_size].astype("f8"), axis=2) for s in starts]
    assert np.allclose(expected, np.concatenate(sums, axis=2) / np.log(2), rtol=1e-12)


def test_cumsum_of_other_libraries():
    call = cumsum_call(PACKED)
    expected = kda.kda_gate_cumsum(**call).tobytes()
    if torch := optional("torch"):
        tensors = {name: to_torch(torch, value) for name, value in call.items()}
        for dtype in (torch.int32, torch.int64):
            tensors["cu_seqlens"] = torch.tensor(call["cu_seqlens"], dtype=dtype)
            result = kda.kda_gate_cumsum(**tensors)
            assert result.dtype == torch.float32
            assert as_bytes(result) == expected
    if jnp := optional("jax.numpy"):
        arrays = {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in call.items()}
        assert as_bytes(kda.kda_gate_cumsum(**arrays)) == expected


def test_cumsum_of_rank_3_and_of_nothing():
    call = cumsum_call(PACKED)
    assert kda.kda_gate_cumsum(**(call | {"g": call["g"][0]})).tobytes() == kda.kda_gate_cumsum(**call).tobytes()
    assert kda.kda_gate_cumsum(np.zeros((2, 3, 0, 16), np.float32), 64).shape == (2, 3, 0, 16)
    assert kda.kda_gate_cumsum(np.zeros((0, 3, 5, 16), np.float32), 64).shape == (0, 3, 5, 16)


def test_cumsum_lower_bound_none_is_minus_five():
    call = cumsum_call(FULL, safe_gate=True)
    results = [kda.kda_gate_cumsum(**(call | {"lower_bound": bound})).tobytes() for bound in (None, -5, -4.0)]
    assert results[0] == results[1] != results[2]


def test_calls_from_several_threads():
    call = gate_call(np.float32, g=raw(300, 4, 24))
    expected = kda.fused_kda_gate(**call).tobytes(), kda.kda_gate_cumsum(call["g"][None], 64).tobytes()
    found = []

    def work():
        for _ in range(20):
            found.append((kda.fused_kda_gate(**call).tobytes(), kda.kda_gate_cumsum(call["g"][None], 64).tobytes()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 80


def test_no_array_is_leaked():
    call = gate_call()
    packed = cumsum_call(PACKED, cu_seqlens=np.array([0, 65, 65, 70]))

    def run():
        kda.fused_kda_gate(**call)
        kda.naive_kda_gate(**call)
        kda.kda_gate_cumsum(**packed)
        kda.supported.fused_kda_gate(**call)

    run()
    held = [value for value in (*call.values(), *packed.values()) if isinstance(value, np.ndarray)]
    before = [sys.getrefcount(value) for value in held]
    for _ in range(10):
        run()
    assert [sys.getrefcount(value) for value in held] == before


def test_other_python_threads_run_meanwhile():
    g = np.zeros((1 << 20, 4, 4), np.float32)
    A_log, counted, done = np.zeros(4, np.float32), [0], threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1
            time.sleep(0.0005)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        time.sleep(0.01)
        before = counted[0]
        kda.reference.fused_kda_gate(g, A_log)
        assert counted[0] - before > 5
    finally:
        done.set()
        counter.join()


def test_threads_change_no_bit():
    call = gate_call(g=raw(3000, 4, 24))
    results = set()
    try:
        for threads in (1, 2, 5):
            kda.set_num_threads(threads)
            results.add(kda.fused_kda_gate(**call).tobytes())
    finally:
        kda.set_num_threads(None)
    assert len(results) == 1


def test_supported():
    assert kda.supported.fused_kda_gate(**gate_call()).backend == "cpu"
    assert kda.supported.kda_gate_cumsum(**cumsum_call(FULL)).backend == "cpu"
    answer = kda.supported.fused_kda_gate(**gate_call(output_dtype="float64"))
    assert (bool(answer), answer.error) == (False, TypeError)
    assert answer.reason == "fused_kda_gate: output_dtype: expected dtype float32, float16 or bfloat16, got float64"
    answer = kda.supported.kda_gate_cumsum(**cumsum_call(FULL, chunk_size=16))
    assert (answer.error, answer.reason) == (ValueError, "kda_gate_cumsum: chunk_size: expected 32, 64 or 128, got 16")
    huge = np.broadcast_to(np.float32(1), (2**40, 4, 24))
    assert kda.supported.fused_kda_gate(**gate_call(g=huge))
