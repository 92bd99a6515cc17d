"""One case list, every door: Python with NumPy, torch, C and C++ agree bit for bit on every case of tests/op_cases."""

import importlib
import json
import os
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest

import c_door
import kda
from helpers import arguments, as_bytes, to_torch
from kda import _cases, _gate_cases

CASES_DIR = Path(__file__).parents[2] / "tests" / "op_cases"
PARSERS = {
    "chunk_kda_fwd": _cases.parse,
    "kda_gate": _gate_cases.parse_gate,
    "kda_gate_cumsum": _gate_cases.parse_gate_cumsum,
}


def load(operator):
    return _cases.load_with(PARSERS[operator], CASES_DIR / f"{operator}.json")


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def cpp_digests(operator, *options):
    tool = Path(os.environ.get("KDA_BUILD_DIR", "")) / "tests" / "case_digest"
    if not tool.is_file():
        pytest.skip("KDA_BUILD_DIR names no build with tests/case_digest")
    done = subprocess.run([tool, CASES_DIR / f"{operator}.json", *options], capture_output=True, text=True, check=True)
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module", params=sorted(PARSERS))
def operator_and_digests(request):
    return request.param, cpp_digests(request.param)


def digests(arrays):
    return {name: f"{zlib.crc32(as_bytes(array)):08x}" for name, array in arrays.items() if array is not None}


def call_and_outputs(operator, case, **options):
    """Return the arguments of a case's call, by name, and what NumPy gets from it."""
    if operator == "kda_gate":
        call = _gate_cases.make_gate_arguments(case)
        return call, {"out": kda.fused_kda_gate(**call)}
    if operator == "kda_gate_cumsum":
        call = _gate_cases.make_gate_cumsum_arguments(case)
        return call, {"gk": kda.kda_gate_cumsum(**call)}
    call = arguments(case) | options
    result = kda.chunk_kda_fwd(**call, **case.keep_flags)._asdict()
    del result["initial_state"]
    return call, {name: array for name, array in result.items() if array is not None}


def test_cpp_has_the_bits_of_numpy(operator_and_digests):
    operator, found = operator_and_digests
    cases = load(operator)
    assert {case.name for case in cases} == set(found)
    for case in cases:
        call, outputs = call_and_outputs(operator, case)
        inputs = {name: value for name, value in call.items() if isinstance(value, np.ndarray)}
        assert digests(inputs) == found[case.name]["inputs"], case.name
        assert digests(outputs) == found[case.name]["outputs"], case.name


def c_outputs(operator, case, call, outputs):
    if operator == "kda_gate":
        return {"out": c_door.kda_gate(call, np.full_like(outputs["out"], np.nan))}
    if operator == "kda_gate_cumsum":
        return {"gk": c_door.kda_gate_cumsum(call, np.full_like(outputs["gk"], np.nan))}
    return c_door.chunk_kda_fwd(call, c_door.make_outputs(call, outputs))


def torch_outputs(torch, door, operator, case, call):
    tensors = {name: to_torch(torch, value) for name, value in call.items()}
    if operator == "kda_gate":
        return {"out": door.fused_kda_gate(**(tensors | {"output_dtype": getattr(torch, case.output_dtype)}))}
    if operator == "kda_gate_cumsum":
        return {"gk": door.kda_gate_cumsum(**tensors)}
    result = door.chunk_kda_fwd(**tensors, **case.keep_flags)._asdict()
    del result["initial_state"]
    return {name: tensor for name, tensor in result.items() if tensor is not None}


def has_negative_strides(call):
    return any(isinstance(value, np.ndarray) and min(value.strides, default=0) < 0 for value in call.values())


@pytest.mark.parametrize("operator", PARSERS)
def test_c_has_the_bits_of_numpy(operator):
    for case in load(operator):
        call, outputs = call_and_outputs(operator, case)
        made = c_outputs(operator, case, call, outputs)
        for name, array in outputs.items():
            assert made[name].tobytes() == array.tobytes(), (case.name, name)


@pytest.mark.parametrize("door", ["kda", "kda.torch"])  # the latter through torch.ops.kda
@pytest.mark.parametrize("operator", PARSERS)
def test_torch_has_the_bits_of_numpy(torch, operator, door):
    module = importlib.import_module(door)
    for case in load(operator):
        call, outputs = call_and_outputs(operator, case)
        if has_negative_strides(call):  # which no tensor can have
            continue
        made = torch_outputs(torch, module, operator, case, call)
        assert list(made) == list(outputs)
        for name, array in outputs.items():
            assert type(made[name]) is torch.Tensor
            assert as_bytes(made[name]) == array.tobytes(), (case.name, name)


def test_bfloat16_products_have_the_same_bits_through_every_door(torch):
    operator = "chunk_kda_fwd"
    found = cpp_digests(operator, "--bfloat16_products", "--filter", "combination_")
    cases = [case for case in load(operator) if case.name in found]
    assert len(cases) > 30
    for case in cases:
        call, outputs = call_and_outputs(operator, case, state_products="bfloat16")
        assert digests(outputs) == found[case.name]["outputs"], case.name
        if has_negative_strides(call):
            continue
        for door in ("kda", "kda.torch"):
            made = torch_outputs(torch, importlib.import_module(door), operator, case, call)
            assert digests(made) == found[case.name]["outputs"], (case.name, door)
