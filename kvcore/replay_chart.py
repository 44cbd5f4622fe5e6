"""What replays of a trace found out, as a chart. Needs matplotlib."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.replay import ALL_KNOWING
from kvcore.replay_report import Report

FORMATS = (".png", ".svg", ".html")


def write_chart(path: str, report: Report) -> None:
    """Writes a chart: what each policy finds in each pool, when blocks are asked for again, and when they are lost.

    Args:
        path: Where to; its ending says how: ``.png``, ``.svg`` or ``.html``, which holds the tables, too.
        report: What to show.

    Raises:
        ConfigError: Another ending, matplotlib is not installed, or the file cannot be written.
    """
    check_chart(path)
    from matplotlib import rc_context

    suffix = Path(path).suffix.lower()
    data = io.BytesIO()
    with rc_context({"svg.hashsalt": "kvcore"}):  # the same report makes the same file
        _draw(report).savefig(
            data,
            format="png" if suffix == ".png" else "svg",
            dpi=150,
            metadata={} if suffix == ".png" else {"Date": None},
        )
    drawn = data.getvalue()
    if suffix == ".html":
        drawn = _page(drawn.decode(), report).encode()
    try:
        Path(path).write_bytes(drawn)
    except OSError as error:
        raise ConfigError(f"cannot write {path!r}: {error}") from error


def check_chart(path: str) -> None:
    """Makes sure, before any work is done, that a chart can be drawn.

    Raises:
        ConfigError: It cannot.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"a chart is a file that ends in {', '.join(FORMATS)}; got {path!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("a chart needs matplotlib: pip install 'kvcore[replay]'") from None


def _draw(report: Report) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    found, distances, ages = figure.subplots(1, 3, width_ratios=(3, 2, 2))
    sizes = sorted(report.sizes)
    for policy in report.policies:
        style = {"linestyle": "--", "color": "0.5"} if policy == ALL_KNOWING else {}
        rates = [100 * report.of(policy, size).block_hit_rate for size in sizes]
        found.plot(sizes, rates, marker="o", markersize=4, label=policy, **style)
    found.set(xlabel="blocks in the pool", ylabel="full blocks found, %", title="What is found", ylim=(0, None))
    if sizes[0] < sizes[-1]:
        found.set_xscale("log", base=2)
    found.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45, ha="right", minor=False)
    found.legend(frameon=False)

    histogram = report.summary.reuse_distance
    counts = histogram.counts
    distances.bar([*counts], [100 * count / max(1, histogram.total) for count in counts.values()])
    distances.set(xlabel="blocks asked for in between", ylabel="reuses, %", title="When blocks are asked for again")
    size = sizes[len(sizes) // 2]
    for policy in report.policies:
        histogram = report.of(policy, size).age_at_eviction
        style = {"linestyle": "--", "color": "0.5"} if policy == ALL_KNOWING else {}
        shares = [100 * histogram.counts[bits] / histogram.total for bits in sorted(histogram.counts)]
        ages.plot(sorted(histogram.counts), shares, marker="o", markersize=4, label=policy, **style)
    ages.set(xlabel="blocks asked for since in use", ylabel="evictions, %", title=f"Age at eviction, {size:,} blocks")
    for axes in (distances, ages):
        ticks = [bits for bits in range(0, 33, 4) if axes.dataLim.x0 - 1 <= bits <= axes.dataLim.x1 + 1]
        axes.set_xticks(ticks, [f"{1 << bits >> 1:,}" for bits in ticks], rotation=45, ha="right")
    for axes in (found, distances, ages):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    return figure


def _page(svg: str, report: Report) -> str:
    drawing = svg[svg.index("<svg") :]
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>Replay of a trace</title>\n'
        "<style>body { font: 16px system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }\n"
        "svg { max-width: 100%; height: auto } pre { overflow-x: auto }</style>\n"
        f"<h1>Replay of a trace</h1>\n{drawing}\n"
        f"<pre>{escape(report.render(histograms=True, width=200))}</pre>\n</html>\n"
    )
