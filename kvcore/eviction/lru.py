"""Least recently used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcore.blocks import KVCacheBlock, Unit
from kvcore.free_block_queue import FreeKVCacheBlockQueue
from kvcore.run_queue import RunQueue


class LRU:
    """Least recently released first; what cannot be hit goes before all. O(1) a block in every call.

    A pool that has it for its policy puts whole runs into its queue and takes them out (:meth:`serve_runs`), without
    asking. A subclass, or what wraps it, is called with blocks, as any other policy.

    Attributes:
        queue: The free blocks.
    """

    def __init__(self) -> None:
        self.queue = FreeKVCacheBlockQueue(())

    def serve_runs(self, free_blocks: Unit) -> RunQueue:
        """The queue of a pool whose blocks are all in ``free_blocks``, for the pool to change."""
        self.queue = queue = RunQueue(free_blocks)
        return queue

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Unhashed blocks to the head, hashed ones to the tail."""
        if unhashed:
            self.queue.prepend_n(unhashed)
        if hashed:
            self.queue.append_n(hashed)

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Takes them out of the queue."""
        self.queue.remove_n(blocks)

    def take(self, n: int) -> list[KVCacheBlock]:
        """The first ``n`` of the queue."""
        return self.queue.popleft_n(n)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self.queue)

    def __len__(self) -> int:
        return len(self.queue)
