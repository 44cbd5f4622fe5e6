"""Least recently used, except that the ends of prompts go first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcore.blocks import KVCacheBlock
from kvcore.eviction.base import Segments
from kvcore.spec import require_positive

SPARE, MAIN = 1, 2


class TailAwareLRU(Segments):
    """Takes the last few blocks of every prompt before it takes more than these from any.

    A prompt that comes back with all but its last blocks cached waits for a few blocks' computation: hardly longer than
    with all of them. One that lost everything waits longest, and it is these that users feel. The order is least
    recently released first, among the spare ends and among the rest. After the tail-optimized LRU of W. Zhang et al.
    (2025), with a count of blocks where they predict latencies. For full attention: of a sliding window the end is what
    counts. O(1) a block in every call.

    Args:
        num_spare_blocks: How many blocks at the end of a prompt may go early.

    Raises:
        ConfigError: Not a positive whole number.
    """

    def __init__(self, num_spare_blocks: int = 4) -> None:
        require_positive(num_spare_blocks=num_spare_blocks)
        super().__init__(3)
        self.num_spare_blocks = num_spare_blocks
        self._is_inner: list[bool] = []

    def start(self) -> None:
        """No block is inside a prompt yet."""
        self._is_inner = [False] * len(self.queue_of)

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """The ends to the spare blocks, unless a longer prompt goes on behind them."""
        self.release_unhashed(unhashed)
        is_inner = self._is_inner
        for block in unhashed:
            is_inner[block.block_id] = False
        spare = self.num_spare_blocks
        first_inner = next((i for i, block in enumerate(hashed[:spare]) if is_inner[block.block_id]), spare)
        self.append(hashed[:first_inner], SPARE)
        for block in hashed[first_inner:]:
            is_inner[block.block_id] = True
        self.append(hashed[first_inner:], MAIN)

    def take(self, n: int) -> list[KVCacheBlock]:
        """What cannot be hit, then spare ends, then the rest."""
        taken: list[KVCacheBlock] = []
        for queue in self.queues:
            taken += queue.popleft_n(min(n - len(taken), len(queue)))
        for block in taken:
            self._is_inner[block.block_id] = False
        return taken

    def __iter__(self) -> Iterator[KVCacheBlock]:
        for queue in self.queues:
            yield from queue
