"""The command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import kda
from helpers import BFLOAT16, FULL, PACKED, PLAIN, arguments
from kda import _cases
from kda.cli.app import app
from kda.cli.console import one_line

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "data" / "kda_layer.safetensors"
OUTPUTS = ("attn_out", "final_state", "gk", "Aqk", "Akk", "w", "u", "qg", "kg", "v_new", "h")
ATTRIBUTES = ("layout", "scale", "chunk_size", "use_gate_in_kernel", "safe_gate", "lower_bound", "state_v_first")


def kda_command(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def assert_refused(result, *parts):
    """One line on stderr, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.isascii()
    for part in parts:
        assert part in result.stderr
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)


def save_call(path, call, **metadata):
    tensors = {name: np.ascontiguousarray(value) for name, value in call.items() if isinstance(value, np.ndarray)}
    for name in ("cu_seqlens", "chunk_indices"):
        if call[name] is not None:
            tensors[name] = np.array(call[name], np.int64)
    attributes = {name: str(call[name]) for name in ATTRIBUTES} | {"format": "pt"} | metadata
    save_file(tensors, path, {name: value for name, value in attributes.items() if value is not None})
    return path


@pytest.fixture
def plain_file(tmp_path):
    return save_call(tmp_path / "plain.safetensors", arguments(PLAIN))


@pytest.mark.parametrize("case", [PLAIN, FULL, PACKED], ids=["plain", "full", "packed"])
def test_run_writes_the_outputs_of_the_call(tmp_path, case):
    call = arguments(case)
    source, output = save_call(tmp_path / "in.safetensors", call), tmp_path / "out.safetensors"
    result = kda_command("run", source, "-o", output, "--check", "--threads", 2)
    assert result.exit_code == 0, result.output
    assert "all outputs within their bounds" in result.stdout
    assert "tokens*heads/s" in result.stdout
    expected = kda.chunk_kda_fwd(**call, output_final_state=True, disable_recompute=True)
    written = load_file(output)
    assert sorted(written) == sorted(OUTPUTS)
    for name in OUTPUTS:
        assert written[name].tobytes() == getattr(expected, name).tobytes(), name
        assert written[name].dtype == getattr(expected, name).dtype
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]


@pytest.mark.skipif(not EXAMPLE.exists(), reason="the example is not there")
def test_version():
    result = kda_command("--version")
    assert result.exit_code == 0
    assert result.stdout == f"kda {kda.__version__}\n"


def test_run_on_the_example(tmp_path):
    output = tmp_path / "out.safetensors"
    result = kda_command("run", EXAMPLE, "-o", output, "--check", "--backend", "cpu")
    assert result.exit_code == 0, result.output
    for name in OUTPUTS:
        assert f"│ {name} " in result.stdout
    expected = load_file(EXAMPLE)["expected_attn_out_f32"]
    actual = load_file(output)["attn_out"].astype(np.float32)
    assert np.linalg.norm(actual - expected) < 3e-3 * np.linalg.norm(expected)


def test_run_picks_outputs(tmp_path, plain_file):
    output = tmp_path / "out.safetensors"
    assert kda_command("run", plain_file, "-o", output, "--outputs", "h, final_state", "--check").exit_code == 0
    assert sorted(load_file(output)) == ["final_state", "h"]
    assert_refused(kda_command("run", plain_file, "-o", output, "--outputs", "h,H"), "--outputs", "'H'")
    assert_refused(kda_command("run", plain_file, "-o", output, "--outputs", ""), "--outputs")


def test_run_flags_override_metadata(tmp_path):
    call = arguments(FULL)
    source, output = save_call(tmp_path / "in.safetensors", call), tmp_path / "out.safetensors"
    flags = ["--scale", "0.5", "--chunk-size", "128", "--safe-gate", "--lower-bound", "-3"]
    assert kda_command("run", source, "-o", output, *flags).exit_code == 0
    changed = {"scale": 0.5, "chunk_size": 128, "safe_gate": True, "lower_bound": -3.0}
    expected = kda.chunk_kda_fwd(**(call | changed))
    assert load_file(output)["attn_out"].tobytes() == expected.attn_out.tobytes()
    with safe_open(output, "numpy") as file:
        metadata = file.metadata()
    assert metadata["chunk_size"] == "128"
    assert metadata["safe_gate"] == "true"
    assert metadata["use_gate_in_kernel"] == "true"


def test_run_has_the_defaults_of_the_call(tmp_path):
    call = arguments(PLAIN)
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_call(source, call, **dict.fromkeys(ATTRIBUTES))
    assert kda_command("run", source, "-o", output).exit_code == 0
    assert load_file(output)["attn_out"].tobytes() == kda.chunk_kda_fwd(**call).attn_out.tobytes()


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_run_with_either_products(tmp_path, products):
    call = arguments(FULL)
    source, output = save_call(tmp_path / "in.safetensors", call), tmp_path / "out.safetensors"
    result = kda_command("run", source, "-o", output, "--check", "--state-products", products)
    assert result.exit_code == 0, result.output
    used = kda.supported(**call, state_products=products).state_products
    assert f"state products {used}" in result.stdout
    expected = kda.chunk_kda_fwd(**call, state_products=products)
    assert load_file(output)["attn_out"].tobytes() == expected.attn_out.tobytes()
    with safe_open(output, "numpy") as file:
        assert file.metadata()["state_products"] == used
    assert_refused(kda_command("run", source, "-o", output, "--state-products", "half"), "state_products", "half")


def test_run_misses_a_bound(tmp_path):
    call = arguments(PLAIN)
    call["v"] = call["v"].copy()
    call["v"][0, 2] = np.nan
    source = save_call(tmp_path / "in.safetensors", call)
    result = kda_command("run", source, "-o", tmp_path / "out.safetensors", "--check")
    assert result.exit_code == 1
    assert "MISSED" in result.stdout
    assert "bounds missed: attn_out" in result.stdout


def test_run_replaces_an_output_only_when_it_succeeds(tmp_path, plain_file):
    output = tmp_path / "out.safetensors"
    output.write_bytes(b"old")
    assert_refused(
        kda_command("run", plain_file, "-o", output, "--chunk-size", "7"), "chunk_size: expected 64 or 128, got 7"
    )
    assert output.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "plain.safetensors"]
    link = tmp_path / "link"
    link.symlink_to(output)
    assert kda_command("run", plain_file, "-o", link).exit_code == 0
    assert link.is_symlink()
    assert "attn_out" in load_file(output)


def test_run_refuses_outputs(tmp_path, plain_file):
    before = plain_file.read_bytes()
    for path in (plain_file, tmp_path / "." / "plain.safetensors"):
        assert_refused(kda_command("run", plain_file, "-o", path), "is the input file")
    link = tmp_path / "hard"
    os.link(plain_file, link)
    assert_refused(kda_command("run", plain_file, "-o", link), "is the input file")
    assert plain_file.read_bytes() == before
    assert_refused(kda_command("run", plain_file, "-o", tmp_path), "not a regular file")
    assert_refused(kda_command("run", plain_file, "-o", "/dev/null"), "not a regular file")
    assert_refused(kda_command("run", plain_file, "-o", tmp_path / "no" / "out"), "cannot be written: No such file")
    assert_refused(kda_command("run", plain_file, "-o", plain_file / "out"), "Not a directory")
    assert_refused(kda_command("run", plain_file, "-o", tmp_path / ("x" * 300)), "File name too long")
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    assert_refused(kda_command("run", plain_file, "-o", circle), "circle cannot be written", "in a circle")
    assert Path("/dev/null").is_char_device()


def test_run_refuses_backends(tmp_path, plain_file):
    output = tmp_path / "out"
    for unknown in ("tpu", "cpu:0", "cuda:", "cuda:one", "cuda:-1"):
        result = kda_command("run", plain_file, "-o", output, "--backend", unknown)
        assert_refused(result, "expected one of cpu", f"got {unknown}")
    for backend in kda.info().backends:
        if not backend.available:
            for command in (("run", plain_file, "-o", output), ("verify",), ("bench",)):
                result = kda_command(*command, "--backend", backend.name)
                assert_refused(result, f"{backend.name} is not available: {backend.detail}")


def test_run_without_its_arguments(tmp_path, plain_file):
    assert kda_command("run").exit_code == 2
    assert kda_command("run", plain_file).exit_code == 2
    assert kda_command("run", plain_file, "-o", tmp_path / "x", "--threads", "0").exit_code == 2
    assert kda_command("run", plain_file, "-o", tmp_path / "x", "--scale", "wide").exit_code == 2


def write_cases(path, *cases):
    path.write_text(json.dumps(list(cases)))
    return path


def test_verify_a_few_of_the_packages_own():
    first = _cases.load(_cases.default_path())[0].name
    result = kda_command("verify", "--filter", first, "--threads", 2)
    assert result.exit_code == 0, result.output
    assert "passed, 0 failed" in result.stdout
    assert "attn_out" in result.stdout


def test_verify_knows_all_operators():
    result = kda_command("verify", "--filter", "tail_T1_", "--filter", "T1_H4_*", "--filter", "C32_bf16_*_short")
    assert result.exit_code == 0, result.output
    for operator in ("chunk_kda_fwd", "kda_gate", "kda_gate_cumsum"):
        assert f"{operator}: worst errors of " in result.stdout
    for output in ("attn_out", "max abs", "mean abs", "max rel", "gk"):
        assert output in result.stdout


@pytest.mark.parametrize(
    ("operator", "shape", "message"),
    [("kda_gate", [3, 4, 16], "max rel: error"), ("kda_gate_cumsum", [3, 70, 16], "gk: error")],
)
def test_verify_notices_wrong_gates(tmp_path, monkeypatch, operator, shape, message):
    from kda.cli import verify

    case, illegal = {"name": "case", "shape": shape}, {"name": "illegal", "shape": [*shape[:-1], 0]}
    path = write_cases(tmp_path / f"{operator}.json", case, illegal)
    right = verify._gates.execute
    assert "1 passed, 1 failed" in kda_command("verify", "--cases", path).stdout
    monkeypatch.setattr(verify._gates, "execute", lambda *args: 1.001 * right(*args))
    result = kda_command("verify", "--cases", path)
    assert result.exit_code == 1
    assert "0 passed, 2 failed" in result.stdout
    assert message in result.stdout


def test_verify_filters(tmp_path):
    cases = [{"name": name, "T": 3, "K": 16, "V": 16} for name in ("one", "other", "two")]
    path = write_cases(tmp_path / "cases.json", *cases)
    assert "3 passed, 0 failed" in kda_command("verify", "--cases", path).stdout
    assert "2 passed, 0 failed" in kda_command("verify", "--cases", path, "--filter", "o?*").stdout
    assert "2 passed, 0 failed" in kda_command("verify", "--cases", path, "--filter", "on", "--filter", "w").stdout
    assert_refused(kda_command("verify", "--cases", path, "--filter", "three"), "no case matches three")


@pytest.mark.parametrize("keys", ["random", "correlated", "repeated"])
def test_verify_with_bfloat16_products(tmp_path, keys):
    case = {
        "name": "case",
        "T": 500,
        "K": 128,
        "V": 128,
        "keys": keys,
        "gate": {"value": -1e-3, "where": "all"},
        "beta": 0.9,
    }
    path = write_cases(tmp_path / "cases.json", case)
    for options in ([], ["--state-products", "bfloat16"]):
        result = kda_command("verify", "--cases", path, *options)
        assert result.exit_code == 0, result.output
    assert_refused(kda_command("verify", "--cases", path, "--state-products", "half"), "--state-products", "half")


def test_verify_fails(tmp_path, monkeypatch):
    good = {"name": "good", "T": 3, "K": 16, "V": 16}
    path = write_cases(
        tmp_path / "cases.json", good, good | {"name": "illegal", "K": 24}, good | {"name": "nan", "beta": 1e39}
    )
    result = kda_command("verify", "--cases", path)
    assert result.exit_code == 1
    assert "1 passed, 2 failed" in result.stdout
    assert "illegal" in result.stdout
    assert "K = 24" in result.stdout


def test_verify_notices_wrong_numbers(tmp_path, monkeypatch):
    from kda.cli import verify

    path = write_cases(tmp_path / "cases.json", {"name": "case", "T": 3, "K": 16, "V": 16, "initial_state": True})
    right = verify.compute

    def wrong(*args, **kwargs):
        outputs = right(*args, **kwargs)
        outputs["u"][0, 0, 0, 0] += 1
        return outputs

    monkeypatch.setattr(verify, "compute", wrong)
    result = kda_command("verify", "--cases", path)
    assert result.exit_code == 1
    assert "u: error" in result.stdout


def test_verify_notices_a_wrong_tuple(tmp_path, monkeypatch):
    path = write_cases(tmp_path / "cases.json", {"name": "case", "T": 3, "K": 16, "V": 16, "initial_state": True})
    right = kda.chunk_kda_fwd

    def wrong(**kwargs):
        result = right(**kwargs)
        return result._replace(gk=None, h=result.Aqk, Akk=result.Akk + 1, initial_state=None)

    monkeypatch.setattr(kda, "chunk_kda_fwd", wrong)
    result = kda_command("verify", "--cases", path)
    assert result.exit_code == 1
    text = " ".join(result.stdout.replace("│", " ").split())
    for part in ("gk: not kept", "h: kept against", "Akk: other bits", "initial_state: not the caller's"):
        assert part in text


def test_verify_refuses_files(tmp_path):
    assert_refused(kda_command("verify", "--cases", tmp_path / "none.json"), "cannot be read: No such file")
    assert_refused(kda_command("verify", "--cases", tmp_path), "cannot be read: Is a directory")
    broken = tmp_path / "broken.json"
    broken.write_bytes(b"\x00[}\n\n")
    assert_refused(kda_command("verify", "--cases", broken), "is not JSON")
    assert_refused(kda_command("verify", "--cases", write_cases(tmp_path / "empty.json")), "has no cases")
    unknown = write_cases(tmp_path / "unknown.json", {"name": "x", "T": 1, "colour\n\x1b[31m": 1})
    assert_refused(kda_command("verify", "--cases", unknown), "unknown fields")


def test_info():
    result = kda_command("info")
    assert result.exit_code == 0
    for part in (kda.__version__, kda.info().cpu_instruction_set, "threads", "backend cpu", "found", "missing"):
        assert part in result.stdout


def test_help():
    for command in ((), ("run",), ("inspect",), ("verify",), ("bench",), ("info",)):
        assert kda_command(*command, "--help").exit_code == 0


@pytest.mark.parametrize("missing", ["typer", "rich", "safetensors", "ml_dtypes"])
def test_without_the_cli_extra(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from kda.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "info"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"kda: the command line needs {missing}: pip install 'kda[cli]'\n"


def test_other_missing_modules_are_not_hidden():
    code = "import sys; sys.modules['fnmatch'] = None; from kda.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Traceback" in done.stderr


def test_as_a_module(tmp_path, plain_file):
    output = tmp_path / "out.safetensors"
    done = subprocess.run(
        [sys.executable, "-m", "kda", "run", plain_file, "-o", output], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert load_file(output)["attn_out"].dtype == BFLOAT16


@pytest.mark.parametrize("command", ["info", "run"])
def test_an_unknown_instruction_set_is_one_line(tmp_path, plain_file, command):
    arguments_of = {"info": (), "run": (plain_file, "-o", tmp_path / "out.safetensors")}
    done = subprocess.run(
        [sys.executable, "-m", "kda", command, *arguments_of[command]],
        capture_output=True,
        text=True,
        env=os.environ | {"KDA_CPU_ISA": "foo"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"kda {command}: KDA_CPU_ISA: expected one of ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "returncode"), [("KDA_CPU_ISA", 2), ("KDA_CUDA_LIBRARY", 0), ("KDA_NUM_THREADS", 0)]
)
def test_an_environment_that_is_no_text(variable, returncode):
    done = subprocess.run(
        [sys.executable, "-m", "kda", "info"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "300", variable: os.fsdecode(b"/no\xff")},
    )
    assert done.returncode == returncode
    assert done.stderr.count("\n") == (returncode != 0)
    if variable != "KDA_NUM_THREADS":
        assert "no\\xff" in done.stdout + done.stderr


def test_outputs_in_a_folder_that_is_gone(tmp_path, plain_file, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for command in (("run", plain_file, "-o", "out"), ("inspect", plain_file, "--json", "out")):
        assert_refused(kda_command(*command), "output out cannot be written: No such file or directory")


@pytest.mark.parametrize("columns", ["0", "10", "-1", "wide"])
def test_terminals_of_any_width(columns):
    for command in (("info",), ("--help",)):
        done = subprocess.run(
            [sys.executable, "-m", "kda", *command],
            capture_output=True,
            text=True,
            env=os.environ | {"COLUMNS": columns},
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert len(done.stdout) > 100


# What prints something, each in its own way.
PRINTING = {
    "no arguments": (),
    "help": ("--help",),
    **{f"{name} help": (name, "--help") for name in ("run", "inspect", "verify", "bench", "info")},
    "run": ("run", "IN", "-o", "OUT"),
    "inspect": ("inspect", "IN"),
    "verify": ("verify", "--filter", "tail_T1_"),
    "failures": ("verify", "--cases", "CASES"),
    "bench": ("bench", "--tokens", "5", "--heads", "1", "--rounds", "1", "--sgemm-size", "8", "--json", "OUT"),
    "info": ("info",),
}


@pytest.fixture
def run_into(tmp_path, plain_file):
    """Run the program with its stdout (or more) being what is given."""
    cases = write_cases(tmp_path / "cases.json", {"name": "illegal", "T": 1, "K": 24, "V": 16})
    files = {"IN": plain_file, "OUT": tmp_path / "out", "CASES": cases}

    def run(command, buffered=True, **streams):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        return subprocess.run(
            [sys.executable, "-m", "kda", *(files.get(argument, argument) for argument in command)],
            **({"stderr": subprocess.PIPE} | streams),
            text=True,
            env=environment if buffered else environment | {"PYTHONUNBUFFERED": "1"},
        )

    return run


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", PRINTING.values(), ids=PRINTING)
def test_a_full_disk_under_stdout_is_one_line(run_into, command, buffered):
    # Buffered output is tried once more when the interpreter ends.
    with Path("/dev/full").open("w") as full:
        done = run_into(command, buffered, stdout=full)
    assert done.returncode == 2
    assert done.stderr == "kda: stdout cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", PRINTING.values(), ids=PRINTING)
def test_a_closed_pipe_ends_the_program_in_silence(run_into, command):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = run_into(command, stdout=closed)
    assert done.returncode not in (0, 2)
    assert done.stderr == ""


def test_errors_that_cannot_be_shown_keep_their_exit_code(run_into):
    with Path("/dev/full").open("w") as full:
        assert run_into(("info",), stdout=full, stderr=full).returncode == 2
        assert run_into(("inspect", "none"), stderr=full).returncode == 2
        assert run_into(("inspect", "--none"), stderr=full).returncode == 2


def test_files_are_kept_when_stdout_is_full(run_into, tmp_path):
    with Path("/dev/full").open("w") as full:
        assert run_into(PRINTING["bench"], stdout=full).returncode == 2
    assert len(json.loads((tmp_path / "out").read_text())["measurements"]) == 6


def test_errors_are_one_line_that_a_terminal_can_show():
    assert one_line("a\nb\x1b[31m\u202e c") == "a b\\x1b[31m\\u202e c"
    long = one_line("start " + "x" * 10_000 + " end")
    assert long.startswith("start")
    assert long.endswith("end")
    assert len(long) < 600
