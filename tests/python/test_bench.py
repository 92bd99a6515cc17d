"""`kda bench`, on sizes that take no time."""

import json
import os
import re
import subprocess
import sys

import pytest

import kda
from helpers import arguments

pytest.importorskip("typer")

SMALL = ("--tokens", "70", "--heads", "2,4", "--rounds", "1", "--sgemm-size", "64", "--threads", "2")


def bench(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "kda", "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"} | environment,
        check=False,
    )


def test_figures_agree_with_each_other(tmp_path):
    file = tmp_path / "bench.json"
    done = bench(*SMALL, "--json", file)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    measurements = report["measurements"]
    # Three gates, two numbers of heads, two sets of outputs.
    assert len(measurements) == 12
    for m in measurements:
        seconds = m["milliseconds"] / 1e3
        # 11.53 MFLOP per 64 tokens and head.
        work = m["tokens"] * m["heads"] * 11.534336e6 / 64
        assert m["gflops"] == pytest.approx(work / seconds / 1e9)
        assert m["ratio_to_sgemm"] == pytest.approx(m["gflops"] / m["sgemm_gflops"])
        assert m["token_heads_per_second"] == pytest.approx(m["tokens"] * m["heads"] / seconds)
        assert m["case"] in done.stdout
        # The state comes in where the case has one, and goes out; two chunks' states are among all outputs.
        moved = m["ratio_to_bandwidth_floor"] * seconds * 1e9 * m["copy_gbytes_per_second"]
        state = 4 * 128 * 128 * m["heads"]
        assert moved > state * (2 if m["outputs"] == "all" else 1) + m["tokens"] * m["heads"] * 128 * 2 * 5
        assert m["flops_per_byte"] == pytest.approx(work / moved)
    assert report["settings"]["threads"] == 2


def test_other_cases_are_scaled(tmp_path):
    file = tmp_path / "bench.json"
    done = bench(*SMALL, "--filter", "matrix_fp16_NTD_bounded_V256_C128", "--json", file)
    assert done.returncode == 0, done.stderr
    assert {(m["tokens"], m["heads"]) for m in json.loads(file.read_text())["measurements"]} == {(70, 2), (70, 4)}
    assert bench(*SMALL, "--filter", "packed_holes").returncode == 0


def test_packed_cases_keep_their_sequences():
    from kda import _cases
    from kda.cli.bench import SHAPES, scaled

    case = _cases.Case(name="packed", **SHAPES["packed_200"])
    assert case.sequences == 200
    assert case.cu_seqlens[-1] == case.T
    for tokens in (3, 2048, 8192):
        bounds = scaled(case, tokens, 4).cu_seqlens
        assert (len(bounds), bounds[0], bounds[-1]) == (201, 0, tokens)
        assert sorted(bounds) == list(bounds)


def test_shapes_are_compared_with_the_usual_one(tmp_path):
    file = tmp_path / "bench.json"
    done = bench(*SMALL, "--heads", "2", "--shapes", "--json", file)
    assert done.returncode == 0, done.stderr
    assert "of K=V=128" in done.stdout
    measurements = json.loads(file.read_text())["measurements"]
    cases = ["V256", "K64", "chunk128", "fp16", "groups_of_4", "packed_200"]
    assert [m["case"] for m in measurements] == [case for case in cases for _ in range(2)]
    assert all(m["ratio_to_usual_shape"] > 0 for m in measurements)


def blas_of(path, **environment):
    """Return what a run says of NumPy's BLAS and of the instruction set."""
    done = bench(*SMALL, "--heads", "2", "--json", path, **environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["blas"] in done.stdout
    return report["blas"], report["instruction_set"]


def test_the_blas_has_the_kernels_of_the_instruction_set(tmp_path):
    """Its own choice, whatever the environment says, unless KDA_CPU_ISA asks for less than the machine has."""
    pytest.importorskip("threadpoolctl")
    foreign = {"OPENBLAS_CORETYPE": "Nehalem", "OPENBLAS_L2_SIZE": "1", "OPENBLAS_NUM_THREADS": "1"}
    usual = blas_of(tmp_path / "usual.json")
    assert blas_of(tmp_path / "foreign.json", **foreign) == usual
    if not usual[0].startswith("openblas"):
        pytest.skip(f"NumPy's BLAS is {usual[0]}")
    assert usual[0].endswith(", 2 threads)")
    best, *others = kda.info().cpu_instruction_sets
    assert blas_of(tmp_path / "best.json", KDA_CPU_ISA=best) == usual
    for name, kernels in (("AVX2", "Haswell"), ("SSE4", "Nehalem")):
        if name in others:
            found = blas_of(tmp_path / f"{name}.json", KDA_CPU_ISA=name, **foreign)
            assert found == (re.sub(r"\(\w+,", f"({kernels},", usual[0]), name)


def test_scaling_and_products(tmp_path):
    file = tmp_path / "bench.json"
    done = bench(*SMALL, "--scaling", "--state-products", "bfloat16", "--json", file, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    call = arguments()
    assert report["state_products"] == kda.supported(**call, state_products="bfloat16").state_products
    assert f"state products {report['state_products']}" in done.stdout
    assert "of 1 thread" in done.stdout
    assert all(m["ratio_to_one_thread"] > 0 for m in report["measurements"])


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    done = bench(*SMALL, "--plot", file)
    assert done.returncode == 0, done.stderr
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "0"), "--tokens"),
        (("--heads", "4,x"), "--heads"),
        (("--heads", "129"), "q: expected H in 1..128, got H = 129"),
        (("--filter", "no such case"), "no such case"),
        (("--filter", "packed_all_empty_BSND_zero"), "packed_all_empty_BSND_zero"),
        (("--shapes", "--filter", "fp16"), "--shapes"),
        (("--state-products", "half"), "--state-products"),
        (("--backend", "abacus"), "--backend"),
        (("--json", "/nowhere/bench.json"), "/nowhere/bench.json"),
    ],
)
def test_refusals_are_one_line(arguments, message):
    done = bench(*SMALL, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
