"""Compare `kda` with flash-linear-attention on one GPU, in one run: errors against float64, and times.

    python bench/compare_fla.py [--json FILE] [--cases NAME,NAME,...]

Needs a GPU, torch, triton, fla-core 0.6 or newer, and a `kda` with its CUDA backend. FLA tunes its kernels at first
use, for a minute or more per number of heads; that is not timed. Times are medians of CUDA graph replays. Exit code 1:
an error of kda's is above FLA's; 77: there is nothing to compare on.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import kda


class Case(NamedTuple):
    """Sizes of a call with K = V = 128, in bf16."""

    T: int
    H: int
    B: int = 1
    cu_seqlens: tuple[int, ...] | None = None


CASES = {
    "T8192_H96": Case(8192, 96),
    "packed6_H96": Case(8192, 96, cu_seqlens=(0, 1300, 1847, 3895, 4858, 5129, 8192)),
    "packed8x1024_H96": Case(8192, 96, cu_seqlens=tuple(range(0, 8193, 1024))),
    "T8192_H64": Case(8192, 64),
    "T4096_H32": Case(4096, 32),
    "T8192_H32": Case(8192, 32),
    "T32768_H32": Case(32768, 32),
    "T512_H64": Case(512, 64),
    "B8_T2048_H32": Case(2048, 32, B=8),
}
# Two numbers of heads, so that tuning takes its minutes twice only.
DEFAULT_CASES = ("T8192_H96", "packed6_H96", "packed8x1024_H96", "T8192_H32", "T4096_H32", "T32768_H32", "B8_T2048_H32")
REPEATS = 20
SKIPPED = 77


def unavailable() -> str | None:
    """Return why there is nothing to compare on; None: there is."""
    backend = next(one for one in kda.info().backends if one.name == "cuda")
    if not backend.available:
        return f"no GPU for kda: {backend.detail}"
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("fla.ops.kda")
    except ImportError as error:
        return str(error)
    return None if torch.cuda.is_available() else "a torch that can use the GPU is missing"


def make_call(torch: Any, case: Case, *, repeated_keys: bool = False) -> dict[str, Any]:
    """Return random inputs: unit variance, gates and betas made inside; or one key at every token and beta near 1."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    B, T, H = case.B, case.T, case.H
    sequences = B if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    call: dict[str, Any] = {name: normal(B, T, H, 128) for name in ("q", "k", "v", "g")}
    call |= {
        "beta": normal(B, T, H),
        "A_log": 0.3 * normal(H, dtype=torch.float32),
        "dt_bias": 0.3 * normal(H * 128, dtype=torch.float32),
        "initial_state": 0.3 * normal(sequences, H, 128, 128, dtype=torch.float32),
    }
    if repeated_keys:
        call["k"] = call["k"][:, :1].expand(-1, T, -1, -1).contiguous()
        call["beta"] = torch.full_like(call["beta"], 8.0)  # its sigmoid is 0.9997
        call["g"] = call["g"] - 12.0  # hardly any decay
    if case.cu_seqlens is not None:
        call["cu_seqlens"] = torch.tensor(case.cu_seqlens, device="cuda")
        call["cu_seqlens_cpu"] = torch.tensor(case.cu_seqlens)
    return call | {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "lower_bound": -5.0,
    }


def reference(torch: Any, call: dict[str, Any]) -> tuple[Any, Any]:
    """Return o and the final state by the token recurrence in float64, on the GPU."""
    q, k, v, g, beta = (call[name].double() for name in ("q", "k", "v", "g", "beta"))
    if call["use_qk_l2norm_in_kernel"]:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if call["use_beta_sigmoid_in_kernel"]:
        beta = torch.sigmoid(beta)
    _, T, H, K = q.shape
    x = torch.exp(call["A_log"].double())[:, None] * (g + call["dt_bias"].double().view(H, K))
    decay = torch.exp(call["lower_bound"] * torch.sigmoid(x))
    q = q * K**-0.5
    o = torch.empty(v.shape, dtype=torch.float64, device="cuda")
    state = call["initial_state"].double().clone()
    bounds = call["cu_seqlens_cpu"].tolist() if "cu_seqlens_cpu" in call else [0, T]
    for n, (begin, end) in enumerate(pairwise(bounds)):
        S = state[n : n + 1] if len(bounds) > 2 else state
        for t in range(begin, end):
            S.mul_(decay[:, t, :, :, None])
            error = (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])) * beta[:, t, :, None]
            S.add_(k[:, t, :, :, None] * error[:, :, None, :])
            o[:, t] = torch.einsum("bhkv,bhk->bhv", S, q[:, t])
    return o, state


def relative_error(actual: Any, expected: Any) -> float:
    """Return the relative Frobenius norm of the difference; NaN is NaN."""
    return float((actual.double() - expected).norm() / expected.norm())


def replay_ms(torch: Any, function: Callable[[], Any]) -> float:
    """Return the median time of replays of the captured call."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times: list[float] = []
    for _ in range(REPEATS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def compare(torch: Any, name: str, case: Case) -> dict[str, Any]:
    """Return errors and times of one case; FLA's first call tunes it."""
    fla = importlib.import_module("fla.ops.kda").chunk_kda
    call = make_call(torch, case)
    start = time.perf_counter()
    theirs = fla(**call)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"case": name, "fla_first_call_s": time.perf_counter() - start}
    ours = kda.chunk_kda(**call)
    expected = reference(torch, call)
    for kind, results in (("kda", ours), ("fla", theirs)):
        row[f"{kind}_o_error"], row[f"{kind}_state_error"] = map(relative_error, results, expected)
    row["kda_ms"] = replay_ms(torch, lambda: kda.chunk_kda(**call))
    row["fla_ms"] = replay_ms(torch, lambda: fla(**call))
    return row


def compare_repeated_keys(torch: Any, name: str, case: Case) -> dict[str, Any]:
    """Return errors on one key at every token: the hardest input that a program can meet."""
    fla = importlib.import_module("fla.ops.kda").chunk_kda
    call = make_call(torch, case, repeated_keys=True)
    expected = reference(torch, call)
    row: dict[str, Any] = {"case": f"{name}, one key"}
    for kind, results in (("kda", kda.chunk_kda(**call)), ("fla", fla(**call))):
        row[f"{kind}_o_error"], row[f"{kind}_state_error"] = map(relative_error, results, expected)
    return row


def compare_all_outputs(torch: Any, name: str, case: Case) -> dict[str, Any]:
    """Return errors and times of the call that keeps all twelve outputs, the gate inside, as training makes it."""
    fla = importlib.import_module("fla.ops.kda.chunk_fwd").chunk_kda_fwd
    call = make_call(torch, case)
    for key in ("q", "k"):
        call[key] = torch.nn.functional.normalize(call[key].float(), dim=-1).bfloat16()
    call["beta"] = call["beta"].float().sigmoid()
    call["use_qk_l2norm_in_kernel"] = call["use_beta_sigmoid_in_kernel"] = False
    expected = reference(torch, call)
    for key in ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "cu_seqlens_cpu"):
        call.pop(key, None)
    call |= {"scale": 128**-0.5, "chunk_size": 64, "disable_recompute": True}
    row: dict[str, Any] = {"case": f"{name} all outputs"}
    for kind, function in (("kda", kda.chunk_kda_fwd), ("fla", fla)):
        row[f"{kind}_o_error"], row[f"{kind}_state_error"] = map(relative_error, function(**call)[:2], expected)
        row[f"{kind}_ms"] = replay_ms(torch, functools.partial(function, **call))
    return row


def compare_gate(torch: Any, T: int, output_dtype: Any) -> dict[str, Any]:
    """Return times of the gate alone beside a copy of as many bytes, H = 16, D = 128, bf16 in."""
    fla = importlib.import_module("fla.ops.kda.gate").fused_kda_gate
    g = torch.randn(T, 16, 128, device="cuda").bfloat16()
    A_log, dt_bias = torch.rand(16, device="cuda"), torch.rand(16 * 128, device="cuda")
    source = torch.empty(g.numel() * (2 + output_dtype.itemsize) // 2, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return {
        "case": f"gate T{T} {str(output_dtype).removeprefix('torch.')}",
        "kda_ms": replay_ms(torch, lambda: kda.fused_kda_gate(g, A_log, dt_bias, output_dtype)),
        "fla_ms": replay_ms(torch, lambda: fla(g, A_log, dt_bias, output_dtype=output_dtype)),
        "copy_ms": replay_ms(torch, lambda: target.copy_(source)),
    }


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    parts = [f"{row['case']:24}"]
    if "kda_ms" in row:
        parts.append(f"ms: kda {row['kda_ms']:.4f}, FLA {row['fla_ms']:.4f} ({row['fla_ms'] / row['kda_ms']:.2f} x)")
    if "copy_ms" in row:
        parts.append(f"copy {row['copy_ms']:.4f}")
    if "kda_o_error" in row:
        ours, theirs = (f"{row[f'{kind}_o_error']:.2e}, {row[f'{kind}_state_error']:.2e}" for kind in ("kda", "fla"))
        parts.append(f"errors of o and state: kda {ours}; FLA {theirs}")
    print("; ".join(parts), flush=True)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--cases", default=",".join(DEFAULT_CASES), help=f"of {', '.join(CASES)}")
    options = parser.parse_args()
    names = options.cases.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"--cases: expected names of {', '.join(CASES)}, got {unknown[0]}")
    reason = unavailable()
    if reason is not None:
        print(f"skipped: {reason}")
        return SKIPPED
    torch = importlib.import_module("torch")
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "driver": os.environ.get("KDA_DRIVER_VERSION", ""),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton", "fla-core")},
        "method": f"CUDA graph replays between events, median of {REPEATS}; bf16, K = V = 128, bounded gate, l2 norm "
        "and sigmoid of beta inside, initial and final state; errors are relative Frobenius norms against float64",
        "rows": [],
    }
    failed = False
    with torch.inference_mode():
        for name in names:
            report["rows"].append(compare(torch, name, CASES[name]))
            show(report["rows"][-1])
            if options.json is not None:  # tuning takes minutes: what there is is kept
                options.json.write_text(json.dumps(report, indent=1) + "\n")
        for compare_also in (compare_repeated_keys, compare_all_outputs):
            report["rows"].append(compare_also(torch, names[0], CASES[names[0]]))
            show(report["rows"][-1])
        for T in (131072, 2048):
            for dtype in (torch.float32, torch.bfloat16):
                report["rows"].append(compare_gate(torch, T, dtype))
                show(report["rows"][-1])
    for row in report["rows"]:
        failed |= any(
            not row[f"kda_{kind}"] <= row[f"fla_{kind}"] for kind in ("o_error", "state_error") if f"kda_{kind}" in row
        )
    if failed:
        print("an error of kda's is above FLA's")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
