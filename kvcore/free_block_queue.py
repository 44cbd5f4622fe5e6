"""A queue of the blocks that nobody holds, in the order they will be overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvcore.blocks import KVCacheBlock
from kvcore.errors import QueueError


class FreeKVCacheBlockQueue:
    """A doubly linked list threaded through the blocks themselves: no object is made to move one.

    The head is overwritten first. Sentinels at both ends spare the loops every test for an empty side: the neighbours
    of what is queued are never None. The methods for single blocks check what they are given, and ``popleft_n`` its
    count; the others trust their caller, for speed.

    Args:
        blocks: The first content, head first.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.append_n(blocks)

    def __len__(self) -> int:
        return self.num_free_blocks

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """The free blocks, head first. The queue must not change meanwhile."""
        block: KVCacheBlock = self._head.next_free_block  # type: ignore[assignment]
        while block is not self._tail:
            yield block
            block = block.next_free_block  # type: ignore[assignment]

    def popleft(self) -> KVCacheBlock:
        """Takes the head. O(1).

        Raises:
            QueueError: The queue is empty.
        """
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Takes the first ``n`` blocks, head first. O(n).

        Raises:
            QueueError: ``n`` is negative, or fewer are there; none is taken.
        """
        if not 0 <= n <= self.num_free_blocks:
            raise QueueError(f"cannot take {n} blocks from a queue of {self.num_free_blocks}")
        taken = []
        block: KVCacheBlock = self._head.next_free_block  # type: ignore[assignment]
        for _ in range(n):
            taken.append(block)
            following: KVCacheBlock = block.next_free_block  # type: ignore[assignment]
            block.prev_free_block = block.next_free_block = None
            block = following
        self._head.next_free_block = block
        block.prev_free_block = self._head
        self.num_free_blocks -= n
        return taken

    def append(self, block: KVCacheBlock) -> None:
        """Puts a block at the tail. O(1).

        Raises:
            QueueError: The block is in a queue already.
        """
        if block.next_free_block is not None:
            raise QueueError(f"{block!r} is in the free queue already")
        self.append_n((block,))

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Puts blocks at the tail, in the given order. O(n)."""
        last: KVCacheBlock = self._tail.prev_free_block  # type: ignore[assignment]
        self._insert(last, blocks)

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Puts blocks at the head: the first of them becomes the head. O(n)."""
        self._insert(self._head, blocks)

    def _insert(self, before: KVCacheBlock, units: Iterable[KVCacheBlock]) -> None:
        after: KVCacheBlock = before.next_free_block  # type: ignore[assignment]
        count = 0
        for block in units:
            block.prev_free_block = before
            before.next_free_block = block
            before = block
            count += 1
        before.next_free_block = after
        after.prev_free_block = before
        self.num_free_blocks += count

    def remove(self, block: KVCacheBlock) -> None:
        """Takes a block out of the middle. O(1).

        Raises:
            QueueError: The block is in no queue.
        """
        if block.next_free_block is None:
            raise QueueError(f"{block!r} is not in the free queue")
        self.remove_n((block,))

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Takes blocks out, wherever they stand. O(n)."""
        for block in blocks:
            before: KVCacheBlock = block.prev_free_block  # type: ignore[assignment]
            after: KVCacheBlock = block.next_free_block  # type: ignore[assignment]
            before.next_free_block = after
            after.prev_free_block = before
            block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Every free block, in the order they would be overwritten. O(queue); for tests and inspection."""
        return list(self)
