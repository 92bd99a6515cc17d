from collections.abc import Callable
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

CHUNK_KDA_FWD_OUTPUTS: tuple[str, ...]

def version() -> str: ...
def default_num_threads() -> int: ...
def cpu_instruction_set() -> str: ...
def cpu_instruction_sets() -> list[str]: ...
def backends() -> list[tuple[str, bool, str]]: ...
def exported(array: tuple[Any, ...]) -> Any: ...
def integers(values: Any, op: str, name: str) -> list[int]: ...
def synchronize(device: int, stream: int) -> None: ...

class DeviceMemory:
    def __init__(self, device: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    def copy_from_host(self, source: Any) -> None: ...
    def copy_to_host(self, target: Any) -> None: ...

Allocate: TypeAlias = Callable[[int], tuple[Any, int]]

class PlanReport(TypedDict):
    backend: str
    num_threads: int
    state_products: str
    variant: int
    launches: int
    workspace_bytes: int
    workspace_regions: list[tuple[str, int, int]]

class ChunkKdaFwdCall:
    def __init__(
        self,
        op: str,
        inputs: tuple[Any, ...],
        layout: str,
        scale: float | None,
        chunk_size: int,
        use_gate_in_kernel: bool,
        safe_gate: bool,
        lower_bound: float,
        state_v_first: bool,
        cu_seqlens: Any | None,
        chunk_indices: Any | None,
        qk_l2norm: bool,
        beta_activation: str,
        any_lower_bound: bool,
        g_is_gk: bool,
        h_has_batch: bool,
        cu_seqlens_may_be_on_gpu: bool,
        state_products: str,
    ) -> None: ...
    def outputs(self) -> list[tuple[tuple[int, ...], str]]: ...
    def plan(self, wanted: tuple[bool, ...], num_threads: int) -> PlanReport: ...
    def execute(
        self, arrays: tuple[Any, ...], num_threads: int, stream: int = 0, allocate: Allocate | None = None
    ) -> None: ...
    def reference(self, intermediates: bool) -> list[npt.NDArray[np.float64] | None]: ...

class GatePlanReport(TypedDict):
    backend: str
    num_threads: int
    launches: int
    workspace_bytes: int

class KdaGateCall:
    def __init__(self, op: str, inputs: tuple[Any, ...], output_dtype: str, lower_bound: float | None) -> None: ...
    def output(self) -> tuple[tuple[int, ...], str]: ...
    def plan(self, num_threads: int) -> GatePlanReport: ...
    def execute(self, array: Any, num_threads: int, stream: int = 0) -> None: ...
    def reference(self) -> npt.NDArray[np.float64]: ...

class KdaGateCumsumCall:
    def __init__(
        self,
        op: str,
        inputs: tuple[Any, ...],
        chunk_size: int,
        use_gate_in_kernel: bool,
        safe_gate: bool,
        lower_bound: float,
        cu_seqlens: Any | None,
    ) -> None: ...
    def output(self) -> tuple[tuple[int, ...], str]: ...
    def plan(self, num_threads: int) -> GatePlanReport: ...
    def execute(self, array: Any, num_threads: int, stream: int = 0) -> None: ...
    def reference(self) -> npt.NDArray[np.float64]: ...
