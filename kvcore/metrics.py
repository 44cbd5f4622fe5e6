"""What an operator asks of a cache: how full it is, how much of what is asked for it has, and what it throws away.

:class:`CacheMetrics` is made over a manager and told of every step; where it is not made, nothing of it is in the
manager's way. :mod:`kvcore.prometheus` exports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.block_lives import BlockLives
from kvcore.call_times import CallTimes
from kvcore.errors import ConfigError
from kvcore.stats import PrefixCacheStats, RecentHits

if TYPE_CHECKING:
    from kvcore.manager import KVCacheManager


class CacheMetrics:
    """The metrics of one manager, from when this is made.

    Args:
        manager: Made with ``log_stats=True``.
        recent_requests: How many requests the recent hit rate looks back.
        watched_blocks: How many blocks' lives are watched, see :class:`kvcore.block_lives.BlockLives`; 0: none.
        step_sample_rate: Share of the steps whose calls are measured, see :class:`kvcore.call_times.CallTimes`; 0:
            none.
        seed: Chooses blocks and steps; None: differently each time.

    Attributes:
        totals: All lookups.
        recent: The last requests.
        num_steps: Calls of :meth:`step`.
        num_resets: Steps in which the cache was reset.
        num_evictions: Cached blocks that were overwritten, or evicted by id, up to the last step.
        block_lives: None unless asked for.
        call_times: None unless asked for.

    Raises:
        ConfigError: The manager counts no lookups, or a number is out of its range.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        recent_requests: int = 1000,
        watched_blocks: int = 0,
        step_sample_rate: float = 0.0,
        seed: int | None = None,
    ) -> None:
        if not manager.log_stats:
            raise ConfigError("metrics need a manager that counts its lookups: KVCacheManager(..., log_stats=True)")
        self.manager = manager
        self.totals = PrefixCacheStats()
        self.recent = RecentHits(recent_requests)
        self.num_steps = self.num_resets = self.num_evictions = 0
        blocks = manager.block_pool.blocks
        self.block_lives = BlockLives(blocks, num_watched=watched_blocks, seed=seed) if watched_blocks else None
        self.call_times = CallTimes(manager, step_sample_rate=step_sample_rate, seed=seed) if step_sample_rate else None
        self._index = manager.block_pool.prefix_index
        self._removals_before = self._index.num_removals

    def __repr__(self) -> str:
        return f"CacheMetrics(steps={self.num_steps}, usage={self.usage:.1%}, {self.recent}, {self.manager!r})"

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold, now, from 0 to 1."""
        return self.manager.usage

    def step(self) -> PrefixCacheStats:
        """Counts what happened since the last step, and begins the next. Call it once in every step. O(1), and
        O(watched blocks) some twenty times a second.

        Returns:
            The lookups since the last step: what ``make_prefix_cache_stats`` would have answered.
        """
        stats = self.manager.make_prefix_cache_stats()
        assert stats is not None
        self.num_steps += 1
        if stats.requests or stats.preempted_requests or stats.reset:  # in decoding there is nothing to count
            self.totals.add(stats)
            self.recent.observe(stats)
            self.num_resets += stats.reset
        self.num_evictions = self._index.num_removals - self._removals_before
        if self.block_lives is not None:
            self.block_lives.step(reset=stats.reset)
        if self.call_times is not None:
            self.call_times.next_step()
        return stats

    def close(self) -> None:
        """Leaves the manager as it was; what was counted stays. Again: does nothing."""
        if self.call_times is not None:
            self.call_times.close()
