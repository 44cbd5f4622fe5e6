"""Runs of blocks that fare alike: their books are kept once for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.blocks import KVCacheBlock, Unit

if TYPE_CHECKING:
    from kvcore.contents import TokenSpan


class BlockRun(Unit):
    """Blocks that follow each other in a block table and fare alike.

    The same requests hold all of them, or all are free, side by side in the queue; all are registered in the prefix
    index, or none is. So a prompt that comes or goes, and one that is found, costs a few steps a run, and not a few a
    block. Where blocks begin to fare differently, the run is cut. What comes one by one, in decoding, stays by itself.

    Args:
        blocks: The blocks, in the order of their table. The list is the run's own from now on.
        num_holders: How many hold them.

    Attributes:
        blocks: The run is ``blocks[start:]``. While it is free, it is overwritten from its end (rule 4).
        start: How many entries at the front were cut off and are not deleted yet.
        hashes: The prefix hash of each of ``blocks`` while they are registered, else None.
        spans: The contents of each of ``blocks``, where hits are verified, else None.
        is_first: The index has these very blocks under their hashes. False: not known; others may have come before.
    """

    __slots__ = ("blocks", "hashes", "is_first", "spans", "start")

    def __init__(self, blocks: list[KVCacheBlock], num_holders: int = 0) -> None:
        super().__init__()
        self.blocks = blocks
        self.start = 0
        self.num_holders = num_holders
        self.hashes: list[bytes] | None = None
        self.spans: list[TokenSpan] | None = None
        self.is_first = True
        for offset, block in enumerate(blocks):
            block.run = self
            block.offset = offset

    def __len__(self) -> int:
        return len(self.blocks) - self.start

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.blocks[self.start : self.start + 3]))
        return f"<run of {len(self)} blocks: {shown}{', ...' if len(self) > 3 else ''}>"

    def cut(self, offset: int) -> tuple[Unit, Unit]:
        """The run as two units, the second beginning with ``blocks[offset]``; neither may be empty.

        In a queue, both are where the one was. O(blocks of the shorter part), amortized: the longer stays this object.
        """
        start = self.start
        if 2 * offset < start + len(self.blocks):
            before = self._part(start, offset)
            self.first_position += offset - start
            self.start = offset
            # What is overwritten first is nearer to the head: the part behind.
            if self.next_free_block is not None:
                _link(before, self, self.next_free_block)
            if 2 * offset > len(self.blocks):
                self.drop_dead()
            return before, self
        behind = self._part(offset, len(self.blocks))
        self._drop_last(offset)
        if self.prev_free_block is not None:
            _link(behind, self.prev_free_block, self)
        return self, behind

    def pop(self, n: int) -> tuple[list[KVCacheBlock], list[bytes] | None]:
        """Takes the last ``n`` blocks out, and their hashes. What they are in from now on is for the caller to say."""
        offset = len(self.blocks) - n
        blocks, hashes = self.blocks[offset:], None if self.hashes is None else self.hashes[offset:]
        self._drop_last(offset)
        return blocks, hashes

    def pop_one(self) -> bytes | None:
        """Takes the last block out; its hash. O(1), amortized."""
        self.blocks.pop()
        prefix_hash = None if self.hashes is None else self.hashes.pop()
        if self.spans is not None:
            self.spans.pop()
        if 2 * self.start > len(self.blocks):
            self.drop_dead()
        return prefix_hash

    def dissolve(self) -> tuple[list[KVCacheBlock], list[bytes] | None]:
        """Its blocks and their hashes, as :meth:`pop`; the run is not used again."""
        start = self.start
        if not start:
            return self.blocks, self.hashes
        return self.blocks[start:], None if self.hashes is None else self.hashes[start:]

    def _part(self, first: int, stop: int) -> Unit:
        """``blocks[first:stop]`` as another unit."""
        part: Unit
        if stop - first == 1:
            part = block = self.blocks[first]
            block.run = None
            block.num_holders = self.num_holders
            if self.hashes is not None:
                block.own_hash = self.hashes[first]
            if self.spans is not None:
                block.own_span = self.spans[first]
        else:
            part = run = BlockRun(self.blocks[first:stop], self.num_holders)
            if self.hashes is not None:
                run.hashes = self.hashes[first:stop]
            if self.spans is not None:
                run.spans = self.spans[first:stop]
            run.is_first = self.is_first
        part.is_hashed = self.is_hashed
        part.group = self.group
        part.first_position = self.first_position + first - self.start
        return part

    def _drop_last(self, offset: int) -> None:
        """Forgets the entries from ``offset`` on."""
        del self.blocks[offset:]
        if self.hashes is not None:
            del self.hashes[offset:]
        if self.spans is not None:
            del self.spans[offset:]
        if 2 * self.start > offset:
            self.drop_dead()

    def drop_dead(self) -> None:
        """Forgets the entries before ``start``. O(blocks): done once they are more than the others."""
        dead = self.start
        self.start = 0
        del self.blocks[:dead]
        if self.hashes is not None:
            del self.hashes[:dead]
        if self.spans is not None:
            del self.spans[:dead]
        for offset, block in enumerate(self.blocks):
            block.offset = offset


def _link(unit: Unit, before: Unit, after: Unit) -> None:
    unit.prev_free_block = before
    unit.next_free_block = after
    before.next_free_block = after.prev_free_block = unit
