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

# Outputs that AVX2 and NEON, whose arithmetic is the same, take from no sum over channels.
AVX2_AND_NEON = ("gk", "qg", "kg")


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


def made_inside(case):
    return case.get("use_gate_in_kernel", False)


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

    given = {case["name"] for case in json.loads((CASES_DIR / f"{operator}.json").read_text()) if not made_inside(case)}

    def outputs(name, names, cases):
        return {
            (case, output): digest
            for case in cases
            for output, digest in results[name][case]["outputs"].items()
            if output in names
        }

    # Sums of gates that are given need neither an exponential nor a fused multiply-add.
    some = given & set(first)
    assert some
    names = list(results)
    assert all(outputs(name, ("gk",), some) == outputs(names[0], ("gk",), some) for name in names[1:]), names
    if "AVX2" in results and "NEON" in results:
        assert outputs("AVX2", AVX2_AND_NEON, first) == outputs("NEON", AVX2_AND_NEON, first)
