"""chunk_kda, the form that FLA gives its users, and chunk_kda_fwd_direct."""

import dataclasses
import inspect
import re
import threading
import warnings

import numpy as np
import pytest

import kda
from helpers import BFLOAT16, FULL, KEEP_ALL, PACKED, PLAIN, arguments, as_bytes, to_torch
from kda import _score

STATES = {"output_final_state": True, "return_intermediate_states": True}
EVERYTHING = STATES | {
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
}


def chunk_kda_call(case=FULL, **changes):
    """Return the case's call of chunk_kda, with q, k that are not normalised and beta before its sigmoid."""
    call = arguments(case)
    del call["layout"], call["chunk_indices"]
    if not (case.use_gate_in_kernel and case.safe_gate):
        call["lower_bound"] = None
    return call | changes


def raw_call(case=FULL, **changes):
    """Return a call whose q, k and beta are raw."""
    call = chunk_kda_call(case)
    rng = np.random.default_rng(2)
    for name in ("q", "k"):
        call[name] = (3 * rng.standard_normal(call[name].shape)).astype(call[name].dtype)
    call["beta"] = (2 * rng.standard_normal(call["beta"].shape)).astype(call["beta"].dtype)
    return call | changes


def assert_close(results, expected):
    for name, array in zip(("o", "final_state", "h"), results, strict=True):
        score = _score.score("attn_out" if name == "o" else name, array, expected[name])
        assert score.ok, (name, score)


def test_signature_is_the_contract():
    parameters = inspect.signature(kda.chunk_kda).parameters
    assert list(parameters) == [
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound",
        "disable_recompute", "return_intermediate_states", "state_v_first", "cu_seqlens", "cu_seqlens_cpu", "A_log",
        "dt_bias", "chunk_size", "state_products", "cp_context", "kwargs",
    ]  # fmt: skip
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert defaults.pop("chunk_size") == 64
    assert defaults.pop("state_products") == "float32"
    assert set(defaults.values()) == {None, False}


@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("beta", ["given", "sigmoid", "twice"])
def test_against_float64(case, dtype, l2norm, beta):
    case = dataclasses.replace(case, dtype=dtype, beta_dtype="float32" if l2norm else "bfloat16")
    call = raw_call(case) if l2norm else chunk_kda_call(case)
    if beta == "given":
        call["beta"] = chunk_kda_call(case)["beta"]
    call |= STATES | {
        "use_qk_l2norm_in_kernel": l2norm,
        "use_beta_sigmoid_in_kernel": beta != "given",
        "allow_neg_eigval": beta == "twice",
    }
    assert_close(kda.chunk_kda(**call), kda.reference.chunk_kda(**call))


def test_the_reference_is_the_formula():
    call = raw_call(dataclasses.replace(FULL, beta_dtype="float32")) | EVERYTHING
    plain = chunk_kda_call(FULL, initial_state=call["initial_state"])

    def unit(x):
        x = x.astype("f8")
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    # The token recurrence, in NumPy.
    q, k, beta = unit(call["q"]), unit(call["k"]), 2 / (1 + np.exp(-call["beta"].astype("f8")))
    x = call["g"].astype("f8") + call["dt_bias"].reshape(4, 32)
    decay = np.exp(-np.exp(call["A_log"].astype("f8"))[:, None] * np.logaddexp(0, x))
    q, k = np.repeat(q, 2, axis=2), np.repeat(k, 2, axis=2)
    v, state = call["v"].astype("f8"), plain["initial_state"].astype("f8")
    o = np.empty(v.shape)
    for t in range(70):
        state = state * decay[:, t, :, :, None]
        error = v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t])
        state += np.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        o[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t]) * call["scale"]
    expected = kda.reference.chunk_kda(**call)
    assert np.allclose(expected["o"], o, rtol=1e-6, atol=1e-9)
    assert np.allclose(expected["final_state"], state, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
def test_plain_calls_are_those_of_the_operator(case):
    expected = kda.chunk_kda_fwd(**arguments(case), **STATES)
    o, final_state, h = kda.chunk_kda(**chunk_kda_call(case), **STATES)
    for ours, theirs in ((o, expected.attn_out), (final_state, expected.final_state), (h, expected.h)):
        ours, theirs = ours.astype("f8"), theirs.astype("f8").reshape(ours.shape)
        assert np.linalg.norm(ours - theirs) <= 3e-3 * np.linalg.norm(theirs)


@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
def test_what_is_returned(case):
    call = chunk_kda_call(case)
    o, final_state = kda.chunk_kda(**call)
    assert final_state is None
    assert (o.shape, o.dtype) == (call["v"].shape, BFLOAT16)
    with_states = kda.chunk_kda(**call, **STATES)
    states, chunks = (2, (2, 2)) if case is FULL else (3, (1, 3))
    assert [array.shape for array in with_states] == [call["v"].shape, (states, 4, 32, 48), (*chunks, 4, 32, 48)]
    assert [array.dtype for array in with_states] == [BFLOAT16, np.float32, BFLOAT16]
    o_too, nothing, h = kda.chunk_kda(**call, return_intermediate_states=True)
    assert nothing is None
    assert h.tobytes() == with_states[2].tobytes()
    assert o.tobytes() == o_too.tobytes() == with_states[0].tobytes()


def test_states_with_v_first():
    call = chunk_kda_call(FULL, **STATES)
    turned = chunk_kda_call(dataclasses.replace(FULL, state_v_first=True), **STATES)
    for ours, theirs in zip(kda.chunk_kda(**turned)[1:], kda.chunk_kda(**call)[1:], strict=True):
        assert np.swapaxes(ours, -1, -2).tobytes() == theirs.tobytes()


def test_disable_recompute_changes_nothing():
    results = [kda.chunk_kda(**chunk_kda_call(), **STATES, disable_recompute=flag) for flag in (False, True)]
    for ours, theirs in zip(*results, strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_scale_defaults_to_the_root():
    call = chunk_kda_call()
    assert (
        kda.chunk_kda(**(call | {"scale": None}))[0].tobytes()
        == kda.chunk_kda(**(call | {"scale": 32**-0.5}))[0].tobytes()
    )


def test_the_gate_is_bounded_if_and_only_if_there_is_a_bound():
    call = chunk_kda_call()
    o = {
        (bound, safe): kda.chunk_kda(**(call | {"lower_bound": bound, "safe_gate": safe}))[0].tobytes()
        for bound, safe in [(None, False), (-5, False), (-5, True), (-1, False)]
    }
    assert o[-5, False] == o[-5, True]
    assert len(set(o.values())) == 3


@pytest.mark.parametrize("bound", [-20.0, -5.0, -0.25])
def test_any_bound_against_float64(bound):
    call = chunk_kda_call(lower_bound=bound, **STATES)
    assert_close(kda.chunk_kda(**call), kda.reference.chunk_kda(**call))


def test_rates_may_be_absent_with_a_bound():
    call = chunk_kda_call(lower_bound=-5)
    zeros = kda.chunk_kda(**(call | {"A_log": np.zeros(4, np.float32)}))[0]
    assert kda.chunk_kda(**(call | {"A_log": None}))[0].tobytes() == zeros.tobytes()


def test_safe_gate_without_the_gate_is_a_hint():
    case = dataclasses.replace(FULL, use_gate_in_kernel=False, dt_bias=False)
    results = [
        kda.chunk_kda(**chunk_kda_call(case, safe_gate=safe, lower_bound=bound))[0].tobytes()
        for safe, bound in [(False, None), (True, None), (True, -7.0)]
    ]
    assert len(set(results)) == 1


@pytest.mark.parametrize("make", [list, tuple, np.int32, np.int64])
def test_cu_seqlens_of_any_kind(make):
    call = chunk_kda_call(PACKED)
    expected = kda.chunk_kda(**call)[0].tobytes()
    values = call["cu_seqlens"]
    made = make(values) if make in (list, tuple) else np.array(values, make)
    assert kda.chunk_kda(**(call | {"cu_seqlens": made}))[0].tobytes() == expected
    assert kda.chunk_kda(**(call | {"cu_seqlens_cpu": made}))[0].tobytes() == expected


def test_cu_seqlens_cpu_stands_in_for_what_is_elsewhere():
    torch = pytest.importorskip("torch")
    call = {name: to_torch(torch, value) for name, value in chunk_kda_call(PACKED).items()}
    elsewhere = torch.tensor(call["cu_seqlens"], device="meta")
    here = torch.tensor(call["cu_seqlens"])
    result = kda.chunk_kda(**(call | {"cu_seqlens": elsewhere, "cu_seqlens_cpu": here}))
    assert as_bytes(result[0]) == as_bytes(kda.chunk_kda(**call)[0])
    assert kda.supported.chunk_kda(**(call | {"cu_seqlens": elsewhere, "cu_seqlens_cpu": here}))
    assert not kda.supported.chunk_kda(**(call | {"cu_seqlens": elsewhere}))


@pytest.mark.parametrize("value", [False, True])
def test_the_deprecated_name(value):
    case = dataclasses.replace(FULL, state_v_first=value)
    call = chunk_kda_call(case, **STATES)
    expected = kda.chunk_kda(**call)
    del call["state_v_first"]
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is now called state_v_first") as caught:
        result = kda.chunk_kda(**call, transpose_state_layout=value)
    assert caught[0].filename == __file__
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kda.supported.chunk_kda(**call, transpose_state_layout=value)
        with pytest.raises(DeprecationWarning):
            kda.chunk_kda(**call, transpose_state_layout=value)


def zeros(*shape, dtype=BFLOAT16):
    return np.zeros(shape, dtype)


# What is wrong, case, changed arguments, exception, argument; expected and given as regular expressions.
ILLEGAL = [
    ("cp_context", FULL, {"cp_context": object()}, ValueError, "cp_context", "not supported", "object"),
    ("use_graph", FULL, {"use_graph": True}, ValueError, "use_graph", "not supported", "True"),
    ("max_num_seqs", FULL, {"max_num_seqs": 4}, ValueError, "max_num_seqs", "not supported", "4"),
    ("head_first", FULL, {"head_first": False}, TypeError, "head_first", "no argument of this name", "False"),
    ("layout", FULL, {"layout": "BSND"}, TypeError, "layout", "no argument of this name", "BSND"),
    ("q float32", PLAIN, {"q": np.zeros((1, 5, 1, 16), "f4")}, TypeError, "q", "float16 or bfloat16", "float32"),
    ("q none", PLAIN, {"q": None}, TypeError, "q", "a tensor", "none"),
    ("q list", PLAIN, {"q": [1.0]}, TypeError, "q", "array", "list"),
    ("q rank 3", PLAIN, {"q": np.zeros((5, 1, 16), BFLOAT16)}, ValueError, "q", "rank 4", "rank 3"),
    ("q rank 0", PLAIN, {"q": np.zeros((), BFLOAT16), "scale": None}, ValueError, "q", "rank 4", "rank 0"),
    ("g float16", PLAIN, {"g": np.zeros((1, 5, 1, 16), "f2")}, TypeError, "g", "float32 or bfloat16", "float16"),
    ("beta float16", PLAIN, {"beta": np.zeros((1, 5, 1), "f2")}, TypeError, "beta", "float32", "float16"),
    ("beta none", PLAIN, {"beta": None}, TypeError, "beta", "tensor", "none"),
    ("state bf16", FULL, {"initial_state": zeros(2, 4, 32, 48)}, TypeError, "initial_state", "float32", "bfloat16"),
    ("states", PACKED, {"initial_state": zeros(1, 4, 32, 48, dtype="f4")}, ValueError, "initial_state", "3,4", "1,4"),
    ("packed batch", FULL, {"cu_seqlens": [0, 70]}, ValueError, "q", "B = 1", "B = 2"),
    ("packed end", PACKED, {"cu_seqlens": [0, 69]}, ValueError, "cu_seqlens", "70", "69"),
    ("cpu alone", PLAIN, {"cu_seqlens_cpu": [0, 5]}, ValueError, "cu_seqlens_cpu", "none, as cu_seqlens", "some"),
    ("cpu differs", PACKED, {"cu_seqlens_cpu": [0, 5, 5, 70]}, ValueError, "cu_seqlens_cpu", "cu_seqlens", "others"),
    ("cpu floats", PACKED, {"cu_seqlens_cpu": [0, 70.0]}, TypeError, "cu_seqlens_cpu", "integers", "float"),
    ("A_log none", FULL, {"A_log": None}, TypeError, "A_log", "use_gate_in_kernel", "none"),
    ("A_log shape", FULL, {"A_log": np.zeros(3, "f4")}, ValueError, "A_log", "4", "3"),
    ("A_log dtype", FULL, {"A_log": np.zeros(4, BFLOAT16)}, TypeError, "A_log", "float32", "bfloat16"),
    ("no bound", FULL, {"safe_gate": True, "lower_bound": None}, ValueError, "lower_bound", r"\[-5, 0\)", "None"),
    ("low bound", FULL, {"safe_gate": True, "lower_bound": -5.5}, ValueError, "lower_bound", r"\[-5, 0\)", "-5.5"),
    ("bound 0", FULL, {"safe_gate": True, "lower_bound": 0}, ValueError, "lower_bound", r"\[-5, 0\)", "0"),
    ("bound NaN", FULL, {"lower_bound": float("nan")}, ValueError, "lower_bound", "finite", "nan"),
    ("bound beyond float32", FULL, {"lower_bound": -1e300}, ValueError, "lower_bound", "float32", r"-1e\+300"),
    ("bound text", FULL, {"lower_bound": "-5"}, TypeError, "lower_bound", "number", "str"),
    ("twice alone", FULL, {"allow_neg_eigval": True}, ValueError, "allow_neg_eigval", "use_beta_sigmoid", "True"),
    ("chunk 32", FULL, {"chunk_size": 32}, ValueError, "chunk_size", "64 or 128", "32"),
    ("scale NaN", FULL, {"scale": float("nan")}, ValueError, "scale", "finite", "nan"),
    ("scale text", FULL, {"scale": "1"}, TypeError, "scale", "number", "str"),
    ("K 24", PLAIN, {"q": np.zeros((1, 5, 1, 24), BFLOAT16)}, ValueError, "q", "16", "24"),
] + [
    (f"{flag} text", FULL, {flag: "no"}, TypeError, flag, "a bool", "str 'no'")
    for flag in [
        "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval", "safe_gate", "disable_recompute", "return_intermediate_states", "state_v_first",
    ]
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "changes", "error", "name", "expected", "given"),
    [row[1:] for row in ILLEGAL],
    ids=[row[0] for row in ILLEGAL],
)
def test_illegal_calls(case, changes, error, name, expected, given):
    call = chunk_kda_call(case) | changes
    with pytest.raises(error) as raised:
        kda.chunk_kda(**call)
    assert type(raised.value) is error
    message = str(raised.value)
    assert re.search(rf"^chunk_kda: {name}: expected .*({expected}).*, got .*({given})", message), message
    answer = kda.supported.chunk_kda(**call)
    assert (bool(answer), answer.error, answer.reason) == (False, error, message)
    with pytest.raises(error):
        kda.reference.chunk_kda(**call)


def test_the_deprecated_name_beside_its_successor():
    with warnings.catch_warnings(record=True), pytest.raises(ValueError, match="transpose_state_layout: expected none"):
        kda.chunk_kda(**chunk_kda_call(state_v_first=True), transpose_state_layout=True)


def test_foreign_arguments_that_ask_for_nothing():
    call = chunk_kda_call()
    result = kda.chunk_kda(**call, cp_context=None, use_graph=False, max_num_seqs=None)
    assert result[0].tobytes() == kda.chunk_kda(**call)[0].tobytes()


@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
def test_supported(case):
    answer = kda.supported.chunk_kda(**chunk_kda_call(case), **EVERYTHING)
    assert (bool(answer), answer.backend, answer.reason) == (True, "cpu", None)
    with pytest.raises(TypeError, match="beta"):
        kda.supported.chunk_kda(*[None] * 4)


def test_supported_computes_nothing():
    huge = np.broadcast_to(np.float16(1), (1, 2**33, 4, 128))
    wide = np.broadcast_to(np.float32(-1), (1, 2**33, 4, 128))
    assert kda.supported.chunk_kda(huge, huge, huge, wide, wide[..., 0], **EVERYTHING)


@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
def test_torch_has_the_bits_of_numpy(case):
    torch = pytest.importorskip("torch")
    call = raw_call(case) | EVERYTHING
    results = kda.chunk_kda(**{name: to_torch(torch, value) for name, value in call.items()})
    for ours, theirs in zip(results, kda.chunk_kda(**call), strict=True):
        assert type(ours) is torch.Tensor
        assert tuple(ours.shape) == theirs.shape
        assert as_bytes(ours) == theirs.tobytes()


def test_torch_gradients_are_refused_while_grad_mode_is_on():
    torch = pytest.importorskip("torch")
    call = {name: to_torch(torch, value) for name, value in chunk_kda_call().items()}
    call["v"].requires_grad_()
    with pytest.raises(ValueError, match=r"chunk_kda: v: expected .*no_grad.*, got one that requires grad"):
        kda.chunk_kda(**call)
    with torch.inference_mode():
        assert kda.chunk_kda(**call)[0].shape == call["v"].shape


def test_jax_has_the_bits_of_numpy():
    jnp = pytest.importorskip("jax.numpy")
    call = raw_call(PACKED, scale=None) | EVERYTHING
    arrays = {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in call.items()}
    for ours, theirs in zip(kda.chunk_kda(**arrays), kda.chunk_kda(**call), strict=True):
        assert as_bytes(ours) == theirs.tobytes()


@pytest.mark.parametrize("case", [dataclasses.replace(FULL, T=0), dataclasses.replace(FULL, B=0)], ids=["T", "B"])
def test_nothing_to_do(case):
    o, final_state, h = kda.chunk_kda(**chunk_kda_call(case), **EVERYTHING)
    assert (o.shape[:2], h.shape[:2]) == ((case.B, case.T), (case.B, -(-case.T // 64)))
    assert final_state.shape == (case.B, 4, 32, 48)


def test_nan_in_one_sequence_stays_there():
    call = raw_call(PACKED) | EVERYTHING
    expected = kda.chunk_kda(**call)
    for name in ("q", "k", "v", "g", "beta"):
        call[name] = call[name].copy()
        call[name][:, :65] = np.nan
    o, final_state, h = kda.chunk_kda(**call)
    assert o[:, 65:].tobytes() == expected[0][:, 65:].tobytes()
    assert final_state[1:].tobytes() == expected[1][1:].tobytes()
    assert h[:, 2:].tobytes() == expected[2][:, 2:].tobytes()


def test_calls_from_several_threads():
    call = raw_call(PACKED) | EVERYTHING
    expected = [array.tobytes() for array in kda.chunk_kda(**call)]
    found = []
    threads = [
        threading.Thread(target=lambda: found.append([array.tobytes() for array in kda.chunk_kda(**call)]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


DIRECT = dataclasses.replace(FULL, K=128, V=128, layout="BNSD", use_gate_in_kernel=False, dt_bias=False)


def direct_call(case=DIRECT, **changes):
    """Return the case's call of chunk_kda_fwd_direct, with the gk of chunk_kda_fwd."""
    call = arguments(case)
    picked = {name: call[name] for name in ("q", "k", "v", "beta", "scale", "chunk_size", "initial_state")}
    return picked | {"gk": kda.chunk_kda_fwd(**call).gk} | changes


@pytest.mark.parametrize("V", [128, 256])
@pytest.mark.parametrize("chunk_size", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_direct_against_float64(V, chunk_size, dtype):
    case = dataclasses.replace(DIRECT, V=V, chunk_size=chunk_size, dtype=dtype)
    call = direct_call(case)
    result = kda.chunk_kda_fwd_direct(**call)
    assert all(array is not None for array in result)
    assert result.gk is call["gk"]
    assert result.initial_state is call["initial_state"]
    expected = kda.reference.chunk_kda_fwd(**arguments(case))
    outputs = {name: getattr(result, name) for name in expected}
    for score in _score.score_all(outputs, expected, chunk_size, None):
        assert score.error <= score.bound + 1e-5, score


def test_direct_keeps_what_is_asked_for():
    call = direct_call(initial_state=None)
    with_state, without = (kda.chunk_kda_fwd_direct(**call, output_final_state=flag) for flag in (True, False))
    assert without.final_state is None
    assert without.initial_state is None
    assert with_state.attn_out.tobytes() == without.attn_out.tobytes()
    hinted = kda.chunk_kda_fwd_direct(**call, safe_gate=True)
    assert hinted.final_state.tobytes() == with_state.final_state.tobytes()


def test_direct_agrees_with_the_operator():
    expected = kda.chunk_kda_fwd(**arguments(DIRECT), **KEEP_ALL)
    result = kda.chunk_kda_fwd_direct(**direct_call())
    for name in ("attn_out", "final_state", "h"):
        ours, theirs = (getattr(one, name).astype("f8") for one in (result, expected))
        assert np.linalg.norm(ours - theirs) <= 3e-3 * np.linalg.norm(theirs), name


@pytest.mark.parametrize(
    ("changes", "error", "name", "expected", "given"),
    [
        ({"gk": None}, TypeError, "gk", "tensor|array", "none"),
        ({"gk": [1.0]}, TypeError, "gk", "array", "list"),
        ({"gk": np.zeros((2, 4, 70, 128), BFLOAT16)}, TypeError, "gk", "float32", "bfloat16"),
        ({"gk": np.zeros((2, 70, 4, 128), "f4")}, ValueError, "gk", r"\[2,4,70,128\]", r"\[2,70,4,128\]"),
        ({"beta": np.zeros((2, 4, 70), BFLOAT16)}, TypeError, "beta", "float32", "bfloat16"),
        ({"q": np.zeros((2, 2, 70, 128), "f4")}, TypeError, "q", "float16 or bfloat16", "float32"),
        ({"chunk_size": 32}, ValueError, "chunk_size", "64 or 128", "32"),
        ({"scale": None}, TypeError, "scale", "number", "None"),
        ({"safe_gate": 1}, TypeError, "safe_gate", "bool", "1"),
        ({"output_final_state": None}, TypeError, "output_final_state", "bool", "None"),
        ({"initial_state": np.zeros((1, 4, 128, 128), "f4")}, ValueError, "initial_state", "2,4", "1,4"),
    ],
)
def test_direct_illegal_calls(changes, error, name, expected, given):
    call = direct_call() | changes
    with pytest.raises(error) as raised:
        kda.chunk_kda_fwd_direct(**call)
    message = str(raised.value)
    assert re.search(rf"^chunk_kda_fwd_direct: {name}: expected .*({expected}).*, got .*({given})", message), message
    assert kda.supported.chunk_kda_fwd_direct(**call).reason == message


@pytest.mark.parametrize(("sizes", "name", "given"), [({"K": 64}, "q", "K = 64"), ({"V": 64}, "v", "V = 64")])
def test_direct_has_sizes_of_its_own(sizes, name, given):
    call = direct_call(dataclasses.replace(DIRECT, **sizes))
    with pytest.raises(ValueError, match=f"chunk_kda_fwd_direct: {name}: expected .* = 128.*, got {given}"):
        kda.chunk_kda_fwd_direct(**call)


def test_direct_after_a_strong_gate():
    """A reset is a gk of -inf: what was before is forgotten, and no NaN arises."""
    call = direct_call(dataclasses.replace(DIRECT, B=1, T=8))
    call["gk"] = call["gk"].copy()
    call["gk"][:, :, 3:] = -np.inf
    result = kda.chunk_kda_fwd_direct(**call)
    assert np.isfinite(result.attn_out.astype("f4")).all()
    assert np.isfinite(result.final_state).all()
