"""flash-linear-attention (FLA) computes `fla.ops.kda.chunk_kda` with this package, where it can.

`register()` adds a backend to FLA's registry of backends, which package fla-core has for this function since 0.5.0.
From then on FLA asks it first. It takes calls for inference (grad mode off) that `kda.chunk_kda` supports, on any
device that `kda` has a backend for; every other call goes on to FLA's own backends and kernels as before. The logger
`kda.integrations.fla` says which way calls go: every call at level DEBUG, and every new reason to pass one on at INFO.

FLA's own switch works too: `FLA_LIBKDA=0` in the environment turns the backend off.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
from typing import Any, ClassVar

import torch

import kda
from kda._arguments import described, fail

__all__ = ["register", "unregister"]

OP = "integrations.fla.register"

_logger = logging.getLogger(__name__)
_lock = threading.Lock()

# What FLA gives for arguments that are not ours when it asks for nothing.
_FOREIGN: dict[str, Any] = {"cp_context": None, "use_graph": False, "max_num_seqs": None}
_OURS = frozenset(
    name
    for name, parameter in inspect.signature(kda.chunk_kda).parameters.items()
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD
)
_OLD_STATE_NAME = "transpose_state_layout"
# Reasons name shapes, and a program may have any number of those.
_MOST_REASONS = 100


class _Backend:
    """The part of a backend of FLA that is ours; FLA's base class is added when FLA is there.

    FLA calls `chunk_kda_verifier` with a call's arguments, and `chunk_kda` with the same ones if the answer was yes.
    """

    backend_type = "libkda"
    package_name = None
    env_var = "FLA_LIBKDA"
    # Lower comes first. FLA's own backends for other machines have 0 and are not in the way; its fastest has 3.
    priority = 1

    signature: ClassVar[inspect.Signature]
    """FLA's function's: it knows the order of positional arguments, which has changed between versions."""
    registered: ClassVar[bool] = True
    reasons: ClassVar[set[str]] = set()
    """Those that were logged at INFO."""

    @classmethod
    def is_available(cls) -> bool:
        return cls.registered

    def chunk_kda_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        try:
            reason = self._reason_against(args, kwargs)
        except (TypeError, ValueError) as error:
            # Not a call of FLA's function, which will say so itself.
            reason = str(error)
        if reason is None:
            _logger.debug("chunk_kda: computed by kda")
            return True, None
        is_new = reason not in self.reasons and len(self.reasons) < _MOST_REASONS
        if is_new:
            self.reasons.add(reason)
        _logger.log(logging.INFO if is_new else logging.DEBUG, "chunk_kda: passed on: %s", reason)
        return False, reason

    def chunk_kda(self, *args: Any, **kwargs: Any) -> Any:
        return kda.chunk_kda(**self._translated(args, kwargs))

    def _reason_against(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        given = self._named(args, kwargs)
        for name, value in given.items():
            if name in _FOREIGN:
                if value is not _FOREIGN[name]:
                    return f"{name} is not supported, got {described(value)}"
            elif name not in _OURS and name != _OLD_STATE_NAME:
                return f"{name} is not known, got {described(value)}"
        if torch.is_grad_enabled():
            return "grad mode is on, and this is the forward pass only"
        return kda.supported.chunk_kda(**self._translated(args, kwargs)).reason

    def _translated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `kda.chunk_kda`."""
        given = {name: value for name, value in self._named(args, kwargs).items() if name not in _FOREIGN}
        # Where FLA's signature still has the old name it is not deprecated.
        if _OLD_STATE_NAME in self.signature.parameters and _OLD_STATE_NAME in given:
            given["state_v_first"] = given.pop(_OLD_STATE_NAME)
        return given

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return every argument under its name in FLA's signature."""
        bound = self.signature.bind(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            else:
                named[name] = value
        return named


# One per process and never removed: FLA's registry has no way out. `unregister` makes it unavailable.
_backend: type[_Backend] | None = None


def register() -> None:
    """Let FLA compute `fla.ops.kda.chunk_kda` with this package, where it can. Calling it again does nothing.

    Raises:
        ImportError: FLA is not installed, cannot be imported here, or has no registry for this function (fla-core
            before 0.5.0).
        RuntimeError: FLA was told to have no backends (`FLA_DISABLE_BACKEND_DISPATCH=1`).
    """
    global _backend
    with _lock:
        if _backend is None:
            _backend = _added_backend()
        _backend.registered = True


def unregister() -> None:
    """Undo `register`. Does nothing where it was not called."""
    with _lock:
        if _backend is not None:
            _backend.registered = False


def _added_backend() -> type[_Backend]:
    function = importlib.import_module("fla.ops.kda").chunk_kda
    try:
        registry: Any = importlib.import_module("fla.backends")
        is_per_function = True
    except ModuleNotFoundError:
        # Before 0.6.0 functions share the registry of their operation.
        is_per_function = False
        try:
            operation: Any = importlib.import_module("fla.ops.kda.backends")
            registry = importlib.import_module("fla.ops.backends")
        except ModuleNotFoundError as error:
            raise ImportError(f"{OP}: expected fla-core 0.5.0 or later, got one without backends of KDA") from error
    if getattr(registry, "_DISPATCH_DISABLED", False):
        fail(RuntimeError, OP, "FLA_DISABLE_BACKEND_DISPATCH", "no such variable when FLA is imported", "1")
    members = {"signature": inspect.signature(inspect.unwrap(function))}
    backend: type[_Backend] = type("LibkdaBackend", (_Backend, registry.BaseBackend), members)
    if is_per_function:
        registry.register(function)(backend)
    else:
        operation.kda_registry.register(backend())
    return backend
