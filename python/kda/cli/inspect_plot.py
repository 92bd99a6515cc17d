"""The picture of `kda inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kda._inspect import BLOCK, HALF_LIFE_EDGES, KINDS, SPAN_LIMIT, Report, quantiles
from kda.cli.plotting import new_figure

_MOST_COLUMNS = 1024


def draw(path: Path, report: Report, title: str) -> None:
    """Draw a report into a PNG file. Raises UserError."""
    heads = len(report.heads)
    figure = new_figure(15, 8.5 + 0.08 * max(heads - 16, 0))
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    figure.suptitle(
        f"{title}: {len(report.keys)} q/k heads, {heads} value heads, {int(report.chunks.rows.sum())} tokens, "
        f"chunks of {report.chunk_size}",
        parse_math=False,
    )
    (decays, half_lives, spans), (alike, condition, doubling) = figure.subplots(2, 3)
    _draw_decays(figure, decays, report)
    _draw_half_lives(half_lives, report)
    edges = _block_edges(report)
    _draw_over_tokens(
        figure, spans, [_in_blocks(report, head.span_block) for head in report.heads], edges, SPAN_LIMIT,
        "largest span of the gates of 16 rows (nats)",
    )  # fmt: skip
    edges = np.append(np.cumsum(report.chunks.rows) - report.chunks.rows, report.chunks.rows.sum())
    limit = KINDS["keys_alike"].limit
    _draw_over_tokens(
        figure, alike, [keys.cosine for keys in report.keys], edges, limit, "mean |cosine| of the keys of a chunk",
        low=0.05, high=1, heads="q/k head",
    )  # fmt: skip
    limit = KINDS["ill_conditioned"].limit
    _draw_over_tokens(
        figure, condition, [head.condition for head in report.heads], edges, limit,
        "condition number of a chunk's I + A", low=1,
    )  # fmt: skip
    limit = KINDS["doubling_chunk"].limit
    _draw_over_tokens(
        figure, doubling, [head.doubling for head in report.heads], edges, limit,
        "error of the doubling product for a chunk, float32", low=1e-8, high=100,
    )  # fmt: skip
    figure.savefig(path, dpi=110, format="png")


def _draw_decays(figure: Any, axes: Any, report: Report) -> None:
    """How the decays of single steps are distributed: a row per head, a column per bin of half-lives."""
    counts = np.array([head.histogram for head in report.heads], np.float64).reshape(-1, len(HALF_LIFE_EDGES) + 1)
    shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    step = HALF_LIFE_EDGES[1] / HALF_LIFE_EDGES[0]
    edges = np.concatenate([[HALF_LIFE_EDGES[0] / step], HALF_LIFE_EDGES, [HALF_LIFE_EDGES[-1] * step]])
    # From 0, as shares that are all alike would span a range beyond 100 % by themselves.
    mesh = axes.pcolormesh(
        edges, np.arange(len(counts) + 1) - 0.5, np.ma.masked_equal(shares, 0), cmap="viridis",
        vmin=0, vmax=shares.max(initial=1),
    )  # fmt: skip
    axes.set_xscale("log")
    _name_heads(axes, len(counts), "head")
    axes.set_xlabel("half-life of a step (tokens; the outer bins: beyond)")
    axes.set_title("decays of single steps", fontsize=10)
    figure.colorbar(mesh, ax=axes, label="% of the head's gates")
    # The same axis, as a decay.
    marks = (0.001, 0.5, 0.9, 0.99, 0.999, 0.9999)
    above = axes.secondary_xaxis("top")
    above.set_xticks([np.log(2) / -np.log(mark) for mark in marks], [f"{mark:g}" for mark in marks], fontsize=7)
    above.minorticks_off()


def _draw_half_lives(axes: Any, report: Report) -> None:
    """Half-lives of the channels: for each head all of them, the range of 10 to 90 %, and the median."""
    size = max(3, 60 / max(len(report.heads), 1))
    first, last = -1.0, 1.0
    for row, head in enumerate(report.heads):
        shown = np.clip(head.half_lives, 1e-2, 1e6)
        low, middle, high = quantiles(shown, (0.1, 0.5, 0.9))
        axes.plot(shown, np.full(shown.size, row), "|", color="tab:blue", alpha=0.35, markersize=size)
        axes.plot([low, high], [row, row], "-", color="black", linewidth=1.2)
        axes.plot([middle], [row], "o", color="black", markersize=4)
        first, last = min(first, np.log10(shown.min())), max(last, np.log10(shown.max()))
    axes.set_xscale("log")
    axes.set_xlim(10 ** np.floor(first - 0.05), 10 ** np.ceil(last + 0.05))
    _name_heads(axes, len(report.heads), "head")
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("half-life (tokens), from the mean gate")
    axes.set_title("half-lives of the channels: all, 10 to 90 %, median", fontsize=10)


def _draw_over_tokens(
    figure: Any,
    axes: Any,
    series: list[npt.NDArray[Any]],
    edges: npt.NDArray[Any],
    limit: float,
    title: str,
    low: float = 1e-1,
    high: float | None = None,
    heads: str = "head",
) -> None:
    """A row per head along the tokens, on a logarithmic scale: blue up to the limit, red beyond."""
    values = np.array(series, np.float64).reshape(len(series), -1)
    if values.size:
        values, edges = _fewer_columns(values, edges)
        if high is None:
            high = max(limit * limit / low, float(values[np.isfinite(values)].max(initial=limit)))
        colors, norm = _scale(low, limit, high)
        rows = np.arange(len(values) + 1) - 0.5
        mesh = axes.pcolormesh(edges, rows, np.clip(values, low, high), cmap=colors, norm=norm, rasterized=True)
        bar = figure.colorbar(mesh, ax=axes)
        ticks = _ticks(low, limit, high)
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
        bar.ax.axhline(limit, color="black", linewidth=1)
    _name_heads(axes, len(series), heads)
    axes.set_xlabel("token")
    axes.set_title(title, fontsize=10)


def _scale(low: float, limit: float, high: float) -> tuple[Any, Any]:
    """Return colours, and a logarithmic norm that puts the limit between the blue and the red ones."""
    from matplotlib import colormaps
    from matplotlib.colors import FuncNorm, ListedColormap

    shades = [colormaps["Blues"](np.linspace(0, 0.75, 128)), colormaps["OrRd"](np.linspace(0.45, 1, 128))]
    marks, places = np.log([low, limit, high]), (0, 0.5, 1)

    def forward(x: Any) -> Any:
        return np.interp(np.log(np.maximum(x, low)), marks, places)

    def backward(x: Any) -> Any:
        return np.exp(np.interp(x, places, marks))

    return ListedColormap(np.vstack(shades)), FuncNorm((forward, backward), vmin=low, vmax=high)


def _ticks(low: float, limit: float, top: float) -> list[float]:
    """Powers of 10 and the limit, without crowding it."""
    powers = 10.0 ** np.arange(np.ceil(np.log10(low)), np.floor(np.log10(top)) + 1)
    step = max(1, len(powers) // 6)
    return sorted([limit, *(power for power in powers[::step] if not 0.5 < power / limit < 2)])


def _name_heads(axes: Any, count: int, name: str) -> None:
    step = max(1, count // 16)
    axes.set_yticks(range(0, count, step))
    axes.set_ylim(max(count, 1) - 0.5, -0.5)
    axes.set_ylabel(name)


def _block_edges(report: Report) -> npt.NDArray[Any]:
    """Where the blocks that have rows begin, counted along all sequences, and where the last one ends."""
    chunks = report.chunks
    begins = np.cumsum(chunks.rows) - chunks.rows
    blocks = [
        begin + offset for begin, rows in zip(begins, chunks.rows, strict=True) for offset in range(0, rows, BLOCK)
    ]
    return np.array([*blocks, chunks.rows.sum()])


def _in_blocks(report: Report, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `[NC, C/16]` without the blocks that have no rows."""
    offsets = np.arange(0, report.chunk_size, BLOCK)
    return np.asarray(values[offsets < report.chunks.rows[:, None]])


def _fewer_columns(values: npt.NDArray[Any], edges: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Keep the largest of neighbouring columns where there are more than a picture can show."""
    step = -(-values.shape[1] // _MOST_COLUMNS)
    starts = np.arange(0, values.shape[1], step)
    return np.maximum.reduceat(values, starts, axis=1), np.append(edges[starts], edges[-1])
