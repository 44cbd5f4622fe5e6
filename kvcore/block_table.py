"""Block tables as arrays, for runners: one row a running request, kept up to date from what each call returned.

The manager's own tables are lists of blocks. A model needs arrays of ids, in a layout that an attention kernel reads,
and must not rebuild them in every step: the cost here grows with the blocks added, not with the length of the context.

Needs numpy; nothing else in this package does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvcore.errors import (
    ConfigError,
    CountError,
    DuplicateRequestError,
    HitHandoverError,
    KVCacheError,
    UnknownRequestError,
)
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.request import RequestId
from kvcore.spec import KVCacheConfig, cdiv

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class BlockTable:
    """The block tables of one KV cache group.

    A position that a window has left keeps the id of the block that was there: nothing reads it any more, and the row
    stays append-only.

    Args:
        max_num_reqs: Rows.
        max_num_blocks: Blocks a row can hold.
        block_size: Tokens per block.

    Attributes:
        array: Block ids, [max_num_reqs, max_num_blocks], int32; what lies behind a row's end is stale.
        num_blocks: Blocks in each row, [max_num_reqs], int32.

    Raises:
        ConfigError: A size below 1.
    """

    def __init__(self, max_num_reqs: int, max_num_blocks: int, block_size: int) -> None:
        if min(max_num_reqs, max_num_blocks, block_size) < 1:
            raise ConfigError(
                "max_num_reqs, max_num_blocks and block_size must be at least 1, "
                f"got {max_num_reqs}, {max_num_blocks} and {block_size}"
            )
        self.block_size = block_size
        self.array: Int32Array = np.zeros((max_num_reqs, max_num_blocks), dtype=np.int32)
        self.num_blocks: Int32Array = np.zeros(max_num_reqs, dtype=np.int32)
        self._changed: set[int] = set()

    def __repr__(self) -> str:
        rows, width = self.array.shape
        return f"BlockTable(max_num_reqs={rows}, max_num_blocks={width}, block_size={self.block_size})"

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Adds blocks at the end of a row. O(blocks added).

        Raises:
            CountError: No such row, or the row would get too long; nothing was added.
        """
        if not block_ids:
            return
        self.require_room(row, len(block_ids))
        start = int(self.num_blocks[row])
        stop = start + len(block_ids)
        self.array[row, start:stop] = block_ids
        self.num_blocks[row] = stop
        self._changed.add(row)

    def require_room(self, row: int, num_blocks: int) -> None:
        """Makes sure that a row can take so many more blocks. O(1).

        Raises:
            CountError: No such row, or it would get too long.
        """
        held = int(self.num_blocks[self._checked(row)])
        if held + num_blocks > self.array.shape[1]:
            raise CountError(
                f"row {row} holds {held} blocks and cannot take {num_blocks} more: "
                f"max_num_blocks is {self.array.shape[1]}"
            )

    def clear(self, row: int) -> None:
        """Empties a row. O(1).

        Raises:
            CountError: No such row.
        """
        self.num_blocks[self._checked(row)] = 0
        self._changed.add(row)

    def take_changed_rows(self) -> list[int]:
        """The rows changed since the last call, in order: those that a copy on the device has to be told of."""
        changed = sorted(self._changed)
        self._changed.clear()
        return changed

    def slot_mapping(self, rows: npt.ArrayLike, positions: npt.ArrayLike) -> Int64Array:
        """Where in the cache each token goes: ``block_id * block_size + offset in the block``. O(tokens), vectorized.

        Args:
            rows: Row of each token's request, [num_tokens].
            positions: Position of each token in its request, [num_tokens].

        Returns:
            Slots, [num_tokens], int64.

        Raises:
            CountError: No such row, or a position that its row has no block for.
        """
        rows = np.asarray(rows, dtype=np.int64)
        positions = np.asarray(positions, dtype=np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < len(self.num_blocks)):
            raise CountError(f"rows go from 0 to {len(self.num_blocks) - 1}, got {rows.min()} to {rows.max()}")
        columns, offsets = np.divmod(positions, self.block_size)
        bad = (columns >= self.num_blocks[rows]) | (positions < 0)
        if bad.any():
            first = int(bad.argmax())
            raise CountError(
                f"row {rows[first]} has no block for position {positions[first]}: it holds "
                f"{self.num_blocks[rows[first]]} blocks of {self.block_size} tokens; append what the manager returned, "
                "which beyond its max_model_len is nothing"
            )
        slots: Int64Array = self.array[rows, columns].astype(np.int64) * self.block_size + offsets
        return slots

    def _checked(self, row: int) -> int:
        if not 0 <= row < len(self.num_blocks):
            raise CountError(f"rows go from 0 to {len(self.num_blocks) - 1}, got {row}")
        return row


class BlockTables:
    """The block tables of all groups, rows given out by request id.

    Args:
        kv_cache_config: The groups.
        max_num_reqs: Most requests at a time.
        max_model_len: Longest sequence, in tokens.

    Attributes:
        tables: One for each group.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, max_num_reqs: int, max_model_len: int) -> None:
        self.tables = [
            BlockTable(
                max_num_reqs, cdiv(max_model_len, group.kv_cache_spec.block_size), group.kv_cache_spec.block_size
            )
            for group in kv_cache_config.kv_cache_groups
        ]
        self._rows: dict[RequestId, int] = {}
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))

    def __len__(self) -> int:
        """Requests that have a row."""
        return len(self._rows)

    def __iter__(self) -> Iterator[RequestId]:
        """Their ids."""
        return iter(self._rows)

    def row(self, request_id: RequestId) -> int:
        """The row of a request. O(1).

        Raises:
            UnknownRequestError: It has none.
        """
        try:
            return self._rows[request_id]
        except KeyError:
            raise UnknownRequestError(f"request {request_id!r} has no row: add it first") from None

    def add(self, request_id: RequestId, blocks: KVCacheBlocks) -> int:
        """Gives a request a row with all of its blocks so far (``KVCacheManager.get_blocks``). O(blocks).

        Raises:
            DuplicateRequestError: It has one already.
            CountError: No row is free, or its blocks are more than a row holds; it has no row then.
            HitHandoverError: These are no blocks for each group; it has no row then.
        """
        if request_id in self._rows:
            raise DuplicateRequestError(f"request {request_id!r} has a row already: remove it first")
        if not self._free_rows:
            raise CountError(f"all {len(self._rows)} rows are taken: make BlockTables with a larger max_num_reqs")
        self._rows[request_id] = row = self._free_rows.pop()
        for table in self.tables:
            table.clear(row)
        try:
            self.append(request_id, blocks)
        except KVCacheError:
            self.remove(request_id)
            raise
        return row

    def append(self, request_id: RequestId, new_blocks: KVCacheBlocks) -> None:
        """Adds what ``allocate_slots`` or ``grow`` returned for a running request. O(new blocks).

        Raises:
            UnknownRequestError: It has no row.
            CountError: Its row would get too long; nothing was added.
            HitHandoverError: These are no blocks for each group; nothing was added.
        """
        row = self.row(request_id)
        if not isinstance(new_blocks, KVCacheBlocks) or len(new_blocks.blocks) != len(self.tables):
            raise HitHandoverError(
                f"a row takes what allocate_slots, grow or get_blocks returned, KVCacheBlocks of {len(self.tables)} "
                f"groups; got {new_blocks!r}"
            )
        groups = new_blocks.get_block_ids()
        for table, block_ids in zip(self.tables, groups, strict=True):
            table.require_room(row, len(block_ids))
        for table, block_ids in zip(self.tables, groups, strict=True):
            table.append(row, block_ids)

    def remove(self, request_id: RequestId) -> None:
        """Gives a request's row back. O(groups).

        Raises:
            UnknownRequestError: It has none.
        """
        row = self.row(request_id)
        for table in self.tables:
            table.clear(row)
        del self._rows[request_id]
        self._free_rows.append(row)
