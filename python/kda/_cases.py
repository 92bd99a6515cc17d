"""The cases of `tests/op_cases/chunk_kda_fwd.json` and their inputs; README.md beside that file describes both.

Inputs are the same bits as those of the C++ tests: integers, and double operations in the order written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kda._chunk_kda_fwd import Arguments

Floats: TypeAlias = npt.NDArray[np.float32]
Shape: TypeAlias = tuple[int, ...]
AnyCase = TypeVar("AnyCase")

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
_CHOICES = {
    "dtype": ("bfloat16", "float16"),
    "g_dtype": ("float32", "bfloat16"),
    "beta_dtype": ("float32", "bfloat16"),
    "layout": ("BSND", "BNSD", "TND", "NTD"),
    "keys": ("random", "repeated", "correlated"),
    "strides": ("contiguous", "padded", "fused", "reversed", "inner"),
}
_GAP = 16  # elements between the rows of padded tensors


class CaseError(ValueError):
    """A case file that does not follow the format."""


@dataclass(frozen=True)
class FixedGate:
    """A gate value and the places that have it."""

    value: float
    where: Literal["all", "half", "single"]


@dataclass(frozen=True)
class Case:
    """One case; the fields are those of the file, with the gate and beta taken apart."""

    name: str
    T: int
    seed: int = 1
    dtype: str = "bfloat16"
    g_dtype: str = "float32"
    beta_dtype: str = "float32"
    layout: str = "BSND"
    B: int = 1
    H: int = 1
    HV: int = 1
    K: int = 128
    V: int = 128
    chunk_size: int = 64
    scale: float | None = None
    cu_seqlens: tuple[int, ...] | None = None
    chunk_indices: bool = False
    use_gate_in_kernel: bool = False
    safe_gate: bool = False
    lower_bound: float = -5.0
    dt_bias: bool = False
    initial_state: bool = False
    state_v_first: bool = False
    output_final_state: bool = False
    disable_recompute: bool = False
    return_intermediate_states: bool = False
    keys: str = "random"
    gate: FixedGate | Literal["random", "linear"] = "random"
    gate_scale: float = 1.0
    beta: float | Literal["random"] = "random"
    strides: str = "contiguous"

    @property
    def sequences(self) -> int:
        """N: the number of sequences."""
        return self.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def is_rank3(self) -> bool:
        """Whether q, k, v and g lack the batch axis."""
        return self.layout in ("TND", "NTD")

    @property
    def is_head_major(self) -> bool:
        """Whether heads come before tokens."""
        return self.layout in ("BNSD", "NTD")

    @property
    def keep_flags(self) -> dict[str, bool]:
        """The arguments that choose what the Python call keeps."""
        names = ("output_final_state", "disable_recompute", "return_intermediate_states")
        return {name: getattr(self, name) for name in names}


def default_path(operator: str = "chunk_kda_fwd") -> Path:
    """Return the case file of an operator that the package carries."""
    return Path(str(resources.files("kda"))) / "op_cases" / f"{operator}.json"


def load(path: Path) -> list[Case]:
    """Read a case file. Raises CaseError, naming the case and the field, and OSError."""
    return load_with(parse, path)


def load_with(parse_case: Callable[[Any], AnyCase], path: Path) -> list[AnyCase]:
    """Read a case file of any operator. Raises CaseError, naming the case and the field, and OSError."""
    try:
        objects = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{path} is not JSON: {error}") from None
    if not isinstance(objects, list):
        raise CaseError(f"{path} is not an array of cases")
    cases = []
    for index, fields_of_case in enumerate(objects):
        try:
            cases.append(parse_case(fields_of_case))
        except CaseError as error:
            raise CaseError(f"{path}, case {index}: {error}") from None
    if len({fields_of_case["name"] for fields_of_case in objects}) != len(cases):
        raise CaseError(f"{path} has two cases of one name")
    return cases


def parse(given: Any) -> Case:
    """Make a case from its JSON object. Raises CaseError."""
    known = check_fields(given, Case)
    values = {name: _parse_field(name, value, known[name]) for name, value in given.items()}
    values.setdefault("HV", values.get("H", 1))
    return Case(**values)


def check_fields(given: Any, case: type[Any]) -> dict[str, Any]:
    """Return the fields of a dataclass of cases with their defaults, which all of `given` are. Raises CaseError."""
    if not isinstance(given, dict):
        raise CaseError("not an object")
    known = {field.name: field.default for field in fields(case)}
    unknown = [name for name in given if name not in known]
    missing = [name for name, default in known.items() if default is MISSING and name not in given]
    if unknown or missing:
        raise CaseError(f"unknown fields {unknown}, missing fields {missing}")
    return known


def _parse_field(name: str, value: Any, default: Any) -> Any:
    if name in ("scale", "cu_seqlens") and value is None:
        return None
    if name == "gate":
        return _parse_gate(value)
    if name == "beta" and value == "random":
        return value
    if name == "cu_seqlens":
        return integers(name, value)
    if name in _CHOICES:
        return one_of(name, value, _CHOICES[name])
    if name in ("scale", "lower_bound", "gate_scale", "beta"):
        return number(name, value)
    return of_type(name, value, {"name": str, "T": int}.get(name, type(default)))


def integers(name: str, value: Any) -> tuple[int, ...]:
    """Return a list of integers as a tuple. Raises CaseError."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    raise CaseError(f"{name}: expected a list of integers, got {value!r}")


def of_type(name: str, value: Any, expected: type[Any]) -> Any:
    """Return a value of the very type, or an integer of 63 bits. Raises CaseError."""
    if type(value) is not expected or (isinstance(value, int) and not 0 <= value < 2**63):
        raise CaseError(f"{name}: expected {expected.__name__}, got {value!r}")
    return value


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    """Return one of the choices. Raises CaseError."""
    if value not in choices:
        raise CaseError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def number(name: str, value: Any) -> float:
    """Return a number as a float. Raises CaseError."""
    if type(value) not in (int, float):
        raise CaseError(f"{name}: expected a number, got {value!r}")
    return float(value)


def _parse_gate(value: Any) -> Any:
    if value in ("random", "linear"):
        return value
    if not isinstance(value, dict) or set(value) != {"value", "where"}:
        raise CaseError(f"gate: expected random, linear or an object of value and where, got {value!r}")
    fixed = -math.inf if value["value"] == "-inf" else number("gate value", value["value"])
    return FixedGate(fixed, one_of("gate where", value["where"], ("all", "half", "single")))


class Generator:
    """The random numbers of one tensor of a case."""

    _GOLDEN = 0x9E3779B97F4A7C15
    _TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "base_keys")

    def __init__(self, seed: int, tensor: str) -> None:
        start = np.array([(seed * self._GOLDEN + self._TENSORS.index(tensor)) % 2**64], np.uint64)
        self._base = _mix(start)

    def bits(self, shape: Shape) -> npt.NDArray[np.uint64]:
        """Return 64 random bits for every element of `shape`, in row-major order."""
        counter = np.arange(1, math.prod(shape) + 1, dtype=np.uint64)
        return _mix(self._base + counter * np.uint64(self._GOLDEN)).reshape(shape)

    def uniform(self, shape: Shape) -> npt.NDArray[np.float64]:
        """Return numbers in [0, 1)."""
        return np.asarray(self.bits(shape) >> np.uint64(40), np.float64) * 2.0**-24

    def bell(self, shape: Shape) -> npt.NDArray[np.int64]:
        """Return integers that are about normal."""
        bits = self.bits(shape)
        total = sum((bits >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48))
        return np.asarray(total, np.uint64).astype(np.int64) - 131070

    def normal(self, shape: Shape) -> npt.NDArray[np.float64]:
        """Return numbers of unit variance."""
        return np.asarray(self.bell(shape), np.float64) * (1.7320508075688772 / 65536)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = z ^ (z >> np.uint64(30))
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def _unit_rows(integers: npt.NDArray[np.int64]) -> Floats:
    norms = np.sqrt((integers * integers).sum(axis=-1, keepdims=True).astype(np.float64))
    return np.asarray(integers.astype(np.float64) / norms, np.float32)


def _keys(case: Case) -> Floats:
    shape = (case.B, case.T, case.H, case.K)
    own = Generator(case.seed, "k").bell(shape)
    if case.keys == "repeated":
        own = np.broadcast_to(own[:, :1], shape)
    elif case.keys == "correlated":
        own = 7 * Generator(case.seed, "base_keys").bell(shape)[:, :1] + 4 * own
    return _unit_rows(own)


def _gates(case: Case) -> Floats:
    shape = (case.B, case.T, case.HV, case.K)
    random = Generator(case.seed, "g")
    if case.gate == "linear":
        values = -(case.gate_scale * random.uniform(shape))
    elif case.use_gate_in_kernel:
        values = case.gate_scale * 2 * random.normal(shape)
    else:
        uniform = random.uniform(shape)
        values = case.gate_scale * -(uniform * uniform)
    if isinstance(case.gate, FixedGate):
        places = {"all": values, "half": values[..., 1::2], "single": values[:, 3::7]}
        places[case.gate.where][...] = case.gate.value
    return values.astype(np.float32)


def values(case: Case) -> dict[str, Floats]:
    """Return the inputs before they are rounded to their dtypes.

    q, k, v, g are `[B,T,heads,dim]` and beta is `[B,T,HV]` whatever the layout, initial_state is `[N,HV,K,V]`; what the
    case does not give is left out.
    """

    def random(name: str) -> Generator:
        return Generator(case.seed, name)

    made: dict[str, Any] = {
        "q": _unit_rows(random("q").bell((case.B, case.T, case.H, case.K))),
        "k": _keys(case),
        "v": random("v").normal((case.B, case.T, case.HV, case.V)),
        "g": _gates(case),
    }
    beta_shape = (case.B, case.T, case.HV)
    made["beta"] = random("beta").uniform(beta_shape) if case.beta == "random" else np.full(beta_shape, case.beta)
    if case.use_gate_in_kernel:
        made["A_log"] = 1.5 * random("A_log").uniform((case.HV,)) - 0.5
    if case.dt_bias:
        made["dt_bias"] = 0.5 * random("dt_bias").normal((case.HV * case.K,))
    if case.initial_state:
        made["initial_state"] = 0.3 * random("initial_state").normal((case.sequences, case.HV, case.K, case.V))
    return {name: array.astype(np.float32) for name, array in made.items()}


def _in_layout(case: Case, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """View `[B,T,heads,...]` in the case's layout."""
    if case.is_head_major:
        array = array.swapaxes(1, 2)
    return array[0] if case.is_rank3 else array


def _filler(shape: Shape, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array in which every byte is 0xff: NaN in every dtype."""
    return np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype)[..., 0]


def _placed(case: Case, numbers: Floats, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Lay `[B,T,heads,...]` out as the case's layout and strides say."""
    numbers = _in_layout(case, numbers)
    shape = numbers.shape
    if case.strides == "padded":
        array = _filler((*shape[:-1], shape[-1] + _GAP), dtype)[..., : shape[-1]]
    elif case.strides == "inner":
        array = _filler((*shape[:-1], shape[-1] * 2), dtype)[..., ::2]
    else:
        array = np.empty(shape, dtype)
    if case.strides == "reversed":
        array = np.flip(array, (0 if case.is_rank3 else 1) + case.is_head_major)
    array[...] = numbers.astype(dtype)
    return array


def _fused(case: Case, numbers: dict[str, Floats]) -> dict[str, npt.NDArray[Any]]:
    """Cut q, k and v out of the rows of one `[B, T, 2*H*K + HV*V]` buffer."""
    dims = {"q": (case.H, case.K), "k": (case.H, case.K), "v": (case.HV, case.V)}
    rows = [numbers[name].reshape(case.B, case.T, heads * dim) for name, (heads, dim) in dims.items()]
    buffer = np.concatenate(rows, axis=-1).astype(DTYPES[case.dtype])
    cuts = np.split(buffer, np.cumsum([row.shape[-1] for row in rows])[:-1], axis=-1)
    return {
        name: _in_layout(case, cut.reshape(case.B, case.T, *dims[name])) for name, cut in zip(dims, cuts, strict=True)
    }


def canonical_chunk_indices(cu_seqlens: Iterable[int], chunk_size: int) -> list[int]:
    """Return the flat pairs (sequence, chunk within it) in order."""
    bounds = list(cu_seqlens)
    lengths = [end - start for start, end in pairwise(bounds)]
    return [part for n, length in enumerate(lengths) for c in range(-(-length // chunk_size)) for part in (n, c)]


def make_arguments(case: Case) -> Arguments:
    """Return the arguments of the case's call; bytes between elements are NaN."""
    numbers = values(case)
    dtypes = {"q": case.dtype, "k": case.dtype, "v": case.dtype, "g": case.g_dtype, "beta": case.beta_dtype}
    arrays = {name: _placed(case, numbers[name], DTYPES[dtype]) for name, dtype in dtypes.items()}
    if case.strides == "fused":
        arrays |= _fused(case, numbers)
    state = numbers.get("initial_state")
    if state is not None and case.state_v_first:
        state = np.ascontiguousarray(state.swapaxes(-1, -2))
    indices = case.cu_seqlens is not None and case.chunk_indices
    return Arguments(
        **arrays,
        scale=case.K**-0.5 if case.scale is None else case.scale,
        chunk_size=case.chunk_size,
        layout=case.layout,
        initial_state=state,
        cu_seqlens=None if case.cu_seqlens is None else list(case.cu_seqlens),
        chunk_indices=canonical_chunk_indices(case.cu_seqlens or (), case.chunk_size) if indices else None,
        safe_gate=case.safe_gate,
        lower_bound=case.lower_bound,
        use_gate_in_kernel=case.use_gate_in_kernel,
        A_log=numbers.get("A_log"),
        dt_bias=numbers.get("dt_bias"),
        state_v_first=case.state_v_first,
    )
