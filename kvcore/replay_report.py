"""What replays of a trace found out, as tables and as JSON."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.planning_text import table
from kvcore.replay_many import ReplaySettings
from kvcore.replay_results import Histogram, ReplayResult, TraceSummary

Rows = list[list[str]]


@dataclass(frozen=True)
class Report:
    """A trace, and what became of it.

    Args:
        summary: What the trace is like.
        settings: What all replays shared.
        results: One for each size and policy.
        num_bad_lines: Lines that were passed over.
    """

    summary: TraceSummary
    settings: ReplaySettings
    results: Sequence[ReplayResult]
    num_bad_lines: int = 0

    @property
    def sizes(self) -> list[int]:
        """Sizes of the pools, as asked for, each once."""
        return [*dict.fromkeys(result.num_blocks for result in self.results)]

    @property
    def policies(self) -> list[str]:
        """Policies, as asked for, each once."""
        return [*dict.fromkeys(result.policy for result in self.results)]

    def of(self, policy: str, num_blocks: int) -> ReplayResult:
        """The result of a policy in a pool.

        Raises:
            KeyError: There is none.
        """
        for result in self.results:
            if (result.policy, result.num_blocks) == (policy, num_blocks):
                return result
        raise KeyError((policy, num_blocks))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "trace": {**self.summary.as_dict(), "num_bad_lines": self.num_bad_lines},
            "settings": self.settings.as_dict(),
            "results": [result.as_dict() for result in self.results],
        }

    def render(self, *, width: int = 120, colour: bool = False, histograms: bool = False) -> str:
        """As tables: rich's if it is installed, else plain ones.

        Args:
            width: Columns of the terminal.
            colour: Write the escape codes of a terminal.
            histograms: Also the ages at eviction, for each size and policy.
        """
        parts = [
            ("Share of the prompts' full blocks that were found", self._shares(), 1),
            ("Each pool", self._details(), 2),
        ]
        if self.summary.reuse_distance.total:
            parts.append(("Reuse distance: blocks asked for since a block was asked for last", self._distances(), 0))
        if histograms:
            parts.append(("Age at eviction: blocks asked for since a block was in use", self._ages(), 2))
        try:
            from rich.console import Console
        except ImportError:
            plain = [f"{title}\n{table(rows[0], rows[1:], range(left))}" for title, rows, left in parts]
            return "\n\n".join([self._trace(), *plain])
        console = Console(
            file=io.StringIO(), width=width, force_terminal=colour, highlight=False, markup=False, emoji=False
        )
        console.print(self._trace(), soft_wrap=True)
        for title, rows, left in parts:
            console.print(f"\n{title}", style="bold", soft_wrap=True)
            console.print(_rich_table(rows, left))
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())

    def _trace(self) -> str:
        summary, settings = self.summary, self.settings
        lines = [
            f"{summary.num_requests:,} requests, {summary.num_blocks:,} full blocks of {settings.block_size} tokens in "
            f"their prompts, {summary.num_distinct:,} of them different: a pool that keeps all finds "
            f"{summary.best_hit_rate:.1%}"
        ]
        if self.num_bad_lines:
            lines.append(f"{self.num_bad_lines:,} bad lines were left out")
        if settings.concurrency is None:
            lines.append(f"One after another; answers: {settings.outputs}")
        else:
            lines.append(
                f"As they arrived, at most {settings.concurrency} at once, {settings.seconds_per_token:g} s for each "
                f"token of an answer; answers: {settings.outputs}"
            )
        return "\n".join(lines)

    def _shares(self) -> Rows:
        header = ["policy", *(f"{size:,} blocks" for size in self.sizes)]
        return [header] + [
            [policy, *(f"{self.of(policy, size).block_hit_rate:.1%}" for size in self.sizes)]
            for policy in self.policies
        ]

    def _details(self) -> Rows:
        waits = self.settings.concurrency is not None
        header = ["blocks", "policy", "tokens found", "requests with a hit", "tokens saved", "evictions"]
        rows = [[*header, "median age", "refused", *(["waited"] if waits else [])]]
        for result in self.results:
            age = result.age_at_eviction
            row = [
                f"{result.num_blocks:,}",
                result.policy,
                f"{result.token_hit_rate:.1%}",
                f"{result.request_hit_rate:.1%}",
                f"{result.num_tokens_saved:,}",
                f"{result.num_evictions:,}",
                f"< {age.quantile(0.5):,}" if age.total else "-",
                f"{result.num_refused:,}",
            ]
            rows.append(row + ([f"{result.num_waited:,}"] if waits else []))
        return rows

    def _distances(self) -> Rows:
        histogram = self.summary.reuse_distance
        rows = [["blocks", "reused", "share", "up to here"]]
        below = 0
        for bits, count in sorted(histogram.counts.items()):
            below += count
            share, up_to = count / histogram.total, below / histogram.total
            rows.append([_range(bits), f"{count:,}", f"{share:.1%}", f"{up_to:.1%}"])
        return rows

    def _ages(self) -> Rows:
        ranges = sorted({bits for result in self.results for bits in result.age_at_eviction.counts})
        header = ["blocks", "policy", *map(_range, ranges)]
        return [header] + [
            [f"{result.num_blocks:,}", result.policy, *_counts(result.age_at_eviction, ranges)]
            for result in self.results
        ]


def _counts(histogram: Histogram, ranges: Sequence[int]) -> list[str]:
    return [f"{histogram.counts[bits]:,}" if bits in histogram.counts else "-" for bits in ranges]


def _range(bits: int) -> str:
    """``4-7`` for the sizes that take three bits."""
    first, last = 1 << bits >> 1, (1 << bits) - 1
    return f"{first:,}" if first >= last else f"{first:,}-{last:,}"


def _rich_table(rows: Rows, left: int) -> Any:
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(rows[0]):
        drawn.add_column(name, justify="left" if index < left else "right")
    for row in rows[1:]:
        drawn.add_row(*row)
    return drawn
