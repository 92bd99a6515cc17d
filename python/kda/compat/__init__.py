"""The names under which programs for Ascend NPUs know these operators.

`register()`, or the statement `import kda.compat.npu`, which calls it, makes them available:

- `torch.ops.npu.npu_chunk_kda_fwd` and `torch.ops._C_ascend.chunk_kda_fwd`
- `torch.ops.npu.npu_kda_gate_cumsum`
- `torch.ops.ascend_ops.chunk_kda_fwd_direct`
- the module `fla_npu.ops.ascendc`, and `fla_npu.load_legacy_torch_ops()`
- the module `mindspeed_ops.api.triton.kda_gate`

A script that uses them runs here once its device string is changed and that import is added. Nothing happens before.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register every legacy name. Imports torch. Calling it again does nothing.

    Raises:
        RuntimeError: a package or an operator with one of the names is there already: the real one. Nothing is
            registered then.
        ImportError: torch is not installed.
    """
    # Importing torch is what the import of the package must not do.
    from kda.compat import _legacy

    _legacy.register()
