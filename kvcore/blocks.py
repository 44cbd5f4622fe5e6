"""A block of the cache, and the queue of those nobody holds, in the order they will be overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvcore.errors import QueueError

if TYPE_CHECKING:
    from kvcore.contents import TokenSpan


class KVCacheBlock:
    """Book entry of one physical block. All of them are made with the pool; the hot path creates none (rule 1).

    Attributes:
        block_id: Index of the block's page in the cache tensors.
        ref_cnt: Running requests and pins that hold it; 0 means that it stands in the free queue.
        prefix_hash: Hash of the prefix that ends with this block, while the block is in the prefix index; else None.
        group_id: KV cache group whose tokens it holds; meaningful while ``prefix_hash`` is set.
        content: The tokens that the hash stands for, where hits are verified; else None.
        is_null: True for block 0, the placeholder (rule 2).
        prev_free_block: Neighbour towards the queue's head, None outside the queue.
        next_free_block: Neighbour towards the queue's tail, None outside the queue.
    """

    __slots__ = (
        "block_id",
        "content",
        "group_id",
        "is_null",
        "next_free_block",
        "prefix_hash",
        "prev_free_block",
        "ref_cnt",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.prefix_hash: bytes | None = None
        self.group_id = 0
        self.content: TokenSpan | None = None
        self.is_null = False
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None

    @property
    def block_hash(self) -> bytes | None:
        """The index key: the prefix hash followed by the group id in 4 bytes, big-endian (rule 5); None if not indexed.

        Made on demand: the index keeps a table for each group, so that no lookup has to build a key.
        """
        return None if self.prefix_hash is None else self.prefix_hash + self.group_id.to_bytes(4, "big")

    def __repr__(self) -> str:
        name = "null" if self.is_null else str(self.block_id)
        hashed = "" if self.prefix_hash is None else f", hash={self.prefix_hash.hex()[:8]}, group={self.group_id}"
        return f"<block {name}: ref_cnt={self.ref_cnt}{hashed}>"


class FreeKVCacheBlockQueue:
    """A doubly linked list threaded through the blocks themselves: no object is made to move one.

    The head is overwritten first. Sentinels at both ends spare the loops every test for an empty side: the neighbours
    of what is queued are never None. The ``_n`` methods trust their caller, for speed; the single-block ones check.

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
        block = self._head.next_free_block
        while block is not self._tail:
            assert block is not None
            yield block
            block = block.next_free_block

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
        tail = self._tail
        last: KVCacheBlock = tail.prev_free_block  # type: ignore[assignment]
        count = 0
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
            count += 1
        last.next_free_block = tail
        tail.prev_free_block = last
        self.num_free_blocks += count

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Puts blocks at the head: the first of them becomes the head. O(n)."""
        last = self._head
        first_before: KVCacheBlock = last.next_free_block  # type: ignore[assignment]
        count = 0
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
            count += 1
        last.next_free_block = first_before
        first_before.prev_free_block = last
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
