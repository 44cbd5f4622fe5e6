"""Whether the block tables of a KV cache group agree with their counts and their blocks: for tests and debugging."""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.blocks import KVCacheBlock
from kvcore.errors import InvariantError
from kvcore.request import RequestId


def check_tables(
    req_to_blocks: Mapping[RequestId, list[KVCacheBlock]],
    num_cached_block: Mapping[RequestId, int],
    num_skipped_block: Mapping[RequestId, int],
    *,
    kv_cache_group_id: int,
    manager: object,
) -> None:
    """Compares the tables with their counts, and each block with its place. O(blocks in tables).

    Args:
        req_to_blocks: Block table of each request, by id.
        num_cached_block: Leading blocks of each table that are registered, or never will be.
        num_skipped_block: Leading blocks of each table that are null.
        kv_cache_group_id: Index of the group that the tables are of.
        manager: Whose tables they are, as errors name it.

    Raises:
        InvariantError: The first disagreement found.
    """
    if not req_to_blocks.keys() == num_cached_block.keys() == num_skipped_block.keys():
        raise InvariantError(f"{manager!r} keeps tables and counts of different requests")
    for request_id, table in req_to_blocks.items():
        num_skipped = num_skipped_block[request_id]
        nulls = [block.is_null for block in table]
        if nulls != [True] * num_skipped + [False] * (len(table) - num_skipped):
            raise InvariantError(
                f"{manager!r}: only the first {num_skipped} blocks of {request_id!r} may be null: {table}"
            )
        if num_cached_block[request_id] > len(table):
            raise InvariantError(f"{manager!r}: more blocks of {request_id!r} registered than it has")
        held = [block.block_id for block in table[num_skipped:]]
        if len(set(held)) != len(held):
            raise InvariantError(f"{manager!r}: {request_id!r} holds a block twice: {held}")
        position = num_skipped
        while position < len(table):
            run = table[position].run
            members = [table[position]] if run is None else run.blocks[run.start :]
            if members != table[position : position + len(members)]:
                raise InvariantError(f"{manager!r}: {request_id!r} holds a part of {run!r} only: {table}")
            position += len(members)
        for position, block in enumerate(table[num_skipped:], num_skipped):
            if block.prefix_hash is not None and block.group_id != kv_cache_group_id:
                raise InvariantError(f"{manager!r}: {request_id!r} holds {block!r} of another group")
            if block.prefix_hash is not None and block.position != position:
                raise InvariantError(
                    f"{manager!r}: {request_id!r} holds {block!r} at {position}, which says it is at {block.position}"
                )
