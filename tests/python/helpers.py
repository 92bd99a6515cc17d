"""What the tests share: calls to make, and comparisons."""

import dataclasses
import os

import ml_dtypes
import numpy as np
from hypothesis import settings

from kda import _cases
from kda._cases import Case

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# A small call that has everything: tails, grouped values, K != V, a state, the gate made inside.
FULL = Case(
    name="full",
    T=70,
    H=2,
    HV=4,
    K=32,
    V=48,
    B=2,
    use_gate_in_kernel=True,
    dt_bias=True,
    initial_state=True,
)
# The same with packed sequences, one of them empty.
PACKED = dataclasses.replace(FULL, name="packed", B=1, cu_seqlens=(0, 65, 65, 70))
# The smallest call.
PLAIN = Case(name="plain", T=5, K=16, V=16)

FLAGS = ("output_final_state", "disable_recompute", "return_intermediate_states")
KEEP_ALL = {"output_final_state": True, "disable_recompute": True}


def arguments(case=PLAIN, **changes):
    """Return the keyword arguments of the case's call, some of them changed."""
    return _cases.make_arguments(case)._asdict() | changes


def as_bytes(array):
    """Return the elements of an array of any library, row-major."""
    if array is None:
        return None
    if type(array).__module__ == "torch":
        import torch

        return array.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return np.asarray(array).tobytes()


def to_torch(torch, value):
    """Return a NumPy array's memory as a tensor, anything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == BFLOAT16:
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def assert_same_bits(actual, expected):
    """Compare two result tuples, leaving out initial_state."""
    for name, a, b in zip(actual._fields[:-1], actual[:-1], expected[:-1], strict=True):
        assert as_bytes(a) == as_bytes(b), name
        assert a is None or tuple(a.shape) == tuple(b.shape), name


def examples(count):
    """Return the settings of a property test that draws so many examples, or as many times as conftest.py says."""
    return settings(max_examples=count * int(os.environ.get("KDA_TEST_EXAMPLES", "1")))
