"""What happened to the prefix index, for those who mirror it: routers, other workers, inspectors.

The fields and their order are those of vLLM's KV events. How they look on the wire: :mod:`kvcore.event_encoding`; how
they get to others: :mod:`kvcore.event_publisher` and :mod:`kvcore.event_subscriber`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ExternalBlockHash = bytes | int
"""The hash of a prefix as others know it: the bytes of the block hash, without the group id, which has a field of its
own; or their last 64 bits as a number, from workers that send those."""


def integer_hash(block_hash: ExternalBlockHash) -> int:
    """The last 64 bits of a hash, as the number that is sent in its place."""
    return int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash


@dataclass
class BlockStored:
    """Blocks of one group became hittable.

    Attributes:
        block_hashes: Their hashes, in the order of the prefix; null blocks and blocks that no hit can use are left out.
        parent_block_hash: Hash of the block before the first one of the range, None at the start of a request.
        token_ids: Tokens of the whole range.
        block_size: Tokens per block.
        lora_id: Always None: adapters are known by name.
        medium: Where the blocks are.
        lora_name: Adapter of the request.
        extra_keys: For each hash, the untagged extra keys of its block, or None.
        group_idx: KV cache group.
        kv_cache_spec_kind: ``full_attention``, ``sliding_window`` or ``chunked_local_attention``; the facade sets it.
        kv_cache_spec_sliding_window: The window in tokens, for that kind; the facade sets it.
        locality: Whether the medium is the worker's own. This and what follows is read from other workers' events;
            this package leaves it None.
        ownership: Tier of an offloaded cache.
        session_id: Session of the request.
        lookahead_token_ids: For each hash, the tokens after its block that entered it.
    """

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


@dataclass
class BlockRemoved:
    """Blocks of one group can no longer be hit: handed out again, or evicted by id.

    The fields are those of :class:`BlockStored`.
    """

    block_hashes: list[ExternalBlockHash]
    medium: str | None = "GPU"
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass
class AllBlocksCleared:
    """The prefix cache was reset."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass
class KVEventBatch:
    """The events of one step, as they are published.

    Attributes:
        ts: When they were taken, in seconds since 1970.
        events: Oldest first.
        data_parallel_rank: Which of the replicas of a model they come from; the publisher sets it where it is None.
    """

    ts: float
    events: Sequence[KVCacheEvent]
    data_parallel_rank: int | None = None
