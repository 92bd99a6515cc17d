"""The case file, the generated inputs and the scores."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

import kda
from helpers import BFLOAT16, FLAGS, FULL, PLAIN, arguments
from kda import _cases, _gate_cases, _score
from kda._cases import Case, CaseError

CASES_DIR = Path(__file__).parents[2] / "tests" / "op_cases"


@pytest.mark.parametrize("operator", ["chunk_kda_fwd", "kda_gate", "kda_gate_cumsum"])
def test_the_package_carries_the_case_files(operator):
    assert _cases.default_path(operator).read_bytes() == (CASES_DIR / f"{operator}.json").read_bytes()


def test_generator_against_plain_integers():
    """The definition of README.md, with Python's integers."""
    mask = 2**64 - 1

    def mix(z):
        z ^= z >> 30
        z = z * 0xBF58476D1CE4E5B9 & mask
        z ^= z >> 27
        z = z * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    for seed, tensor, name in [(1, 0, "q"), (2**63 - 1, 8, "base_keys")]:
        bits = [mix((mix((seed * golden + tensor) & mask) + (e + 1) * golden) & mask) for e in range(100)]
        generator = _cases.Generator(seed, name)
        assert generator.bits((100,)).tolist() == bits
        assert generator.uniform((100,)).tolist() == [(b >> 40) * 2.0**-24 for b in bits]
        bell = [sum(b >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 131070 for b in bits]
        assert generator.bell((10, 10)).ravel().tolist() == bell


def test_distributions():
    values = _cases.values(dataclasses.replace(FULL, T=500, gate="linear", gate_scale=3.0))
    assert np.allclose(np.linalg.norm(values["q"], axis=-1), 1, atol=1e-6)
    assert abs(values["v"].std() - 1) < 0.02
    assert -3 < values["g"].min() < values["g"].max() < 0
    assert 0 <= values["beta"].min() <= values["beta"].max() < 1


def test_keys():
    repeated = _cases.values(dataclasses.replace(FULL, keys="repeated"))["k"]
    assert (repeated == repeated[:, :1]).all()
    assert not (repeated[:, :, 0] == repeated[:, :, 1]).all()
    correlated = _cases.values(dataclasses.replace(FULL, K=256, keys="correlated"))["k"]
    cosines = np.einsum("btd,bsd->bts", correlated[:, :, 0], correlated[:, :, 0])
    assert 0.7 < cosines[:, 0, 1:].mean() < 0.9


@pytest.mark.parametrize("where", ["all", "half", "single"])
def test_fixed_gates(where):
    case = dataclasses.replace(FULL, gate=_cases.FixedGate(-math.inf, where))
    fixed = np.isneginf(_cases.values(case)["g"])
    t, d = np.arange(70)[:, None, None], np.arange(32)
    expected = {"all": (t >= 0) & (d >= 0), "half": (t >= 0) & (d % 2 == 1), "single": (t % 7 == 3) & (d >= 0)}
    assert (fixed == expected[where]).all()


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "TND", "NTD"])
@pytest.mark.parametrize("strides", ["contiguous", "padded", "fused", "reversed", "inner"])
def test_layouts_and_strides_hold_the_same_values(layout, strides):
    batch = 1 if layout in ("TND", "NTD") else 2
    plain = _cases.make_arguments(dataclasses.replace(FULL, B=batch))
    call = _cases.make_arguments(dataclasses.replace(FULL, B=batch, layout=layout, strides=strides))
    for name in ("q", "k", "v", "g", "beta"):
        array = getattr(call, name)
        if layout in ("TND", "NTD"):
            array = array[None]
        if layout in ("BNSD", "NTD"):
            array = array.swapaxes(1, 2)
        assert array.tobytes() == getattr(plain, name).tobytes(), name


def test_strides_are_what_they_are_called():
    def stride_of(strides, name="q", axis=1):
        array = getattr(_cases.make_arguments(dataclasses.replace(FULL, strides=strides)), name)
        return array.strides[axis] // array.itemsize

    assert stride_of("contiguous", axis=2) == 32
    assert stride_of("padded", axis=2) == 48
    assert stride_of("reversed") == -64
    assert stride_of("inner", axis=3) == 2
    assert stride_of("fused") == stride_of("fused", "v") == 2 * 2 * 32 + 4 * 48


def test_gaps_are_nan():
    padded = _cases.make_arguments(dataclasses.replace(FULL, strides="padded"))
    for array in (padded.q, padded.g, padded.beta):
        whole = array.base if array.base.dtype != np.uint8 else array.base.view(array.dtype)
        assert np.isnan(whole.astype(np.float32)).any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "missing fields"),
        ({"name": "x"}, "missing fields"),
        ({"name": "x", "T": 1, "Q": 2}, "unknown fields"),
        ({"name": "x", "T": "1"}, "T: expected int"),
        ({"name": "x", "T": -1}, "T: expected int"),
        ({"name": "x", "T": True}, "T: expected int"),
        ({"name": 1, "T": 1}, "name: expected str"),
        ({"name": "x", "T": 1, "dtype": "float32"}, "dtype: expected one of"),
        ({"name": "x", "T": 1, "dtype": []}, "dtype: expected one of"),
        ({"name": "x", "T": 1, "gate": "none"}, "gate: expected"),
        ({"name": "x", "T": 1, "gate": {"value": 1}}, "gate: expected"),
        ({"name": "x", "T": 1, "gate": {"value": "x", "where": "all"}}, "gate value: expected"),
        ({"name": "x", "T": 1, "gate": {"value": 1, "where": "here"}}, "gate where: expected"),
        ({"name": "x", "T": 1, "cu_seqlens": [0, 1.5]}, "cu_seqlens: expected"),
        ({"name": "x", "T": 1, "beta": "none"}, "beta: expected"),
        ({"name": "x", "T": 1, "safe_gate": 1}, "safe_gate: expected bool"),
        ([], "not an object"),
    ],
)
def test_broken_cases(fields, message):
    with pytest.raises(CaseError, match=message):
        _cases.parse(fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{}", "not an array"),
        ("[1]", "case 0: not an object"),
        ("[" * 100_000, "not JSON"),
        ("\x80", "not JSON"),
    ],
)
def test_broken_files(tmp_path, text, message):
    path = tmp_path / "cases.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CaseError, match=message):
        _cases.load(path)


def test_names_are_unique(tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([{"name": "x", "T": 1}] * 2))
    with pytest.raises(CaseError, match="two cases of one name"):
        _cases.load(path)


def test_defaults():
    assert _cases.parse({"name": "x", "T": 1, "H": 3}) == Case(name="x", T=1, H=3, HV=3)
    assert _cases.parse({"name": "x", "T": 1, "scale": None, "beta": 1, "gate": "random"}).beta == 1.0
    assert tuple(PLAIN.keep_flags) == FLAGS


@pytest.mark.parametrize(
    ("parse", "fields", "message"),
    [
        (_gate_cases.parse_gate, {"name": "x"}, "missing fields"),
        (_gate_cases.parse_gate, {"name": "x", "shape": [4]}, "shape: expected 2 extents or more"),
        (_gate_cases.parse_gate, {"name": "x", "shape": [4, -1]}, "shape: expected 2 extents or more"),
        (_gate_cases.parse_gate, {"name": "x", "shape": [4, 1.5]}, "shape: expected a list of integers"),
        (_gate_cases.parse_gate, {"name": "x", "shape": [4, 4], "dtype": "float64"}, "dtype: expected one of"),
        (_gate_cases.parse_gate, {"name": "x", "shape": [4, 4], "dt_bias": True}, "dt_bias: expected one of"),
        (_gate_cases.parse_gate, {"name": "x", "shape": [4, 4], "gate": "linear"}, "gate: expected one of"),
        (_gate_cases.parse_gate, {"name": "x", "shape": [4, 4], "A_log": 1}, "A_log: expected bool"),
        (_gate_cases.parse_gate, {"name": "x", "shape": [4, 4], "lower_bound": "-5"}, "lower_bound: expected a number"),
        (_gate_cases.parse_gate, {"name": 1, "shape": [4, 4]}, "name: expected str"),
        (_gate_cases.parse_gate_cumsum, {"name": "x", "shape": [4, 4]}, "shape: expected 3 extents or more"),
        (_gate_cases.parse_gate_cumsum, {"name": "x", "shape": [4, 4, 4], "T": 4}, "unknown fields"),
        (_gate_cases.parse_gate_cumsum, {"name": "x", "shape": [4, 4, 4], "cu_seqlens": 4}, "cu_seqlens: expected"),
        (
            _gate_cases.parse_gate_cumsum,
            {"name": "x", "shape": [4, 4, 4], "lower_bound": None},
            "lower_bound: expected",
        ),
        (_gate_cases.parse_gate_cumsum, {"name": "x", "shape": [4, 4, 4], "seed": -1}, "seed: expected int"),
        (_gate_cases.parse_gate_cumsum, [], "not an object"),
    ],
)
def test_broken_gate_cases(parse, fields, message):
    with pytest.raises(CaseError, match=message):
        parse(fields)


def test_gate_cases_have_the_distributions_of_the_definition():
    wide = _gate_cases.GateCase("wide", (200, 4, 64), gate="wide", dtype="float32", dt_bias="matrix")
    call = _gate_cases.make_gate_arguments(wide)
    magnitudes = np.abs(call["g"])
    assert 2**-24 <= magnitudes.min() < 2**-22
    assert 2**7 <= magnitudes.max() <= 2**8
    assert 0.45 < (call["g"] < 0).mean() < 0.55
    assert call["dt_bias"].shape == (4, 64)
    flat = _gate_cases.make_gate_arguments(dataclasses.replace(wide, dt_bias="flat", A_log=False))
    assert flat["dt_bias"].tobytes() == call["dt_bias"].tobytes()
    assert flat["A_log"] is None
    cumsum = _gate_cases.GateCumsumCase("cumsum", (2, 3, 100, 8), gate_scale=2.0)
    assert -2 < _gate_cases.make_gate_cumsum_arguments(cumsum)["g"].min() < -1.9
    raw = _gate_cases.make_gate_cumsum_arguments(dataclasses.replace(cumsum, use_gate_in_kernel=True))
    assert abs(raw["g"].std() - 4) < 0.1


def errors_of(actual, expected):
    return [score.error for score in _score.score_gate(actual, np.asarray(expected, np.float64))]


def test_gate_scores():
    assert errors_of(np.float32([1, 2, 4]), [1, 2, 5]) == [1.0, 1 / 3, 0.2]
    assert errors_of(np.float32([1e-38]), [0.0]) == pytest.approx([1e-38, 1e-38, 0.1])
    assert errors_of(np.float32([-np.inf, 1]), [-np.inf, 1]) == [0.0, 0.0, 0.0]
    assert errors_of(np.float16([-np.inf, 1]), [-1e6, 1]) == [0.0, 0.0, 0.0]
    assert errors_of(np.zeros((0,), np.float32), []) == [0.0, 0.0, 0.0]
    for wrong in ([np.nan, 1], [np.inf, 1], [-1e38, 1]):
        assert errors_of(np.float32(wrong), [-np.inf, 1]) == [math.inf] * 3
    assert errors_of(np.float32([np.inf, 1]), [1, 1]) == [math.inf] * 3
    best = _score.score_gate(np.float32([1 / 3, 2 / 3]), np.array([1 / 3, 2 / 3]))
    assert [score.output for score in best] == ["max abs", "mean abs", "max rel"]
    assert all(score.ok and score.error == score.rounding for score in best)
    assert best[0].bound == 1.001 * best[0].rounding + 2**-22 * 2 / 3
    assert best[1].bound == 1.001 * best[1].rounding + 2**-22 * 0.5
    assert best[2].bound == 1.001 * best[2].rounding + 2**-22
    wrong = _score.score_gate(np.float32([1 / 3, 2 / 3]) * np.float32(1 + 1e-6), np.array([1 / 3, 2 / 3]))
    assert not any(score.ok for score in wrong)


def test_relative_error():
    ones = np.ones(4)
    assert _score.relative_error(np.float32([1, 1, 1, 3]), ones) == 1.0
    assert _score.relative_error(np.float32([0, 0, 0, 2]), np.zeros(4)) == 2.0
    assert _score.relative_error(np.zeros(4, np.float32), np.full(4, 2e-30)) == 1.0
    assert _score.relative_error(np.zeros(4, np.float32), np.full(4, 2e-38)) == pytest.approx(2e-8)
    assert _score.relative_error(np.zeros((0,), np.float32), np.zeros(0)) == 0.0
    assert _score.relative_error(np.float32([1, 1, 1, np.nan]), ones) == math.inf
    assert _score.relative_error(np.float32([1, 1, 1, np.inf]), ones) == math.inf
    assert _score.relative_error(np.float32([1]), ones) == math.inf
    infinite = np.array([-np.inf, 1.0])
    assert _score.relative_error(np.float32([-np.inf, 1]), infinite) == 0.0
    assert _score.relative_error(np.float32([np.inf, 1]), infinite) == math.inf
    assert _score.relative_error(np.float32([-1e30, 1]), infinite) == math.inf
    assert _score.relative_error(np.float32([np.nan, 1]), np.array([np.nan, 1])) == math.inf


def test_what_overflows_must_be_infinite():
    expected = np.array([1e6, 1.0])
    assert _score.score("u", np.float16([np.inf, 1]), expected).ok
    assert not _score.score("u", np.float16([65504, 1]), expected).ok


def test_bounds():
    exact = np.array([1 / 3, 2 / 3])
    best = exact.astype(np.float32).astype(BFLOAT16)
    score = _score.score("attn_out", best, exact)
    assert score.error == score.rounding
    assert score.bound == 1.05 * score.rounding
    assert _score.score("u", best, exact).bound == 1.05 * score.rounding + 1e-5
    assert _score.score("gk", exact.astype(np.float32), exact).bound == 1e-5
    assert not _score.score("attn_out", best, np.array([np.nan, 2 / 3])).ok
    assert not _score.score("attn_out", np.nextafter(best, BFLOAT16.type(2)), exact).ok


def test_akk_by_its_triangle():
    call = arguments(dataclasses.replace(PLAIN, T=70, K=32))
    exact = kda.reference.chunk_kda_fwd(**call)["Akk"]
    best = exact.astype(np.float32).astype(BFLOAT16)
    assert _score.score_akk(best, exact, 64, None).ok
    for row, column, value in [(3, 3, 1.01), (3, 4, 1e-30), (66, 5, 1e-30), (3, 1, 1.0)]:
        wrong = best.copy()
        wrong[0, 0, row, column] = value
        assert not _score.score_akk(wrong, exact, 64, None).ok, (row, column)


def test_rows_in_chunk():
    assert _score.rows_in_chunk(5, 3, None).tolist() == [0, 1, 2, 0, 1]
    assert _score.rows_in_chunk(6, 3, (0, 0, 4, 4, 6)).tolist() == [0, 1, 2, 0, 0, 1]
    assert _score.rows_in_chunk(0, 3, (0, 0)).tolist() == []
