"""Block tables where the attention kernels read them, told of the rows that changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcore.block_table import BlockTable
from runner.staging import StagingBuffer, section_bytes


class DeviceBlockTable:
    """One KV cache group's block tables on the device, row by row those of a table on the host.

    Args:
        host: The table on the host, which is the one that is appended to.
        device: Where the other one is.
        separate: Whether that is memory of its own; else the two are one.

    Attributes:
        host: As given.
    """

    def __init__(self, host: BlockTable, device: torch.device, *, separate: bool = True) -> None:
        self.host = host
        self._separate = separate
        table = torch.from_numpy(host.array)
        self._device = table.to(device, copy=True) if separate else table

    @property
    def max_num_blocks(self) -> int:
        """Blocks that a row can hold."""
        return self.host.array.shape[1]

    def lists(self, rows: Sequence[int]) -> list[list[int]]:
        """The block ids of each row, from the host. O(blocks)."""
        array, num_blocks = self.host.array, self.host.num_blocks
        return [array[row, : num_blocks[row]].tolist() for row in rows]

    def gather(self, row_index: torch.Tensor, width: int) -> torch.Tensor:
        """The first blocks of some rows, side by side: ``[B, width]``, int32, contiguous.

        Args:
            row_index: ``[B]``, int64, on the device.
            width: Blocks of each.
        """
        return self._device[:, :width].index_select(0, row_index)

    def take_changed_rows(self) -> list[int]:
        """Rows that the device has to be told of: those that changed since the last call and hold something."""
        changed = self.host.take_changed_rows()
        return [row for row in changed if self.host.num_blocks[row]] if self._separate else []

    @property
    def row_bytes(self) -> int:
        """Of a staging buffer, for the longest row there can be."""
        return _update_bytes(1, self.max_num_blocks)

    def update_bytes(self, rows: Sequence[int]) -> int:
        """Of a staging buffer, for all these rows, one at least."""
        return _update_bytes(len(rows), self._width(rows))

    def stage(self, rows: Sequence[int], staging: StagingBuffer) -> Update:
        """Lay out what these rows hold, as many of them as there is room for, from the first on.

        Args:
            rows: At least one.
            staging: With room for one; sent by the caller before the update is applied.
        """
        width, count = self._width(rows), len(rows)
        while count > 1 and _update_bytes(count, width) > staging.room:
            count //= 2
        chosen = list(rows[:count])
        index = staging.section((count,), torch.int64)
        contents = staging.section((count, width), torch.int32)
        index.host[:] = chosen
        contents.host[:] = self.host.array[chosen, :width]
        return Update(self._device[:, :width], index.device, contents.device)

    def _width(self, rows: Sequence[int]) -> int:
        return int(self.host.num_blocks[list(rows)].max())


class Update:
    """Rows on their way to a table on the device."""

    def __init__(self, table: torch.Tensor, index: torch.Tensor, contents: torch.Tensor) -> None:
        self._table = table
        self._index = index
        self._contents = contents

    def __len__(self) -> int:
        """Rows."""
        return len(self._index)

    def apply(self) -> None:
        """Put them in place, once the staging buffer was sent."""
        self._table.index_copy_(0, self._index, self._contents)


def _update_bytes(num_rows: int, width: int) -> int:
    return section_bytes((num_rows,), torch.int64) + section_bytes((num_rows, width), torch.int32)
