"""From a manager to a :class:`Snapshot`. Reads every layer and changes none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvcore.request import RequestLike
from kvcore.snapshot import BlockSnapshot, GroupSnapshot, RequestSnapshot, Snapshot

if TYPE_CHECKING:
    from kvcore.manager import KVCacheManager

_Links = dict[tuple[int, str], tuple[int, str | None]]
"""For a group and a hash: which block of its prefix ends there, and the hash of the prefix before it."""


def take_snapshot(
    manager: KVCacheManager, label: str, *, previous: Snapshot | None, known_requests: Iterable[RequestLike]
) -> Snapshot:
    """See :meth:`kvcore.KVCacheManager.snapshot`."""
    managers = manager.coordinator.single_type_managers
    pool = manager.block_pool
    running = [holder.request for holder in manager._holders.values()]
    links = _links_of_snapshot(previous) if previous is not None else {}
    for request in [*known_requests, *running]:
        for group_id, group_manager in enumerate(managers):
            _add_links(links, request, group_id, group_manager.block_size // pool.hash_block_size)
    serves = {
        block.block_id: group_id
        for group_id, group_manager in enumerate(managers)
        for table in group_manager.req_to_blocks.values()
        for block in table
    }
    blocks = []
    for block in pool.blocks:
        if block.is_null or (not block.ref_cnt and block.prefix_hash is None):
            blocks.append(BlockSnapshot(block.block_id))
            continue
        prefix_hash = position = parent_hash = None
        duplicate = False
        group = serves.get(block.block_id)
        if block.prefix_hash is not None:
            group = block.group_id
            prefix_hash = block.prefix_hash.hex()
            position, parent_hash = links.get((group, prefix_hash), (None, None))
            duplicate = pool.prefix_index.get(block.prefix_hash, group) is not block
        num_pins = manager.residency.counts[block.block_id]
        blocks.append(
            BlockSnapshot(block.block_id, block.ref_cnt, prefix_hash, group, position, parent_hash, duplicate, num_pins)
        )
    groups = []
    for group_spec in manager.kv_cache_config.kv_cache_groups:
        spec = group_spec.kv_cache_spec
        span = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        groups.append(GroupSnapshot(spec.kind, spec.block_size, span, tuple(group_spec.layer_names)))
    return Snapshot(
        label=label,
        groups=tuple(groups),
        blocks=tuple(blocks),
        queue=tuple(block.block_id for block in pool.policy),
        requests=tuple(
            RequestSnapshot(
                request.request_id if isinstance(request.request_id, str) else repr(request.request_id),
                request.num_tokens,
                request.num_computed_tokens,
                tuple(map(tuple, manager.get_block_ids(request.request_id))),
            )
            for request in running
        ),
        enable_caching=manager.enable_caching,
        hash_block_size=pool.hash_block_size,
    )


def _links_of_snapshot(snapshot: Snapshot) -> _Links:
    return {
        (block.group_id, block.prefix_hash): (block.position, block.parent_hash)
        for block in snapshot.blocks
        if block.prefix_hash is not None and block.group_id is not None and block.position is not None
    }


def _add_links(links: _Links, request: RequestLike, group_id: int, hashes_per_block: int) -> None:
    """What a request's hashes say about the prefixes it has. O(its blocks)."""
    parent = None
    hashes = getattr(request, "block_hashes", ())[hashes_per_block - 1 :: hashes_per_block]
    for position, block_hash in enumerate(hashes):
        name = block_hash.hex()
        links[group_id, name] = (position, parent)
        parent = name
