"""What happened to the prefix index, for those who mirror it: routers, other workers, inspectors.

The fields are those of vLLM's KV events. Hashes are plain bytes, without the group id, which has a field of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass
class BlockRemoved:
    """Blocks of one group can no longer be hit: handed out again, or evicted by id."""

    block_hashes: list[bytes]
    medium: str | None = "GPU"
    group_idx: int | None = None


@dataclass
class AllBlocksCleared:
    """The prefix cache was reset."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
