"""`kda inspect`: its figures against the float64 reference, and every warning at its place."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from helpers import FULL, PACKED, PLAIN, arguments
from kda import _cases, _inspect, reference
from kda._cases import Case, FixedGate
from kda._chunk_kda_fwd import Arguments
from test_cli import EXAMPLE, assert_refused, kda_command, save_call

# Nothing that breaks anybody.
HARMLESS = Case(name="harmless", T=150, H=2, HV=4, K=64, V=32, gate_scale=0.5)


def look(case=HARMLESS, **changes):
    return _inspect.inspect(Arguments(**arguments(case, **changes)))


def found(report, kind):
    return [finding for finding in report.findings if finding.kind == kind]


def changed(name, *writes, case=HARMLESS):
    """Return a copy of an input with values written to it: pairs of an index and a value."""
    array = np.array(arguments(case)[name])
    for index, value in writes:
        array[index] = value
    return {name: array}


def test_nothing_to_warn_of():
    report = look()
    assert {finding.severity for finding in report.findings} <= {"note"}
    assert len(report.keys) == 2
    assert [head.key_head for head in report.heads] == [0, 0, 1, 1]


@pytest.mark.parametrize("chunk_size", [64, 128])
@pytest.mark.parametrize(
    "case",
    [
        FULL,
        PACKED,
        dataclasses.replace(FULL, T=150, B=1, safe_gate=True, lower_bound=-2.0, layout="NTD"),
        dataclasses.replace(HARMLESS, keys="correlated", gate=FixedGate(-np.inf, "single")),
        dataclasses.replace(HARMLESS, keys="repeated", beta=1.9, gate=FixedGate(-1000.0, "half")),
    ],
    ids=["full", "packed", "bounded", "resets", "strong"],
)
def test_gates_and_systems_are_the_references(case, chunk_size):
    a = Arguments(**arguments(case, chunk_size=chunk_size))
    report, expected = _inspect.inspect(a), reference.compute(a)
    chunks = report.chunks
    akk = expected["Akk"].reshape(-1, *expected["Akk"].shape[-3:])
    gk = expected["gk"].reshape(-1, *expected["gk"].shape[-3:])
    g, k, beta = (_inspect._token_major(array, a.layout) for array in (a.g, a.k, a.beta))
    for head in report.heads:
        lows = []
        for part in chunks.parts():
            gate = _inspect._activated(a, part.take(g, head.head), head.head).astype(np.float64)
            gate = np.where(part.valid[..., None], gate, 0)
            keys, write = part.numbers(k, head.key_head), part.numbers(beta, head.head)
            inverse = _inspect.invert(_inspect.lower_part(gate, keys, write))
            of_reference = akk[part.batch, head.head, part.tokens]
            np.testing.assert_allclose(inverse[part.valid], of_reference[part.valid], rtol=1e-5, atol=1e-6)
            sums = gk[part.batch, head.head, part.tokens] * np.log(2)
            np.testing.assert_allclose(np.cumsum(gate, 1)[part.valid], sums[part.valid], rtol=1e-5, atol=1e-6)
            lows.append(gate.min())
        assert head.smallest_gate == min(lows)
        assert head.histogram.sum() == g.shape[0] * g.shape[1] * g.shape[3]


@pytest.mark.parametrize("layout", ["BNSD", "TND", "NTD"])
def test_layouts_are_one(layout):
    expected, report = look(), look(dataclasses.replace(HARMLESS, layout=layout))
    for a, b in zip(expected.heads, report.heads, strict=True):
        np.testing.assert_array_equal(a.condition, b.condition)
        np.testing.assert_array_equal(a.histogram, b.histogram)
    assert expected.findings == report.findings


def test_chunks_end_with_their_sequences():
    chunks = look(PACKED).chunks
    assert chunks.sequence.tolist() == [0, 0, 2]
    assert chunks.first.tolist() == [0, 64, 65]
    assert chunks.rows.tolist() == [64, 1, 5]


def hostile_gates(rng, n=3, size=64, width=32):
    """Gates of every size, with resets and a few that grow."""
    gate = -(10.0 ** rng.uniform(-6, 2.5, (n, size, width)))
    gate[rng.random(gate.shape) < 0.02] = -np.inf
    gate[rng.random(gate.shape) < 0.02] = 0.3
    return gate


@pytest.mark.parametrize("size", [64, 128])
def test_systems_are_those_of_the_recurrence(size):
    """Not merely near the reference: the same to rounding as keys carried from row to row."""
    rng = np.random.default_rng(5)
    gate = hostile_gates(rng, size=size)
    keys, beta = rng.standard_normal(gate.shape), rng.uniform(-1, 2, gate.shape[:2])
    A = _inspect.lower_part(gate, keys, beta)
    carried = np.zeros_like(keys)
    for i in range(size):
        carried *= np.exp(gate[:, i, None])
        expected = np.einsum("njd,nd->nj", carried, keys[:, i]) * beta[:, i, None]
        np.testing.assert_allclose(A[:, i], expected, rtol=1e-12, atol=1e-14)
        carried[:, i] = keys[:, i]


def test_spans_and_sums_are_those_of_numpy():
    gate = hostile_gates(np.random.default_rng(6))
    part = next(_inspect.Chunks(50, 3, None, 64).parts())
    gate[~part.valid] = 0
    spans, channels = _inspect._span(gate)
    sums = np.cumsum(gate[:, 1:], axis=1)
    expected = np.maximum(sums.max(axis=1), 0) - np.minimum(sums.min(axis=1), 0)
    np.testing.assert_array_equal(spans, expected.max(axis=-1))
    np.testing.assert_array_equal(channels, expected.argmax(axis=-1))
    sums = np.abs(np.cumsum(gate, axis=1)[:, :-1])
    counted = np.isfinite(sums) & (gate[:, 1:] > -87.3365448) & part.valid[:, 1:, None]
    np.testing.assert_array_equal(_inspect._largest_sums(gate, part), np.where(counted, sums, 0).max(axis=1))


def test_histogram_is_numpys():
    gate = hostile_gates(np.random.default_rng(7)).astype(np.float32).reshape(-1, 32)
    edges = (-np.log(2) / _inspect.HALF_LIFE_EDGES).astype(np.float32)
    for step in (-np.inf, 0, np.inf):
        gate[: len(edges), 3] = np.nextafter(edges, np.float32(step))
        gates = _inspect._Gates(32)
        with np.errstate(divide="ignore"):
            gates.add(gate[:50])
            gates.add(gate[50:])
            half_lives = np.log(2) / np.abs(gate[gate <= 0].astype(np.float64))
        expected, _ = np.histogram(half_lives, [-np.inf, *_inspect.HALF_LIFE_EDGES, np.inf])
        np.testing.assert_array_equal(gates.histogram, expected)
        assert gates.growing == (gate > 0).sum()


def test_histogram_and_half_lives_of_known_gates():
    case = dataclasses.replace(HARMLESS, gate=FixedGate(float(np.float32(-np.log(2) / 20)), "all"))
    for head in look(case).heads:
        assert head.histogram[np.searchsorted(_inspect.HALF_LIFE_EDGES, 20.0)] == 150 * 64
        np.testing.assert_allclose(head.half_lives, 20, rtol=1e-6)
    for head in look(dataclasses.replace(HARMLESS, gate=FixedGate(0.0, "all"))).heads:
        assert head.histogram[-1] == 150 * 64
        assert np.isinf(head.half_lives).all()


def test_spans_of_known_gates():
    case = dataclasses.replace(HARMLESS, gate=FixedGate(-2.0, "all"))
    for head in look(case).heads:
        # A block's first gate decays what came before.
        np.testing.assert_allclose(head.span_block[0], 2.0 * 15)
        np.testing.assert_allclose(head.span_chunk[:2], 2.0 * 63)


def test_doubling_product_on_one_repeated_key():
    """The figures of a study of such inverses: 5e-5 for 16 rows, and nothing left of 64, in float32."""
    case = dataclasses.replace(HARMLESS, keys="repeated", beta=0.9997, gate=FixedGate(0.0, "all"), K=128)
    for head in look(case).heads:
        assert 1e-6 < head.doubling_block[0].max() < 1e-3
        assert head.doubling[0] > 1e6
    assert len(found(look(case), "doubling_chunk")) == 4
    assert len(found(look(case), "keys_alike")) == 2


@pytest.mark.parametrize(
    ("kind", "changes", "head", "tokens", "channel"),
    [
        ("gate_not_finite", changed("g", ((0, 70, 1, 3), np.nan)), 1, (70, 71), 3),
        ("gate_not_finite", changed("g", ((0, 70, 1, 3), np.inf)), 1, (70, 71), 3),
        ("gate_positive", changed("g", ((0, 149, 3, 5), 0.5)), 3, (149, 150), 5),
        ("gate_reset", changed("g", ((0, 64, 2, 0), -np.inf)), 2, (64, 65), 0),
        ("decay_underflow", changed("g", ((0, 5, 0, 63), -90.0)), 0, (5, 6), 63),
        ("span_block", changed("g", ((0, slice(33, 36), 2, 9), -30.0)), 2, (32, 48), 9),
        ("span_chunk", changed("g", ((0, slice(64, 128, 6), 2, 9), -10.0)), 2, (64, 128), 9),
        ("span_block", changed("g", ((0, 145, 2, 9), -200.0)), 2, (144, 150), 9),
        ("gk_resolution", changed("g", ((0, 66, 1, 7), -1000.0)), 1, (64, 128), 7),
        ("expansion", changed("beta", ((0, 77, 2), 2.5)), 2, (77, 78), None),
        ("beta_outside", changed("beta", ((0, 77, 2), -0.5)), 2, (77, 78), None),
        ("input_not_finite", changed("q", ((0, 128, 1, 2), np.nan)), 1, (128, 129), 2),
        ("input_not_finite", changed("k", ((0, 0, 0, 2), np.inf)), 0, (0, 1), 2),
        ("input_not_finite", changed("v", ((0, 12, 3, 31), np.nan)), 3, (12, 13), 31),
        ("input_not_finite", changed("beta", ((0, 12, 3), np.nan)), 3, (12, 13), None),
    ],
)
def test_every_warning_has_its_place(kind, changes, head, tokens, channel):
    (finding,) = found(look(**changes), kind)
    assert (finding.head, finding.sequence, finding.tokens, finding.channel) == (head, 0, tokens, channel)
    assert finding.count >= 1


def test_keys_that_repeat_are_found_where_they_do():
    k = arguments(HARMLESS)["k"].copy()
    k[0, 64:128, 1] = k[0, 64, 1]
    report = look(k=k, beta=np.full((1, 150, 4), 1.9, np.float32), g=np.zeros((1, 150, 4, 64), np.float32))
    (alike,) = found(report, "keys_alike")
    assert (alike.head, alike.tokens, alike.count) == (1, (64, 128), 1)
    assert alike.value == pytest.approx(1, abs=1e-3)
    assert {(f.head, f.tokens) for f in found(report, "doubling_chunk")} >= {(2, (64, 128)), (3, (64, 128))}


def test_ill_conditioned_systems():
    case = dataclasses.replace(HARMLESS, keys="repeated", beta=2.0, gate=FixedGate(0.0, "all"))
    assert len(found(look(case), "ill_conditioned")) == 4


def test_places_of_packed_sequences():
    packed = dataclasses.replace(HARMLESS, cu_seqlens=(0, 50, 50, 150))
    (finding,) = found(look(packed, **changed("g", ((0, 120, 1, 3), -np.inf))), "gate_reset")
    assert (finding.sequence, finding.tokens) == (2, (120, 121))
    dense = dataclasses.replace(HARMLESS, B=2)
    (finding,) = found(look(dense, **changed("g", ((1, 120, 1, 3), -np.inf), case=dense)), "gate_reset")
    assert (finding.sequence, finding.tokens) == (1, (120, 121))


def test_what_has_no_tokens():
    a = arguments(FULL)
    state, bias, A_log = (a[name].copy() for name in ("initial_state", "dt_bias", "A_log"))
    state[1, 2, 3, 4], bias[32], A_log[3] = np.nan, np.inf, np.nan
    report = look(FULL, initial_state=state, dt_bias=bias, A_log=A_log)
    faults = {(f.tensor, f.head, f.sequence, f.tokens) for f in found(report, "input_not_finite")}
    assert faults == {("initial_state", 2, 1, None), ("dt_bias", 1, None, None), ("A_log", 3, None, None)}


def test_slow_decays_that_bfloat16_cannot_hold():
    report = look(dataclasses.replace(HARMLESS, gate=FixedGate(-1e-3, "all")))
    assert [f.value for f in found(report, "decay_one_in_bfloat16")] == [1.0] * 4


@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}, {"T": 0, "cu_seqlens": (0, 0, 0)}])
def test_nothing_to_look_at(tmp_path, sizes):
    source = save_call(tmp_path / "in", arguments(dataclasses.replace(FULL, B=1) if "B" not in sizes else FULL))
    case = dataclasses.replace(FULL, **({"B": 1} | sizes))
    source = save_call(tmp_path / "in", arguments(case))
    result = kda_command("inspect", source, "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    assert result.exit_code == 0, result.output
    assert "tokens 0" in result.stdout


def test_command_on_the_example(tmp_path):
    if not EXAMPLE.exists():
        pytest.skip("the example is not there")
    file = tmp_path / "report.json"
    result = kda_command("inspect", EXAMPLE, "--json", file)
    assert result.exit_code == 0, result.output
    assert "warning: exp(gk_i) exp(-gk_j), anchored once per chunk, overflows float32" in result.stdout
    assert (
        "head 1, tokens 256 to 319, channel 32: the gates of a chunk span 124.4 nats (5 of 6 chunks)" in result.stdout
    )
    report = json.loads(file.read_text())
    # What examples/data/README.md says of the layer.
    assert min(head["smallest_gate"] for head in report["heads"]) == pytest.approx(-12.8, abs=0.05)
    assert max(head["largest_gate"] for head in report["heads"]) == pytest.approx(-1e-4, rel=0.5)
    assert [np.mean(keys["cosine"]) for keys in report["key_heads"]] == pytest.approx([0.25, 0.25], abs=0.02)
    assert {finding["severity"] for finding in report["findings"]} == {"warning", "note"}


def test_json_has_no_numbers_that_are_none(tmp_path):
    source = save_call(tmp_path / "in", arguments(PLAIN) | {"g": np.full((1, 5, 1, 16), -np.inf, np.float32)})
    file = tmp_path / "report.json"
    assert kda_command("inspect", source, "--json", file).exit_code == 0

    def refuse(name):
        raise AssertionError(name)

    report = json.loads(file.read_text(), parse_constant=refuse)
    assert report["heads"][0]["smallest_gate"] == "-inf"


@pytest.mark.parametrize("case", [PACKED, dataclasses.replace(HARMLESS, gate=FixedGate(-np.inf, "all"))])
def test_picture(tmp_path, case):
    pytest.importorskip("matplotlib")
    source, file = save_call(tmp_path / "in", arguments(case)), tmp_path / "report.png"
    result = kda_command("inspect", source, "--plot", file)
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "report.png"]


@pytest.mark.parametrize("name", [r"a$\frac$.st", "a$b$", os.fsdecode(b"a\xff"), "a\nb", "\u4e00"])
def test_picture_of_a_file_of_any_name(tmp_path, name):
    pytest.importorskip("matplotlib")
    source, file = save_call(tmp_path / name, arguments(PLAIN)), tmp_path / f"{name}.png"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        result = kda_command("inspect", source, "--plot", file)
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(tmp_path):
    source = save_call(tmp_path / "in", arguments(PLAIN))
    code = "import sys; sys.modules['matplotlib'] = None; from kda.cli import main; main()"
    for command in (("inspect", source), ("bench", "--threads", "1")):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, command), "--plot", str(tmp_path / "x.png")],
            capture_output=True,
            text=True,
            env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        assert done.returncode == 2
        assert done.stderr == f"kda {command[0]}: --plot needs matplotlib: pip install 'kda[plot]'\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_outputs_that_are_refused(tmp_path):
    source = save_call(tmp_path / "in", arguments(PLAIN))
    before = source.read_bytes()
    for option in ("--json", "--plot"):
        assert_refused(kda_command("inspect", source, option, source), "is the input file")
        assert_refused(kda_command("inspect", source, option, tmp_path), "is not a regular file")
        assert_refused(kda_command("inspect", source, option, tmp_path / "none" / "x"), "cannot be written")
    both = ("--json", tmp_path / "x", "--plot", tmp_path / "." / "x")
    assert_refused(kda_command("inspect", source, *both), "is named twice")
    assert source.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_options_override_metadata(tmp_path):
    source = save_call(tmp_path / "in", arguments(FULL))
    result = kda_command("inspect", source, "--chunk-size", "128", "--safe-gate", "--lower-bound", "-3")
    assert result.exit_code == 0, result.output
    assert "chunks of 128 tokens" in result.stdout
    assert_refused(kda_command("inspect", source, "--chunk-size", "7"), "chunk_size: expected 64 or 128, got 7")


def test_bars():
    from kda.cli.inspect import sparkline

    assert sparkline([0, 1, 25, 100], ".12345678") == ".148"
    assert sparkline([0, 0], ".1") == ".."
    assert sparkline([], ".1") == ""


def test_cases_of_every_kind_are_looked_at():
    """Whatever the operator takes, this takes as well."""
    cases = [case for case in _cases.load(_cases.default_path()) if case.T * case.HV <= 600]
    assert len(cases) > 150
    for case in cases[::7]:
        report = look(case)
        assert len(report.heads) == case.HV, case.name


def test_the_page_names_every_finding():
    page = Path(__file__).parents[2] / "docs" / "quickstart" / "cli.md"
    if not page.exists():
        pytest.skip("the documentation is not there")
    named = {name for name in re.findall(r"`(\w+)`", page.read_text()) if name in _inspect.KINDS}
    assert named == _inspect.KINDS.keys()
