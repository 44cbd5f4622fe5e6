"""A block of the cache, and a queue of those that nobody holds, in the order they will be overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvcore.errors import QueueError

if TYPE_CHECKING:
    from kvcore.block_run import BlockRun
    from kvcore.contents import TokenSpan


class Unit:
    """What is held, registered and freed as one: a block by itself, or a run of blocks.

    Attributes:
        num_holders: Running requests and pins that hold it; 0: it is free.
        is_hashed: It is in the prefix index.
        group: KV cache group that it is registered for.
        first_position: Index of its first block in the block tables that have it, while it is registered.
        prev_free_block: Neighbour towards the queue's head, None outside the queue.
        next_free_block: Neighbour towards the queue's tail, None outside the queue.
    """

    __slots__ = ("first_position", "group", "is_hashed", "next_free_block", "num_holders", "prev_free_block")

    def __init__(self) -> None:
        self.num_holders = 0
        self.is_hashed = False
        self.group = 0
        self.first_position = 0
        self.prev_free_block: Unit | None = None
        self.next_free_block: Unit | None = None


class KVCacheBlock(Unit):
    """Book entry of one physical block. All of them are made with the pool; no call makes one (rule 1).

    A block is a unit by itself, or one of a run: then the run says what is so of all its blocks, and what the block has
    as a unit, its links in the free queue too, means nothing. The properties tell, either way.

    Attributes:
        block_id: Index of the block's page in the cache tensors.
        is_null: True for block 0, the placeholder (rule 2).
        run: The run that it belongs to, None by itself.
        offset: Its index in ``run.blocks``.
        own_hash: Of a block by itself, its prefix hash, if it is registered.
        own_span: Of a block by itself, its contents, if it is registered and hits are verified.
    """

    __slots__ = ("block_id", "is_null", "offset", "own_hash", "own_span", "run")

    def __init__(self, block_id: int) -> None:
        super().__init__()
        self.block_id = block_id
        self.is_null = False
        self.run: BlockRun | None = None
        self.offset = 0
        self.own_hash: bytes | None = None
        self.own_span: TokenSpan | None = None

    @property
    def ref_cnt(self) -> int:
        """Running requests and pins that hold it; 0 means that it is free."""
        return self.num_holders if self.run is None else self.run.num_holders

    @property
    def prefix_hash(self) -> bytes | None:
        """Hash of the prefix that ends with this block, while the block is in the prefix index; else None."""
        if self.run is None:
            return self.own_hash
        return None if self.run.hashes is None else self.run.hashes[self.offset]

    @property
    def group_id(self) -> int:
        """KV cache group whose tokens it holds; meaningful while ``prefix_hash`` is not None."""
        return self.group if self.run is None else self.run.group

    @property
    def position(self) -> int:
        """Its index in the block tables that have it; meaningful while ``prefix_hash`` is not None."""
        return self.first_position if self.run is None else self.run.first_position + self.offset - self.run.start

    @property
    def content(self) -> TokenSpan | None:
        """The tokens that the hash stands for, where hits are verified; else None."""
        if self.run is None:
            return self.own_span
        return None if self.run.spans is None else self.run.spans[self.offset]

    @property
    def block_hash(self) -> bytes | None:
        """The index key: the prefix hash followed by the group id in 4 bytes, big-endian (rule 5); None if not indexed.

        Made on demand: the index keeps a table for each group, so that no lookup has to build a key.
        """
        prefix_hash = self.prefix_hash
        return None if prefix_hash is None else prefix_hash + self.group_id.to_bytes(4, "big")

    def __repr__(self) -> str:
        name = "null" if self.is_null else str(self.block_id)
        prefix_hash = self.prefix_hash
        hashed = "" if prefix_hash is None else f", hash={prefix_hash.hex()[:8]}, group={self.group_id}"
        return f"<block {name}: ref_cnt={self.ref_cnt}{hashed}>"


class FreeKVCacheBlockQueue:
    """A doubly linked list threaded through the blocks themselves: no object is made to move one.

    The head is overwritten first. Sentinels at both ends spare the loops every test for an empty side: the neighbours
    of what is queued are never None. The methods for single blocks check what they are
    given, and ``popleft_n`` its count; the others trust their caller, for speed.

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
