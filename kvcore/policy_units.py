"""The free units of a pool whose eviction policy knows of blocks only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kvcore.block_run import BlockRun
from kvcore.blocks import KVCacheBlock, Unit
from kvcore.eviction import EvictionPolicy
from kvcore.run_queue import Taken
from kvcore.units import blocks_of, unit_of


class PolicyUnits:
    """Speaks of units to the pool, as :class:`RunQueue` does, and of blocks to the policy.

    Args:
        policy: The policy, with the blocks that are free.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy

    def release(self, unhashed: list[Unit], hashed: list[Unit]) -> None:
        """As :meth:`RunQueue.release`. O(blocks)."""
        self._policy.release(_in_eviction_order(unhashed), _in_eviction_order(hashed))

    def reuse(self, units: list[Unit]) -> None:
        """As :meth:`RunQueue.reuse`. O(blocks)."""
        blocks: list[KVCacheBlock] = []
        for unit in units:
            blocks += blocks_of(unit)
        self._policy.reuse(blocks)

    def take(self, n: int) -> list[Taken]:
        """As :meth:`RunQueue.take`."""
        taken: list[Taken] = []
        for block in self._policy.take(n):
            prefix_hash, group = _leave_unit(block)
            hashes = None if prefix_hash is None else [prefix_hash]
            taken.append(([block], hashes, group))
        return taken

    def take_one(self) -> tuple[KVCacheBlock, bytes | None, int]:
        """As :meth:`RunQueue.take_one`."""
        block = self._policy.take(1)[0]
        prefix_hash, group = _leave_unit(block)
        return block, prefix_hash, group


def _leave_unit(block: KVCacheBlock) -> tuple[bytes | None, int]:
    """Takes a block that is to be overwritten out of its run; its hash, if it has one, and for which group."""
    if block.run is not None and block.run.blocks[-1] is not block:
        unit_of(block)  # seldom: the end of a prefix goes first, as a rule
    run = block.run
    if run is not None:
        return run.pop_one(), run.group
    prefix_hash = block.own_hash
    block.is_hashed = False
    block.own_hash = block.own_span = None
    return prefix_hash, block.group


def _in_eviction_order(units: Iterable[Unit]) -> list[KVCacheBlock]:
    """The blocks of units that come back, each run from its end."""
    blocks: list[KVCacheBlock] = []
    for unit in units:
        if isinstance(unit, BlockRun):
            blocks += unit.blocks[: unit.start - 1 if unit.start else None : -1]
        else:
            blocks.append(cast(KVCacheBlock, unit))
    return blocks
