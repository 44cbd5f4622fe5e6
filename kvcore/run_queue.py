"""The free blocks of a pool in the order they will be overwritten, a unit at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeAlias, cast

from kvcore.block_run import BlockRun
from kvcore.blocks import KVCacheBlock, Unit
from kvcore.errors import QueueError
from kvcore.free_block_queue import FreeKVCacheBlockQueue
from kvcore.units import unit_of

Taken: TypeAlias = "tuple[list[KVCacheBlock], list[bytes] | None, int]"
"""Blocks in the order they are to be overwritten; their hashes, if they are still registered; and for which group."""


class RunQueue(FreeKVCacheBlockQueue):
    """A doubly linked list threaded through runs of free blocks, and free blocks by themselves.

    The head is overwritten first, and each run from its end: what was freed last block first stays one run. A run is
    put in or taken out in O(1), however many blocks it has. The methods of the base class, for whoever changes the
    order by hand, cut the blocks out of their runs, which costs what :meth:`BlockRun.cut` does.

    Args:
        unit: The first content.

    Attributes:
        num_free_blocks: Blocks in it.
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__(())
        self.put_last([unit])

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """The free blocks, head first. The queue must not change meanwhile."""
        for unit in self.units():
            if isinstance(unit, BlockRun):
                yield from islice(reversed(unit.blocks), len(unit))
            else:
                yield unit  # type: ignore[misc]

    def units(self) -> Iterator[Unit]:
        """Runs, and blocks by themselves, head first. The queue must not change meanwhile."""
        unit: Unit = self._head.next_free_block  # type: ignore[assignment]
        while unit is not self._tail:
            yield unit
            unit = unit.next_free_block  # type: ignore[assignment]

    def release(self, unhashed: list[Unit], hashed: list[Unit]) -> None:
        """Takes units in that their last holder let go of, each list with the one to overwrite first in front: those
        that are in no index to the head, the others to the tail. O(units)."""
        if unhashed:
            self.put_first(unhashed)
        if hashed:
            self.put_last(hashed)

    def reuse(self, units: list[Unit]) -> None:
        """Lets units go that were hit while free. O(units)."""
        for unit in units:
            self.unlink(unit)

    def put_last(self, units: Iterable[Unit]) -> None:
        """Puts units at the tail, in the given order. O(units)."""
        last: Unit = self._tail.prev_free_block  # type: ignore[assignment]
        self._insert(last, units)

    def put_first(self, units: Iterable[Unit]) -> None:
        """Puts units at the head: the first of them becomes the head. O(units)."""
        self._insert(self._head, units)

    def _insert(self, before: Unit, units: Iterable[Unit]) -> None:
        after: Unit = before.next_free_block  # type: ignore[assignment]
        count = 0  # by hand, here and below: a call of num_blocks would be a fifth of all this
        for unit in units:
            unit.prev_free_block = before
            before.next_free_block = unit
            before = unit
            count += len(unit.blocks) - unit.start if isinstance(unit, BlockRun) else 1
        before.next_free_block = after
        after.prev_free_block = before
        self.num_free_blocks += count

    def unlink(self, unit: Unit) -> None:
        """Takes a unit out, wherever it stands. O(1)."""
        before: Unit = unit.prev_free_block  # type: ignore[assignment]
        after: Unit = unit.next_free_block  # type: ignore[assignment]
        before.next_free_block = after
        after.prev_free_block = before
        unit.prev_free_block = unit.next_free_block = None
        self.num_free_blocks -= len(unit.blocks) - unit.start if isinstance(unit, BlockRun) else 1

    def take_one(self) -> tuple[KVCacheBlock, bytes | None, int]:
        """As :meth:`take` one, in a third of the time: the block, its hash if it has one, and the group."""
        unit: Unit = self._head.next_free_block  # type: ignore[assignment]
        if isinstance(unit, BlockRun):
            if len(unit.blocks) - unit.start == 1:
                self.unlink(unit)
            else:
                self.num_free_blocks -= 1
            return unit.blocks[-1], unit.pop_one(), unit.group
        self.unlink(unit)
        block = cast(KVCacheBlock, unit)
        prefix_hash = block.own_hash
        if prefix_hash is not None:
            block.is_hashed = False
            block.own_hash = block.own_span = None
        return block, prefix_hash, block.group

    def take(self, n: int) -> list[Taken]:
        """Takes the first ``n`` blocks, of which there must be so many. Whether they are in a run from now on,
        the caller has to say before anything reads it.

        O(n): 10 ns each in runs, 200 ns by themselves, and the runs.
        """
        taken: list[Taken] = []
        unit: Unit = self._head.next_free_block  # type: ignore[assignment]
        self.num_free_blocks -= n
        while n:
            group = unit.group
            following = unit
            if isinstance(unit, BlockRun):
                length = len(unit.blocks) - unit.start
                if length <= n:
                    blocks, hashes = unit.dissolve()
                    following = unit.next_free_block  # type: ignore[assignment]
                else:
                    length = n
                    blocks, hashes = unit.pop(n)
                blocks.reverse()
                if hashes is not None:
                    hashes.reverse()
            else:
                block = cast(KVCacheBlock, unit)
                length = 1
                blocks, hashes = [block], None if block.own_hash is None else [block.own_hash]
                block.is_hashed = False
                block.own_hash = block.own_span = None
                following = block.next_free_block  # type: ignore[assignment]
            n -= length
            if following is not unit:
                unit.prev_free_block = unit.next_free_block = None
                unit = following
            if taken and hashes is not None:
                # What windows left behind came one by one, and goes in one.
                last_blocks, last_hashes, last_group = taken[-1]
                if last_hashes is not None and group == last_group:
                    last_blocks += blocks
                    last_hashes += hashes
                    continue
            taken.append((blocks, hashes, group))
        self._head.next_free_block = unit
        unit.prev_free_block = self._head
        return taken

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """As in the base class."""
        if not 0 <= n <= self.num_free_blocks:
            raise QueueError(f"cannot take {n} blocks from a queue of {self.num_free_blocks}")
        blocks = [*islice(self, n)]
        self.remove_n(blocks)
        return blocks

    def append(self, block: KVCacheBlock) -> None:
        """As in the base class."""
        if unit_of(block).next_free_block is not None:
            raise QueueError(f"{block!r} is in the free queue already")
        self.append_n((block,))

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """As in the base class."""
        self.put_last([unit_of(block) for block in blocks])

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """As in the base class."""
        self.put_first([unit_of(block) for block in blocks])

    def remove(self, block: KVCacheBlock) -> None:
        """As in the base class."""
        if unit_of(block).next_free_block is None:
            raise QueueError(f"{block!r} is not in the free queue")
        self.remove_n((block,))

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """As in the base class."""
        for block in blocks:
            self.unlink(unit_of(block))
