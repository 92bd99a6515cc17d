"""Registers every legacy name when it is imported: `import kda.compat.npu` is all that a script needs."""

from __future__ import annotations

from kda.compat import register

register()
