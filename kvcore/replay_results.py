"""What a replay found out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Histogram:
    """How often each size occurred, in ranges that double.

    Args:
        counts: For each ``b``, how many were at least ``2**(b - 1)`` and below ``2**b``; 0 for those that were 0.
    """

    counts: Mapping[int, int]

    @classmethod
    def of(cls, counts: Iterable[int]) -> Histogram:
        """From how many there are of 0, of 1, of 2 to 3, of 4 to 7, ..."""
        return cls({bits: count for bits, count in enumerate(counts) if count})

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    def quantile(self, share: float) -> int:
        """A size that no less than this share of them stay below; 0 if there are none. Exact to a factor of 2."""
        below = 0
        for bits in sorted(self.counts):
            below += self.counts[bits]
            if below >= share * self.total:
                return 1 << bits
        return 0

    def as_dict(self) -> dict[str, int]:
        """Counts by the first size of each range, for JSON."""
        return {str(1 << bits >> 1): self.counts[bits] for bits in sorted(self.counts)}


@dataclass(frozen=True)
class ReplayResult:
    """How a trace did in a pool under a policy.

    Args:
        policy: Its name.
        num_blocks: Blocks of the pool, the null block left out.
        block_size: Tokens of a block.
        num_requests: Requests of the trace.
        num_refused: Those that need more blocks than the pool has. They count as asked for and not found.
        num_waited: Those that did not start when they arrived: too many ran, or no blocks were free.
        num_requests_hit: Those that found at least one block.
        num_blocks_asked: Full blocks of all prompts.
        num_blocks_hit: Those that were found.
        num_tokens: Tokens of all prompts, with those after the last full block.
        num_evictions: Blocks that were overwritten while a prefix could still hit them.
        age_at_eviction: How many blocks had been asked for since they were last in use.
    """

    policy: str
    num_blocks: int
    block_size: int
    num_requests: int
    num_refused: int
    num_waited: int
    num_requests_hit: int
    num_blocks_asked: int
    num_blocks_hit: int
    num_tokens: int
    num_evictions: int
    age_at_eviction: Histogram

    @property
    def block_hit_rate(self) -> float:
        """Share of the blocks asked for that were found."""
        return self.num_blocks_hit / max(1, self.num_blocks_asked)

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompts' tokens that need not be computed."""
        return self.num_tokens_saved / max(1, self.num_tokens)

    @property
    def request_hit_rate(self) -> float:
        """Share of the requests that found at least one block."""
        return self.num_requests_hit / max(1, self.num_requests)

    @property
    def num_tokens_saved(self) -> int:
        """Tokens that need not be computed."""
        return self.num_blocks_hit * self.block_size

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "policy": self.policy,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "num_requests": self.num_requests,
            "num_refused": self.num_refused,
            "num_waited": self.num_waited,
            "num_requests_hit": self.num_requests_hit,
            "num_evictions": self.num_evictions,
            "num_blocks_asked": self.num_blocks_asked,
            "num_blocks_hit": self.num_blocks_hit,
            "num_tokens": self.num_tokens,
            "num_tokens_saved": self.num_tokens_saved,
            "block_hit_rate": self.block_hit_rate,
            "token_hit_rate": self.token_hit_rate,
            "request_hit_rate": self.request_hit_rate,
            "age_at_eviction": self.age_at_eviction.as_dict(),
        }


@dataclass(frozen=True)
class TraceSummary:
    """What a trace is like, whatever the pool.

    Args:
        num_requests: Requests.
        num_blocks: Full blocks of all prompts.
        num_distinct: Different ones among them.
        longest: Blocks of the longest prompt.
        reuse_distance: For each block that was asked for before: how many blocks were asked for since by others.
    """

    num_requests: int
    num_blocks: int
    num_distinct: int
    longest: int
    reuse_distance: Histogram

    @property
    def best_hit_rate(self) -> float:
        """Share of blocks found in a pool that never overwrites anything."""
        return (self.num_blocks - self.num_distinct) / max(1, self.num_blocks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_requests": self.num_requests,
            "num_blocks": self.num_blocks,
            "num_distinct": self.num_distinct,
            "longest": self.longest,
            "best_hit_rate": self.best_hit_rate,
            "reuse_distance": self.reuse_distance.as_dict(),
        }
