"""bench/compare_torch.py: its PyTorch forms against float64, and the program on sizes that take no time."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kda import _cases, reference
from kda._cases import Case
from kda._score import relative_error

PROGRAM = Path(__file__).parents[2] / "bench" / "compare_torch.py"
torch = pytest.importorskip("torch")
pytest.importorskip("typer")
if not PROGRAM.exists():
    pytest.skip("the benchmarks are not there", allow_module_level=True)

CASE = Case(name="case", T=150, H=3, HV=3, K=32, V=48, scale=0.3)
CASES = [
    CASE,
    dataclasses.replace(CASE, dtype="float16", T=64, g_dtype="bfloat16", beta_dtype="bfloat16"),
    dataclasses.replace(CASE, T=1),
    dataclasses.replace(CASE, use_gate_in_kernel=True, dt_bias=True, initial_state=True),
    dataclasses.replace(CASE, use_gate_in_kernel=True, safe_gate=True, lower_bound=-3.0),
    dataclasses.replace(CASE, keys="correlated", beta=1.0, gate_scale=0.01),
    dataclasses.replace(CASE, gate=_cases.FixedGate(-24.0, "half")),
]


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("compare_torch", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_forms_are_the_references(program, form, case, threads):
    arguments = _cases.make_arguments(case)
    expected = reference.compute(arguments, intermediates=False)
    call = program.make_call(arguments)
    call = dataclasses.replace(call, inputs=call.inputs._replace(v=call.inputs.v.float()))
    with program.new_pool(threads) as pool:
        out, state = program.run(program.FORMS[form], call, threads, pool)()
    assert relative_error(out.numpy()[None], expected["attn_out"]) < 5e-6
    assert relative_error(state.numpy()[None], expected["final_state"]) < 5e-6


def test_inputs_are_not_written(program):
    arguments = _cases.make_arguments(CASE)
    before = {name: value.tobytes() for name, value in arguments._asdict().items() if isinstance(value, np.ndarray)}
    call = program.make_call(arguments)
    with program.new_pool(1) as pool:
        for form in program.FORMS.values():
            program.run(form, call, 1, pool)()
    assert before == {name: getattr(arguments, name).tobytes() for name in before}


def test_a_form_that_is_wrong_is_not_timed(program):
    from kda.cli.console import UserError

    # Where the chunked form subtracts -inf from -inf.
    case = dataclasses.replace(CASE, gate=_cases.FixedGate(-np.inf, "single"))
    with program.new_pool(1) as pool, pytest.raises(UserError, match="the chunked form is wrong by inf"):
        program.check(case, pool, 1)


def run(*options):
    return subprocess.run([sys.executable, PROGRAM, *map(str, options)], capture_output=True, text=True)


def test_figures_agree_with_each_other(tmp_path):
    file = tmp_path / "compared.json"
    done = run("--tokens", "70", "--heads", "2,3", "--threads", "2", "--rounds", "1", "--json", file)
    assert done.returncode == 0, done.stderr
    measurements = json.loads(file.read_text())["measurements"]
    programs = ["kda", "chunked", "recurrent"]
    assert [(m["program"], m["heads"]) for m in measurements] == [(p, heads) for heads in (2, 3) for p in programs]
    for place, m in enumerate(measurements):
        of_kda = measurements[place // 3 * 3]
        assert m["speed_of_kda"] == pytest.approx(m["milliseconds"] / of_kda["milliseconds"])
        assert m["token_heads_per_second"] == pytest.approx(70 * m["heads"] / m["milliseconds"] * 1e3)
        assert (m["error"] is None) == (m["program"] == "kda")
    for name in programs:
        assert name in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--case", "nothing"), "--case: there is no case nothing"),
        (("--case", "groups_of_8"), "as many value heads as q/k heads"),
        (("--case", "matrix_bf16_NTD_softplus_V128_C64"), "layout BSND"),
        (("--tokens", "0"), "--tokens"),
        (("--json", "/nowhere/file"), "/nowhere/file"),
    ],
)
def test_refusals_are_one_line(options, message):
    done = run("--tokens", "20", "--heads", "1", "--rounds", "1", *options)
    assert done.returncode == 2
    assert done.stderr.startswith("kda compare_torch: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_full_disk_under_stdout_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, PROGRAM, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "kda: stdout cannot be written: No space left on device\n"


def test_without_torch_the_program_says_so():
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "compare_torch.py: needs torch: pip install torch\n")
