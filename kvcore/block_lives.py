"""How long blocks live, lie idle, and wait to be used again: is the cache large enough for what comes back?

Nothing is asked of the pool, which is as fast as ever: now and then a few of its blocks, chosen at random once, are
looked at, and what became of them since is seen from their hash and their reference count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from kvcore.blocks import KVCacheBlock
from kvcore.errors import ConfigError
from kvcore.histogram import Histogram
from kvcore.spec import require_positive

SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
"""Bounds of the histograms."""


class BlockLives:
    """Watches a sample of the blocks of a pool.

    Idle times and reuse gaps belong together. Both begin when the last holder lets go of a cached block: an idle time
    ends with its eviction, a gap with a hit. Gaps that reach as far as the idle times say that a larger cache would be
    hit more.

    Times are as exact as the interval. Of two changes of a block within it, only their sum is seen: one that was hit
    and released again has not changed.

    Args:
        blocks: The pool's blocks, the null block first.
        num_watched: How many to watch, if there are so many.
        interval: Seconds from one look to the next, at least.
        seed: Chooses the blocks; None: differently each time.
        clock: Seconds.

    Attributes:
        age_at_eviction: Seconds from being handed out to being overwritten while cached.
        idle_before_eviction: Seconds from the last release to that.
        reuse_gaps: Seconds from the last release to a hit.

    Raises:
        ConfigError: No blocks to watch, or a negative interval.
    """

    def __init__(
        self,
        blocks: Sequence[KVCacheBlock],
        *,
        num_watched: int = 200,
        interval: float = 0.05,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_positive(num_watched=num_watched)
        if interval < 0:
            raise ConfigError(f"interval is in seconds and not negative, got {interval!r}")
        self.age_at_eviction = Histogram(SECONDS)
        self.idle_before_eviction = Histogram(SECONDS)
        self.reuse_gaps = Histogram(SECONDS)
        self._interval = interval
        self._clock = clock
        self._due = clock()
        watched = random.Random(seed).sample(blocks[1:], min(num_watched, len(blocks) - 1))
        self._lives = [_Life(block) for block in watched]

    def __repr__(self) -> str:
        return f"BlockLives(blocks={len(self._lives)}, evictions={self.age_at_eviction.count})"

    def step(self, *, reset: bool = False) -> None:
        """Looks at the blocks, if it is time. O(1) if it is not, else O(watched blocks).

        Args:
            reset: The cache was reset since the last step: what has gone was not evicted.
        """
        now = self._clock()
        if now < self._due and not reset:
            return
        self._due = now + self._interval
        for life in self._lives:
            block = life.block
            if block.prefix_hash is not life.prefix_hash or (block.ref_cnt > 0) is not life.held:
                self._changed(life, now, reset)

    def _changed(self, life: _Life, now: float, reset: bool) -> None:
        """Notes what became of a block since it was looked at last."""
        before, prefix_hash = life.prefix_hash, life.block.prefix_hash
        was_held, held = life.held, life.block.ref_cnt > 0
        # A hash that is gone, without another in its place, can also have been evicted by id; but not if the block lay
        # idle and is held now.
        overwritten = (
            before is not None
            and prefix_hash is not before
            and not reset
            and (prefix_hash is not None or (held and not was_held))
        )
        if overwritten:
            # What was in the cache before the watch began is left out.
            if life.handed_out_at is not None:
                self.age_at_eviction.observe(now - life.handed_out_at)
            if life.released_at is not None:
                self.idle_before_eviction.observe(0.0 if was_held else now - life.released_at)
        elif held and not was_held and prefix_hash is before and before is not None and life.released_at is not None:
            self.reuse_gaps.observe(now - life.released_at)
        handed_out = overwritten or (before is None and not was_held)
        if handed_out:
            life.handed_out_at = now
        if not held and (was_held or handed_out):
            life.released_at = now
        life.prefix_hash, life.held = prefix_hash, held


class _Life:
    """What is known of one block: as it was at the last look, and since when."""

    __slots__ = ("block", "handed_out_at", "held", "prefix_hash", "released_at")

    def __init__(self, block: KVCacheBlock) -> None:
        self.block = block
        self.prefix_hash = block.prefix_hash
        self.held = block.ref_cnt > 0
        self.handed_out_at: float | None = None
        self.released_at: float | None = None
