"""Kimi Delta Attention: the chunked forward operator on ordinary CPUs and GPUs.

`chunk_kda_fwd` is the operator, `chunk_kda` the form of it that flash-linear-attention gives its users,
`chunk_kda_fwd_direct` one for tests. `fused_kda_gate`, `naive_kda_gate` and `kda_gate_cumsum` make gates. `supported`
tells whether a call would be taken, `info` what this installation can do. `kda.reference` holds all of it in float64.
"""

from kda import _kda, reference
from kda._chunk_kda import chunk_kda, chunk_kda_fwd_direct
from kda._chunk_kda_fwd import ChunkKdaFwdResult, chunk_kda_fwd
from kda._gates import fused_kda_gate, kda_gate_cumsum, naive_kda_gate
from kda._info import Backend, Info, info
from kda._supported import Support, supported
from kda._threads import get_num_threads, set_num_threads

__version__ = _kda.version()

__all__ = [
    "Backend",
    "ChunkKdaFwdResult",
    "Info",
    "Support",
    "__version__",
    "chunk_kda",
    "chunk_kda_fwd",
    "chunk_kda_fwd_direct",
    "fused_kda_gate",
    "get_num_threads",
    "info",
    "kda_gate_cumsum",
    "naive_kda_gate",
    "reference",
    "set_num_threads",
    "supported",
]
