"""How values spread, in constant memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from kvcore.errors import ConfigError


class Histogram:
    """Counts values by size.

    Args:
        bounds: The largest value of each bucket, ascending; one bucket more takes what is larger than all.

    Attributes:
        bounds: As given.
        counts: Values in each bucket.
        sum: Of all values.

    Raises:
        ConfigError: No bounds, or not ascending.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        if not self.bounds or list(self.bounds) != sorted(set(self.bounds)):
            raise ConfigError(f"bounds of a histogram must ascend, and there must be some; got {self.bounds}")
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def __repr__(self) -> str:
        return f"Histogram(count={self.count}, mean={self.mean:.3g})"

    def observe(self, value: float) -> None:
        """Counts a value. O(log buckets)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Their mean; 0 of none."""
        count = self.count
        return self.sum / count if count else 0.0

    def cumulative(self) -> list[tuple[float, int]]:
        """For each bound, infinity the last, how many values are no larger: what Prometheus wants."""
        return list(zip((*self.bounds, float("inf")), accumulate(list(self.counts)), strict=True))
