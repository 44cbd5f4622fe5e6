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


def note(
    unit: Unit, hashes: list[bytes], spans: list[TokenSpan] | None, position: int, group_id: int, *, is_first: bool
) -> None:
    """Notes what the blocks of a unit are registered for: a hash, and a span or none, for each, the first of them being
    at ``position`` of its table. The lists become the unit's own."""
    unit.is_hashed = True
    unit.group = group_id
    unit.first_position = position
    if isinstance(unit, BlockRun):
        dead = unit.start
        unit.hashes = [b""] * dead + hashes if dead else hashes
        unit.spans = spans
        if dead and spans is not None:
            unit.spans = spans[:1] * dead + spans
        unit.is_first = is_first
    else:
        assert isinstance(unit, KVCacheBlock)
        unit.own_hash = hashes[0]
        unit.own_span = None if spans is None else spans[0]


def clear_notes(unit: Unit) -> None:
    """Notes that the blocks of a unit are registered no longer."""
    unit.is_hashed = False
    if isinstance(unit, BlockRun):
        unit.hashes = unit.spans = None
        unit.is_first = True
    else:
        assert isinstance(unit, KVCacheBlock)
        unit.own_hash = unit.own_span = None


def blocks_of(unit: Unit) -> list[KVCacheBlock]:
    """The blocks of a unit, in the order of their table."""
    if isinstance(unit, BlockRun):
        return unit.blocks[unit.start :]
    assert isinstance(unit, KVCacheBlock)
    return [unit]


def num_blocks(unit: Unit) -> int:
    """How many blocks a unit has. O(1)."""
    return len(unit.blocks) - unit.start if isinstance(unit, BlockRun) else 1


def unit_of(block: KVCacheBlock) -> Unit:
    """The unit of a block, cut so that it has no other blocks. O(1) by itself, else O(blocks before or behind it)."""
    run = block.run
    if run is None:
        return block
    unit: Unit = run
    if block.offset > run.start:
        unit = run.cut(block.offset)[1]
    if isinstance(unit, BlockRun) and len(unit.blocks) - unit.start > 1:
        unit = unit.cut(unit.start + 1)[0]
    return unit


def length_in_run(blocks: list[KVCacheBlock], first: int) -> int:
    """How many of ``blocks``, from index ``first`` on, follow each other in the run of the first of them. O(those)."""
    block = blocks[first]
    run = block.run
    if run is None:
        return 1
    offset, members = block.offset, run.blocks
    length = len(members) - offset
    if length > len(blocks) - first:
        length = len(blocks) - first
    if length == 1:
        return 1
    if members[offset + length - 1] is blocks[first + length - 1]:  # else there are gaps
        ours = members if length == len(members) else members[offset : offset + length]
        theirs = blocks if length == len(blocks) else blocks[first : first + length]
        if ours == theirs:
            return length
    for i in range(1, length):
        if members[offset + i] is not blocks[first + i]:
            return i
    return length


def units_of(blocks: list[KVCacheBlock], *, as_held: bool = False) -> list[Unit]:
    """``blocks`` as units, in their order, cut so that they have no other blocks.

    O(runs), and 100 ns for each block by itself; unless ``as_held``, 6 ns for each block of a run.

    Args:
        blocks: Blocks of a pool, none twice and none null; their order is that of a block table, or the runs are short.
        as_held: They are a part of a block table, nothing left out: then they need not be compared with their runs,
            which a table has as a whole.
    """
    units: list[Unit] = []
    first, stop = 0, len(blocks)
    while first < stop:
        block = blocks[first]
        unit: Unit = block
        length = 1
        run = block.run
        if run is not None:
            length = min(len(run.blocks) - block.offset, stop - first) if as_held else length_in_run(blocks, first)
            unit = run
            if block.offset > run.start:
                unit = run.cut(block.offset)[1]
            if isinstance(unit, BlockRun) and unit.start + length < len(unit.blocks):
                unit = unit.cut(unit.start + length)[0]
        units.append(unit)
        first += length
    return units


MIN_MEAN_BLOCKS = 8
"""Units that come back together are joined where they have, on average, less than so many blocks."""


def joined(units: list[Unit]) -> list[Unit]:
    """Registered units that nobody holds any more, in the order of their table; neighbours are joined if they are
    short, on average.

    Requests that hit a prefix at different lengths cut it into pieces. When the last holder lets go, the pieces become
    one run again. O(units), or O(blocks) where it joins them: 80 ns each.
    """
    blocks = sum(map(num_blocks, units))
    if blocks >= MIN_MEAN_BLOCKS * len(units):
        return units
    result: list[Unit] = []
    first = 0
    for stop in range(1, len(units) + 1):
        if stop == len(units) or not _follows(units[stop - 1], units[stop]):
            result.append(units[first] if stop - first == 1 else _join(units[first:stop]))
            first = stop
    return result


def _follows(unit: Unit, following: Unit) -> bool:
    """Whether ``following`` can be in one run with ``unit``, behind it."""
    return (
        following.first_position == unit.first_position + num_blocks(unit)
        and following.group == unit.group
        and _is_verified(following) == _is_verified(unit)
    )


def _is_verified(unit: Unit) -> bool:
    if isinstance(unit, BlockRun):
        return unit.spans is not None
    assert isinstance(unit, KVCacheBlock)
    return unit.own_span is not None


def _join(units: list[Unit]) -> BlockRun:
    blocks: list[KVCacheBlock] = []
    hashes: list[bytes] = []
    spans: list[TokenSpan] = []
    for unit in units:
        if isinstance(unit, BlockRun):
            assert unit.hashes is not None
            blocks += unit.blocks[unit.start :]
            hashes += unit.hashes[unit.start :]
            if unit.spans is not None:
                spans += unit.spans[unit.start :]
            continue
        assert isinstance(unit, KVCacheBlock)
        assert unit.own_hash is not None
        blocks.append(unit)
        hashes.append(unit.own_hash)
        if unit.own_span is not None:
            spans.append(unit.own_span)
        clear_notes(unit)  # the run has them now
    run = BlockRun(blocks)
    first = units[0]
    # Whether the index has all of them under their hashes is not known of blocks by themselves: a lookup finds out.
    note(run, hashes, spans or None, first.first_position, first.group, is_first=False)
    return run


def count_held(blocks: list[KVCacheBlock], ref_cnt: int) -> int:
    """How many of ``blocks`` are held so many times. O(blocks), as :func:`units_of`."""
    count = first = 0
    while first < len(blocks):
        length = length_in_run(blocks, first)
        if blocks[first].ref_cnt == ref_cnt:
            count += length
        first += length
    return count


def _link(unit: Unit, before: Unit, after: Unit) -> None:
    unit.prev_free_block = before
    unit.next_free_block = after
    before.next_free_block = after.prev_free_block = unit
