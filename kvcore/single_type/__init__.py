"""One manager for each kind of attention: which tokens it still needs, hence which blocks."""

from kvcore.block_pool import BlockPool
from kvcore.errors import ConfigError
from kvcore.single_type.base import SingleTypeKVCacheManager
from kvcore.single_type.chunked_local import ChunkedLocalAttentionManager
from kvcore.single_type.full_attention import FullAttentionManager
from kvcore.single_type.sliding_window import SlidingWindowManager
from kvcore.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

__all__ = [
    "ChunkedLocalAttentionManager",
    "FullAttentionManager",
    "SingleTypeKVCacheManager",
    "SlidingWindowManager",
    "make_single_type_manager",
]

_MANAGERS: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
}


def make_single_type_manager(
    kv_cache_spec: KVCacheSpec,
    block_pool: BlockPool,
    *,
    kv_cache_group_id: int,
    enable_caching: bool,
    alignment_tokens: int,
    max_blocks_per_request: int,
    retain_ends: bool = False,
) -> SingleTypeKVCacheManager:
    """The manager for a spec of that kind.

    Raises:
        ConfigError: There is none.
    """
    for spec_type, manager_type in _MANAGERS.items():
        if isinstance(kv_cache_spec, spec_type):
            return manager_type(
                kv_cache_spec,
                block_pool,
                kv_cache_group_id=kv_cache_group_id,
                enable_caching=enable_caching,
                alignment_tokens=alignment_tokens,
                max_blocks_per_request=max_blocks_per_request,
                retain_ends=retain_ends,
            )
    raise ConfigError(
        f"kv_cache_spec must be one of {', '.join(t.__name__ for t in _MANAGERS)}; got {type(kv_cache_spec).__name__}"
    )
