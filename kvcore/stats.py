"""Counts of what the prefix cache was asked for and what it had."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvcore.spec import require_positive


@dataclass(slots=True)
class PrefixCacheStats:
    """Lookups since the last time the stats were taken.

    Requests that come back after a preemption are counted apart: they hit their own blocks, which says nothing about
    how well prompts are shared.

    Attributes:
        reset: The cache was reset meanwhile.
        requests: Lookups.
        queries: Tokens asked for.
        hits: Tokens found.
        preempted_requests: As ``requests``, of those that had been preempted.
        preempted_queries: As ``queries``.
        preempted_hits: As ``hits``.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, *, preempted: bool) -> None:
        """Counts one lookup of ``num_tokens`` tokens that found ``num_hits`` of them."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits

    def add(self, other: PrefixCacheStats) -> None:
        """Counts in what others have counted."""
        self.reset |= other.reset
        self.requests += other.requests
        self.queries += other.queries
        self.hits += other.hits
        self.preempted_requests += other.preempted_requests
        self.preempted_queries += other.preempted_queries
        self.preempted_hits += other.preempted_hits

    @property
    def hit_rate(self) -> float:
        """Found tokens over asked ones, preempted requests left out; 0 when nothing was asked."""
        return self.hits / self.queries if self.queries else 0.0

    @property
    def mean_hit_tokens(self) -> float:
        """Found tokens of a request, on average, preempted requests left out; 0 when nothing was asked."""
        return self.hits / self.requests if self.requests else 0.0


class RecentHits:
    """The hit rate of the last requests, so that it shows what changed and not what was long ago.

    Steps are counted in and forgotten as a whole: where a step looks several requests up, there may be a few requests
    fewer than ``max_requests``, and a single step with more than that counts. A reset of the cache forgets all before
    it.

    Args:
        max_requests: How many requests to look back.

    Raises:
        ConfigError: It is below 1.
    """

    def __init__(self, max_requests: int = 1000) -> None:
        require_positive(max_requests=max_requests)
        self.max_requests = max_requests
        self._steps: deque[PrefixCacheStats] = deque()
        self._requests = self._queries = self._hits = 0

    def __repr__(self) -> str:
        return f"RecentHits(requests={self._requests} of {self.max_requests}, hit_rate={self.hit_rate:.1%})"

    def observe(self, stats: PrefixCacheStats) -> None:
        """Counts a step in. Amortised O(1)."""
        if stats.reset:
            self._steps.clear()
            self._requests = self._queries = self._hits = 0
        if stats.requests:
            self._steps.append(stats)
            self._count(stats, 1)
        while self._requests > self.max_requests and len(self._steps) > 1:
            self._count(self._steps.popleft(), -1)

    @property
    def num_requests(self) -> int:
        """Requests that are counted."""
        return self._requests

    @property
    def hit_rate(self) -> float:
        """Their found tokens over the asked ones; 0 of none."""
        return self._hits / self._queries if self._queries else 0.0

    @property
    def mean_hit_tokens(self) -> float:
        """Found tokens of one of them, on average; 0 of none."""
        return self._hits / self._requests if self._requests else 0.0

    def _count(self, stats: PrefixCacheStats, sign: int) -> None:
        self._requests += sign * stats.requests
        self._queries += sign * stats.queries
        self._hits += sign * stats.hits
