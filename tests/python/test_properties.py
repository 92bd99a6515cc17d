"""Properties that hold for every legal call, on small random ones."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kda
from helpers import BFLOAT16, KEEP_ALL, arguments, as_bytes, assert_same_bits, examples
from kda import _score
from kda._cases import Case, FixedGate

# Mostly small, so that many are tried.
DIMS = st.integers(1, 3).map(lambda n: 16 * n) | st.integers(1, 16).map(lambda n: 16 * n)
GATES = st.sampled_from([0.0, -1e-4, -5.0, -12.0, -88.0, -1000.0, -1e4, -np.inf])
PLACES = ["all", "half", "single"]
TOKEN_AXIS = {"BSND": 1, "BNSD": 2, "TND": 0, "NTD": 1}
PER_TOKEN = ("q", "k", "v", "g", "beta")


@st.composite
def cases(draw, packed=None, layout=None):
    layout = layout or draw(st.sampled_from(["BSND", "BNSD", "TND", "NTD"]))
    heads = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65]), min_size=1, max_size=4))
    is_packed = draw(st.booleans()) if packed is None else packed
    rank3 = layout in ("TND", "NTD")
    return Case(
        name="drawn",
        seed=draw(st.integers(0, 2**63)),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        g_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        beta_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        layout=layout,
        B=1 if is_packed or rank3 else draw(st.integers(0, 2)),
        T=sum(lengths),
        cu_seqlens=tuple(int(end) for end in np.cumsum([0, *lengths])) if is_packed else None,
        chunk_indices=is_packed and draw(st.booleans()),
        H=heads,
        HV=heads * draw(st.integers(1, 2)),
        K=draw(DIMS),
        V=draw(DIMS),
        scale=draw(st.sampled_from([None, 1.0, -0.3, 0.0])),
        chunk_size=draw(st.sampled_from([64, 128])),
        use_gate_in_kernel=draw(st.booleans()),
        safe_gate=draw(st.booleans()),
        lower_bound=draw(st.floats(-5, -1e-3)),
        dt_bias=draw(st.booleans()),
        initial_state=draw(st.booleans()),
        state_v_first=draw(st.booleans()),
        keys=draw(st.sampled_from(["random", "repeated", "correlated"])),
        gate=draw(st.sampled_from(["random", "linear"]) | st.builds(FixedGate, GATES, st.sampled_from(PLACES))),
        gate_scale=draw(st.sampled_from([1.0, 0.01, 30.0])),
        beta=draw(st.just("random") | st.floats(0, 1, width=16)),
        strides=draw(st.sampled_from(["contiguous", "padded", "fused", "reversed", "inner"])),
    )


# Outputs with a row for every token, and those whose rows do not depend on later tokens.
ROWS = ["attn_out", "gk", "Aqk", "Akk", "w", "u", "qg", "kg", "v_new"]
CAUSAL = [name for name in ROWS if name != "kg"]


def rows(name, result):
    """Return one of these outputs with its tokens first and its heads second."""
    array = getattr(result, name)
    if array.ndim == 4:
        array = np.moveaxis(array, 0, -1)
    return np.ascontiguousarray(array if name == "attn_out" else array.swapaxes(0, 1))


def is_kept(score, expected):
    """Tell whether a bound is kept. There is none where all has decayed to what float32 can hardly hold."""
    return score.ok or 0 < np.abs(expected).max(initial=0) < 1e-30


def cut(call, start, end):
    """Return the call for tokens [start, end) alone."""
    axis = TOKEN_AXIS[call["layout"]]
    part = (slice(None),) * axis + (slice(start, end),)
    return call | {name: call[name][part] for name in PER_TOKEN} | {"cu_seqlens": None, "chunk_indices": None}


@examples(60)
@given(case=cases())
def test_every_output_keeps_its_bound(case):
    call = arguments(case)
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    expected = kda.reference.chunk_kda_fwd(**call)
    outputs = {name: getattr(result, name) for name in expected}
    scores = _score.score_all(outputs, expected, case.chunk_size, case.cu_seqlens)
    assert [score for score in scores if not is_kept(score, expected[score.output])] == []


@examples(30)
@given(case=cases(), threads=st.integers(1, 5))
def test_neither_strides_nor_threads_change_a_bit(case, threads):
    expected = kda.chunk_kda_fwd(**arguments(dataclasses.replace(case, strides="contiguous")), **KEEP_ALL)
    kda.set_num_threads(threads)
    try:
        assert_same_bits(kda.chunk_kda_fwd(**arguments(case), **KEEP_ALL), expected)
    finally:
        kda.set_num_threads(None)


@examples(30)
@given(case=cases(packed=True))
def test_a_sequence_alone_has_the_same_bits(case):
    call = arguments(case)
    packed = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    for n, (start, end) in enumerate(pairwise(case.cu_seqlens)):
        alone = cut(call, start, end)
        if call["initial_state"] is not None:
            alone["initial_state"] = call["initial_state"][n : n + 1]
        result = kda.chunk_kda_fwd(**alone, **KEEP_ALL)
        for name in ROWS:
            assert rows(name, result).tobytes() == rows(name, packed)[start:end].tobytes(), name
        assert result.final_state.tobytes() == packed.final_state[n : n + 1].tobytes()


@examples(25)
@given(case=cases(layout="BSND"))
def test_layouts_have_the_same_bits(case):
    call = arguments(case)
    expected = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    by_head = call | {name: call[name].swapaxes(1, 2) for name in PER_TOKEN} | {"layout": "BNSD"}
    assert_same_bits(kda.chunk_kda_fwd(**by_head, **KEEP_ALL), expected)
    if case.B != 1:
        return
    for four, three in ((call, "TND"), (by_head, "NTD")):
        result = kda.chunk_kda_fwd(**four | {name: four[name][0] for name in PER_TOKEN} | {"layout": three}, **KEEP_ALL)
        for name, array in result._asdict().items():
            assert as_bytes(array) == as_bytes(getattr(expected, name)), name


@examples(30)
@given(case=cases(packed=False), tokens=st.integers(2, 300), data=st.data())
def test_a_split_sequence_is_the_whole(case, tokens, data):
    case = dataclasses.replace(case, T=tokens)
    boundaries = st.integers(1, max(1, tokens // case.chunk_size)).map(lambda n: min(n * case.chunk_size, tokens))
    at = data.draw(boundaries | st.integers(0, tokens))
    call = arguments(case)
    whole = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    first = kda.chunk_kda_fwd(**cut(call, 0, at), **KEEP_ALL)
    second = kda.chunk_kda_fwd(**cut(call, at, tokens) | {"initial_state": first.final_state}, **KEEP_ALL)
    if at % case.chunk_size == 0 or at == tokens:
        for name in ROWS:
            joined = np.concatenate([rows(name, first), rows(name, second)])
            assert joined.tobytes() == rows(name, whole).tobytes(), name
        assert second.final_state.tobytes() == whole.final_state.tobytes()
        return
    expected = kda.reference.chunk_kda_fwd(**call, intermediates=False)
    attn_out = np.concatenate([first.attn_out, second.attn_out], axis=first.attn_out.ndim - 3)
    for name, array in (("attn_out", attn_out), ("final_state", second.final_state)):
        score = _score.score(name, array, expected[name])
        assert is_kept(score, expected[name]), score


@examples(30)
@given(case=cases(packed=False), tokens=st.integers(1, 200), more=st.integers(0, 100))
def test_what_follows_changes_nothing_before(case, tokens, more):
    call = arguments(dataclasses.replace(case, T=tokens + more))
    expected = kda.chunk_kda_fwd(**cut(call, 0, tokens), **KEEP_ALL)
    for name in PER_TOKEN:
        np.moveaxis(call[name], TOKEN_AXIS[case.layout], 0)[tokens:] = np.nan
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    for name in CAUSAL:
        assert rows(name, result)[:tokens].tobytes() == rows(name, expected).tobytes(), name
    chunks = -(-tokens // case.chunk_size)
    before = (slice(None),) * (result.h.ndim - 4) + (slice(chunks),)
    assert result.h[before].tobytes() == expected.h[before].tobytes()


@examples(30)
@given(case=cases(packed=True), data=st.data())
def test_nan_stays_in_its_sequence(case, data):
    call = arguments(case)
    expected = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    bad = data.draw(st.integers(0, case.sequences - 1))
    start, end = case.cu_seqlens[bad : bad + 2]
    for name in PER_TOKEN:
        np.moveaxis(call[name], TOKEN_AXIS[case.layout], 0)[start:end] = np.nan
    if call["initial_state"] is not None:
        call["initial_state"][bad] = np.nan
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    for name in ROWS:
        for part in (slice(start), slice(end, None)):
            assert rows(name, result)[part].tobytes() == rows(name, expected)[part].tobytes(), name
    others = [n for n in range(case.sequences) if n != bad]
    assert result.final_state[others].tobytes() == expected.final_state[others].tobytes()


@examples(30)
@given(case=cases(), data=st.data())
def test_nan_stays_in_its_heads(case, data):
    call = arguments(case)
    expected = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    group = case.HV // case.H
    bad = data.draw(st.integers(0, case.HV - 1))
    hit = {bad}
    head_axis = {"BSND": 2, "BNSD": 1, "TND": 1, "NTD": 0}[case.layout]
    for name in ("v", "g", "beta"):
        np.moveaxis(call[name], head_axis, 0)[bad] = np.nan
    if data.draw(st.booleans()):
        hit = set(range(bad // group * group, bad // group * group + group))
        for name in ("q", "k"):
            np.moveaxis(call[name], head_axis, 0)[bad // group] = np.nan
    if call["initial_state"] is not None:
        call["initial_state"][:, bad] = np.nan
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    others = [head for head in range(case.HV) if head not in hit]
    for name in ROWS:
        assert rows(name, result)[:, others].tobytes() == rows(name, expected)[:, others].tobytes(), name
    assert result.final_state[:, others].tobytes() == expected.final_state[:, others].tobytes()
    assert result.h[..., others, :, :].tobytes() == expected.h[..., others, :, :].tobytes()


@st.composite
def gate_calls(draw):
    """Return arguments of fused_kda_gate: numbers of any magnitude, any shape."""
    shape = (*draw(st.lists(st.integers(0, 5), max_size=3)), draw(st.integers(1, 6)), draw(st.integers(1, 140)))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    magnitude = 2.0 ** numbers.uniform(-30, draw(st.sampled_from([3, 15])), shape)
    lower_bound = draw(st.none() | st.floats(-1e4, 1e4, width=32))
    has_A_log = lower_bound is None or draw(st.booleans())
    bias_shape = draw(st.sampled_from([None, (shape[-2] * shape[-1],), shape[-2:]]))
    g = (magnitude * numbers.choice([-1, 1], shape)).astype(draw(st.sampled_from([np.float32, np.float16, BFLOAT16])))
    return {
        "g": g,
        "A_log": numbers.uniform(-3, 3, shape[-2]).astype(np.float32) if has_A_log else None,
        "dt_bias": None if bias_shape is None else numbers.standard_normal(bias_shape).astype(np.float32),
        "lower_bound": lower_bound,
    }


@examples(60)
@given(call=gate_calls(), output=st.sampled_from([np.float32, np.float16, BFLOAT16]))
def test_the_gate_keeps_its_bounds(call, output):
    gates = kda.fused_kda_gate(**call, output_dtype=output)
    scores = _score.score_gate(gates, kda.reference.fused_kda_gate(**call))
    assert [score for score in scores if not score.ok] == []


@examples(30)
@given(case=cases(), chunk_size=st.sampled_from([32, 64, 128]), dtype=st.sampled_from([np.float32, np.float16]))
def test_gate_cumsum_keeps_its_bound_and_is_gk(case, chunk_size, dtype):
    call = arguments(case)
    by_head = call["g"] if case.is_head_major else np.moveaxis(call["g"], TOKEN_AXIS[case.layout], -2)
    names = ("A_log", "dt_bias", "cu_seqlens", "use_gate_in_kernel", "safe_gate", "lower_bound")
    shared = {name: call[name] for name in names}
    gk = kda.kda_gate_cumsum(by_head, case.chunk_size, **shared)
    assert gk.tobytes() == kda.chunk_kda_fwd(**call, **KEEP_ALL).gk.tobytes()
    with np.errstate(over="ignore"):
        narrow = by_head.astype(dtype)
    score = _score.score(
        "gk",
        kda.kda_gate_cumsum(narrow, chunk_size, **shared),
        kda.reference.kda_gate_cumsum(narrow, chunk_size, **shared),
    )
    assert score.ok, score


@st.composite
def chunk_kda_calls(draw, packed=None):
    """Return a call of chunk_kda with raw q, k and beta, and any flags."""
    case = dataclasses.replace(draw(cases(packed)), layout="BSND", strides="contiguous")
    call = arguments(case)
    del call["layout"], call["chunk_indices"]
    numbers = np.random.default_rng(case.seed % 2**32)
    for name in ("q", "k", "beta"):
        call[name] = (2 * numbers.standard_normal(call[name].shape)).astype(call[name].dtype)
    sigmoid = draw(st.booleans())
    call["beta"] = call["beta"] if sigmoid else abs(call["beta"]) / 8
    return call | {
        "lower_bound": draw(st.sampled_from([None, -0.5, -5.0])) if not case.safe_gate else -4.0,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": sigmoid,
        "allow_neg_eigval": sigmoid and draw(st.booleans()),
        "output_final_state": True,
        "return_intermediate_states": True,
    }


@examples(40)
@given(call=chunk_kda_calls())
def test_chunk_kda_keeps_its_bounds(call):
    expected = kda.reference.chunk_kda(**call)
    for name, array in zip(("o", "final_state", "h"), kda.chunk_kda(**call), strict=True):
        score = _score.score("attn_out" if name == "o" else name, array, expected[name])
        assert is_kept(score, expected[name]), (name, score)


@examples(30)
@given(call=chunk_kda_calls(packed=True))
def test_chunk_kda_of_a_sequence_alone_has_the_same_bits(call):
    o, final_state, _ = kda.chunk_kda(**call)
    bounds = call["cu_seqlens"]
    for n, (start, end) in enumerate(pairwise(bounds)):
        alone = call | {name: call[name][:, start:end] for name in ("q", "k", "v", "g", "beta")} | {"cu_seqlens": None}
        if call["initial_state"] is not None:
            alone["initial_state"] = call["initial_state"][n : n + 1]
        result = kda.chunk_kda(**alone)
        assert result[0].tobytes() == o[:, start:end].tobytes()
        assert result[1].tobytes() == final_state[n : n + 1].tobytes()


@examples(60)
@given(
    layout=st.text(max_size=5),
    scale=st.floats() | st.none(),
    chunk_size=st.integers() | st.floats(),
    shape=st.lists(st.integers(0, 3), max_size=9),
    cu_seqlens=st.none() | st.lists(st.integers(-3, 2**65), max_size=4),
)
def test_nonsense_is_refused_and_supported_agrees(layout, scale, chunk_size, shape, cu_seqlens):
    call = arguments() | {"layout": layout, "scale": scale, "chunk_size": chunk_size, "cu_seqlens": cu_seqlens}
    call["beta"] = np.zeros(shape, np.float32)
    answer = kda.supported(**call)
    assert not answer
    with pytest.raises((TypeError, ValueError)) as raised:
        kda.chunk_kda_fwd(**call)
    assert answer.reason == str(raised.value)
