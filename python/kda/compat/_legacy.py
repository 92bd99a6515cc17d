"""The legacy functions, and how they get into torch's dispatcher and among Python's modules."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch

import kda.torch
from kda import _kda
from kda._arguments import fail
from kda._chunk_kda_fwd import ChunkKdaFwdResult
from kda._gates import naive_kda_gate

Tensor: TypeAlias = torch.Tensor
# A list or a tuple of ints, or an array or a tensor of them.
Metadata: TypeAlias = Any

OP = "compat.register"


def npu_chunk_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    chunk_size: int = 64,
    *,
    layout: str = "BSND",
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    cu_seqlens: Metadata | None = None,
    chunk_indices: Metadata | None = None,
    safe_gate: bool | None = False,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool | None = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    disable_recompute: bool | None = False,
    return_intermediate_states: bool | None = False,
    state_v_first: bool | None = False,
) -> ChunkKdaFwdResult:
    """Compute `kda.chunk_kda_fwd`, with its arguments, results and errors, but for three things.

    What is optional goes by keyword, a flag may be None, which is False, and h of packed sequences in a rank-4 layout
    is `[1,NC,HV,K,V]`.
    """
    result = kda.torch.chunk_kda_fwd(
        q,
        k,
        v,
        g,
        beta,
        scale,
        chunk_size,
        layout=layout,
        initial_state=initial_state,
        output_final_state=_flag(output_final_state),
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
        safe_gate=_flag(safe_gate),
        lower_bound=lower_bound,
        use_gate_in_kernel=_flag(use_gate_in_kernel),
        A_log=A_log,
        dt_bias=dt_bias,
        disable_recompute=_flag(disable_recompute),
        return_intermediate_states=_flag(return_intermediate_states),
        state_v_first=_flag(state_v_first),
    )
    if result.h is not None and cu_seqlens is not None and q.dim() == 4:
        return result._replace(h=result.h.unsqueeze(0))
    return result


def npu_kda_gate_cumsum(
    g: Tensor,
    chunk_size: int,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Metadata | None = None,
    use_gate_in_kernel: bool | None = False,
    safe_gate: bool | None = False,
    lower_bound: float | None = None,
) -> Tensor:
    """Compute `kda.kda_gate_cumsum`, with its arguments, result and errors; a flag may be None, which is False."""
    return kda.torch.kda_gate_cumsum(
        g,
        chunk_size,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=cu_seqlens,
        use_gate_in_kernel=_flag(use_gate_in_kernel),
        safe_gate=_flag(safe_gate),
        lower_bound=lower_bound,
    )


def load_legacy_torch_ops() -> Path:
    """Return the library that holds the operators: `torch.ops.npu` has them already."""
    return Path(_kda.__file__)


def _flag(value: Any) -> Any:
    return False if value is None else value


class _Operator(NamedTuple):
    namespace: str
    schema: str
    kernel: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


_CHUNK_KDA_FWD = (
    '(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, int chunk_size=64, *, str layout="BSND",'
    " Tensor(a)? initial_state=None, bool? output_final_state=False, int[]? cu_seqlens=None, int[]? chunk_indices=None,"
    " bool? safe_gate=False, float? lower_bound=None, bool? use_gate_in_kernel=False, Tensor? A_log=None,"
    " Tensor? dt_bias=None, bool? disable_recompute=False, bool? return_intermediate_states=False,"
    " bool? state_v_first=False) -> (Tensor attn_out, Tensor? final_state, Tensor? gk, Tensor Aqk, Tensor Akk,"
    " Tensor? w, Tensor? u, Tensor? qg, Tensor? kg, Tensor? v_new, Tensor? h, Tensor(a)? initial_state)"
)
_OPERATORS = (
    _Operator("npu", "npu_chunk_kda_fwd" + _CHUNK_KDA_FWD, npu_chunk_kda_fwd),
    _Operator("_C_ascend", "chunk_kda_fwd" + _CHUNK_KDA_FWD, npu_chunk_kda_fwd),
    _Operator(
        "npu",
        "npu_kda_gate_cumsum(Tensor g, int chunk_size, *, Tensor? A_log=None, Tensor? dt_bias=None,"
        " int[]? cu_seqlens=None, bool? use_gate_in_kernel=False, bool? safe_gate=False, float? lower_bound=None)"
        " -> Tensor",
        npu_kda_gate_cumsum,
    ),
    _Operator(
        "ascend_ops",
        "chunk_kda_fwd_direct(Tensor q, Tensor k, Tensor v, Tensor(a) gk, Tensor beta, float scale, int chunk_size, *,"
        " Tensor(b)? initial_state=None, bool output_final_state=True, bool safe_gate=False) -> (Tensor attn_out,"
        " Tensor? final_state, Tensor(a) gk, Tensor Aqk, Tensor Akk, Tensor w, Tensor u, Tensor qg, Tensor kg,"
        " Tensor v_new, Tensor h, Tensor(b)? initial_state)",
        kda.torch.chunk_kda_fwd_direct,
    ),
)
_ASCENDC = {
    "npu_chunk_kda_fwd": npu_chunk_kda_fwd,
    "chunk_kda_fwd": npu_chunk_kda_fwd,
    "npu_kda_gate_cumsum": npu_kda_gate_cumsum,
    "kda_gate_cumsum": npu_kda_gate_cumsum,
}
_MODULES: dict[str, dict[str, Any]] = {
    "fla_npu": {"load_legacy_torch_ops": load_legacy_torch_ops, "is_legacy_torch_ops_loaded": lambda: True},
    "fla_npu.ops": {},
    "fla_npu.ops.ascendc": _ASCENDC,
    "mindspeed_ops": {},
    "mindspeed_ops.api": {},
    "mindspeed_ops.api.triton": {},
    "mindspeed_ops.api.triton.kda_gate": {
        "fused_kda_gate": kda.torch.fused_kda_gate,
        "naive_kda_gate": naive_kda_gate,
    },
}

_lock = threading.Lock()
# The operators stay registered as long as these objects live.
_libraries: dict[str, Any] = {}


def register() -> None:
    """Do what `kda.compat.register` promises."""
    with _lock:
        if _libraries:
            return
        _refuse_if_present()
        new_library: Any = torch.library.Library
        libraries = {name: new_library(name, "FRAGMENT") for name in {operator.namespace for operator in _OPERATORS}}
        for operator in _OPERATORS:
            library = libraries[operator.namespace]
            library.define(operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
            # What these do is reshape and call torch.ops.kda; autograd and compilers see through them.
            library.impl(operator.name, operator.kernel, "CompositeImplicitAutograd")
        for name, members in _MODULES.items():
            _add_module(name, members)
        _libraries.update(libraries)


def _refuse_if_present() -> None:
    for name in _MODULES:
        if "." not in name and (name in sys.modules or find_spec(name) is not None):
            fail(RuntimeError, OP, name, "no package of this name", "a real one, which this would hide")
    for operator in _OPERATORS:
        if hasattr(getattr(torch.ops, operator.namespace), operator.name):
            name = f"torch.ops.{operator.namespace}.{operator.name}"
            fail(RuntimeError, OP, name, "no operator of this name", "a real one, registered already")


def _add_module(name: str, members: dict[str, Any]) -> None:
    module = ModuleType(name, "A legacy name of the package kda; see kda.compat.")
    module.__spec__ = ModuleSpec(name, None, origin="kda.compat", is_package=True)
    # A package without files: its submodules are in sys.modules or nowhere.
    module.__path__ = []
    for member, value in members.items():
        setattr(module, member, value)
    module.__dict__["__all__"] = sorted(members)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
