"""Least frequently used, with ageing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from kvcore.blocks import KVCacheBlock
from kvcore.free_block_queue import FreeKVCacheBlockQueue


class LFU:
    """The block with the fewest hits goes first, of those the least recently released.

    Uses count from the floor at the time: the rank of the last block that was given away. It rises as blocks come and
    go, so that what was popular once does not stay for ever (M. Arlitt et al., "Evaluating content management
    techniques for Web proxy caches", 1999: LFU with dynamic ageing). O(1) a block in every call, amortized: the floor
    passes no more ranks than there were uses.
    """

    def __init__(self) -> None:
        self._unhashed = FreeKVCacheBlockQueue(())
        self._by_rank: defaultdict[int, FreeKVCacheBlockQueue] = defaultdict(lambda: FreeKVCacheBlockQueue(()))
        self._hits: dict[KVCacheBlock, int] = {}
        self._rank: dict[KVCacheBlock, int] = {}  # of the free hashed blocks
        self._floor = 0

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Ranks each block by the floor and its uses, and no lower than what comes after it in its prefix."""
        for block in unhashed:
            self._hits.pop(block, None)
        self._unhashed.prepend_n(unhashed)
        hits = 0
        for block in hashed:
            hits = max(hits, self._hits.get(block, 0))
            self._hits[block] = hits
            self._rank[block] = rank = self._floor + 1 + hits
            self._by_rank[rank].append_n((block,))

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Counts a hit for each."""
        for block in blocks:
            rank = self._rank.pop(block, None)
            if rank is None:
                self._unhashed.remove(block)
                continue
            self._hits[block] += 1
            queue = self._by_rank[rank]
            queue.remove_n((block,))
            if not queue.num_free_blocks:
                del self._by_rank[rank]

    def take(self, n: int) -> list[KVCacheBlock]:
        """What cannot be hit, then rank by rank."""
        taken = self._unhashed.popleft_n(min(n, len(self._unhashed)))
        while len(taken) < n:
            queue = self._by_rank.get(self._floor)
            if queue is None:
                self._floor += 1
                continue
            victims = queue.popleft_n(min(n - len(taken), len(queue)))
            if not queue.num_free_blocks:
                del self._by_rank[self._floor]
            for block in victims:
                del self._rank[block], self._hits[block]
            taken += victims
        return taken

    def __iter__(self) -> Iterator[KVCacheBlock]:
        yield from self._unhashed
        for rank in sorted(self._by_rank):
            yield from self._by_rank[rank]

    def __len__(self) -> int:
        return len(self._unhashed) + len(self._rank)
