"""What a call takes beyond its inputs and outputs: the workspace that its plan announces, and little more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

MIB = 1 << 20

# In a process of its own, which has not computed anything yet. The peak is that of the call alone: the kernel forgets
# earlier ones on request.
PROGRAM = """
import json, sys
from pathlib import Path
from kda import _cases
from kda._arrays import NumpyKind
from kda._chunk_kda_fwd import OP, OUTPUTS, prepare
from kda.cli.bench import make_arguments

def of_this_process(field):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":")]
    return 1024 * int(line.split()[1])

fields, names, threads = json.loads(sys.argv[1])
arguments = make_arguments(_cases.Case(name="memory", **fields))
call, kind = prepare(arguments), NumpyKind()
arrays = {}
for name, spec in zip(OUTPUTS, call.outputs()):
    if name in names:
        arrays[name] = kind.empty(*spec, like=arguments.q)
        arrays[name].fill(0)
views = tuple(kind.describe(OP, name, arrays[name]) if name in arrays else None for name in OUTPUTS)
plan = call.plan(tuple(name in names for name in OUTPUTS), threads)
Path("/proc/self/clear_refs").write_text("5")
before = of_this_process("VmRSS")
call.execute(views, threads)
print(json.dumps({
    "beyond": of_this_process("VmHWM") - before, "workspace": plan["workspace_bytes"], "threads": plan["num_threads"]
}))
"""

SERVING = ("attn_out", "final_state")
ALL = (*SERVING, "gk", "Aqk", "Akk", "w", "u", "qg", "kg", "v_new", "h")


def measured(fields, names, threads):
    """Return what a call had resident beyond what was there before, what its plan announced, and its threads."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([fields, names, threads])],
        capture_output=True,
        text=True,
        # Without these a workspace may lie in memory that was freed before, and so count for nothing.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def can_forget_peaks():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@pytest.mark.skipif(not can_forget_peaks(), reason="this system does not forget a process's earlier peaks")
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"T": 2048, "H": 8, "HV": 8}, SERVING),
        ({"T": 2048, "H": 8, "HV": 8, "use_gate_in_kernel": True, "dt_bias": True}, ALL),
        ({"T": 4096, "H": 1, "HV": 1}, SERVING),
        ({"T": 1000, "H": 2, "HV": 4, "K": 256, "V": 256, "chunk_size": 128, "layout": "NTD"}, ALL),
        ({"T": 2000, "H": 2, "HV": 2, "cu_seqlens": tuple(range(0, 2001, 10))}, SERVING),
    ],
    ids=["serving", "all", "one_head", "wide", "packed"],
)
def test_peak_is_the_workspace_and_little_more(fields, names, threads):
    found = measured(fields, names, threads)
    assert 1 <= found["threads"] <= threads
    if threads == 1 and found["workspace"] > MIB:
        # It did use the workspace, or nothing has been measured.
        assert found["beyond"] > found["workspace"] // 2, found
    assert found["beyond"] <= found["workspace"] + MIB * found["threads"], found
