"""A block of the cache, and what a block by itself has in common with a run of them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

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


def make_blocks(count: int) -> list[KVCacheBlock]:
    """All blocks of a pool, with the garbage collector off meanwhile.

    It would go through the blocks made so far again and again, and find nothing: with it on, a million blocks take
    three times as long.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return [KVCacheBlock(block_id) for block_id in range(count)]
    finally:
        if was_enabled:
            gc.enable()
