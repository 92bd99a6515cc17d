#!/usr/bin/env python3
"""Writes chunk_kda_fwd.json. The same cases every time; README.md describes the format."""

import itertools
import json
import pathlib

DTYPES = ["bfloat16", "float16"]
LAYOUTS = ["BSND", "BNSD", "TND", "NTD"]
STRIDES = ["contiguous", "padded", "fused", "reversed", "inner"]
GATES = {
    "activated": {},
    "hinted": {"safe_gate": True},
    "softplus": {"use_gate_in_kernel": True},
    "bounded": {"use_gate_in_kernel": True, "safe_gate": True},
}
KEEP_ALL = {"output_final_state": True, "disable_recompute": True}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
EDGE_LENGTHS = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129]
DEFAULTS = {
    "seed": 1, "dtype": "bfloat16", "g_dtype": "float32", "beta_dtype": "float32", "layout": "BSND", "B": 1, "H": 1,
    "K": 128, "V": 128, "chunk_size": 64, "scale": None, "cu_seqlens": None, "chunk_indices": False,
    "use_gate_in_kernel": False, "safe_gate": False, "lower_bound": -5.0, "dt_bias": False, "initial_state": False,
    "state_v_first": False, "output_final_state": False, "disable_recompute": False,
    "return_intermediate_states": False, "keys": "random", "gate": "random", "gate_scale": 1.0, "beta": "random",
    "strides": "contiguous",
}  # fmt: skip

cases = []


def label(value):
    """A number as part of a name: -1e-4 is minus_0p0001."""
    text = value if isinstance(value, str) else f"{value:.6f}".rstrip("0").rstrip(".")
    return text.replace("-", "minus_").replace(".", "p")


def add(name, **fields):
    """Every case has a seed of its own; fields with their default value are left out."""
    case = {"name": name, "seed": len(cases) + 1}
    fields.setdefault("HV", fields.get("H", 1))
    for key, value in fields.items():
        default = fields.get("H", 1) if key == "HV" else DEFAULTS.get(key)
        if key == "T" or value != default or isinstance(value, bool) != isinstance(default, bool):
            case[key] = value
    cases.append(case)


def packed(lengths):
    """The fields of sequences of these lengths in one call."""
    bounds = [0, *itertools.accumulate(lengths)]
    return {"T": bounds[-1], "cu_seqlens": bounds}


def pairwise(factors):
    """Rows (name -> value) in which every pair of values of two factors occurs, by greedy choice."""
    names = list(factors)
    missing = {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }

    def pairs(name, index, row):
        for other, chosen in row.items():
            pair = ((other, chosen), (name, index))
            yield pair if names.index(other) < names.index(name) else pair[::-1]

    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in names:
            if name not in row:
                gain = [sum(p in missing for p in pairs(name, i, row)) for i in range(len(factors[name]))]
                # Ties go round, so that no value is favoured.
                best = [i for i, g in enumerate(gain) if g == max(gain)]
                row[name] = best[len(rows) % len(best)]
        for (a, i), (b, j) in itertools.combinations(sorted(row.items(), key=lambda x: names.index(x[0])), 2):
            missing.pop(((a, i), (b, j)), None)
        rows.append({name: factors[name][row[name]] for name in names})
    return rows


def matrix():
    """The full product of dtype, layout, gate, V and chunk size; the rest goes round."""
    product = itertools.product(DTYPES, LAYOUTS, GATES, [128, 256], [64, 128])
    for i, (dtype, layout, gate, V, C) in enumerate(product):
        shape = [{"T": 150}, packed([70, 0, 81]), {"T": 129, "B": 2}, {"T": 64}, packed([1, 130])][i % 5]
        if layout in ("TND", "NTD"):
            shape = {key: value for key, value in shape.items() if key != "B"}
        add(
            f"matrix_{SHORT[dtype]}_{layout}_{gate}_V{V}_C{C}",
            dtype=dtype, layout=layout, V=V, chunk_size=C, **shape, **GATES[gate],
            H=1, HV=[1, 2, 1][i % 3], dt_bias="use_gate_in_kernel" in GATES[gate] and i % 2 == 0,
            initial_state=i % 3 != 0, state_v_first=i // 3 % 2 == 1, output_final_state=i % 7 != 0,
            disable_recompute=i // 2 % 3 != 1, return_intermediate_states=i % 4 == 1,
            chunk_indices="cu_seqlens" in shape and i % 2 == 0,
        )  # fmt: skip


def combinations():
    """Every pair of choices, small sizes."""
    rows = pairwise(
        {
            "shape": ["dense", "batch", "packed", "short"],
            "layout": LAYOUTS,
            "strides": STRIDES,
            "gate": list(GATES),
            "dtype": DTYPES,
            "g_dtype": ["float32", "bfloat16"],
            "beta_dtype": ["float32", "bfloat16"],
            "heads": [(1, 1), (2, 2), (2, 4), (1, 3)],
            "dims": [(128, 128), (128, 256), (64, 48), (48, 128), (80, 64)],
            "chunk_size": [64, 128],
            "initial_state": [False, True],
            "state_v_first": [False, True],
            "dt_bias": [False, True],
            "keep": ["least", "state", "states", "all"],
            "keys": ["random", "correlated"],
        }
    )
    keep = {
        "least": {}, "state": {"output_final_state": True},
        "states": {"output_final_state": True, "return_intermediate_states": True}, "all": KEEP_ALL,
    }  # fmt: skip
    for i, row in enumerate(rows):
        shape = {
            "dense": {"T": 131}, "batch": {"T": 77, "B": 3}, "packed": packed([17, 64, 0, 50]), "short": {"T": 9}
        }[row.pop("shape")]  # fmt: skip
        if shape.get("B", 1) > 1 and row["layout"] in ("TND", "NTD"):
            shape = {"T": 77}
        gate = GATES[row.pop("gate")]
        (H, HV), (K, V) = row.pop("heads"), row.pop("dims")
        if not gate.get("use_gate_in_kernel"):
            row["dt_bias"] = False
        add(f"combination_{i:02}", **shape, **gate, H=H, HV=HV, K=K, V=V, **keep[row.pop("keep")], **row)


def dimensions():
    """The other legal K and V."""
    dims = [(16, 16), (16, 256), (256, 16), (32, 48), (48, 32), (80, 144), (144, 80), (96, 112), (112, 96), (208, 240),
            (240, 208), (256, 256), (256, 128), (64, 64), (64, 128), (176, 160), (192, 224), (128, 16), (16, 128),
            (128, 240), (160, 176), (224, 192)]  # fmt: skip
    for i, (K, V) in enumerate(dims):
        for C in (64, 128):
            add(
                f"dims_K{K}_V{V}_C{C}", K=K, V=V, chunk_size=C, dtype=DTYPES[(i + C // 128) % 2], T=C + 37,
                layout=LAYOUTS[i % 4], initial_state=True, state_v_first=(i + C // 128) % 2 == 0, **KEEP_ALL,
                **list(GATES.values())[(i + C // 64) % 4],
            )  # fmt: skip


def lengths():
    """Tails, sequences shorter than a chunk, packed sequences of every awkward length."""
    for i, T in enumerate([1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 191, 300]):
        for C in (64, 128):
            add(
                f"tail_T{T}_C{C}", T=T, H=1 + i % 2, HV=2, chunk_size=C, dtype=DTYPES[i % 2], initial_state=i % 2 == 0,
                **KEEP_ALL,
            )  # fmt: skip
    for i, (layout, C) in enumerate(itertools.product(LAYOUTS, (64, 128))):
        order = EDGE_LENGTHS if i % 2 else EDGE_LENGTHS[::-1]
        add(
            f"packed_edges_{layout}_C{C}", **packed(order), layout=layout, chunk_size=C, dtype=DTYPES[i // 2 % 2],
            K=64, V=[64, 128][i % 2], initial_state=True, chunk_indices=i % 3 == 0, state_v_first=i % 2 == 0,
            **KEEP_ALL, **list(GATES.values())[i % 4],
        )  # fmt: skip
    for length in EDGE_LENGTHS:
        add(f"packed_alone_{length}", **packed([length]), H=1, HV=2, initial_state=True, chunk_indices=True, **KEEP_ALL)
    for length in EDGE_LENGTHS[1::2]:
        add(f"packed_thrice_{length}", **packed([length] * 3), layout="TND", K=32, V=64, chunk_size=128, **KEEP_ALL)
    add("packed_holes", **packed([0, 0, 5, 0, 70, 0, 0]), initial_state=True, chunk_indices=True, **KEEP_ALL)
    for i, (layout, state) in enumerate(itertools.product(LAYOUTS, (False, True))):
        add(f"packed_all_empty_{layout}_{'state' if state else 'zero'}", **packed([0] * 4), layout=layout, H=2, HV=4,
            V=48, initial_state=state, state_v_first=i % 3 == 0, chunk_indices=i % 2 == 0, **KEEP_ALL)  # fmt: skip
    many = [i * 7 % 5 for i in range(1024)]
    add("packed_1024", **packed(many), K=16, V=32, initial_state=True, chunk_indices=True, **KEEP_ALL)
    add("packed_1024_NTD", **packed(many[::-1]), layout="NTD", K=32, V=16, H=1, HV=2, chunk_size=128, **KEEP_ALL)
    add("packed_1024_empty_but_one", **packed([0] * 700 + [200] + [0] * 323), K=16, V=16, output_final_state=True)


def sizes():
    """Nothing at all, many heads, many batches."""
    for layout in LAYOUTS:
        add(f"no_tokens_{layout}", T=0, layout=layout, H=2, V=64, initial_state=True, **KEEP_ALL)
    add("no_tokens_no_state", T=0, B=3, H=1, HV=2, state_v_first=True, **KEEP_ALL)
    add("no_batch", T=70, B=0, H=2, initial_state=True, **KEEP_ALL)
    add("no_batch_BNSD", T=70, B=0, H=2, layout="BNSD", chunk_size=128, output_final_state=True)
    add("heads_128", T=70, H=128, K=16, V=16, **KEEP_ALL)
    add("heads_2_of_128", T=40, H=2, HV=128, K=32, V=16, layout="BNSD", initial_state=True, **KEEP_ALL)
    add("heads_1_of_128", T=40, H=1, HV=128, K=16, V=32, layout="NTD", dtype="float16", **KEEP_ALL)
    add("heads_96_of_96", T=65, H=96, K=16, V=16, layout="TND", strides="padded", output_final_state=True)
    add("batch_40", T=67, B=40, K=16, V=16, initial_state=True, state_v_first=True, **KEEP_ALL)
    add("groups_of_8", T=130, H=2, HV=16, K=64, V=32, strides="fused", dtype="float16", **KEEP_ALL)


def strides():
    for i, (mode, layout) in enumerate(itertools.product(STRIDES[1:], LAYOUTS)):
        add(
            f"strides_{mode}_{layout}", T=83, B=2 if layout[0] == "B" else 1, H=2, HV=4, K=48, V=80, strides=mode,
            layout=layout, dtype=DTYPES[i % 2], initial_state=True, g_dtype=["float32", "bfloat16"][i // 2 % 2],
            beta_dtype=["bfloat16", "float32"][i % 2], **KEEP_ALL, **list(GATES.values())[i // 4 % 4],
        )  # fmt: skip


def attributes():
    for scale in (1.0, 0.01, -0.25, 0.0, 7.3):
        add(f"scale_{label(scale)}", T=90, scale=scale, **KEEP_ALL)
    for bound in (-1.0, -0.01):
        add(f"lower_bound_{label(bound)}", T=140, lower_bound=bound, dt_bias=True,
            **GATES["bounded"], **KEEP_ALL)  # fmt: skip
    # Not read in these modes, so not checked either.
    add("lower_bound_unread", T=70, lower_bound=-50.0, **GATES["softplus"], **KEEP_ALL)
    add("lower_bound_unread_hinted", T=70, lower_bound=1.0, **GATES["hinted"], **KEEP_ALL)
    add(
        "documented_example", T=128, H=4, dtype="float16", safe_gate=True, gate="linear", gate_scale=0.01,
        output_final_state=True, return_intermediate_states=True,
    )  # fmt: skip


def hostile():
    """Where kernels of this kind are known to fail."""
    for i, (value, where) in enumerate(
        itertools.product([0, -1e-4, -5, -12, -24, -1000, "-inf"], ["all", "half", "single"])
    ):
        for C in (64, 128):
            add(
                f"gate_{label(value)}_{where}_C{C}", T=200, chunk_size=C, dtype=DTYPES[(i + C // 128) % 2],
                gate={"value": value, "where": where}, initial_state=True, **KEEP_ALL,
            )  # fmt: skip
    for value, where in itertools.product([50.0, 1000.0, -30.0, "-inf"], ["all", "single"]):
        for gate in ("softplus", "bounded"):
            add(
                f"raw_gate_{label(value)}_{where}_{gate}", T=140,
                gate={"value": value, "where": where}, initial_state=True, dt_bias=True, **GATES[gate], **KEEP_ALL,
            )  # fmt: skip
    for scale in (0.001, 20.0):
        for gate in GATES:
            add(f"gate_scale_{label(scale)}_{gate}", T=140, gate_scale=scale, **GATES[gate], **KEEP_ALL)
    for keys, beta in (("repeated", 0.9997), ("correlated", "random"), ("correlated", 1.0), ("repeated", 0.5)):
        for gate, C in (("random", 64), ({"value": 0, "where": "all"}, 64), ({"value": -1e-4, "where": "all"}, 128)):
            gate_label = gate if isinstance(gate, str) else label(gate["value"])
            add(
                f"keys_{keys}_beta_{label(beta)}_gate_{gate_label}_C{C}", T=1024, keys=keys, beta=beta, gate=gate,
                chunk_size=C, dtype=DTYPES[C // 128], **KEEP_ALL,
            )  # fmt: skip
    for beta in (0.0, 1.0, 2.0):
        for C in (64, 128):
            add(f"beta_{label(beta)}_C{C}", T=200, beta=beta, chunk_size=C, initial_state=beta != 0, **KEEP_ALL)
    add("beta_0_with_state", T=100, beta=0.0, initial_state=True, H=1, HV=2, **KEEP_ALL)


def long_sequences():
    """Thousands of equal tiny gates: a decay made of rounded exponentials drifts."""
    for T, value, C, dtype, initial in (
        (8192, -1e-4, 64, "bfloat16", True),
        (4096, -1e-5, 128, "float16", True),
        (4096, -1e-3, 64, "float16", False),
        (2048, -3e-6, 64, "bfloat16", True),
        (2048, -0.01, 128, "bfloat16", True),
    ):
        add(f"long_{T}_C{C}_{dtype}", T=T, gate={"value": value, "where": "all"}, chunk_size=C, dtype=dtype,
            initial_state=initial, output_final_state=True)  # fmt: skip
    # No new values: what remains of the initial state after 4096 tokens.
    add("long_decay_only", T=4096, gate={"value": -1e-4, "where": "all"}, beta=0.0, initial_state=True,
        output_final_state=True, return_intermediate_states=True)  # fmt: skip


def main():
    for group in (
        matrix, combinations, dimensions, lengths, sizes, strides, attributes, hostile, long_sequences
    ):  # fmt: skip
        group()
    assert len({case["name"] for case in cases}) == len(cases)
    lines = ",\n".join(json.dumps(case) for case in cases)
    pathlib.Path(__file__).with_name("chunk_kda_fwd.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
