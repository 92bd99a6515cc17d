"""Checks of Python arguments that are no arrays, with the library's form of message."""

from __future__ import annotations

import numbers
import operator
from typing import Any, NoReturn

import numpy as np


def fail(error: type[Exception], op: str, name: str, expected: str, got: str) -> NoReturn:
    """Raise `error` with the form of message that the whole library has."""
    raise error(f"{op}: {name}: expected {expected}, got {got}")


def as_float(op: str, name: str, value: Any) -> float:
    """Return a real number as a float. Raises TypeError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
        fail(TypeError, op, name, "a number", described(value))
    try:
        return float(value)
    except OverflowError:
        fail(ValueError, op, name, "a finite number", "an integer beyond the range of a double")


def as_int(op: str, name: str, value: Any) -> int:
    """Return an integer of 64 bits as an int. Raises TypeError, ValueError."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        fail(TypeError, op, name, "an integer", described(value))
    try:
        result = operator.index(value)
    except TypeError:
        # Arrays have `__index__` whether or not they hold one integer.
        fail(TypeError, op, name, "an integer", described(value))
    if not -(2**63) <= result < 2**63:
        fail(ValueError, op, name, "an integer of 64 bits", str(result))
    return result


def as_bool(op: str, name: str, value: Any) -> bool:
    """Return a bool. Raises TypeError: the string "false" is true to Python, and a flag must not be."""
    if not isinstance(value, (bool, np.bool_)):
        fail(TypeError, op, name, "a bool", described(value))
    return bool(value)


def as_str(op: str, name: str, value: Any) -> str:
    """Return a string that has an encoding: surrogates, which no name has, are spelled out. Raises TypeError."""
    if not isinstance(value, str):
        fail(TypeError, op, name, "a string", described(value))
    return value.encode(errors="backslashreplace").decode()


def described(value: Any) -> str:
    """Return what messages call a value."""
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 40 else type(value).__name__
