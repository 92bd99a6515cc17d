"""Every illegal input of the contract, for all doors: what is wrong with a call, and what the refusal has to say."""

from typing import Any, NamedTuple

import numpy as np

from helpers import BFLOAT16, FULL, PACKED, PLAIN
from kda._cases import Case


class Illegal(NamedTuple):
    """A refusal: what is wrong, and what the message must name; expected and given are regular expressions."""

    label: str
    base: Case | dict[str, Any]
    """The legal call: a case of chunk_kda_fwd, or the arguments of a gate operator."""
    changes: dict[str, Any]
    error: type[Exception]
    argument: str
    expected: str
    given: str


def of_shape(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


def bf16(*shape):
    return np.zeros(shape, BFLOAT16)


def f32(*shape):
    return np.zeros(shape, np.float32)


def heads(H, HV, K=16, V=16):
    """Return the five inputs of a call with other heads than PLAIN's."""
    return {
        "q": bf16(1, 5, H, K),
        "k": bf16(1, 5, H, K),
        "v": bf16(1, 5, HV, V),
        "g": f32(1, 5, HV, K),
        "beta": f32(1, 5, HV),
    }


GATE = {"g": f32(3, 4, 16), "A_log": f32(4), "dt_bias": f32(64)}
CUMSUM = {"g": f32(2, 4, 70, 16), "chunk_size": 64, "A_log": f32(4), "dt_bias": f32(64), "use_gate_in_kernel": True}
BOUNDED = CUMSUM | {"safe_gate": True}
PACKED_CUMSUM = {"g": f32(1, 4, 70, 16), "chunk_size": 64, "cu_seqlens": [0, 65, 65, 70]}
TOO_MANY = [0] * 1024 + [35, 70]


# Calls of chunk_kda_fwd that Python and C can make.
CHUNK_KDA_FWD = [
    Illegal("q missing", PLAIN, {"q": None}, TypeError, "q", "tensor|array", "[Nn]one"),
    Illegal("k missing", PLAIN, {"k": None}, TypeError, "k", "tensor", "none"),
    Illegal("v missing", PLAIN, {"v": None}, TypeError, "v", "tensor", "none"),
    Illegal("g missing", PLAIN, {"g": None}, TypeError, "g", "tensor", "none"),
    Illegal("beta missing", PLAIN, {"beta": None}, TypeError, "beta", "tensor", "none"),
    Illegal("A_log missing", FULL, {"A_log": None}, TypeError, "A_log", "use_gate_in_kernel", "none"),
    Illegal(
        "q float32", PLAIN, {"q": of_shape(1, 5, 1, 16, dtype="f4")}, TypeError, "q", "float16 or bfloat16", "float32"
    ),
    Illegal("q int8", PLAIN, {"q": of_shape(1, 5, 1, 16, dtype="i1")}, TypeError, "q", "float16 or bfloat16", "int8"),
    Illegal("k other than q", PLAIN, {"k": of_shape(1, 5, 1, 16)}, TypeError, "k", "bfloat16", "float16"),
    Illegal("v other than q", PLAIN, {"v": of_shape(1, 5, 1, 16)}, TypeError, "v", "bfloat16", "float16"),
    Illegal("g float16", PLAIN, {"g": of_shape(1, 5, 1, 16)}, TypeError, "g", "float32 or bfloat16", "float16"),
    Illegal(
        "g float64", PLAIN, {"g": of_shape(1, 5, 1, 16, dtype="f8")}, TypeError, "g", "float32 or bfloat16", "float64"
    ),
    Illegal("beta float16", PLAIN, {"beta": of_shape(1, 5, 1)}, TypeError, "beta", "float32 or bfloat16", "float16"),
    Illegal("A_log float64", FULL, {"A_log": of_shape(4, dtype="f8")}, TypeError, "A_log", "float32", "float64"),
    Illegal("A_log unread", PLAIN, {"A_log": of_shape(1, dtype="f8")}, TypeError, "A_log", "float32", "float64"),
    Illegal("dt_bias float16", FULL, {"dt_bias": of_shape(128)}, TypeError, "dt_bias", "float32", "float16"),
    Illegal(
        "state float16",
        FULL,
        {"initial_state": of_shape(2, 4, 32, 48)},
        TypeError,
        "initial_state",
        "float32",
        "float16",
    ),
    Illegal("q rank 3", PLAIN, {"q": bf16(5, 1, 16)}, ValueError, "q", "rank 4", "3"),
    Illegal("q rank 9", PLAIN, {"q": bf16(*[1] * 9)}, ValueError, "q", "8", "9"),
    Illegal("K 24", PLAIN, {"q": bf16(1, 5, 1, 24)}, ValueError, "q", "16", "24"),
    Illegal("k tokens", PLAIN, {"k": bf16(1, 6, 1, 16)}, ValueError, "k", "1,5,1,16", "1,6,1,16"),
    Illegal("HV below H", PLAIN, {"q": bf16(1, 5, 2, 16), "k": bf16(1, 5, 2, 16)}, ValueError, "v", "H = 2", "HV = 1"),
    Illegal("g shape", PLAIN, {"g": of_shape(1, 5, 1, 32, dtype="f4")}, ValueError, "g", "1,5,1,16", "1,5,1,32"),
    Illegal("beta shape", PLAIN, {"beta": of_shape(1, 5, 2, dtype="f4")}, ValueError, "beta", "1,5,1", "1,5,2"),
    Illegal("A_log shape", FULL, {"A_log": of_shape(3, dtype="f4")}, ValueError, "A_log", "4", "3"),
    Illegal(
        "dt_bias shape", FULL, {"dt_bias": of_shape(4, 32, dtype="f4")}, ValueError, "dt_bias", "rank 1|128", "2|4,32"
    ),
    Illegal(
        "state shape",
        FULL,
        {"initial_state": of_shape(2, 4, 48, 32, dtype="f4")},
        ValueError,
        "initial_state",
        "32,48",
        "48,32",
    ),
    Illegal("layout lower", PLAIN, {"layout": "bsnd"}, ValueError, "layout", "BSND", "bsnd"),
    Illegal("layout empty", PLAIN, {"layout": ""}, ValueError, "layout", "BSND", '""'),
    Illegal("scale NaN", PLAIN, {"scale": float("nan")}, ValueError, "scale", "finite", "nan"),
    Illegal("scale inf", PLAIN, {"scale": float("inf")}, ValueError, "scale", "finite", "inf"),
    Illegal("scale beyond float32", PLAIN, {"scale": 1e300}, ValueError, "scale", "float32", "1e\\+?300"),
    Illegal("chunk 32", PLAIN, {"chunk_size": 32}, ValueError, "chunk_size", "64 or 128", "32"),
    Illegal("chunk 0", PLAIN, {"chunk_size": 0}, ValueError, "chunk_size", "64 or 128", "0"),
    Illegal(
        "bound low", FULL, {"safe_gate": True, "lower_bound": -5.5}, ValueError, "lower_bound", "\\[-5, 0\\)", "-5.5"
    ),
    Illegal("bound 0", FULL, {"safe_gate": True, "lower_bound": 0}, ValueError, "lower_bound", "\\[-5, 0\\)", "0"),
    Illegal(
        "bound NaN",
        FULL,
        {"safe_gate": True, "lower_bound": float("nan")},
        ValueError,
        "lower_bound",
        "\\[-5, 0\\)",
        "nan",
    ),
    Illegal("cu_seqlens empty", PACKED, {"cu_seqlens": []}, ValueError, "cu_seqlens", "N", "0 values"),
    Illegal("cu_seqlens one", PACKED, {"cu_seqlens": [0]}, ValueError, "cu_seqlens", "N", "1 values"),
    Illegal("cu_seqlens start", PACKED, {"cu_seqlens": [1, 70]}, ValueError, "cu_seqlens", "= 0", "1"),
    Illegal("cu_seqlens end", PACKED, {"cu_seqlens": [0, 69]}, ValueError, "cu_seqlens", "70", "69"),
    Illegal("cu_seqlens falls", PACKED, {"cu_seqlens": [0, 30, 20, 70]}, ValueError, "cu_seqlens", "30", "20"),
    Illegal("cu_seqlens batch", FULL, {"cu_seqlens": [0, 70]}, ValueError, "q", "B = 1", "B = 2"),
    Illegal("indices alone", PLAIN, {"chunk_indices": [0, 0]}, ValueError, "chunk_indices", "cu_seqlens", "."),
    Illegal("indices short", PACKED, {"chunk_indices": [0, 0]}, ValueError, "chunk_indices", "6", "2"),
    Illegal("indices wrong", PACKED, {"chunk_indices": [0, 0, 0, 1, 1, 0]}, ValueError, "chunk_indices", "2", "1"),
    # Heads and dimensions.
    Illegal("no heads", PLAIN, heads(0, 1), ValueError, "q", "H in 1..128", "H = 0"),
    Illegal("129 heads", PLAIN, heads(129, 129), ValueError, "q", "H in 1..128", "H = 129"),
    Illegal("129 value heads", PLAIN, heads(43, 129), ValueError, "v", "HV in H..128", "HV = 129"),
    Illegal("no value heads", PLAIN, heads(1, 0), ValueError, "v", "HV in H..128", "HV = 0"),
    Illegal("HV no multiple", PLAIN, heads(2, 3), ValueError, "v", "a multiple of H = 2", "HV = 3"),
    Illegal("K 0", PLAIN, heads(1, 1, K=0), ValueError, "q", "K a multiple of 16 in 16..256", "K = 0"),
    Illegal("K 8", PLAIN, heads(1, 1, K=8), ValueError, "q", "K a multiple of 16 in 16..256", "K = 8"),
    Illegal("K 272", PLAIN, heads(1, 1, K=272), ValueError, "q", "K a multiple of 16 in 16..256", "K = 272"),
    Illegal("V 0", PLAIN, heads(1, 1, V=0), ValueError, "v", "V a multiple of 16 in 16..256", "V = 0"),
    Illegal("V 40", PLAIN, heads(1, 1, V=40), ValueError, "v", "V a multiple of 16 in 16..256", "V = 40"),
    Illegal("V 272", PLAIN, heads(1, 1, V=272), ValueError, "v", "V a multiple of 16 in 16..256", "V = 272"),
    # Ranks and shapes.
    Illegal("rank 4 in TND", PLAIN, {"layout": "TND"}, ValueError, "q", r"rank 3, \[T,H,K\]", "rank 4"),
    Illegal("rank 4 in NTD", PLAIN, {"layout": "NTD"}, ValueError, "q", r"rank 3, \[H,T,K\]", "rank 4"),
    Illegal("q scalar tensor", PLAIN, {"q": bf16()}, ValueError, "q", "rank 4", "rank 0"),
    Illegal("k rank 3", PLAIN, {"k": bf16(5, 1, 16)}, ValueError, "k", "rank 4", "rank 3"),
    Illegal("k heads", PLAIN, {"k": bf16(1, 5, 2, 16)}, ValueError, "k", "1,5,1,16", "1,5,2,16"),
    Illegal("k width", PLAIN, {"k": bf16(1, 5, 1, 32)}, ValueError, "k", "1,5,1,16", "1,5,1,32"),
    Illegal("k batch", PLAIN, {"k": bf16(2, 5, 1, 16)}, ValueError, "k", "1,5,1,16", "2,5,1,16"),
    Illegal("v rank 3", PLAIN, {"v": bf16(5, 1, 16)}, ValueError, "v", "rank 4", "rank 3"),
    Illegal("v tokens", PLAIN, {"v": bf16(1, 4, 1, 16)}, ValueError, "v", "1,5,1,16", "1,4,1,16"),
    Illegal("g rank 3", PLAIN, {"g": f32(5, 1, 16)}, ValueError, "g", "rank 4", "rank 3"),
    Illegal("g of query heads", FULL, {"g": f32(2, 70, 2, 32)}, ValueError, "g", "2,70,4,32", "2,70,2,32"),
    Illegal("beta rank 4", PLAIN, {"beta": f32(1, 5, 1, 1)}, ValueError, "beta", "rank 3", "rank 4"),
    Illegal("beta tokens", PLAIN, {"beta": f32(1, 6, 1)}, ValueError, "beta", "1,5,1", "1,6,1"),
    Illegal("A_log rank 2", FULL, {"A_log": f32(1, 4)}, ValueError, "A_log", "rank 1", "rank 2"),
    Illegal("dt_bias short", FULL, {"dt_bias": f32(127)}, ValueError, "dt_bias", "128", "127"),
    Illegal("state of H", FULL, {"initial_state": f32(2, 2, 32, 48)}, ValueError, "initial_state", "2,4,32,48", "2,2,"),
    Illegal("state rank 3", FULL, {"initial_state": f32(4, 32, 48)}, ValueError, "initial_state", "rank 4", "rank 3"),
    Illegal("states missing", PACKED, {"initial_state": f32(1, 4, 32, 48)}, ValueError, "initial_state", "3,4", "1,4"),
    Illegal("state not turned", FULL, {"state_v_first": True}, ValueError, "initial_state", "2,4,48,32", "2,4,32,48"),
    # Attributes.
    Illegal("layout SBND", PLAIN, {"layout": "SBND"}, ValueError, "layout", "BSND, BNSD, TND or NTD", "SBND"),
    Illegal("layout long", PLAIN, {"layout": "BSNDX"}, ValueError, "layout", "BSND, BNSD, TND or NTD", "BSNDX"),
    Illegal("scale minus inf", PLAIN, {"scale": -np.inf}, ValueError, "scale", "finite", "-inf"),
    Illegal("chunk 65", PLAIN, {"chunk_size": 65}, ValueError, "chunk_size", "64 or 128", "65"),
    Illegal("chunk 256", PLAIN, {"chunk_size": 256}, ValueError, "chunk_size", "64 or 128", "256"),
    Illegal("chunk negative", PLAIN, {"chunk_size": -64}, ValueError, "chunk_size", "64 or 128", "-64"),
    Illegal("bound inf", FULL, {"safe_gate": True, "lower_bound": -np.inf}, ValueError, "lower_bound", "-5", "-inf"),
    Illegal("bound positive", FULL, {"safe_gate": True, "lower_bound": 0.5}, ValueError, "lower_bound", "-5", "0.5"),
    # Dtypes.
    Illegal("k int32", PLAIN, {"k": of_shape(1, 5, 1, 16, dtype="i4")}, TypeError, "k", "bfloat16", "int32"),
    Illegal("v float32", PLAIN, {"v": f32(1, 5, 1, 16)}, TypeError, "v", "bfloat16", "float32"),
    Illegal("g int64", PLAIN, {"g": of_shape(1, 5, 1, 16, dtype="i8")}, TypeError, "g", "float32 or bfloat16", "int64"),
    Illegal("beta bool", PLAIN, {"beta": of_shape(1, 5, 1, dtype="?")}, TypeError, "beta", "float32", "bool"),
    Illegal("A_log bfloat16", FULL, {"A_log": bf16(4)}, TypeError, "A_log", "float32", "bfloat16"),
    Illegal("dt_bias unread", PLAIN, {"dt_bias": bf16(16)}, TypeError, "dt_bias", "float32", "bfloat16"),
    Illegal(
        "state bfloat16",
        FULL,
        {"initial_state": bf16(2, 4, 32, 48)},
        TypeError,
        "initial_state",
        "float32",
        "bfloat16",
    ),
    # Metadata.
    Illegal("cu_seqlens negative", PACKED, {"cu_seqlens": [0, -1, 70]}, ValueError, "cu_seqlens", "0", "-1"),
    Illegal("cu_seqlens beyond T", PACKED, {"cu_seqlens": [0, 71]}, ValueError, "cu_seqlens", "70", "71"),
    Illegal("1025 sequences", PACKED, {"cu_seqlens": TOO_MANY}, ValueError, "cu_seqlens", "1..1024", "1026 values"),
    Illegal("indices long", PACKED, {"chunk_indices": [0] * 8}, ValueError, "chunk_indices", "6 values", "8 values"),
    Illegal("indices odd", PACKED, {"chunk_indices": [0] * 5}, ValueError, "chunk_indices", "6 values", "5 values"),
    Illegal("indices sequence", PACKED, {"chunk_indices": [0, 0, 0, 1, 2, 1]}, ValueError, "chunk_indices", "0", "1"),
]

# And those that only Python can.
CHUNK_KDA_FWD_IN_PYTHON = [
    Illegal("scale missing", PLAIN, {"scale": None}, TypeError, "scale", "number", "None"),
    Illegal(
        "q objects", PLAIN, {"q": of_shape(1, 5, 1, 16, dtype=object)}, TypeError, "q", "float16 or bfloat16", "object"
    ),
    Illegal("q big-endian", PLAIN, {"q": of_shape(1, 5, 1, 16, dtype=">f2")}, TypeError, "q", "float16", ">f2"),
    Illegal("q list", PLAIN, {"q": [[1.0]]}, TypeError, "q", "array", "list"),
    Illegal("q scalar", PLAIN, {"q": 1.0}, TypeError, "q", "array", "float"),
    Illegal("q bytes", PLAIN, {"q": b"1234"}, TypeError, "q", "array", "bytes"),
    Illegal("q class", PLAIN, {"q": np.ndarray}, TypeError, "q", "array", "type"),
    Illegal("q masked", PLAIN, {"q": np.ma.masked_array(of_shape(1, 5, 1, 16))}, TypeError, "q", "mask", "masked"),
    Illegal("k void", PLAIN, {"k": of_shape(1, 5, 1, 16, dtype="V2")}, TypeError, "k", "bfloat16", "V2"),
    Illegal("layout with zero", PLAIN, {"layout": "BSND\x00"}, ValueError, "layout", "BSND", "BSND"),
    Illegal("layout of bytes that are no text", PLAIN, {"layout": "\udcff"}, ValueError, "layout", "BSND", r"\\udcff"),
    Illegal("layout None", PLAIN, {"layout": None}, TypeError, "layout", "string", "None"),
    Illegal("layout bytes", PLAIN, {"layout": b"BSND"}, TypeError, "layout", "string", "bytes"),
    Illegal("scale beyond double", PLAIN, {"scale": 10**400}, ValueError, "scale", "finite", "beyond"),
    Illegal("scale string", PLAIN, {"scale": "0.1"}, TypeError, "scale", "number", "str"),
    Illegal("scale bool", PLAIN, {"scale": True}, TypeError, "scale", "number", "bool"),
    Illegal("scale array", PLAIN, {"scale": np.ones(1)}, TypeError, "scale", "number", "ndarray"),
    Illegal("chunk float", PLAIN, {"chunk_size": 64.0}, TypeError, "chunk_size", "integer", "float"),
    Illegal("chunk bool", PLAIN, {"chunk_size": True}, TypeError, "chunk_size", "integer", "bool"),
    Illegal("chunk huge", PLAIN, {"chunk_size": 2**64}, ValueError, "chunk_size", "64", "18446744073709551616"),
    Illegal("chunk array", PLAIN, {"chunk_size": np.array([64])}, TypeError, "chunk_size", "integer", "ndarray"),
    Illegal("chunk None", PLAIN, {"chunk_size": None}, TypeError, "chunk_size", "integer", "None"),
    Illegal("safe_gate string", PLAIN, {"safe_gate": "false"}, TypeError, "safe_gate", "bool", "false"),
    Illegal("use_gate None", PLAIN, {"use_gate_in_kernel": None}, TypeError, "use_gate_in_kernel", "bool", "None"),
    Illegal("state_v_first int", PLAIN, {"state_v_first": 1}, TypeError, "state_v_first", "bool", "1"),
    Illegal("final state int", PLAIN, {"output_final_state": 1}, TypeError, "output_final_state", "bool", "1"),
    Illegal("recompute int", PLAIN, {"disable_recompute": 1}, TypeError, "disable_recompute", "bool", "1"),
    Illegal(
        "states int", PLAIN, {"return_intermediate_states": 1}, TypeError, "return_intermediate_states", "bool", "1"
    ),
    Illegal("products None", PLAIN, {"state_products": None}, TypeError, "state_products", "string", "None"),
    Illegal("products unknown", PLAIN, {"state_products": "half"}, ValueError, "state_products", "bfloat16", "half"),
    Illegal("bound string", FULL, {"lower_bound": "-5"}, TypeError, "lower_bound", "number", "str"),
    Illegal("cu_seqlens floats", PACKED, {"cu_seqlens": [0, 70.0]}, TypeError, "cu_seqlens", "integers", "float"),
    Illegal(
        "cu_seqlens float array",
        PACKED,
        {"cu_seqlens": np.array([0.0, 70])},
        TypeError,
        "cu_seqlens",
        "int64",
        "float64",
    ),
    Illegal(
        "cu_seqlens int8", PACKED, {"cu_seqlens": np.array([0, 70], "i1")}, TypeError, "cu_seqlens", "int64", "int8"
    ),
    Illegal("cu_seqlens bools", PACKED, {"cu_seqlens": [False, 70]}, TypeError, "cu_seqlens", "integers", "bool"),
    Illegal("cu_seqlens number", PACKED, {"cu_seqlens": 70}, TypeError, "cu_seqlens", "array", "int"),
    Illegal("cu_seqlens string", PACKED, {"cu_seqlens": "0,70"}, TypeError, "cu_seqlens", "array", "str"),
    Illegal("cu_seqlens huge", PACKED, {"cu_seqlens": [0, 2**70]}, ValueError, "cu_seqlens", "64-bit", str(2**70)),
    Illegal(
        "cu_seqlens rank 2", PACKED, {"cu_seqlens": np.array([[0, 70]])}, ValueError, "cu_seqlens", "N\\+1", "\\[1,2\\]"
    ),
    Illegal("cu_seqlens nested", PACKED, {"cu_seqlens": [[0, 70]]}, TypeError, "cu_seqlens", "integers", "list"),
    Illegal("indices triple", PACKED, {"chunk_indices": [[0, 0, 0]]}, ValueError, "chunk_indices", "pairs", "3"),
    Illegal(
        "indices rank 2",
        PACKED,
        {"chunk_indices": np.zeros((2, 3), int)},
        ValueError,
        "chunk_indices",
        "NC,2",
        "\\[2,3\\]",
    ),
    Illegal("indices floats", PACKED, {"chunk_indices": [0, 0.5]}, TypeError, "chunk_indices", "integers", "float"),
]

# Calls of kda_gate, named fused_kda_gate in Python.
KDA_GATE = [
    Illegal("g missing", GATE, {"g": None}, TypeError, "g", "array|tensor", "[Nn]one"),
    Illegal("A_log missing", GATE, {"A_log": None}, TypeError, "A_log", "lower_bound", "none"),
    Illegal("g float64", GATE, {"g": of_shape(3, 4, 16, dtype="f8")}, TypeError, "g", "float32", "float64"),
    Illegal("g int8", GATE, {"g": of_shape(3, 4, 16, dtype="i1")}, TypeError, "g", "float32", "int8"),
    Illegal("A_log float16", GATE, {"A_log": of_shape(4)}, TypeError, "A_log", "float32", "float16"),
    Illegal("dt_bias bfloat16", GATE, {"dt_bias": bf16(64)}, TypeError, "dt_bias", "float32", "bfloat16"),
    Illegal("g rank 1", GATE, {"g": f32(16)}, ValueError, "g", r"\[...,H,D\]", "rank 1"),
    Illegal("g rank 9", GATE, {"g": f32(*[1] * 9)}, ValueError, "g", "8", "rank 9"),
    Illegal("no heads", GATE, {"g": f32(3, 0, 16)}, ValueError, "g", "H at least 1", "H = 0"),
    Illegal("no channels", GATE, {"g": f32(3, 4, 0)}, ValueError, "g", "D at least 1", "D = 0"),
    Illegal("A_log shape", GATE, {"A_log": f32(3)}, ValueError, "A_log", "4", "3"),
    Illegal("A_log rank 2", GATE, {"A_log": f32(1, 4)}, ValueError, "A_log", "rank 1", "rank 2"),
    Illegal("dt_bias short", GATE, {"dt_bias": f32(63)}, ValueError, "dt_bias", r"\[64\] or .*\[4,16\]", r"\[63\]"),
    Illegal("dt_bias turned", GATE, {"dt_bias": f32(16, 4)}, ValueError, "dt_bias", r"\[4,16\]", r"\[16,4\]"),
    Illegal("bound NaN", GATE, {"lower_bound": float("nan")}, ValueError, "lower_bound", "finite", "nan"),
    Illegal("bound inf", GATE, {"lower_bound": float("-inf")}, ValueError, "lower_bound", "finite", "-inf"),
]

KDA_GATE_IN_PYTHON = [
    Illegal("g list", GATE, {"g": [[1.0]]}, TypeError, "g", "array", "list"),
    Illegal("bound string", GATE, {"lower_bound": "-5"}, TypeError, "lower_bound", "number", "str"),
    Illegal("bound bool", GATE, {"lower_bound": True}, TypeError, "lower_bound", "number", "bool"),
    Illegal("output none", GATE, {"output_dtype": None}, TypeError, "output_dtype", "float32", "None"),
    Illegal("output double", GATE, {"output_dtype": float}, TypeError, "output_dtype", "float32", "float64"),
    Illegal("output name", GATE, {"output_dtype": "fp32"}, TypeError, "output_dtype", "float32", "fp32"),
    Illegal("output int", GATE, {"output_dtype": np.int32}, TypeError, "output_dtype", "float32", "int32"),
    Illegal("output swapped", GATE, {"output_dtype": np.dtype(">f4")}, TypeError, "output_dtype", "float32", ">f4"),
    Illegal("output number", GATE, {"output_dtype": 32}, TypeError, "output_dtype", "float32", "int"),
]

KDA_GATE_CUMSUM = [
    Illegal("g missing", CUMSUM, {"g": None}, TypeError, "g", "array|tensor", "[Nn]one"),
    Illegal("A_log missing", CUMSUM, {"A_log": None}, TypeError, "A_log", "use_gate_in_kernel", "none"),
    Illegal("g float64", CUMSUM, {"g": of_shape(2, 4, 70, 16, dtype="f8")}, TypeError, "g", "float32", "float64"),
    Illegal("A_log float16", CUMSUM, {"A_log": of_shape(4)}, TypeError, "A_log", "float32", "float16"),
    Illegal("dt_bias bfloat16", CUMSUM, {"dt_bias": bf16(64)}, TypeError, "dt_bias", "float32", "bfloat16"),
    Illegal("A_log unread", PACKED_CUMSUM, {"A_log": of_shape(4)}, TypeError, "A_log", "float32", "float16"),
    Illegal("g rank 2", CUMSUM, {"g": f32(70, 16)}, ValueError, "g", "rank 4", "rank 2"),
    Illegal("g rank 5", CUMSUM, {"g": f32(1, 2, 4, 70, 16)}, ValueError, "g", "rank 4", "rank 5"),
    Illegal("no heads", CUMSUM, {"g": f32(2, 0, 70, 16)}, ValueError, "g", "HV at least 1", "HV = 0"),
    Illegal("K 0", CUMSUM, {"g": f32(2, 4, 70, 0)}, ValueError, "g", "K in 1..256", "K = 0"),
    Illegal("K 257", CUMSUM, {"g": f32(2, 4, 70, 257)}, ValueError, "g", "K in 1..256", "K = 257"),
    Illegal("A_log shape", CUMSUM, {"A_log": f32(3)}, ValueError, "A_log", "4", "3"),
    Illegal("dt_bias shape", CUMSUM, {"dt_bias": f32(4, 16)}, ValueError, "dt_bias", "rank 1", "rank 2"),
    Illegal("dt_bias short", CUMSUM, {"dt_bias": f32(63)}, ValueError, "dt_bias", "64", "63"),
    Illegal("chunk 16", CUMSUM, {"chunk_size": 16}, ValueError, "chunk_size", "32, 64 or 128", "16"),
    Illegal("chunk 256", CUMSUM, {"chunk_size": 256}, ValueError, "chunk_size", "32, 64 or 128", "256"),
    Illegal("bound low", BOUNDED, {"lower_bound": -5.5}, ValueError, "lower_bound", r"\[-5, 0\)", "-5.5"),
    Illegal("bound 0", BOUNDED, {"lower_bound": 0.0}, ValueError, "lower_bound", r"\[-5, 0\)", "0"),
    Illegal("bound NaN", BOUNDED, {"lower_bound": float("nan")}, ValueError, "lower_bound", r"\[-5, 0\)", "nan"),
    Illegal("packed batch", CUMSUM, {"cu_seqlens": [0, 70]}, ValueError, "g", "B = 1", "B = 2"),
    Illegal("cu_seqlens empty", PACKED_CUMSUM, {"cu_seqlens": []}, ValueError, "cu_seqlens", "N", "0 values"),
    Illegal("cu_seqlens start", PACKED_CUMSUM, {"cu_seqlens": [1, 70]}, ValueError, "cu_seqlens", "0", "1"),
    Illegal("cu_seqlens end", PACKED_CUMSUM, {"cu_seqlens": [0, 69]}, ValueError, "cu_seqlens", "70", "69"),
    Illegal("cu_seqlens falls", PACKED_CUMSUM, {"cu_seqlens": [0, 30, 20, 70]}, ValueError, "cu_seqlens", "30", "20"),
]

KDA_GATE_CUMSUM_IN_PYTHON = [
    Illegal("g list", CUMSUM, {"g": [[1.0]]}, TypeError, "g", "array", "list"),
    Illegal("chunk array", CUMSUM, {"chunk_size": np.array([64])}, TypeError, "chunk_size", "integer", "ndarray"),
    Illegal("chunk float", CUMSUM, {"chunk_size": 64.0}, TypeError, "chunk_size", "integer", "float"),
    Illegal("use_gate int", CUMSUM, {"use_gate_in_kernel": 1}, TypeError, "use_gate_in_kernel", "bool", "1"),
    Illegal("safe_gate string", CUMSUM, {"safe_gate": "no"}, TypeError, "safe_gate", "bool", "no"),
    Illegal("bound string", CUMSUM, {"lower_bound": "-5"}, TypeError, "lower_bound", "number", "str"),
    Illegal("cu_seqlens floats", PACKED_CUMSUM, {"cu_seqlens": [0, 70.0]}, TypeError, "cu_seqlens", "int", "float"),
]
