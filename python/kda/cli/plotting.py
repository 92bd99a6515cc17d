"""Pictures: matplotlib, where it is installed, without a display."""

from __future__ import annotations

from typing import Any

from kda.cli.console import UserError


def figure_type() -> Any:
    """Return matplotlib's Figure, which draws to files only. Raises UserError where there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'kda[plot]'") from None
    return Figure


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches. Raises UserError."""
    return figure_type()(figsize=(width, height), layout="constrained")
