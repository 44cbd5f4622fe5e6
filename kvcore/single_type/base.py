"""What every kind of attention has in common: a block table for each request, and the calls that change it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

from kvcore.block_pool import BlockPool
from kvcore.blocks import KVCacheBlock
from kvcore.errors import StaleHitError
from kvcore.request import RequestId, RequestLike
from kvcore.single_type.ends import Ends
from kvcore.single_type.lookup import Lookup
from kvcore.single_type.table_checks import check_tables
from kvcore.spec import KVCacheSpec, cdiv
from kvcore.units import count_held

NEVER: Final = sys.maxsize
"""A number of tokens that no request reaches."""


class SingleTypeKVCacheManager(ABC):
    """Keeps the block tables of one KV cache group.

    A subclass takes what it needs of its spec (:meth:`read_spec`). It says which tokens its kind of attention still
    needs (:meth:`get_num_skipped_tokens`, :meth:`next_skip_at`), and how far the blocks in the index serve a new
    request (:meth:`find_longest_cache_hit`).
    The coordinator makes every call with arguments already checked; nothing here may fail half way.

    Args:
        kv_cache_spec: The group's spec.
        block_pool: Where blocks come from.
        kv_cache_group_id: Index of the group.
        enable_caching: Register full blocks.
        alignment_tokens: Every hit length is a multiple of this: the least common multiple of the groups' block sizes.
        max_blocks_per_request: Most blocks that one request holds at once.
        retain_ends: Of the blocks given back, overwrite those first that no known end of a prefix needs.

    Attributes:
        req_to_blocks: Block table of each request, by id. Append-only (rule 3), except that skipped blocks become null.
        num_cached_block: Leading blocks of each table that are registered, or never will be.
        num_skipped_block: Leading blocks of each table that are null.
        ends: The known ends, with ``retain_ends``.
    """

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        *,
        kv_cache_group_id: int,
        enable_caching: bool,
        alignment_tokens: int,
        max_blocks_per_request: int,
        retain_ends: bool = False,
    ) -> None:
        self.read_spec(kv_cache_spec)
        self.block_pool = block_pool
        self.kv_cache_group_id = kv_cache_group_id
        self.enable_caching = enable_caching
        self.alignment_tokens = alignment_tokens
        self.max_blocks_per_request = max_blocks_per_request
        self.req_to_blocks: dict[RequestId, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[RequestId, int] = {}
        self.num_skipped_block: dict[RequestId, int] = {}
        self.ends = Ends(self.block_size, alignment_tokens, self.get_num_skipped_tokens) if retain_ends else None
        self._hashes_per_block = self.block_size // block_pool.hash_block_size
        # Whether each block is registered as soon as it is full, and nothing but that has to be done.
        self._registers_each = (
            alignment_tokens == self.block_size
            and self.cacheable_mask(0, 1) is None
            and not block_pool.enable_kv_cache_events
        )
        self._lookup = Lookup(block_pool.prefix_index.table(kv_cache_group_id), self._hashes_per_block)

    def __repr__(self) -> str:
        name, group, requests = type(self).__name__, self.kv_cache_group_id, len(self.req_to_blocks)
        return f"{name}(group={group}, {self.kv_cache_spec}, requests={requests})"

    def read_spec(self, kv_cache_spec: KVCacheSpec) -> None:
        """Takes from the spec what the other methods need; called before any of them."""
        self.kv_cache_spec = kv_cache_spec
        self.block_size = kv_cache_spec.block_size

    @abstractmethod
    def find_longest_cache_hit(self, request: RequestLike, max_length: int) -> tuple[KVCacheBlock, ...]:
        """The blocks of the longest prefix, at most ``max_length`` tokens, that this group can serve from the index.

        The hit ends at a multiple of ``alignment_tokens``; its length is that of the tuple times the block size.
        Positions that no later token reads hold the null block.
        """

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no token from ``num_computed_tokens`` on will read."""
        return 0

    def next_skip_at(self, request_id: RequestId) -> int:
        """Number of computed tokens from which on one more block of the request is skipped."""
        return NEVER

    def cacheable_mask(self, first_block: int, stop_block: int) -> list[bool] | None:
        """For each block of the range, whether a hit can ever use it; None: each can."""
        return None

    def get_num_blocks_to_admit(
        self,
        num_tokens: int,
        hit_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *,
        cap: bool = False,
    ) -> int:
        """Free blocks that a request new to this group takes out of the queue to hold ``num_tokens`` tokens. O(hit
        blocks).

        Args:
            num_tokens: Tokens that need a slot, computed ones included.
            hit_blocks: Blocks the lookup found; those that are free now leave the queue when they are touched.
            total_computed_tokens: Hit tokens and external ones.
            cap: Count only what is held at once, since skipped blocks come back on the way.
        """
        num_skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        kept = [*hit_blocks[num_skipped:]]  # behind the skipped blocks, none is null
        new = max(cdiv(num_tokens, self.block_size) - max(num_skipped, len(hit_blocks)), 0)
        needed = new + count_held(kept, 0)
        # Hits that others hold too do not come back when the window leaves them, so that only the others count.
        return min(needed, self.max_blocks_per_request) if cap else needed

    def num_new_blocks(self, request_id: RequestId, num_tokens: int) -> int:
        """Blocks that a running request's table lacks to hold ``num_tokens`` tokens. O(1)."""
        lacking = -(-num_tokens // self.block_size) - len(self.req_to_blocks[request_id])
        return lacking if lacking > 0 else 0

    def get_num_blocks_to_grow(self, request_id: RequestId, num_tokens: int, *, cap: bool = False) -> int:
        """Free blocks that a running request needs to hold ``num_tokens`` tokens. O(1), with ``cap`` O(held blocks)."""
        new = self.num_new_blocks(request_id, num_tokens)
        if cap:
            # As for hits: what others hold too does not come back.
            own = count_held(self.req_to_blocks[request_id][self.num_skipped_block[request_id] :], 1)
            new = max(min(new, self.max_blocks_per_request - own), 0)
        return new

    def check_hits(self, request: RequestLike, hit_blocks: Sequence[KVCacheBlock]) -> None:
        """Makes sure that blocks found by an earlier lookup still hold what was looked up. O(hit blocks).

        Raises:
            ForeignBlockError: A block is not of this pool.
            StaleHitError: A block that the request needs is no longer registered for its prefix.
        """
        num_skipped = self.get_num_skipped_tokens(len(hit_blocks) * self.block_size) // self.block_size
        scale = self._hashes_per_block
        hashes = request.block_hashes[scale - 1 : len(hit_blocks) * scale : scale]
        for i, block in enumerate(hit_blocks):
            self.block_pool.require_own(block)
            if i < num_skipped:
                continue
            registered = not block.is_null and block.group_id == self.kv_cache_group_id
            if not registered or block.prefix_hash != hashes[i] or not self._lookup.is_real(request, i, block):
                raise StaleHitError(
                    f"{block!r} no longer holds block {i} of {request.request_id!r} in group {self.kv_cache_group_id}: "
                    "call get_computed_blocks again, and allocate_slots before anything else evicts blocks"
                )

    def add_local_computed_blocks(
        self, request_id: RequestId, hit_blocks: Sequence[KVCacheBlock], total_computed_tokens: int
    ) -> None:
        """Opens the table of a new request and takes its hits. O(hit blocks).

        Hits that external tokens have pushed out of the window are not taken. Must have been called in every group
        before any group hands out a block (rule 8).
        """
        num_skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        table = [*hit_blocks[num_skipped:]]
        self.block_pool.hold(table)
        if num_skipped:
            table = [*self.block_pool.null_blocks(num_skipped), *table]
        self.req_to_blocks[request_id] = table
        self.num_cached_block[request_id] = len(table)
        self.num_skipped_block[request_id] = num_skipped

    def append_blocks(self, request_id: RequestId, blocks: list[KVCacheBlock]) -> None:
        """Grows the table by new blocks. O(new blocks)."""
        self.req_to_blocks[request_id] += blocks

    def remove_skipped_blocks(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """Frees the blocks that no token from ``num_computed_tokens`` on reads; null takes their place. O(freed
        blocks).

        The last of them is freed first, as for a whole request.
        """
        first = self.num_skipped_block[request_id]
        table = self.req_to_blocks[request_id]
        stop = min(self.get_num_skipped_tokens(num_computed_tokens) // self.block_size, len(table))
        if stop <= first:
            return
        freed = table[first:stop]
        table[first:stop] = [self.block_pool.null_block] * len(freed)
        self.num_skipped_block[request_id] = stop
        self._give_back(request_id, first, freed)

    def cache_blocks(self, request: RequestLike, num_tokens: int) -> None:
        """Registers the full blocks of the first ``num_tokens`` tokens. O(newly full blocks)."""
        request_id = request.request_id
        num_cached = self.num_cached_block[request_id]
        num_hashed_tokens = len(request.block_hashes) * self.block_pool.hash_block_size
        if num_tokens > num_hashed_tokens:
            num_tokens = num_hashed_tokens
        # Hits are aligned, so that what lies past the last alignment boundary cannot be hit yet.
        num_full = (num_tokens - num_tokens % self.alignment_tokens) // self.block_size
        if num_full <= num_cached:
            return
        self.num_cached_block[request_id] = num_full
        if num_full == num_cached + 1 and self._registers_each:
            # One more block in decoding: the machinery for many would cost four times as much.
            table = self.req_to_blocks[request_id]
            if not table[num_cached].is_null:
                self.block_pool.prefix_index.add(
                    request, table, num_cached, self._hashes_per_block, self.kv_cache_group_id
                )
            return
        self.block_pool.register(
            request,
            self.req_to_blocks[request_id],
            num_cached,
            num_full,
            self.block_size,
            self.kv_cache_group_id,
            self.cacheable_mask(num_cached, num_full),
        )

    def free(self, request_id: RequestId) -> None:
        """Closes the table and frees its blocks, the last one first (rule 4). O(blocks)."""
        table = self.req_to_blocks.pop(request_id)
        num_cached = self.num_cached_block.pop(request_id)
        num_skipped = self.num_skipped_block.pop(request_id)
        if num_skipped:
            del table[:num_skipped]
        if self.ends is not None:
            self.ends.note(request_id, num_cached * self.block_size)
        self._give_back(request_id, num_skipped, table)
        if self.ends is not None:
            self.ends.forget(request_id)

    def _give_back(self, request_id: RequestId, first_block: int, blocks: list[KVCacheBlock]) -> None:
        """Frees blocks that have left the table at ``first_block``, the last one first."""
        if self.ends is not None:
            spent, needed = self.ends.split(request_id, first_block, blocks)
            self.block_pool.give_back_some(spent, spent=True)
            self.block_pool.give_back_some(needed, spent=False)
        else:
            self.block_pool.give_back(blocks)

    def num_slots(self, request_id: RequestId) -> int:
        """Tokens that the request's table holds. O(1)."""
        return len(self.req_to_blocks[request_id]) * self.block_size

    def next_register_at(self, request_id: RequestId) -> int:
        """Number of tokens from which on the request has a block to register. O(1)."""
        if not self.enable_caching:
            return NEVER
        next_full = (self.num_cached_block[request_id] + 1) * self.block_size
        return -(-next_full // self.alignment_tokens) * self.alignment_tokens

    def get_num_common_prefix_blocks(
        self, request_id: RequestId, num_running_requests: int, pinned: Mapping[int, int]
    ) -> int:
        """Leading blocks of the request that all running requests hold; ``pinned``: how often something else does, by
        block id."""
        return 0

    def check_invariants(self) -> None:
        """Compares the tables with their counts. O(blocks in tables).

        Raises:
            InvariantError: The first disagreement found.
        """
        check_tables(
            self.req_to_blocks,
            self.num_cached_block,
            self.num_skipped_block,
            kv_cache_group_id=self.kv_cache_group_id,
            manager=self,
        )
