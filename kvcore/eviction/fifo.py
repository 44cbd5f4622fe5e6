"""First in, first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvcore.blocks import KVCacheBlock
from kvcore.free_block_queue import FreeKVCacheBlockQueue


class FIFO:
    """What was filled first goes first, however often it was hit since.

    A prefix that grows moves to the end as a whole, with its new blocks: they could not be hit without it. O(1) a block
    in every call, amortized.
    """

    def __init__(self) -> None:
        # What goes before all others: what cannot be hit, then what was in use when its turn came.
        self._unhashed = FreeKVCacheBlockQueue(())
        self._overdue = FreeKVCacheBlockQueue(())
        # Places in line, oldest first, with whether the block is free. One in use keeps its place until its turn comes.
        self._line: OrderedDict[KVCacheBlock, bool] = OrderedDict()
        self._in_overdue: set[KVCacheBlock] = set()
        self._passed: set[KVCacheBlock] = set()  # in use when their turn came, and still so
        self._num_free = 0

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Blocks that were here before go back to their places, up to the first new one, seen from the chain's end."""
        for block in unhashed:
            self._line.pop(block, None)
            self._passed.discard(block)
        self._unhashed.prepend_n(unhashed)
        line = self._line
        grown = False
        for block in hashed:
            grown = grown or not (block in line or block in self._passed)
            if grown:
                line.pop(block, None)
                self._passed.discard(block)
                line[block] = True
            elif block in line:
                line[block] = True
            else:
                self._passed.remove(block)
                self._in_overdue.add(block)
                self._overdue.append(block)
        self._num_free += len(unhashed) + len(hashed)

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Keeps their places."""
        for block in blocks:
            if self._line.get(block):
                self._line[block] = False
            elif block in self._in_overdue:
                self._in_overdue.remove(block)
                self._overdue.remove(block)
                self._passed.add(block)
            else:
                self._unhashed.remove(block)
        self._num_free -= len(blocks)

    def take(self, n: int) -> list[KVCacheBlock]:
        """What cannot be hit, then what is overdue, then the oldest in line."""
        taken = self._unhashed.popleft_n(min(n, len(self._unhashed)))
        overdue = self._overdue.popleft_n(min(n - len(taken), len(self._overdue)))
        self._in_overdue.difference_update(overdue)
        taken += overdue
        while len(taken) < n:
            block, free = self._line.popitem(last=False)
            if free:
                taken.append(block)
            else:
                self._passed.add(block)
        self._num_free -= n
        return taken

    def __iter__(self) -> Iterator[KVCacheBlock]:
        yield from self._unhashed
        yield from self._overdue
        for block, free in self._line.items():
            if free:
                yield block

    def __len__(self) -> int:
        return self._num_free
