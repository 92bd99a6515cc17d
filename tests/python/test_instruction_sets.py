"""Which instruction sets give the same bits: what docs/portability.md says.

KDA_BUILD_DIR names a build whose case_digest runs here; KDA_AARCH64_BUILD_DIR, where it is set, one for 64-bit ARM, run
by qemu.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

import kda

CASES_DIR = Path(__file__).parents[2] / "tests" / "op_cases"

# Sets that agree bit for bit in these outputs, whatever the case. SSE4 lacks the fused multiply-add of the others.
FUSED = ("AVX2", "AVX3", "NEON")
SAME_BITS = {"kda_gate_cumsum": ("gk",), "chunk_kda_fwd": ("gk", "qg", "kg")}


def tool(variable):
    return Path(os.environ.get(variable, "")) / "tests" / "case_digest"


def commands():
    """Return for every instruction set that can run here what runs case_digest with it."""
    found = {}
    if tool("KDA_BUILD_DIR").is_file():
        found |= {name: [tool("KDA_BUILD_DIR")] for name in kda.info().cpu_instruction_sets}
    if tool("KDA_AARCH64_BUILD_DIR").is_file():
        found["NEON"] = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", tool("KDA_AARCH64_BUILD_DIR")]
    return found


def digests(command, name, operator, filter_):
    arguments = [*command, CASES_DIR / f"{operator}.json", "--filter", filter_]
    environment = os.environ | {"KDA_CPU_ISA": name}
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(("operator", "filter_"), [("kda_gate_cumsum", ""), ("chunk_kda_fwd", "combination")])
def test_which_outputs_have_the_same_bits(operator, filter_):
    found = commands()
    if len(found) < 2:
        pytest.skip("fewer than two instruction sets to compare")
    results = {name: digests(command, name, operator, filter_) for name, command in found.items()}
    first = next(iter(results.values()))
    for name, cases in results.items():
        assert {case: line["inputs"] for case, line in cases.items()} == {
            case: line["inputs"] for case, line in first.items()
        }, name

    def outputs(name):
        return {
            (case, output): digest
            for case, line in results[name].items()
            for output, digest in line["outputs"].items()
            if output in SAME_BITS[operator]
        }

    fused = [name for name in results if name in FUSED]
    assert all(outputs(name) == outputs(fused[0]) for name in fused[1:]), fused
