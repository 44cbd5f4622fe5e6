"""From the hash of a prefix to the block that ends it, for each KV cache group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat

from kvcore.blocks import KVCacheBlock
from kvcore.contents import TokenSpan
from kvcore.errors import InvariantError
from kvcore.request import RequestLike


class PrefixIndex:
    """Which blocks can be hit.

    The key of an entry is (hash, group id). Each group has a table of its own, so that a lookup uses the request's
    hashes as they are. One hash may name several blocks (rule 3): the table holds the one registered first, the later
    ones wait aside in the order they came, and take its place when it goes.

    Attributes:
        num_removals: Blocks that ever left the index; while it stands still, what a lookup found is still there.
    """

    def __init__(self) -> None:
        self.num_removals = 0
        self._tables: defaultdict[int, dict[bytes, KVCacheBlock]] = defaultdict(dict)
        self._duplicates: dict[tuple[bytes, int], dict[int, KVCacheBlock]] = {}

    def table(self, group_id: int) -> dict[bytes, KVCacheBlock]:
        """The live table of a group, for hot lookups: hash to the block registered first. Read only."""
        return self._tables[group_id]

    def get(self, prefix_hash: bytes, group_id: int) -> KVCacheBlock | None:
        """The block registered first under the hash, or None. O(1)."""
        return self.table(group_id).get(prefix_hash)

    def add(self, request: RequestLike, block: KVCacheBlock, index: int, group_id: int) -> None:
        """As :meth:`add_n`, for the one block that ends with hash block ``index``: a quarter of the time. O(1)."""
        prefix_hash = request.block_hashes[index]
        contents = request.block_contents
        first = self._tables[group_id].setdefault(prefix_hash, block)
        span = None if contents is None else contents.span(index)
        if first is not block:
            if contents is not None and not contents.matches(index, first.content):
                return
            self._add_duplicate(prefix_hash, group_id, block)
        block.prefix_hash = prefix_hash
        block.group_id = group_id
        block.content = span

    def add_n(
        self,
        request: RequestLike,
        blocks: Sequence[KVCacheBlock],
        indices: range,
        group_id: int,
        usable: Sequence[bool] | None = None,
    ) -> Sequence[int]:
        """Registers blocks of a request. O(n).

        A block whose hash is that of another prefix in the index, by accident, is left out: a hit on the one could not
        be told from a hit on the other.

        Args:
            request: Whose blocks they are, with the hashes and what these stand for.
            blocks: Blocks that are not registered.
            indices: The hash block that each of them ends with.
            group_id: The group whose tokens they hold.
            usable: For each block, whether to register it; None: all.

        Returns:
            Those of ``indices`` whose blocks are registered now.
        """
        start, stop, step = indices.start, indices.stop, indices.step
        contents = request.block_contents
        hashes = request.block_hashes[start:stop:step]
        spans: Iterable[TokenSpan | None] = repeat(None)
        if contents is not None:
            spans = contents.spans(stop)[start:stop:step]
        rows: Iterable[tuple[KVCacheBlock, bytes, TokenSpan | None, int]]
        rows = zip(blocks, hashes, spans, indices, strict=False)
        stored: Sequence[int] = indices
        if usable is not None:
            rows = compress(rows, usable)
            stored = [*compress(indices, usable)]
        setdefault = self._tables[group_id].setdefault
        for block, prefix_hash, span, index in rows:
            first = setdefault(prefix_hash, block)
            if first is not block:
                if contents is not None and not contents.matches(index, first.content):
                    stored = [i for i in stored if i != index]
                    continue
                self._add_duplicate(prefix_hash, group_id, block)
            block.prefix_hash = prefix_hash
            block.group_id = group_id
            block.content = span
        return stored

    def _add_duplicate(self, prefix_hash: bytes, group_id: int, block: KVCacheBlock) -> None:
        self._duplicates.setdefault((prefix_hash, group_id), {})[block.block_id] = block

    def remove_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Forgets blocks and their hashes; those that are not registered are passed over. O(n)."""
        tables, duplicates = self._tables, self._duplicates
        num_removals = self.num_removals
        for block in blocks:
            prefix_hash = block.prefix_hash
            if prefix_hash is not None:
                if duplicates:
                    self._remove_one_of_several(prefix_hash, block)
                else:
                    del tables[block.group_id][prefix_hash]
                block.prefix_hash = block.content = None
                num_removals += 1
        self.num_removals = num_removals

    def _remove_one_of_several(self, prefix_hash: bytes, block: KVCacheBlock) -> None:
        table = self._tables[block.group_id]
        waiting = self._duplicates.get((prefix_hash, block.group_id))
        if waiting is None:
            del table[prefix_hash]
            return
        if table[prefix_hash] is block:
            table[prefix_hash] = waiting.pop(next(iter(waiting)))
        else:
            del waiting[block.block_id]
        if not waiting:
            del self._duplicates[prefix_hash, block.group_id]

    def clear(self) -> None:
        """Forgets every block. O(entries)."""
        self.num_removals += 1
        for block in self:
            block.prefix_hash = None
            block.content = None
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
            if block.prefix_hash is None and block.content is not None:
                raise InvariantError(f"{block!r} keeps the contents of a prefix it is not registered for")
