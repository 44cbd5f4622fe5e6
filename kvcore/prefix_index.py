"""From the hash of a prefix to the block that ends it, for each KV cache group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvcore.blocks import KVCacheBlock, Unit
from kvcore.contents import PrefixContents, TokenSpan
from kvcore.errors import InvariantError
from kvcore.request import RequestLike
from kvcore.units import clear_notes, note, num_blocks, unit_of, units_of

_T = TypeVar("_T")


class PrefixIndex:
    """Which blocks can be hit.

    The key of an entry is (hash, group id). Each group has a table of its own, so that a lookup uses the request's
    hashes as they are. One hash may name several blocks (rule 3): the table holds the one registered first, the later
    ones wait aside in the order they came, and take its place when it goes.

    Attributes:
        generation: While it stands still, what a lookup found is still there.
        num_removals: Blocks that ever left the index one by one, and not because all were forgotten.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.num_removals = 0
        self._tables: defaultdict[int, dict[bytes, KVCacheBlock]] = defaultdict(dict)
        self._duplicates: dict[tuple[bytes, int], dict[int, KVCacheBlock]] = {}

    def table(self, group_id: int) -> dict[bytes, KVCacheBlock]:
        """The live table of a group, for hot lookups: hash to the block registered first. Read only."""
        return self._tables[group_id]

    def get(self, prefix_hash: bytes, group_id: int) -> KVCacheBlock | None:
        """The block registered first under the hash, or None. O(1)."""
        table = self._tables.get(group_id)
        return None if table is None else table.get(prefix_hash)

    def add(
        self, request: RequestLike, table: Sequence[KVCacheBlock], position: int, scale: int, group_id: int
    ) -> bool:
        """As :meth:`add_n`, for the one block at ``position`` of a request's table: a quarter of the time.

        Returns:
            Whether it is registered now.
        """
        block = table[position]
        index = (position + 1) * scale - 1
        prefix_hash = request.block_hashes[index]
        contents = request.block_contents
        first = self._tables[group_id].setdefault(prefix_hash, block)
        span = None if contents is None else contents.span(index)
        is_first = first is block
        if not is_first:
            if not _holds(first, position, index, contents):
                return False
            self._add_duplicate(prefix_hash, group_id, block)
        unit: Unit = block
        if block.run is not None:
            unit = unit_of(block)
        if unit is block:
            block.is_hashed = True
            block.group = group_id
            block.first_position = position
            block.own_hash = prefix_hash
            block.own_span = span
        else:
            note(unit, [prefix_hash], None if span is None else [span], position, group_id, is_first=is_first)
        return True

    def add_n(
        self, request: RequestLike, blocks: list[KVCacheBlock], positions: Sequence[int], scale: int, group_id: int
    ) -> Sequence[int]:
        """Registers blocks of a request. O(n): 80 ns each.

        A block whose hash is that of another prefix in the index, by accident, is left out: a hit on the one could not
        be told from a hit on the other.

        Args:
            request: Whose blocks they are, with the hashes and what these stand for.
            blocks: Blocks that are not registered, at least one.
            positions: The index of each in the request's table.
            scale: Hash blocks a block.
            group_id: The group whose tokens they hold.

        Returns:
            Those of ``positions`` whose blocks are registered now.
        """
        contents = request.block_contents
        hashes = _of_blocks(request.block_hashes, positions, scale)
        spans = None
        if contents is not None:
            spans = _of_blocks(contents.spans((positions[-1] + 1) * scale), positions, scale)
        # The loop runs in C: 45 ns each, 60 where the blocks are looked up before they are added.
        firsts = [*map(self._tables[group_id].setdefault, hashes, blocks)]
        if firsts == blocks and isinstance(positions, range):
            _register(blocks, hashes, spans, positions[0], group_id, is_first=True)
            return positions
        # Whether each is the first under its hash; None: the hash is another prefix's.
        kinds: list[bool | None] = []
        for first, block, position, prefix_hash in zip(firsts, blocks, positions, hashes, strict=True):
            if first is block:
                kinds.append(True)
            elif _holds(first, position, (position + 1) * scale - 1, contents):
                kinds.append(False)
                self._add_duplicate(prefix_hash, group_id, block)
            else:
                kinds.append(None)
        start, count = 0, len(blocks)
        for stop in range(1, count + 1):
            if stop < count and kinds[stop] == kinds[start] and positions[stop] == positions[stop - 1] + 1:
                continue
            is_first = kinds[start]
            if is_first is not None:
                part = slice(start, stop)
                of_spans = None if spans is None else spans[part]
                _register(blocks[part], hashes[part], of_spans, positions[start], group_id, is_first=is_first)
            start = stop
        return [position for position, kind in zip(positions, kinds, strict=True) if kind is not None]

    def _add_duplicate(self, prefix_hash: bytes, group_id: int, block: KVCacheBlock) -> None:
        self._duplicates.setdefault((prefix_hash, group_id), {})[block.block_id] = block

    def remove_n(self, blocks: list[KVCacheBlock], hashes: list[bytes], group_id: int) -> None:
        """Forgets blocks of a group that are registered under these hashes. O(n)."""
        if self._duplicates:
            for block, prefix_hash in zip(blocks, hashes, strict=True):
                self._remove_one_of_several(prefix_hash, block, group_id)
        else:
            table = self._tables[group_id]
            for prefix_hash in hashes:
                del table[prefix_hash]
        self.generation += 1
        self.num_removals += len(hashes)

    def _remove_one_of_several(self, prefix_hash: bytes, block: KVCacheBlock, group_id: int) -> None:
        table = self._tables[group_id]
        waiting = self._duplicates.get((prefix_hash, group_id))
        if waiting is None:
            del table[prefix_hash]
            return
        if table[prefix_hash] is block:
            table[prefix_hash] = waiting.pop(next(iter(waiting)))
        else:
            del waiting[block.block_id]
        if not waiting:
            del self._duplicates[prefix_hash, group_id]

    def clear(self) -> None:
        """Forgets every block. O(entries)."""
        self.generation += 1
        for block in self:
            clear_notes(block if block.run is None else block.run)
        for table in self._tables.values():
            table.clear()
        self._duplicates.clear()

    def __len__(self) -> int:
        """Distinct keys: prefixes that can be hit, over all groups."""
        return sum(map(len, self._tables.values()))

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Every registered block, duplicates included."""
        for table in self._tables.values():
            yield from table.values()
        for waiting in self._duplicates.values():
            yield from waiting.values()

    def _is_first(self, block: KVCacheBlock) -> bool:
        assert block.prefix_hash is not None
        return self.get(block.prefix_hash, block.group_id) is block

    def check_invariants(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Compares the tables with the blocks' own hashes. O(blocks).

        Raises:
            InvariantError: The first disagreement found.
        """
        for group_id, table in self._tables.items():
            for prefix_hash, block in table.items():
                if block.prefix_hash != prefix_hash or block.group_id != group_id:
                    raise InvariantError(f"group {group_id} knows {block!r} by hash {prefix_hash.hex()[:8]}")
        for (prefix_hash, group_id), waiting in self._duplicates.items():
            first = self.get(prefix_hash, group_id)
            if not waiting or first is None or first.block_id in waiting:
                raise InvariantError(
                    f"hash {prefix_hash.hex()[:8]} of group {group_id} has stray duplicates: {waiting}"
                )
            for block in waiting.values():
                if block.prefix_hash != prefix_hash or block.group_id != group_id:
                    raise InvariantError(f"group {group_id} knows {block!r} by hash {prefix_hash.hex()[:8]}")
        registered = {id(block) for block in self}
        for block in blocks:
            if (block.prefix_hash is not None) != (id(block) in registered):
                raise InvariantError(f"{block!r} and the prefix index disagree on whether it is registered")
            if block.run is not None and block.run.is_hashed and block.run.is_first and not self._is_first(block):
                raise InvariantError(f"{block!r} is not the one that the index has under its hash, as its run says")
            if block.prefix_hash is None and block.content is not None:
                raise InvariantError(f"{block!r} keeps the contents of a prefix it is not registered for")


def _holds(block: KVCacheBlock, position: int, index: int, contents: PrefixContents | None) -> bool:
    """Whether a block that has the hash of hash block ``index`` of a request, at ``position`` of its table, also holds
    that prefix."""
    return contents is None or (block.position == position and contents.matches(index, block.content))


def _register(
    blocks: list[KVCacheBlock],
    hashes: list[bytes],
    spans: list[TokenSpan] | None,
    position: int,
    group_id: int,
    *,
    is_first: bool,
) -> None:
    """Tells the units of ``blocks``, which follow each other from ``position`` of a table on, what they are registered
    for."""
    start = 0
    for unit in units_of(blocks):
        stop = start + num_blocks(unit)
        of_spans = None if spans is None else spans[start:stop]
        note(unit, hashes[start:stop], of_spans, position + start, group_id, is_first=is_first)
        start = stop


def _of_blocks(items: Sequence[_T], positions: Sequence[int], scale: int) -> list[_T]:
    """For each block of a table, what the last of its hash blocks has."""
    if isinstance(positions, range):
        part = items[(positions.start + 1) * scale - 1 : positions.stop * scale : scale]
        return part if isinstance(part, list) else [*part]
    return [items[(position + 1) * scale - 1] for position in positions]
