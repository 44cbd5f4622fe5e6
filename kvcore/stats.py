"""Counts of what the prefix cache was asked for and what it had."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
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

    @property
    def hit_rate(self) -> float:
        """Found tokens over asked ones, preempted requests left out; 0 when nothing was asked."""
        return self.hits / self.queries if self.queries else 0.0
