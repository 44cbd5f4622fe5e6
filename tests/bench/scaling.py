"""Measures how costs grow, for kvcore and vLLM: with prompt length, pool size, number of groups, and context length.

Draws a figure for each, and says where the cost of one grows and that of the other does not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import peer, report
from tests.bench.scaling_series import (
    CHUNK_TOKENS,
    GROUP_REQUESTS,
    PROMPT_IN_GROUPS,
    PROMPT_IN_POOL,
    SHARING_REQUESTS,
    Point,
)
from tests.bench.workloads import CLOCKS

BLOCK_TABLES = "block_tables"
FLAT, GROWN = 1.5, 2.0
"""A cost that grew by less than the first is called flat, one that grew by at least the second is said to grow."""


@dataclass(frozen=True)
class Plot:
    """A figure.

    Args:
        series: The series it shows, and what to write before the operation's name for each.
        title: In the documentation.
        x_label: What the series were measured at.
        operations: Titles of the panels, by operation.
        unit: Of times: "s", "ms" or "us".
        caption: What was done, in the documentation.
    """

    series: Mapping[str, str]
    title: str
    x_label: str
    operations: Mapping[str, str]
    unit: str
    caption: str


COLD_AND_WARM = {
    "cold_admit": "admit, nothing cached",
    "free": "free",
    "warm_lookup": "look up, all cached",
    "warm_alloc": "allocate, all cached",
}

PLOTS = {
    "prompt_length": Plot(
        {"prompt_length": ""},
        "Prompt length",
        "tokens of the prompt",
        {"hash": "make and hash", **COLD_AND_WARM, "first_chunk": f"first {CHUNK_TOKENS:,} tokens"},
        "ms",
        "One request in an empty cache, and the same prompt again; one full-attention group. The last panel is the "
        f"first call of a chunked prefill: slots for {CHUNK_TOKENS:,} tokens of the prompt.",
    ),
    "pool_size": Plot(
        {"pool_size": ""},
        "Pool size",
        "blocks of the pool",
        COLD_AND_WARM,
        "ms",
        f"A prompt of {PROMPT_IN_POOL:,} tokens in a pool where every block holds another cached prefix, freed in no "
        "particular order, so that each new block evicts one that was used long ago. The work is the same everywhere; "
        "what grows is the share of it that misses the processor's caches.",
    ),
    "start_up": Plot(
        {"start_up": ""},
        "Start-up and memory",
        "blocks of the pool",
        {"start_up": "make the manager", "bytes_per_block": "Python memory per block"},
        "ms",
        "Making the manager, and the bytes that Python allocates for it (`tracemalloc`), divided by its blocks.",
    ),
    "groups": Plot(
        {"groups": ""},
        "Number of groups",
        "KV cache groups",
        {
            **COLD_AND_WARM,
            "decode": "decode, a request and step",
            "quiet_step": "the same, inside the last block",
        },
        "us",
        f"One full-attention group and the rest with windows. A prompt of {PROMPT_IN_GROUPS:,} tokens, and decoding of "
        f"{GROUP_REQUESTS} requests. A block that is full or new is work in each group; a step that stays inside the "
        "last block is not, and most do.",
    ),
    "context": Plot(
        {"context_full": "full: ", "context_hybrid": "hybrid: "},
        "Context length",
        "tokens of the context",
        {"decode": "decode, a request and step"},
        "us",
        f"Decoding of {SHARING_REQUESTS} requests that share a prompt of that length: time per request and step, "
        "through `allocate_slots`, and through `grow`, which vLLM has no counterpart of.",
    ),
    BLOCK_TABLES: Plot(
        {BLOCK_TABLES: ""},
        "Block tables as arrays",
        "tokens of the context",
        {"append_and_map": "a step of 256 requests"},
        "us",
        "`BlockTables`: a sixteenth of the requests gets a block, changed rows are listed, every new token gets its "
        "slot. Set against making the array anew from the manager's lists.",
    ),
}

IMPLEMENTATIONS = ("vLLM", "kvcore", "kvcore, grow", "rebuilt")
PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the series on both sides, and those of the block tables here."""
    options = ["--suite", "scaling", "--reps", str(args.reps), "--clock", args.clock]
    options += ["--quick"] if args.quick else []
    python = None if args.no_peer else peer.python_of(args)
    results = {"machine": report.machine(), "repetitions": args.reps, "clock": args.clock}
    results["kvcore"] = peer.run_kvcore(options)
    if python:
        results["vLLM"] = peer.run_vllm(python, options)

    from tests.bench import block_table_series

    clock = CLOCKS[args.clock]
    points = list(block_table_series.measure(repetitions=args.reps, clock=clock, quick=args.quick))
    results["kvcore"]["series"][BLOCK_TABLES] = [
        {"at": point["at"], "append_and_map": point["append_and_map"]} for point in points
    ]
    results["rebuilt"] = {
        "series": {BLOCK_TABLES: [{"at": point["at"], "append_and_map": point["rebuild"]} for point in points]}
    }
    return results


@dataclass(frozen=True)
class Curve:
    """Values of one operation in one series, by implementation and place."""

    title: str
    unit: str
    lines: Mapping[str, Mapping[float, float]]

    def growth(self, name: str) -> float:
        """Last value divided by the first."""
        values = list(self.lines[name].values())
        return values[-1] / values[0]


def curves(results: Mapping[str, Any], plot: Plot) -> Iterator[Curve]:
    """What the panels of a plot show."""
    names = [name for name in IMPLEMENTATIONS if name in results]
    for series, prefix in plot.series.items():
        for operation, title in plot.operations.items():
            unit, factor = plot.unit, PER_SECOND[plot.unit]
            if operation.startswith("bytes"):
                unit, factor = "bytes", 1.0
            lines = {}
            for name in names:
                points: Sequence[Point] = results[name]["series"].get(series, ())
                line = {point["at"]: point[operation] * factor for point in points if operation in point}
                if line:
                    lines[name] = line
            if operation == "decode":  # in the same panel: what vLLM has no counterpart of
                points = results["kvcore"]["series"].get(series, ())
                lines["kvcore, grow"] = {point["at"]: point["decode_at_once"] * factor for point in points}
            yield Curve(prefix + title, unit, lines)


def growth_table(results: Mapping[str, Any], plot: Plot) -> list[str]:
    """First and last values in Markdown, and how much they grew."""
    all_curves = list(curves(results, plot))
    names = [name for name in IMPLEMENTATIONS if any(name in curve.lines for curve in all_curves)]
    first, last = (report.short(list(all_curves[0].lines["kvcore"])[i]) for i in (0, -1))
    header = " | ".join(f"{name} at {first} | at {last} | grew by" for name in names)
    lines = [f"| | {header} |", "|---" + "|--:" * 3 * len(names) + "|"]
    for curve in all_curves:
        cells = []
        for name in names:
            if name not in curve.lines:
                cells += ["", "", ""]
                continue
            values = list(curve.lines[name].values())
            unit = curve.unit.replace("us", "µs")
            ends = [f"{report.number(value)} {unit}" for value in (values[0], values[-1])]
            cells += [*ends, report.number(curve.growth(name))]
        lines.append(f"| {curve.title} | " + " | ".join(cells) + " |")
    return lines


def only_one_grows(results: Mapping[str, Any]) -> Iterator[str]:
    """Sentences: where the cost of one grows and that of the other does not."""
    for plot in PLOTS.values():
        for curve in curves(results, plot):
            if not {"vLLM", "kvcore"} <= curve.lines.keys():
                continue
            theirs, ours = curve.growth("vLLM"), curve.growth("kvcore")
            if max(theirs, ours) >= GROWN and min(theirs, ours) < FLAT:
                places = list(curve.lines["kvcore"])
                yield (
                    f"{curve.title}, from {places[0]:,} to {places[-1]:,} {plot.x_label}: "
                    f"vLLM's cost grows by {theirs:.1f}, kvcore's by {ours:.1f}"
                )


def section(results: Mapping[str, Any]) -> str:
    """The generated part of the documentation's page."""
    lines = []
    for name, plot in PLOTS.items():
        lines += [f"### {plot.title}", "", plot.caption, ""]
        lines += [f"![{plot.title}: costs by {plot.x_label}](assets/bench/scaling_{name}.svg)", ""]
        lines += [*growth_table(results, plot), ""]
    found = [f"- {sentence}" for sentence in only_one_grows(results)]
    if found:
        lines += ["Where the cost of one grows and that of the other does not:", "", *found, ""]
    machine = results["machine"]
    lines.append(
        f"Medians of {results['repetitions']}, clock: {results['clock']}. Python {results['kvcore']['python']}, "
        f"{machine['processor']}, {machine['system']}."
    )
    return "\n".join(lines)


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """A figure for each plot."""
    from tests.bench import figures

    for name, plot in PLOTS.items():
        panels = [figures.Panel(curve.title, curve.lines, curve.unit) for curve in curves(results, plot) if curve.lines]
        figures.lines_figure(panels, plot.x_label, folder / f"scaling_{name}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer.add_arguments(parser)
    parser.add_argument("--no-peer", action="store_true", help="measure kvcore only")
    parser.add_argument("--reps", type=int, default=3, help="repetitions, of which the median counts (default: 3)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a busy machine")
    parser.add_argument("--quick", action="store_true", help="small sizes only, to see that it works")
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="show results measured before")
    parser.add_argument("--out", type=Path, default=report.ROOT / report.OUT, help="folder for the results")
    parser.add_argument("--update-docs", action="store_true", help="put figures and tables into docs/performance.md")
    args = parser.parse_args()

    results = json.loads(args.source.read_text("utf-8")) if args.source else measure(args)
    report.write_json(args.out / "scaling.json", results)
    draw(results, args.out)
    for plot in PLOTS.values():
        print(f"{plot.title}\n" + "\n".join(growth_table(results, plot)) + "\n")
    print("\n".join(only_one_grows(results)))
    if args.update_docs:
        report.write_json(report.ASSETS / "scaling.json", results)
        draw(results, report.ASSETS)
        report.update_section("scaling", section(results))
    peer.progress(f"results and figures: {args.out}")


if __name__ == "__main__":
    main()
