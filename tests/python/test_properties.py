"""Properties that hold for every legal call, on small random ones."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kda
from helpers import KEEP_ALL, arguments, assert_same_bits
from kda import _score
from kda._cases import Case, FixedGate


@st.composite
def cases(draw, packed=None):
    layout = draw(st.sampled_from(["BSND", "BNSD", "TND", "NTD"]))
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
        K=16 * draw(st.integers(1, 3)),
        V=16 * draw(st.integers(1, 3)),
        chunk_size=draw(st.sampled_from([64, 128])),
        use_gate_in_kernel=draw(st.booleans()),
        safe_gate=draw(st.booleans()),
        dt_bias=draw(st.booleans()),
        initial_state=draw(st.booleans()),
        state_v_first=draw(st.booleans()),
        keys=draw(st.sampled_from(["random", "repeated", "correlated"])),
        gate=draw(st.sampled_from(["random", "linear", FixedGate(-1000.0, "single"), FixedGate(-np.inf, "half")])),
        strides=draw(st.sampled_from(["contiguous", "padded", "fused", "reversed", "inner"])),
    )


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_every_output_keeps_its_bound(case):
    call = arguments(case)
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    expected = kda.reference.chunk_kda_fwd(**call)
    outputs = {name: getattr(result, name) for name in expected}
    scores = _score.score_all(outputs, expected, case.chunk_size, case.cu_seqlens)
    assert [score for score in scores if not score.ok] == []


@settings(max_examples=30, deadline=None)
@given(case=cases(), threads=st.integers(1, 5))
def test_neither_strides_nor_threads_change_a_bit(case, threads):
    expected = kda.chunk_kda_fwd(**arguments(dataclasses.replace(case, strides="contiguous")), **KEEP_ALL)
    kda.set_num_threads(threads)
    try:
        assert_same_bits(kda.chunk_kda_fwd(**arguments(case), **KEEP_ALL), expected)
    finally:
        kda.set_num_threads(None)


@settings(max_examples=30, deadline=None)
@given(case=cases(packed=True))
def test_a_sequence_alone_has_the_same_bits(case):
    call = arguments(case)
    packed = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    axis = {"BSND": 1, "BNSD": 2, "TND": 0, "NTD": 1}[case.layout]
    tokens = -3  # of attn_out, which is always sequence-major
    for n, (start, end) in enumerate(zip(case.cu_seqlens, case.cu_seqlens[1:], strict=False)):
        alone = dict(call, cu_seqlens=None, chunk_indices=None)
        for name in ("q", "k", "v", "g", "beta"):
            cut = [slice(None)] * call[name].ndim
            cut[axis] = slice(start, end)
            alone[name] = call[name][tuple(cut)]
        if call["initial_state"] is not None:
            alone["initial_state"] = call["initial_state"][n : n + 1]
        result = kda.chunk_kda_fwd(**alone, **KEEP_ALL)
        expected = np.take(packed.attn_out, range(start, end), axis=packed.attn_out.ndim + tokens)
        assert result.attn_out.tobytes() == expected.tobytes()
        assert result.final_state.tobytes() == packed.final_state[n : n + 1].tobytes()


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


@settings(max_examples=40, deadline=None)
@given(call=chunk_kda_calls())
def test_chunk_kda_keeps_its_bounds(call):
    expected = kda.reference.chunk_kda(**call)
    for name, array in zip(("o", "final_state", "h"), kda.chunk_kda(**call), strict=True):
        score = _score.score("attn_out" if name == "o" else name, array, expected[name])
        assert score.ok, (name, score)


@settings(max_examples=30, deadline=None)
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


@settings(max_examples=60, deadline=None)
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
