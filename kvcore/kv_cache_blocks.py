"""What the facade answers with: blocks, for each KV cache group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.blocks import KVCacheBlock
from kvcore.errors import CountError


@dataclass(frozen=True)
class KVCacheBlocks:
    """Blocks of one request, outer index the KV cache group, inner index the position.

    Args:
        blocks: ``blocks[group][i]``; groups may have different lengths, since their block sizes may differ.
    """

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The ids, for each group; 0 is the null block. O(blocks)."""
        return tuple([block.block_id for block in group] for group in self.blocks)

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """The blocks of both, group by group.

        Raises:
            CountError: They have different numbers of groups.
        """
        if len(self.blocks) != len(other.blocks):
            raise CountError(f"cannot add blocks of {len(other.blocks)} groups to blocks of {len(self.blocks)} groups")
        return KVCacheBlocks(tuple([*mine, *theirs] for mine, theirs in zip(self.blocks, other.blocks, strict=True)))

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, for as many groups."""
        return KVCacheBlocks(tuple(() for _ in self.blocks))
