"""What `kda` does about `torch.ops.kda` when nobody has imported `kda.torch`. Never imports torch itself."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def register(torch: Any) -> None:
    """Register the operators, as the first tensor has arrived; not with a torch before 2.4, which lacks the means."""
    if hasattr(torch.library, "register_fake"):
        importlib.import_module("kda.torch")


def traceable(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let `torch.compile` see a call of `function` as a call of the function of that name in `kda.torch`.

    It cannot look into the extension, and what it makes of a graph that breaks there does not run.
    """
    name = function.__name__

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        torch = sys.modules.get("torch")
        # torch has had a compiler since 2.1.
        if torch is not None and hasattr(torch, "compiler") and torch.compiler.is_compiling():
            # The form of import that torch.compile can follow.
            from kda import torch as kda_torch

            result: _R = getattr(kda_torch, name)(*args, **kwargs)
            return result
        return function(*args, **kwargs)

    return call
