"""From the results of runs side by side to the table: ratios, what was aimed at, and whether hits agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from tests.bench.report import number
from tests.bench.workloads import ALL_GROUPS, WARM_PROMPT, WORKLOADS

Run = Mapping[str, Any]
"""What one run measured, by side: each what the side's script printed. See ``SIDES`` of ``compare.py``."""


def compiled(side: str) -> str:
    """The side that is the same measured on kvcore compiled."""
    return f"{side}, compiled"


TARGETS = {
    "hash32k": 10.0,
    "cold_admit32k": 4.0,
    "free32k": 1.5,
    "warm_lookup32k": 5.0,
    "warm_alloc32k": 1.5,
    "warm_free32k": 1.5,
    "decode": 5.0,
    "churn": 4.0,
}
"""Ratios aimed at, by workload, the same for all groups."""

TARGET_GEOMETRIC_MEAN = 5.0
TARGET_RAW_HASH = 4.0
TARGET_LOOKUP_UNVERIFIED = 8.0

TARGET_WARM_PROMPT = 5.6 / (1.0 / 2)
"""Half the time of SGLang's radix tree. Its key and match took 1.0 ms where vLLM's hash and lookup took 5.6 ms."""

TARGET_GROW_US = 0.5


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        title: What was measured.
        unit: Of the two times.
        theirs: vLLM's time, the median over the runs; None if vLLM has no such operation.
        ours: kvcore's.
        ratios: vLLM's time divided by kvcore's, of each run.
        target: The ratio aimed at.
        note: Said after the title.
        compiled: kvcore's time with its hot path compiled; None if that was not measured.
        compiled_ratios: vLLM's time divided by that, of each run.
    """

    title: str
    unit: str
    theirs: float | None
    ours: float
    ratios: Sequence[float] = ()
    target: float | None = None
    note: str = ""
    compiled: float | None = None
    compiled_ratios: Sequence[float] = ()

    @property
    def ratio(self) -> float | None:
        """The median of the runs' ratios: what is common to the two halves of a run cancels out."""
        return median(self.ratios) if self.ratios else None

    @property
    def compiled_ratio(self) -> float | None:
        """The same for kvcore compiled."""
        return median(self.compiled_ratios) if self.compiled_ratios else None


@dataclass(frozen=True)
class Comparison:
    """All lines.

    Args:
        rows: The workloads, for each set of groups; their geometric mean is the figure of merit.
        extra: Lines that are not part of the mean.
        hit_tokens: Tokens found in the cache by both, by groups' and workload's name.
    """

    rows: Mapping[str, Row]
    extra: Sequence[Row]
    hit_tokens: Mapping[str, int]

    @property
    def geometric_mean(self) -> float:
        """Of the rows' ratios."""
        return geometric_mean([row.ratio or math.nan for row in self.rows.values()])

    @property
    def compiled_geometric_mean(self) -> float | None:
        """The same for kvcore compiled; None if that was not measured."""
        ratios = [row.compiled_ratio for row in self.rows.values()]
        return None if None in ratios else geometric_mean([ratio or math.nan for ratio in ratios])


class HitsDiffer(Exception):
    """The implementations did not find the same tokens in the cache, so that their times mean nothing."""


def compare(runs: Sequence[Run]) -> Comparison:
    """Puts the sides of each run beside each other.

    Raises:
        HitsDiffer: Somewhere vLLM and kvcore found different numbers of tokens in the cache.
    """
    rows = {
        f"{groups.name}.{workload.name}": _row(
            runs,
            f"{groups.name}.{workload.name}",
            title=f"{workload.title}, {groups.name}",
            unit=workload.unit,
            target=TARGETS[workload.name],
        )
        for groups in ALL_GROUPS
        for workload in WORKLOADS
    }
    return Comparison(rows, list(_extra_rows(runs)), _equal_hits(runs))


def _extra_rows(runs: Sequence[Run]) -> Iterable[Row]:
    full_hash, title = "full.hash32k", "hash a 32K prompt"
    yield _row(runs, full_hash, "raw", title=title, unit="ms", target=TARGET_RAW_HASH, note="kvcore with sha256_raw")
    yield _row(runs, full_hash, "same_hash", title=title, unit="ms", note="kvcore with sha256: the same hashes as vLLM")
    for groups in ALL_GROUPS:
        yield _row(
            runs,
            f"{groups.name}.warm_lookup32k",
            "unverified",
            title=f"look it up, all cached, {groups.name}",
            unit="ms",
            target=TARGET_LOOKUP_UNVERIFIED,
            note="kvcore without comparing tokens",
        )
    for groups in ALL_GROUPS:
        yield _row(
            runs,
            f"{groups.name}.{WARM_PROMPT.name}",
            title=f"{WARM_PROMPT.title}, {groups.name}",
            unit="ms",
            target=TARGET_WARM_PROMPT,
        )
    for groups in ALL_GROUPS:
        yield _row(
            runs,
            f"{groups.name}.decode",
            ours_key=f"{groups.name}.decode_at_once",
            title=f"decode, a request and step, {groups.name}",
            unit="us",
            note="kvcore with one call a step",
        )
    for groups in ALL_GROUPS:
        key = f"{groups.name}.grow"
        ours = median([run["kvcore"]["medians"][key] for run in runs])
        compiled_time = median(times.values()) if (times := _compiled_times(runs, "kvcore", key)) else None
        note = f"kvcore only; aimed at: under {TARGET_GROW_US} us"
        yield Row(f"that call alone, {groups.name}", "us", None, ours, note=note, compiled=compiled_time)


def _row(
    runs: Sequence[Run],
    key: str,
    side: str = "kvcore",
    *,
    ours_key: str | None = None,
    title: str,
    unit: str,
    target: float | None = None,
    note: str = "",
) -> Row:
    theirs = [run["vllm"]["medians"][key] for run in runs]
    ours = [run[side]["medians"][ours_key or key] for run in runs]
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    compiled_times = _compiled_times(runs, side, ours_key or key)
    compiled_ratios = [theirs[number] / time for number, time in compiled_times.items()]
    return Row(
        title,
        unit,
        median(theirs),
        median(ours),
        ratios,
        target,
        note,
        median(compiled_times.values()) if compiled_times else None,
        compiled_ratios,
    )


def _compiled_times(runs: Sequence[Run], side: str, key: str) -> dict[int, float]:
    """What kvcore compiled took, by the index of the run, for those that measured it."""
    side = compiled(side)
    return {number: run[side]["medians"][key] for number, run in enumerate(runs) if side in run}


def _equal_hits(runs: Sequence[Run]) -> dict[str, int]:
    expected: dict[str, int] = dict(runs[0]["vllm"]["hit_tokens"])
    differences = [
        f"{key}: {side} found {found:,} tokens of run {number} in the cache, vLLM {expected[key]:,} of run 1"
        for number, run in enumerate(runs, 1)
        for side, result in run.items()
        for key, found in result["hit_tokens"].items()
        if found != expected[key]
    ]
    if differences:
        raise HitsDiffer("hit counts differ, so that the times cannot be compared:\n" + "\n".join(differences))
    return expected


HEADINGS = ("", "vLLM", "kvcore", "", "ratio", "runs", "compiled", "ratio", "aim")


def text_table(comparison: Comparison) -> str:
    """The table for a terminal."""
    lines = [HEADINGS]
    lines += [_cells(row) for row in comparison.rows.values()]
    mean, compiled_mean = f"{comparison.geometric_mean:.2f}", _number(comparison.compiled_geometric_mean)
    lines.append(("geometric mean of these", "", "", "", mean, "", "", compiled_mean, number(TARGET_GEOMETRIC_MEAN)))
    lines += [_cells(row) for row in comparison.extra]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.ljust(width) if i in (0, 3) else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    text.insert(len(comparison.rows) + 2, "")
    hits = ", ".join(f"{key} {found:,}" for key, found in comparison.hit_tokens.items())
    return "\n".join([*(line.rstrip() for line in text), "", f"tokens found in the cache, the same for both: {hits}"])


def markdown_table(comparison: Comparison) -> str:
    """The table for the documentation."""
    lines = ["| | vLLM | kvcore | ratio | runs | compiled | ratio | aim |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for row in comparison.rows.values():
        lines.append(_markdown_row(row))
    means = [f"{mean:.1f}" if mean else "" for mean in (comparison.geometric_mean, comparison.compiled_geometric_mean)]
    aim = number(TARGET_GEOMETRIC_MEAN)
    lines.append(f"| **geometric mean** | | | **{means[0]}** | | | {f'**{means[1]}**' if means[1] else ''} | {aim} |")
    lines += ["", "Beside them, not part of the mean:", "", *lines[:2]]
    lines += [_markdown_row(row) for row in comparison.extra]
    hits = ", ".join(f"{found:,} in `{key}`" for key, found in comparison.hit_tokens.items() if found)
    return "\n".join([*lines, "", f"Both found the same tokens in the cache: {hits}."])


def _markdown_row(row: Row) -> str:
    title, theirs, ours, unit, ratio, spread, compiled, compiled_ratio, target = _cells(row)
    times = [f"{time} {unit.replace('us', 'µs')}" if time else "" for time in (theirs, ours, compiled)]
    cells = [title.replace(" us", " µs"), *times[:2], ratio, spread, times[2], compiled_ratio, target]
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.title} ({row.note})" if row.note else row.title,
        _number(row.theirs),
        number(row.ours),
        row.unit,
        _number(row.ratio),
        f"{number(min(row.ratios))}–{number(max(row.ratios))}" if len(row.ratios) > 1 else "",
        _number(row.compiled),
        _number(row.compiled_ratio),
        _number(row.target),
    )


def _number(value: float | None) -> str:
    return "" if value is None else number(value)
