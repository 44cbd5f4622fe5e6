"""Units of blocks: how lists of blocks become runs and single blocks, and back.

What holds, registers and frees blocks is given lists of them, and does its work once for each unit. Here such a list
becomes units, cut where it begins or ends in a run; a unit becomes its blocks again; and short units that came back
together become one run. What a unit is registered for is noted and cleared here too: only here does it matter that a
run keeps lists of what a block by itself keeps one of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.block_run import BlockRun
from kvcore.blocks import KVCacheBlock, Unit

if TYPE_CHECKING:
    from kvcore.contents import TokenSpan


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


def units_with_repeats(blocks: list[KVCacheBlock]) -> list[Unit]:
    """As :func:`units_of`, for blocks that may come more than once: their units then do."""
    return units_of(blocks) if len({*blocks}) == len(blocks) else [unit_of(block) for block in blocks]


def place_in_run(block: KVCacheBlock) -> tuple[int, int]:
    """To sort blocks by: those of a run come together, in its order."""
    return id(block.run), block.offset
