"""supported(), info() and the number of threads."""

import inspect

import numpy as np
import pytest

import kda
from helpers import FULL, PACKED, PLAIN, arguments


@pytest.mark.parametrize("case", [PLAIN, FULL, PACKED], ids=["plain", "full", "packed"])
def test_supported(case):
    answer = kda.supported(**arguments(case))
    assert answer
    assert (answer.backend, answer.reason, answer.error) == ("cpu", None, None)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"chunk_size": 32}, ValueError, "chunk_size"),
        ({"q": None}, TypeError, "q"),
        ({"g": np.zeros(3)}, TypeError, "g"),
        ({"layout": "TND"}, ValueError, "q"),
        ({"scale": "1"}, TypeError, "scale"),
    ],
)
def test_unsupported_with_the_reason_of_the_call(changes, error, reason):
    call = arguments(**changes)
    answer = kda.supported(**call)
    assert not answer
    assert answer.error is error
    with pytest.raises(error) as raised:
        kda.chunk_kda_fwd(**call)
    assert answer.reason == str(raised.value)
    assert answer.reason.startswith(f"chunk_kda_fwd: {reason}: ")


def test_supported_computes_nothing():
    huge = np.broadcast_to(np.float16(1), (1, 2**33, 4, 128))
    wide = np.broadcast_to(np.float32(-1), (1, 2**33, 4, 128))
    assert kda.supported(huge, huge, huge, wide, wide[..., 0], 0.1)


def test_supported_has_the_signature_of_the_call():
    assert inspect.signature(kda.supported).parameters == inspect.signature(kda.chunk_kda_fwd).parameters
    with pytest.raises(TypeError, match="cp_context"):
        kda.supported(**arguments(), cp_context=None)


def test_info():
    info = kda.info()
    assert info.version == kda.__version__
    assert info.cpu_instruction_set in info.cpu_instruction_sets
    assert info.cpu
    assert all(feature.islower() or feature.isalnum() for feature in info.cpu_features)
    assert info.num_threads == kda.get_num_threads() >= 1
    backends = {backend.name: backend for backend in info.backends}
    assert backends["cpu"].available
    assert all(backend.detail for backend in info.backends)


def test_threads():
    default = kda.get_num_threads()
    try:
        kda.set_num_threads(3)
        assert kda.get_num_threads() == kda.info().num_threads == 3
        kda.set_num_threads(np.int64(2))
        assert kda.get_num_threads() == 2
    finally:
        kda.set_num_threads(None)
    assert kda.get_num_threads() == default


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1, ValueError), (2**40, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)],
)
def test_illegal_threads(value, error):
    before = kda.get_num_threads()
    with pytest.raises(error, match="num_threads"):
        kda.set_num_threads(value)
    assert kda.get_num_threads() == before
