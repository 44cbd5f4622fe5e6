"""Whether the blocks of a pool, their runs and the free queue agree: for tests and debugging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcore.blocks import KVCacheBlock
from kvcore.errors import InvariantError
from kvcore.eviction import FreeBlocks
from kvcore.free_block_queue import FreeKVCacheBlockQueue
from kvcore.run_queue import RunQueue
from kvcore.units import blocks_of


def check_pool(
    blocks: Sequence[KVCacheBlock], queue: FreeKVCacheBlockQueue | FreeBlocks, holders: Mapping[int, int] | None
) -> None:
    """Compares every block with its run, with the queue, and with who holds it. O(blocks).

    Args:
        blocks: All blocks of a pool, the null block first.
        queue: The free ones.
        holders: How many requests hold each block id; None to leave that out.

    Raises:
        InvariantError: The first disagreement found.
    """
    null = blocks[0]
    if not null.is_null or null.run is not None or null.ref_cnt or null.is_hashed or null.next_free_block is not None:
        raise InvariantError(f"the null block is held, registered or queued: {null!r}")
    queued = _check_queue(queue)
    for block in blocks[1:]:
        if block.is_null:
            raise InvariantError(f"block {block.block_id} says it is the null block")
        if (block.ref_cnt == 0) != (block.block_id in queued) or block.ref_cnt < 0:
            raise InvariantError(
                f"{block!r} is {'in' if block.block_id in queued else 'not in'} the free queue; "
                "blocks with ref_cnt 0, and no others, belong there"
            )
        if holders is not None and block.ref_cnt != holders.get(block.block_id, 0):
            raise InvariantError(f"{block!r} is held by {holders.get(block.block_id, 0)} block tables")
        _check_unit(block)


def _check_queue(queue: FreeKVCacheBlockQueue | FreeBlocks) -> set[int]:
    """The ids in the queue, each once, linked both ways and counted."""
    queued: set[int] = set()
    before: KVCacheBlock | None = None
    by_blocks = isinstance(queue, FreeKVCacheBlockQueue) and not isinstance(queue, RunQueue)
    for block in queue:
        if block.block_id in queued or (by_blocks and before is not None and block.prev_free_block is not before):
            raise InvariantError(f"the free queue is linked wrongly at {block!r}")
        queued.add(block.block_id)
        before = block
    if len(queued) != queue.num_free_blocks:
        raise InvariantError(f"the free queue holds {len(queued)} blocks and counts {len(queue)}")
    for unit in queue.units() if isinstance(queue, RunQueue) else ():
        if unit.prev_free_block is None or unit.prev_free_block.next_free_block is not unit or not blocks_of(unit):
            raise InvariantError(f"the free queue is linked wrongly at {unit!r}")
    return queued


def _check_unit(block: KVCacheBlock) -> None:
    """Compares a block with its run, or with itself."""
    run = block.run
    if run is None:
        if block.is_hashed != (block.own_hash is not None):
            raise InvariantError(f"{block!r} has a hash and no place in the index, or a place and no hash")
        return
    if not run.start <= block.offset < len(run.blocks) or run.blocks[block.offset] is not block:
        raise InvariantError(f"{block!r} is not in its run: {run!r}")
    if run.is_hashed != (run.hashes is not None):
        raise InvariantError(f"{run!r} has hashes and no place in the index, or a place and no hashes")
    for notes in (run.hashes, run.spans):
        if notes is not None and len(notes) != len(run.blocks):
            raise InvariantError(f"{run!r} has {len(notes)} hashes or contents for {len(run.blocks)} blocks")
    if block.is_hashed or block.own_hash is not None or block.own_span is not None:
        raise InvariantError(f"{block!r} keeps a hash or contents beside those of its run")
