"""Segmented least recently used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcore.blocks import KVCacheBlock
from kvcore.errors import ConfigError
from kvcore.eviction.base import Segments

PROBATION, PROTECTED = 1, 2


class SLRU(Segments):
    """Blocks that were hit are protected from those that never were, up to a share of the pool.

    Both segments go least recently released first. What the protected one cannot hold moves to the end of the other (R.
    Karedla et al., "Caching strategies to improve disk system performance", 1994). O(1) a block in every call,
    amortized.

    Args:
        protected_share: Share of the pool for blocks that were hit, between 0 and 1.

    Raises:
        ConfigError: It is not.
    """

    def __init__(self, protected_share: float = 0.8) -> None:
        if not 0 < protected_share < 1:
            raise ConfigError(f"protected_share is a share of the pool between 0 and 1, got {protected_share!r}")
        super().__init__(3)
        self.protected_share = protected_share
        self._was_hit: list[bool] = []

    def start(self) -> None:
        """Nothing was hit yet."""
        self._was_hit = [False] * len(self.queue_of)

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Those hit since they were filled, and those before them in their prefix, to the protected segment."""
        self.release_unhashed(unhashed)
        was_hit = self._was_hit
        for block in unhashed:
            was_hit[block.block_id] = False
        first_hit = next((i for i, block in enumerate(hashed) if was_hit[block.block_id]), len(hashed))
        self.append(hashed[:first_hit], PROBATION)
        for block in hashed[first_hit:]:
            was_hit[block.block_id] = True
        self.append(hashed[first_hit:], PROTECTED)
        protected = self.queues[PROTECTED]
        excess = len(protected) - int(self.protected_share * self.num_blocks)
        if excess > 0:
            self.append(protected.popleft_n(excess), PROBATION)

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Notes that they were hit."""
        super().reuse(blocks)
        for block in blocks:
            self._was_hit[block.block_id] = True

    def take(self, n: int) -> list[KVCacheBlock]:
        """What cannot be hit, then the segments in turn."""
        taken: list[KVCacheBlock] = []
        for queue in self.queues:
            taken += queue.popleft_n(min(n - len(taken), len(queue)))
        for block in taken:
            self._was_hit[block.block_id] = False
        return taken

    def __iter__(self) -> Iterator[KVCacheBlock]:
        for queue in self.queues:
            yield from queue
