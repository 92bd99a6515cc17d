"""Files that are broken, truncated or hostile: one clear line on stderr and exit code 2, never a traceback."""

import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import BFLOAT16, FULL, PLAIN, arguments
from test_cli import assert_refused, kda_command, save_call

OUTPUT_OPTION = {"run": "-o", "inspect": "--json"}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return save_call(tmp_path_factory.mktemp("good") / "in.safetensors", arguments(PLAIN)).read_bytes()


def parts(file):
    (length,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def built(header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.fixture(params=["run", "inspect"])
def read(request):
    """Run a command that reads a file and writes another."""
    return lambda source, output: kda_command(request.param, source, OUTPUT_OPTION[request.param], output)


@pytest.fixture
def run(tmp_path, read):
    """Run such a command on the bytes of a file."""

    def run_on(file):
        source = tmp_path / "in.safetensors"
        output = tmp_path / "out.safetensors"
        source.write_bytes(file)
        output.unlink(missing_ok=True)
        result = read(source, output)
        if result.exit_code != 0:
            assert list(tmp_path.iterdir()) == [source]
        return result

    return run_on


def test_the_good_file_is_good(good, run):
    assert run(good).exit_code == 0


def test_truncated_anywhere(good, run):
    (length,) = struct.unpack("<Q", good[:8])
    ends = [*range(0, 8 + length, 7), *range(9), *range(8 + length - 3, 8 + length + 3), len(good) - 1]
    for end in ends:
        assert_refused(run(good[:end]), "in.safetensors cannot be read")


def test_trailing_bytes(good, run):
    assert_refused(run(good + b"\0"), "cannot be read")


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_lying_header_length(good, run, length):
    assert_refused(run(struct.pack("<Q", length) + good[8:]), "cannot be read")


def test_lying_tensors(good, run):
    header, data = parts(good)
    size = len(data)
    lies = [
        {"q": header["q"] | {"data_offsets": header["k"]["data_offsets"]}},
        {"q": header["q"] | {"data_offsets": [0, size]}},
        {"q": header["q"] | {"data_offsets": [size, size + 160]}},
        {"q": header["q"] | {"data_offsets": [2**63, 2**63 + 160]}},
        {"q": header["q"] | {"data_offsets": [160, 0]}},
        {"q": header["q"] | {"data_offsets": [-160, 0]}},
        {"q": header["q"] | {"shape": [1, 5, 1, 17]}},
        {"q": header["q"] | {"shape": [2**32, 2**32, 2**32, 16]}},
        {"q": header["q"] | {"shape": [-1, -5, 1, 16]}},
        {"q": header["q"] | {"shape": "x"}},
        {"q": header["q"] | {"dtype": "F32"}},
        {"q": header["q"] | {"dtype": "Q99"}},
        {"q": {"dtype": "BF16"}},
        {"q": None},
        {"q": 5},
        {"__metadata__": {"scale": 1}},
        {"__metadata__": [1]},
        {"__metadata__": {"scale": {"a": "b"}}},
    ]
    for lie in lies:
        assert_refused(run(built(header | lie, data)), "cannot be read")


@pytest.mark.parametrize(
    "header", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"[" * 50_000, b'{"q":' * 50_000, b"{}" + b"x" * 9]
)
def test_headers_that_are_no_header(good, run, header):
    assert_refused(run(built(header, parts(good)[1])), "in.safetensors")


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_missing_tensors(tmp_path, read, name):
    call = arguments(PLAIN)
    del call[name]
    source = save_call(tmp_path / "in", call)
    assert_refused(read(source, tmp_path / "out"), f"tensor {name} is missing; needed are q, k, v, g, beta")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((1, 5, 1, 16), np.float32)}, "q: expected dtype float16 or bfloat16, got float32"),
        ({"q": np.zeros((1, 5, 1, 16), np.float64)}, "q: expected dtype float16 or bfloat16, got float64"),
        (
            {"q": np.zeros((1, 5, 1, 16), np.uint8)},
            "tensor q: expected a dtype of F16, BF16, F32, F64, I32, I64, got U8",
        ),
        ({"q": np.zeros((1, 5, 1, 16), np.bool_)}, "tensor q: expected a dtype of"),
        ({"g": np.zeros((1, 5, 1, 16), np.int64)}, "g: expected dtype float32 or bfloat16, got int64"),
        ({"q": np.zeros((1,), BFLOAT16)}, "q: expected rank 4"),
        ({"q": np.zeros((), BFLOAT16)}, "q: expected rank 4"),
        ({"beta": np.zeros((1, 5), np.float32)}, "beta: expected"),
        ({"q": np.zeros((1,) * 12, np.float16)}, "q: expected a rank of at most 8, got rank 12"),
    ],
)
def test_wrong_tensors(tmp_path, read, changes, message):
    source = save_call(tmp_path / "in", arguments(PLAIN) | changes)
    assert_refused(read(source, tmp_path / "out"), message)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "BOOL", "I8"])
def test_dtypes_that_numpy_lacks(good, run, dtype):
    header, data = parts(good)
    header["q"] |= {"dtype": dtype, "shape": [1, 5, 2, 16]}
    assert_refused(run(built(header, data)), "tensor q: expected a dtype of", f"got {dtype}")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"scale": "nan"}, "scale: expected a finite number, got nan"),
        ({"scale": "inf"}, "scale: expected a finite number, got inf"),
        ({"scale": "wide"}, "metadata scale: expected a number, got 'wide'"),
        ({"scale": ""}, "metadata scale: expected a number, got ''"),
        ({"scale": "1" * 5000}, "scale: expected a finite number"),
        ({"chunk_size": "64.0"}, "metadata chunk_size: expected an integer, got '64.0'"),
        ({"chunk_size": "9" * 5000}, "metadata chunk_size: expected an integer"),
        ({"chunk_size": "9" * 30}, "chunk_size: expected an integer of 64 bits"),
        ({"chunk_size": "65"}, "chunk_size: expected 64 or 128, got 65"),
        ({"safe_gate": "maybe"}, "metadata safe_gate: expected true or false, got 'maybe'"),
        ({"state_v_first": "\x1b[31mred\nline"}, "metadata state_v_first: expected true or false"),
        ({"layout": "bsnd"}, "layout: expected BSND, BNSD, TND or NTD"),
        ({"layout": "NTD"}, "q: expected rank 3"),
        ({"layout": "\u202e"}, "layout: expected"),
        ({"lower_bound": "low"}, "metadata lower_bound: expected a number, got 'low'"),
        ({"use_gate_in_kernel": "true"}, "A_log: expected a tensor"),
    ],
)
def test_wrong_metadata(tmp_path, read, metadata, message):
    source = save_call(tmp_path / "in", arguments(PLAIN), **metadata)
    assert_refused(read(source, tmp_path / "out"), message)


def test_bounded_gate_of_a_file(tmp_path, read):
    source = save_call(tmp_path / "in", arguments(FULL), safe_gate="true", lower_bound="nan")
    assert_refused(read(source, tmp_path / "out"), "lower_bound: expected a number in [-5, 0), got nan")
    source = save_call(tmp_path / "in", arguments(FULL), safe_gate="True", lower_bound="None")
    assert read(source, tmp_path / "out").exit_code == 0


def test_a_file_of_holes_as_large_as_it_likes(tmp_path, read):
    tokens = 2**36
    header = {
        "q": {"dtype": "BF16", "shape": [1, tokens, 1, 16], "data_offsets": [0, 32 * tokens]},
        **{n: {"dtype": "BF16", "shape": [0], "data_offsets": [32 * tokens] * 2} for n in ("k", "v", "g", "beta")},
    }
    source = tmp_path / "in"
    source.write_bytes(built(header, b""))
    try:
        with source.open("r+b") as file:
            file.truncate(source.stat().st_size + 32 * tokens)
    except OSError:
        pytest.skip("the file system takes no file of this size")
    assert_refused(read(source, tmp_path / "out"))


def test_no_file(tmp_path, read):
    assert_refused(read(tmp_path / "none", tmp_path / "out"), "none cannot be read: No such file")
    assert_refused(read(tmp_path, tmp_path / "out"), "not a regular file")
    assert_refused(read("/dev/zero", tmp_path / "out"), "not a regular file")
    assert_refused(read("x" * 5000, tmp_path / "out"), "xxx cannot be read: File name too long")


@pytest.mark.parametrize("command", ["run", "inspect"])
def test_the_program_itself(tmp_path, good, command):
    """Not in this process: what a user sees, with nothing that catches it."""
    source = tmp_path / "in.safetensors"
    for file in (b"", good[:50], built(b"[" * 1000, b""), struct.pack("<Q", 2**64 - 1)):
        source.write_bytes(file)
        arguments_of = [command, source, OUTPUT_OPTION[command], tmp_path / "out"]
        done = subprocess.run([sys.executable, "-m", "kda", *arguments_of], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith(f"kda {command}: ")
        assert done.stderr.count("\n") == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes(good, run, data):
    """Whatever a file says, it is computed or refused."""
    (length,) = struct.unpack("<Q", good[:8])
    file = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        file[data.draw(st.integers(0, 8 + length - 1))] = data.draw(st.integers(0, 255))
    result = run(bytes(file))
    if result.exit_code != 0:
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
    else:
        assert result.stderr == ""
