"""The figures, drawn with matplotlib from results as ``compare.py`` and ``scaling.py`` write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from tests.bench import report
from tests.bench.comparison import Comparison
from tests.bench.workloads import FULL, HYBRID

COLOURS = {"kvcore": "#00796b", "kvcore, grow": "#5c9ded", "vLLM": "#c2611f", "rebuilt": "#9e9e9e"}
GROUP_COLOURS = {FULL.name: "#00796b", HYBRID.name: "#5c9ded"}

# Text as text and no dates: the files then stay small, and change only when what they show does.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvcore", "font.family": "sans-serif"})


class Panel(NamedTuple):
    """One pair of axes.

    Attributes:
        title: Above it.
        lines: Values by name and place.
        unit: Of the values.
    """

    title: str
    lines: Mapping[str, Mapping[float, float]]
    unit: str


def comparison_figure(comparison: Comparison, path: Path) -> None:
    """A bar for each workload: how many times as long vLLM takes. Marks say what was aimed at, dots the ratio of kvcore
    compiled, where that was measured."""
    rows = list(comparison.rows.items())[::-1]
    figure = Figure(figsize=(8, 0.34 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, (key, row) in enumerate(rows):
        group = key.partition(".")[0]
        assert row.ratio is not None
        axes.barh(place, row.ratio, color=GROUP_COLOURS[group], height=0.7)
        axes.text(row.ratio * 0.97, place, f"{row.ratio:.1f}", va="center", ha="right", color="white", fontsize=8)
        axes.plot([row.target] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.2)
        if row.compiled_ratio is not None:
            axes.plot(row.compiled_ratio, place, "o", color="#263238", markersize=5)
    axes.set_yticks(range(len(rows)), [row.title for _, row in rows], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(0.8, 1.3 * max(max(row.ratio or 1, row.compiled_ratio or 1, row.target or 1) for _, row in rows))
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xticks([1, 2, 5, 10, 20, 50][: 4 if axes.get_xlim()[1] < 20 else 6])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    mean, compiled_mean = comparison.geometric_mean, comparison.compiled_geometric_mean
    dots = "; dots: kvcore compiled" if compiled_mean else ""
    axes.set_xlabel(f"time of vLLM / time of kvcore (black marks: what was aimed at{dots})")
    compiled = f", compiled {compiled_mean:.1f}" if compiled_mean else ""
    axes.set_title(f"geometric mean {mean:.1f}{compiled}", fontsize=10)
    _clean(axes)
    _save(figure, path)


def lines_figure(panels: Sequence[Panel], x_label: str, path: Path) -> None:
    """Panels side by side, both axes logarithmic."""
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.9 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        for name, line in panel.lines.items():
            axes.plot(list(line), list(line.values()), label=name, color=COLOURS[name], marker="o", markersize=3)
        axes.set_title(panel.title, fontsize=10)
        axes.set_ylabel(panel.unit, fontsize=8)
        axes.set_xlabel(x_label, fontsize=8)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xscale("log", base=2)
        places = sorted({place for line in panel.lines.values() for place in line})
        axes.set_xticks(places, [report.short(place) for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
        _widen(axes, [value for line in panel.lines.values() for value in line.values()])
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        _clean(axes)
    for axes in grid[len(panels) :]:
        axes.remove()
    most = max(range(len(panels)), key=lambda i: len(panels[i].lines))
    grid[most].legend(fontsize=8, frameon=False)
    _save(figure, path)


def _widen(axes: Axes, values: Sequence[float]) -> None:
    """At least a factor of 100 from bottom to top, so that what is flat looks flat."""
    low, high = min(values) / 1.5, max(values) * 1.5
    factor = max(100 / (high / low), 1.0) ** 0.5
    axes.set_ylim(low / factor, high * factor)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata, dpi=150, facecolor="white")
