"""Illegal calls: the right exception, and a message that names the argument, what was expected and what was given."""

import re

import numpy as np
import pytest

import c_door
import illegal_calls
import kda
from helpers import FULL, PACKED, PLAIN, arguments


def pairs(*tables):
    """Return (operator, row) for parametrize, with ids."""
    return [pytest.param(operator, row, id=f"{operator}: {row.label}") for operator, rows in tables for row in rows]


BOTH_DOORS = pairs(
    ("chunk_kda_fwd", illegal_calls.CHUNK_KDA_FWD),
    ("kda_gate", illegal_calls.KDA_GATE),
    ("kda_gate_cumsum", illegal_calls.KDA_GATE_CUMSUM),
)
PYTHON_ONLY = pairs(
    ("chunk_kda_fwd", illegal_calls.CHUNK_KDA_FWD_IN_PYTHON),
    ("kda_gate", illegal_calls.KDA_GATE_IN_PYTHON),
    ("kda_gate_cumsum", illegal_calls.KDA_GATE_CUMSUM_IN_PYTHON),
)
IN_PYTHON = {
    "chunk_kda_fwd": kda.chunk_kda_fwd,
    "kda_gate": kda.fused_kda_gate,
    "kda_gate_cumsum": kda.kda_gate_cumsum,
}


def legal(row):
    return dict(row.base) if isinstance(row.base, dict) else arguments(row.base)


def assert_says(message, operator, row):
    assert re.search(rf"^{operator}: {row.argument}: expected .*({row.expected}).*, got .*({row.given})", message), (
        message
    )
    assert "\n" not in message


def test_there_are_enough_rows():
    labels = [param.id for param in BOTH_DOORS + PYTHON_ONLY]
    assert len(set(labels)) == len(labels)
    assert len(BOTH_DOORS) >= 120


@pytest.mark.parametrize(("operator", "row"), BOTH_DOORS + PYTHON_ONLY)
def test_illegal_call_through_python(operator, row):
    function = IN_PYTHON[operator]
    with pytest.raises(row.error) as raised:
        function(**(legal(row) | row.changes))
    assert type(raised.value) is row.error
    assert_says(str(raised.value), function.__name__, row)


def c_call(operator, call, outputs):
    if operator == "kda_gate":
        return c_door.kda_gate(call, outputs["out"])
    if operator == "kda_gate_cumsum":
        return c_door.kda_gate_cumsum(call, outputs["gk"])
    return c_door.chunk_kda_fwd(call, outputs)


def c_outputs(operator, call):
    """Return NaN for all outputs of a legal call."""
    if operator == "chunk_kda_fwd":
        return c_door.make_outputs(call)
    return {"gk" if operator == "kda_gate_cumsum" else "out": np.full(call["g"].shape, np.nan, np.float32)}


@pytest.mark.parametrize(("operator", "row"), BOTH_DOORS)
def test_illegal_call_through_c(operator, row):
    call = legal(row)
    outputs = c_outputs(operator, call)
    with pytest.raises(c_door.RefusedError) as raised:
        c_call(operator, call | row.changes, outputs)
    is_missing = row.error is TypeError and row.changes[row.argument] is None
    assert raised.value.status == (c_door.NULL_POINTER if is_missing else c_door.INVALID)
    assert_says(str(raised.value), operator, row)
    assert all(np.isnan(array.astype(np.float32)).all() for array in outputs.values())


@pytest.mark.parametrize("base", [PLAIN, FULL, PACKED], ids=lambda case: case.name)
def test_the_calls_that_are_made_illegal_are_legal(base):
    call = arguments(base)
    outputs = c_door.chunk_kda_fwd(call, c_door.make_outputs(call))
    assert outputs["attn_out"].tobytes() == kda.chunk_kda_fwd(**call).attn_out.tobytes()


@pytest.mark.parametrize("base", [illegal_calls.CUMSUM, illegal_calls.BOUNDED, illegal_calls.PACKED_CUMSUM])
def test_the_gate_calls_that_are_made_illegal_are_legal(base):
    assert kda.kda_gate_cumsum(**base).shape == base["g"].shape
    c_door.kda_gate_cumsum(base, np.empty(base["g"].shape, np.float32))
    assert kda.fused_kda_gate(**illegal_calls.GATE).shape == illegal_calls.GATE["g"].shape


def test_unknown_and_missing_arguments():
    with pytest.raises(TypeError, match="head_first"):
        kda.chunk_kda_fwd(**arguments(), head_first=True)
    with pytest.raises(TypeError, match="scale"):
        kda.chunk_kda_fwd(*[None] * 5)


def test_misaligned_data():
    call = arguments(PLAIN)
    raw = np.zeros(call["g"].nbytes + 1, np.uint8)
    call["g"] = raw[1:].view(np.float32).reshape(call["g"].shape)
    with pytest.raises(ValueError, match="g: expected data aligned to its elements of 4 bytes"):
        kda.chunk_kda_fwd(**call)


def test_strides_between_elements():
    call = arguments(PLAIN)
    records = np.zeros(call["g"].shape, np.dtype({"names": ["g", "x"], "formats": ["f4", "u2"], "itemsize": 6}))
    call["g"] = records["g"]
    with pytest.raises(ValueError, match="g: expected strides of whole elements of 4 bytes, got a stride of"):
        kda.chunk_kda_fwd(**call)


@pytest.mark.parametrize("reason", ["not today", "\udcff"])
def test_object_whose_dlpack_fails(reason):
    class Broken:
        def __dlpack__(self, **_):
            raise RuntimeError(reason)

        def __dlpack_device__(self):
            return (1, 0)

    shown = re.escape(reason.encode(errors="backslashreplace").decode())
    with pytest.raises(TypeError, match=f"q: expected an array of float16 or bfloat16, got .*Broken .*{shown}"):
        kda.chunk_kda_fwd(**arguments(q=Broken()))


def test_nothing_is_left_behind_by_errors():
    for _ in range(3):
        with pytest.raises(ValueError, match="layout"):
            kda.chunk_kda_fwd(**arguments(layout="SBND"))
    assert kda.chunk_kda_fwd(**arguments()).attn_out.shape == (1, 5, 1, 16)


def test_reference_refuses_alike():
    for call in (arguments(chunk_size=32), arguments(layout="x"), arguments(q=None)):
        with pytest.raises((TypeError, ValueError)) as expected:
            kda.chunk_kda_fwd(**call)
        with pytest.raises(type(expected.value)) as actual:
            kda.reference.chunk_kda_fwd(**call)
        assert type(actual.value) is type(expected.value)
