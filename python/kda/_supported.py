"""Asking whether a call is supported, without making it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeAlias

from kda._chunk_kda import Prepared, chunk_kda, chunk_kda_fwd_direct, prepare_chunk_kda, prepare_direct
from kda._chunk_kda_fwd import OUTPUTS, Arguments, chunk_kda_fwd, kept_names, prepare
from kda._gates import fused_kda_gate, kda_gate_cumsum, prepare_gate, prepare_gate_cumsum
from kda._threads import planned_threads

_P = ParamSpec("_P")
# The backend, and the products with the state.
_Planned: TypeAlias = tuple[str, str | None]
_KEEP_FLAGS = ("output_final_state", "use_gate_in_kernel", "disable_recompute", "return_intermediate_states")


@dataclass(frozen=True)
class Support:
    """The answer of `supported()`: true, or false with the reason."""

    backend: str | None
    """The backend that would run the call; None when there is none."""
    reason: str | None
    """Why the call is not supported, in the words of `error`. None when it is."""
    error: type[Exception] | None
    """What the call would raise."""
    state_products: str | None = None
    """The products with the state that the call would use, "bfloat16" only where it asks for them and the CPU has
    them. None for a gate, which has no such products, and for a call that is not supported."""

    def __bool__(self) -> bool:
        """Tell whether the call is supported."""
        return self.error is None


def _answers(function: Callable[_P, Any]) -> Callable[[Callable[..., _Planned]], Callable[_P, Support]]:
    """Make an answer to calls of `function` from a function that plans them."""

    def decorate(plan: Callable[..., _Planned]) -> Callable[_P, Support]:
        signature = inspect.signature(function)

        def answer(*args: _P.args, **kwargs: _P.kwargs) -> Support:
            signature.bind(*args, **kwargs)
            try:
                backend, state_products = plan(*args, **kwargs)
            except (TypeError, ValueError, RuntimeError, MemoryError) as error:
                return Support(backend=None, reason=str(error), error=type(error))
            return Support(backend=backend, reason=None, error=None, state_products=state_products)

        answer.__name__ = answer.__qualname__ = function.__name__
        answer.__doc__ = (
            f"Tell whether `{function.__name__}` would take these arguments, without computing anything.\n\n"
            "Args:\n"
            f"    *args: those of `{function.__name__}`.\n"
            f"    **kwargs: those of `{function.__name__}`.\n\n"
            "Returns:\n"
            "    An object that is true, or false with the reason.\n\n"
            "Raises:\n"
            f"    TypeError: an argument is missing, or `{function.__name__}` has none of that name.\n"
        )
        answer.__signature__ = signature.replace(return_annotation=Support)  # type: ignore[attr-defined]
        return answer

    return decorate


@_answers(chunk_kda_fwd)
def _chunk_kda_fwd(*args: Any, **kwargs: Any) -> _Planned:
    bound = inspect.signature(chunk_kda_fwd).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    arguments = Arguments(**{name: given[name] for name in Arguments._fields})
    call = prepare(arguments, state_products=given["state_products"])
    return _planned(Prepared(call, kept_names(**{name: given[name] for name in _KEEP_FLAGS})))


@_answers(chunk_kda)
def _chunk_kda(*args: Any, **kwargs: Any) -> _Planned:
    return _planned(prepare_chunk_kda(*args, **kwargs))


@_answers(chunk_kda_fwd_direct)
def _chunk_kda_fwd_direct(*args: Any, **kwargs: Any) -> _Planned:
    return _planned(prepare_direct(*args, **kwargs))


@_answers(fused_kda_gate)
def _fused_kda_gate(*args: Any, **kwargs: Any) -> _Planned:
    return prepare_gate("fused_kda_gate", *args, **kwargs).plan(planned_threads())["backend"], None


@_answers(kda_gate_cumsum)
def _kda_gate_cumsum(*args: Any, **kwargs: Any) -> _Planned:
    return prepare_gate_cumsum("kda_gate_cumsum", *args, **kwargs).plan(planned_threads())["backend"], None


def _planned(prepared: Prepared) -> _Planned:
    wanted = tuple(name in prepared.outputs for name in OUTPUTS)
    report = prepared.call.plan(wanted, planned_threads())
    return report["backend"], report["state_products"]


class _Supported:
    """Tell whether a call would be taken, without computing anything.

    `supported(...)` takes the arguments of `chunk_kda_fwd`; `supported.chunk_kda(...)`, `supported.chunk_kda_fwd(...)`,
    `supported.chunk_kda_fwd_direct(...)`, `supported.fused_kda_gate(...)` and `supported.kda_gate_cumsum(...)` those of
    the function of the same name.

    Returns:
        A `Support`, which is true, or false with the reason.

    Raises:
        TypeError: an argument is missing, or there is none of that name.
    """

    chunk_kda = staticmethod(_chunk_kda)
    chunk_kda_fwd = staticmethod(_chunk_kda_fwd)
    chunk_kda_fwd_direct = staticmethod(_chunk_kda_fwd_direct)
    fused_kda_gate = staticmethod(_fused_kda_gate)
    kda_gate_cumsum = staticmethod(_kda_gate_cumsum)
    __call__ = staticmethod(_chunk_kda_fwd)
    __signature__ = inspect.signature(_chunk_kda_fwd)

    def __repr__(self) -> str:
        return "<function supported>"


supported = _Supported()
