"""By the priority of the requests that used a block."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from kvcore.blocks import KVCacheBlock
from kvcore.free_block_queue import FreeKVCacheBlockQueue
from kvcore.request import RequestLike


class Priority:
    """The blocks of the least urgent requests go first, of those the least recently released.

    A block is as urgent as the most urgent request that used it since it was filled: the lowest ``priority``. A request
    without one counts as 0. O(1) a block in every call, and O(priorities among the free blocks) where one
    appears or disappears.
    """

    def __init__(self) -> None:
        self._unhashed = FreeKVCacheBlockQueue(())
        self._by_priority: dict[int, FreeKVCacheBlockQueue] = {}
        self._order: list[int] = []  # negated, so that the least urgent stands in front
        self._priority: dict[KVCacheBlock, int] = {}
        self._free: set[KVCacheBlock] = set()  # the hashed ones

    def serve(self, request: RequestLike, tables: Sequence[Sequence[KVCacheBlock]]) -> None:
        """Notes the priority for all blocks of the request, also those that others still hold."""
        priority = getattr(request, "priority", 0)
        noted = self._priority
        for table in tables:
            for block in table:
                if not block.is_null and priority < noted.get(block, priority + 1):
                    noted[block] = priority

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Each to its priority, and no less urgent than what comes after it in its prefix."""
        for block in unhashed:
            self._priority.pop(block, None)
        self._unhashed.prepend_n(unhashed)
        priority: int | None = None
        for block in hashed:
            own = self._priority.get(block, 0)
            priority = own if priority is None else min(priority, own)
            self._priority[block] = priority
            if priority not in self._by_priority:
                self._by_priority[priority] = FreeKVCacheBlockQueue(())
                insort(self._order, -priority)
            self._by_priority[priority].append_n((block,))
        self._free.update(hashed)

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Keeps their priority."""
        for block in blocks:
            if block in self._free:
                self._free.remove(block)
                priority = self._priority[block]
                self._by_priority[priority].remove(block)
                self._drop_if_empty(priority)
            else:
                self._unhashed.remove(block)

    def take(self, n: int) -> list[KVCacheBlock]:
        """What cannot be hit, then from the least urgent on."""
        taken = self._unhashed.popleft_n(min(n, len(self._unhashed)))
        while len(taken) < n:
            priority = -self._order[0]
            queue = self._by_priority[priority]
            victims = queue.popleft_n(min(n - len(taken), len(queue)))
            self._free.difference_update(victims)
            for block in victims:
                del self._priority[block]
            taken += victims
            self._drop_if_empty(priority)
        return taken

    def _drop_if_empty(self, priority: int) -> None:
        """Priorities may be deadlines: as many as there ever were requests."""
        if not self._by_priority[priority].num_free_blocks:
            del self._by_priority[priority]
            del self._order[bisect_left(self._order, -priority)]

    def __iter__(self) -> Iterator[KVCacheBlock]:
        yield from self._unhashed
        for negated in self._order:
            yield from self._by_priority[-negated]

    def __len__(self) -> int:
        return len(self._unhashed) + len(self._free)
