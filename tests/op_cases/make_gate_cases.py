#!/usr/bin/env python3
"""Writes kda_gate.json and kda_gate_cumsum.json. The same cases every time; README.md describes the format."""

import itertools
import json
import pathlib

DTYPES = ["bfloat16", "float16", "float32"]
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
HEADS = [4, 8, 12, 16, 32]
CHANNELS = [64, 96, 128, 256]
GATE_DEFAULTS = {
    "dtype": "bfloat16", "output_dtype": "float32", "A_log": True, "dt_bias": "none", "lower_bound": None,
    "gate": "random", "gate_scale": 1.0,
}  # fmt: skip
CUMSUM_DEFAULTS = {
    "dtype": "float32", "chunk_size": 64, "cu_seqlens": None, "use_gate_in_kernel": False, "safe_gate": False,
    "lower_bound": -5.0, "dt_bias": False, "gate_scale": 1.0,
}  # fmt: skip


class Cases:
    """Cases of one file, each with a seed of its own; fields with their default value are left out."""

    def __init__(self, defaults):
        self.defaults = defaults
        self.cases = []

    def add(self, name, **fields):
        case = {"name": name, "seed": len(self.cases) + 1}
        case.update({key: value for key, value in fields.items() if value != self.defaults.get(key)})
        self.cases.append(case)

    def write(self, file):
        assert len({case["name"] for case in self.cases}) == len(self.cases)
        lines = ",\n".join(json.dumps(case) for case in self.cases)
        pathlib.Path(__file__).with_name(file).write_text(f"[\n{lines}\n]\n")


def gate_matrix(cases):
    """All T x H x D of up to 129 tokens, longer ones for some H and D; dtypes, bias and the kind of gate go round."""
    short = itertools.product([1, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129], HEADS, CHANNELS)
    long = [
        (512, 4, 64), (512, 32, 128), (512, 12, 256), (512, 16, 96), (1024, 8, 128), (1024, 12, 96), (1024, 4, 256),
        (1024, 16, 64), (2048, 4, 96), (2048, 8, 64), (2048, 16, 128), (2048, 12, 64), (4096, 4, 128), (4096, 8, 96),
        (4096, 12, 64), (4096, 4, 256),
    ]  # fmt: skip
    for i, (T, H, D) in enumerate([*short, *long]):
        dtype = DTYPES[i % 3]
        dt_bias = ["none", "flat", "matrix"][i // 3 % 3]
        bound = [None, -5.0][i // 9 % 2]
        output = [DTYPES[2], DTYPES[2], DTYPES[0], DTYPES[1]][i // 18 % 4]
        cases.add(
            f"T{T}_H{H}_D{D}_{SHORT[dtype]}_{SHORT[output]}_{dt_bias}_{'softplus' if bound is None else 'bounded'}",
            shape=[T, H, D], dtype=dtype, output_dtype=output, dt_bias=dt_bias, lower_bound=bound,
        )  # fmt: skip


def gate_dtypes(cases):
    """Every dtype in and out, with and without dt_bias, both kinds."""
    for dtype, output, dt_bias, bound in itertools.product(DTYPES, DTYPES, ["none", "flat"], [None, -5.0]):
        cases.add(
            f"dtypes_{SHORT[dtype]}_{SHORT[output]}_{dt_bias}_{'softplus' if bound is None else 'bounded'}",
            shape=[2, 33, 4, 96], dtype=dtype, output_dtype=output, dt_bias=dt_bias, lower_bound=bound,
        )  # fmt: skip


def gate_shapes(cases):
    """Other ranks and remainders of every length."""
    for i, D in enumerate([1, 2, 3, 7, 15, 17, 31, 33, 63, 65, 100, 127, 129, 255, 257, 1000, 1025]):
        cases.add(f"channels_{D}", shape=[37, 3, D], dtype=DTYPES[i % 3],
                  dt_bias=["flat", "none", "matrix"][i // 3 % 3], lower_bound=[None, -5.0][i % 2])  # fmt: skip
    for i, shape in enumerate([[5, 7], [1, 1], [2, 3, 5, 7], [2, 1, 3, 4, 9], [2, 2, 2, 2, 2, 2, 3, 5], [70000, 1, 3],
                               [3, 300, 8], [1, 2000, 1], [9, 1, 4100]]):  # fmt: skip
        cases.add(f"shape_{'x'.join(map(str, shape))}", shape=shape, dtype=DTYPES[i % 3], dt_bias="flat",
                  lower_bound=[-5.0, None][i % 2])  # fmt: skip
    for i, shape in enumerate([[0, 4, 64], [2, 0, 3, 5]]):
        cases.add(f"empty_{i}", shape=shape, dt_bias="flat")


def gate_values(cases):
    """Magnitudes from 2^-24 to 2^8, large and tiny factors, bounds without limit, no A_log."""
    for dtype, dt_bias, bound in itertools.product(DTYPES, ["none", "flat"], [None, -5.0]):
        kind = "softplus" if bound is None else "bounded"
        cases.add(f"wide_{SHORT[dtype]}_{dt_bias}_{kind}", shape=[64, 8, 128], dtype=dtype, dt_bias=dt_bias,
                  lower_bound=bound, gate="wide")  # fmt: skip
        for scale in (0.001, 20.0):
            cases.add(f"scale_{str(scale).replace('.', 'p')}_{SHORT[dtype]}_{dt_bias}_{kind}", shape=[64, 8, 128],
                      dtype=dtype, dt_bias=dt_bias, lower_bound=bound, gate_scale=scale)  # fmt: skip
    for i, bound in enumerate([-1.0, -0.01, -1000.0, 0.0, 3.5]):
        for A_log in (True, False):
            cases.add(f"lower_bound_{i}_{'A_log' if A_log else 'alone'}", shape=[40, 5, 24], dtype=DTYPES[i % 3],
                      A_log=A_log, dt_bias=["none", "matrix"][i % 2], lower_bound=bound)  # fmt: skip


def cumsum_matrix(cases):
    """Chunk sizes, dtypes, modes and sequence forms against each other; K goes round."""
    modes = {
        "activated": {}, "softplus": {"use_gate_in_kernel": True},
        "bounded": {"use_gate_in_kernel": True, "safe_gate": True},
    }  # fmt: skip
    forms = [
        ("dense", [2, 3, 150]), ("short", [1, 2, 9]), ("rank3", [3, 129]),
        ("packed", [1, 2, 151], [0, 70, 70, 151]), ("packed3", [2, 131], [0, 1, 33, 131]),
    ]  # fmt: skip
    dims = [16, 128, 1, 100, 256, 7, 64, 33, 255, 17, 96]
    for i, (C, dtype, mode, form) in enumerate(itertools.product([32, 64, 128], DTYPES, modes, forms)):
        name, shape, *packing = form
        cases.add(f"C{C}_{SHORT[dtype]}_{mode}_{name}", shape=[*shape, dims[i % len(dims)]], dtype=dtype, chunk_size=C,
                  cu_seqlens=packing[0] if packing else None, dt_bias=mode != "activated" and i % 2 == 0,
                  **modes[mode])  # fmt: skip


def cumsum_edges(cases):
    """Lengths around a chunk, hints that change nothing, nothing at all."""
    for i, T in enumerate([1, 31, 32, 33, 63, 64, 65, 127, 128, 129]):
        for C in (32, 64, 128):
            cases.add(f"tail_T{T}_C{C}", shape=[1, 2, T, [5, 48, 256][i % 3]], chunk_size=C, dtype=DTYPES[i % 3])
    cases.add("hinted", shape=[2, 2, 70, 128], safe_gate=True, lower_bound=-50.0)
    cases.add("lower_bound", shape=[2, 2, 70, 128], use_gate_in_kernel=True, safe_gate=True, lower_bound=-0.25)
    cases.add("scaled", shape=[2, 2, 70, 100], use_gate_in_kernel=True, gate_scale=20.0, dtype="bfloat16")
    cases.add("many_heads", shape=[1, 300, 40, 3], chunk_size=32)
    cases.add("no_tokens", shape=[2, 3, 0, 64])
    cases.add("no_batch", shape=[0, 3, 70, 64])
    cases.add("all_empty", shape=[1, 3, 0, 64], cu_seqlens=[0, 0, 0, 0])


def main():
    gate = Cases(GATE_DEFAULTS)
    for group in (gate_matrix, gate_dtypes, gate_shapes, gate_values):
        group(gate)
    gate.write("kda_gate.json")
    cumsum = Cases(CUMSUM_DEFAULTS)
    for group in (cumsum_matrix, cumsum_edges):
        group(cumsum)
    cumsum.write("kda_gate_cumsum.json")


if __name__ == "__main__":
    main()
