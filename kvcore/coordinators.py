"""Which coordinator serves which model, and how the hits of several groups become one length.

A model with one KV cache group takes what that group finds. One that mixes kinds of attention has a group for each, and
a hit must end at the same token in all of them: the groups are asked in turn until none shortens it any more (rule 10).
With caching turned off, nothing is looked up at all.
"""

from __future__ import annotations

from itertools import cycle

from kvcore.blocks import KVCacheBlock
from kvcore.coordinator import GroupBlocks, KVCacheCoordinator
from kvcore.eviction import PolicyChoice
from kvcore.request import RequestLike
from kvcore.single_type import FullAttentionManager
from kvcore.spec import KVCacheConfig


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """For caching turned off: nothing is ever hit."""

    def find_longest_cache_hit(self, request: RequestLike, max_cache_hit_length: int) -> tuple[GroupBlocks, int]:
        """No blocks, 0 tokens."""
        return tuple(() for _ in self.single_type_managers), 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """For models with one KV cache group."""

    def find_longest_cache_hit(self, request: RequestLike, max_cache_hit_length: int) -> tuple[GroupBlocks, int]:
        """What the only group finds."""
        manager = self.single_type_managers[0]
        blocks = manager.find_longest_cache_hit(request, max_cache_hit_length)
        return (blocks,), len(blocks) * manager.block_size


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """For models that mix kinds of attention."""

    def find_longest_cache_hit(self, request: RequestLike, max_cache_hit_length: int) -> tuple[GroupBlocks, int]:
        """The longest hit that every group accepts (rule 10).

        Each group in turn accepts the length or shortens it; once a whole round has accepted, it stands. Lengths only
        shrink, so that this ends. A group of full attention is asked once: any shorter hit is a part of its longest.
        """
        managers = self.single_type_managers
        found: dict[int, tuple[KVCacheBlock, ...]] = {}
        length = max_cache_hit_length
        accepted = 0
        full_length = 0
        for group in cycle(self._lookup_order):
            manager = managers[group]
            if group in found and isinstance(manager, FullAttentionManager):
                found[group] = found[group][: length // manager.block_size]
            else:
                found[group] = manager.find_longest_cache_hit(request, length)
            hit_length = len(found[group]) * manager.block_size
            if isinstance(manager, FullAttentionManager):
                full_length = max(full_length, hit_length)
            accepted = accepted + 1 if hit_length == length else 1
            length = hit_length
            if accepted == len(managers):
                break
        self._parting = (request, full_length)
        return tuple([found[group] for group in range(len(managers))]), length


def make_coordinator(
    kv_cache_config: KVCacheConfig,
    max_model_len: int,
    *,
    max_in_flight_tokens: int | None = None,
    enable_caching: bool = True,
    enable_kv_cache_events: bool = False,
    hash_block_size: int | None = None,
    eviction_policy: PolicyChoice = "lru",
    window_retention: str = "all",
) -> KVCacheCoordinator:
    """The coordinator that fits: none of the prefix cache's work where caching is off, no rounds where one group is."""
    kind: type[KVCacheCoordinator]
    if not enable_caching:
        kind = KVCacheCoordinatorNoPrefixCache
    elif len(kv_cache_config.kv_cache_groups) == 1:
        kind = UnitaryKVCacheCoordinator
    else:
        kind = HybridKVCacheCoordinator
    return kind(
        kv_cache_config,
        max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        enable_caching=enable_caching,
        enable_kv_cache_events=enable_kv_cache_events,
        hash_block_size=hash_block_size,
        eviction_policy=eviction_policy,
        window_retention=window_retention,
    )
