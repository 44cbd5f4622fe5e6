"""One hit length for all KV cache groups, and the calls of the facade fanned out to them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence

from kvcore.block_pool import BlockPool
from kvcore.blocks import KVCacheBlock
from kvcore.errors import ConfigError
from kvcore.eviction import PolicyChoice
from kvcore.request import RequestId, RequestLike
from kvcore.single_type import FullAttentionManager, make_single_type_manager
from kvcore.single_type.base import NEVER
from kvcore.spec import FullAttentionSpec, KVCacheConfig, cdiv

GroupBlocks = tuple[Sequence[KVCacheBlock], ...]
"""Blocks for each KV cache group."""


class KVCacheCoordinator(ABC):
    """Holds the pool and a manager for each group.

    Args:
        kv_cache_config: The groups and the size of the pool.
        max_model_len: Longest sequence, in tokens.
        max_in_flight_tokens: Most tokens of one request in one step, None for the whole sequence.
        enable_caching: Register full blocks for prefix hits.
        enable_kv_cache_events: Keep events.
        hash_block_size: Tokens per hash of the requests; None: the greatest common divisor of the groups' block sizes.
        eviction_policy: As for the pool.
        window_retention: "all" or "ends", see :class:`kvcore.KVCacheManager`.

    Raises:
        ConfigError: The hash block size does not divide each group's block size, or no such retention.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        max_in_flight_tokens: int | None,
        enable_caching: bool,
        enable_kv_cache_events: bool,
        hash_block_size: int | None,
        eviction_policy: PolicyChoice,
        window_retention: str,
    ) -> None:
        if window_retention not in ("all", "ends"):
            raise ConfigError(f'window_retention must be "all" or "ends", got {window_retention!r}')
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        block_sizes = [spec.block_size for spec in specs]
        if hash_block_size is None:
            hash_block_size = math.gcd(*block_sizes)
        if any(size % hash_block_size for size in block_sizes):
            raise ConfigError(
                f"hash_block_size must divide the block size of every group ({', '.join(map(str, block_sizes))}), "
                f"got {hash_block_size}"
            )
        self.kv_cache_config = kv_cache_config
        self.hash_block_size = hash_block_size
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events=enable_kv_cache_events,
            eviction_policy=eviction_policy,
        )
        self.single_type_managers = tuple(
            make_single_type_manager(
                spec,
                self.block_pool,
                kv_cache_group_id=group_id,
                enable_caching=enable_caching,
                alignment_tokens=math.lcm(*block_sizes),
                max_blocks_per_request=spec.max_blocks_per_request(max_model_len, max_in_flight_tokens),
                retain_ends=window_retention == "ends" and not isinstance(spec, FullAttentionSpec),
            )
            for group_id, spec in enumerate(specs)
        )
        # Full attention first: its scan stops at the first miss, and bounds what the others have to look at.
        self._lookup_order = sorted(
            range(len(specs)), key=lambda group: not isinstance(self.single_type_managers[group], FullAttentionManager)
        )
        self._serve = getattr(self.block_pool.policy, "serve", None)
        # The last request looked up, and how far its hit would have gone with full attention alone.
        self._parting: tuple[RequestLike, int] | None = None

    @abstractmethod
    def find_longest_cache_hit(self, request: RequestLike, max_cache_hit_length: int) -> tuple[GroupBlocks, int]:
        """Blocks for each group, and the tokens they cover: the same number in all groups."""

    def get_num_blocks_to_admit(
        self, num_tokens: int, hit_blocks: GroupBlocks, total_computed_tokens: int, *, cap: bool = False
    ) -> int:
        """Free blocks that a new request takes, over all groups. See :class:`SingleTypeKVCacheManager`."""
        needed = 0
        for manager, blocks in zip(self.single_type_managers, hit_blocks, strict=True):
            needed += manager.get_num_blocks_to_admit(num_tokens, blocks, total_computed_tokens, cap=cap)
        return needed

    def has_room(
        self,
        num_tokens: int,
        hit_blocks: GroupBlocks,
        total_computed_tokens: int,
        num_free_blocks: int,
        *,
        cap: bool = False,
    ) -> bool:
        """Whether a new request fits into ``num_free_blocks``. O(groups) if it does with none of its hits counted, else
        O(hit blocks)."""
        most = sum([cdiv(num_tokens, manager.block_size) for manager in self.single_type_managers])
        if most <= num_free_blocks:
            return True
        return self.get_num_blocks_to_admit(num_tokens, hit_blocks, total_computed_tokens, cap=cap) <= num_free_blocks

    def get_num_blocks_to_grow(self, request_id: RequestId, num_tokens: int, *, cap: bool = False) -> int:
        """Free blocks that a running request takes, over all groups."""
        return sum(
            [manager.get_num_blocks_to_grow(request_id, num_tokens, cap=cap) for manager in self.single_type_managers]
        )

    def admit(
        self,
        request: RequestLike,
        hit_blocks: GroupBlocks,
        total_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Opens the tables of a new request: hits in every group first, then blocks for external tokens (rule 8)."""
        request_id = request.request_id
        for manager, blocks in zip(self.single_type_managers, hit_blocks, strict=True):
            manager.add_local_computed_blocks(request_id, blocks, total_computed_tokens)
            if manager.ends is not None:
                manager.ends.note(request_id, len(blocks) * manager.block_size)
                manager.ends.note(request_id, request.num_tokens)
                if self._parting is not None and self._parting[0] is request:
                    manager.ends.note(request_id, self._parting[1])
        self._parting = None  # else a request would live on after its end
        if num_external_computed_tokens:
            self.append_new_blocks(request_id, self.num_new_blocks(request_id, total_computed_tokens))

    def num_new_blocks(self, request_id: RequestId, num_tokens: int) -> list[int]:
        """For each group, the blocks that the request's table lacks to hold ``num_tokens`` tokens. O(groups)."""
        counts = []
        for manager in self.single_type_managers:
            counts.append(manager.num_new_blocks(request_id, num_tokens))
        return counts

    def append_new_blocks(self, request_id: RequestId, num_new_blocks: Sequence[int]) -> GroupBlocks:
        """Grows the tables by so many blocks in each group; the new blocks for each group. O(groups + new blocks).

        That so many are free is for the caller to see to.
        """
        groups = self.block_pool.hand_out(num_new_blocks)
        for manager, blocks in zip(self.single_type_managers, groups, strict=True):
            manager.append_blocks(request_id, blocks)
        return tuple(groups)

    def cache_blocks(self, request: RequestLike, num_tokens: int) -> None:
        """Registers the full blocks among the first ``num_tokens`` tokens, if caching is on."""
        if self.block_pool.enable_caching:
            for manager in self.single_type_managers:
                manager.cache_blocks(request, num_tokens)

    def tell_policy(self, request: RequestLike) -> None:
        """Says that blocks of a request are about to come back, if the policy wants to know whose they are."""
        if self._serve is not None:
            self._serve(request, self.get_blocks(request.request_id))

    def remove_skipped_blocks(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """Frees what no later token reads."""
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, num_computed_tokens)

    def free(self, request_id: RequestId) -> None:
        """Closes the tables and frees their blocks."""
        for manager in self.single_type_managers:
            manager.free(request_id)

    # Loops, here and in num_new_blocks, since decoding asks these for each new block: `min([... for ...])` takes three
    # times as long with one group, and twice with six.

    def num_slots(self, request_id: RequestId) -> int:
        """Tokens that the request's tables hold, in every group. O(groups)."""
        least = NEVER
        for manager in self.single_type_managers:
            limit = manager.num_slots(request_id)
            if limit < least:
                least = limit
        return least

    def next_register_at(self, request_id: RequestId) -> int:
        """Number of tokens from which on the request has a block to register. O(groups)."""
        least = NEVER
        for manager in self.single_type_managers:
            limit = manager.next_register_at(request_id)
            if limit < least:
                least = limit
        return least

    def next_skip_at(self, request_id: RequestId) -> int:
        """Number of computed tokens from which on the request has a block to give back. O(groups)."""
        least = NEVER
        for manager in self.single_type_managers:
            limit = manager.next_skip_at(request_id)
            if limit < least:
                least = limit
        return least

    def get_blocks(self, request_id: RequestId) -> GroupBlocks:
        """The block tables themselves: they change as the request runs."""
        return tuple([manager.req_to_blocks[request_id] for manager in self.single_type_managers])

    def check_invariants(self, pinned: Mapping[int, int] | None = None) -> None:
        """Compares the tables of every group with their counts and with the pool. O(pool + blocks in tables).

        Args:
            pinned: How often each block id is held by something that is no request.
        """
        holders = Counter(pinned)
        for manager in self.single_type_managers:
            manager.check_invariants()
            for table in manager.req_to_blocks.values():
                holders.update(block.block_id for block in table if not block.is_null)
        self.block_pool.check_invariants(holders)
