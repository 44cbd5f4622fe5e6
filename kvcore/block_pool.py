"""The pool: hands blocks out, shares them, makes them hittable, and takes them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, groupby, repeat
from typing import Any, cast

from kvcore.block_run import BlockRun
from kvcore.blocks import KVCacheBlock, Unit, make_blocks
from kvcore.errors import (
    ConfigError,
    CountError,
    DoubleFreeError,
    DuplicateBlockError,
    ForeignBlockError,
    OutOfBlocksError,
    shown,
)
from kvcore.event_log import EventLog
from kvcore.events import KVCacheEvent
from kvcore.eviction import LRU, PolicyChoice, free_block_queue, make_policy
from kvcore.policy_units import PolicyUnits
from kvcore.pool_checks import check_pool
from kvcore.prefix_index import PrefixIndex
from kvcore.request import EventRequest, RequestLike
from kvcore.run_queue import RunQueue
from kvcore.spec import require_positive
from kvcore.units import clear_notes, joined, place_in_run, unit_of, units_of, units_with_repeats

MAX_LOOSE_BLOCKS = 3
"""So many blocks of one call, at most, stay by themselves: a run of them would cost more than it saves."""


class BlockPool:
    """All blocks of a cache, whatever group they serve at the moment.

    A block is in one of two places: held by ``ref_cnt`` requests, or free and in the policy's queue. Either way it may
    be registered in the prefix index; it leaves the index only when it is handed out again, evicted by id, or the cache
    is reset (rule 4).

    Args:
        num_gpu_blocks: Blocks, the null block included.
        enable_caching: Register full blocks for prefix hits.
        hash_block_size: Tokens per hash of the requests.
        enable_kv_cache_events: Keep :mod:`kvcore.events` until :meth:`take_events`.
        eviction_policy: Which free block to overwrite next: a name of :data:`kvcore.eviction.POLICIES`, a policy, or
            a class of policies.

    Attributes:
        blocks: Every block, at the index of its id.
        null_block: Block 0, the placeholder: never held, freed or registered (rule 2).
        prefix_index: The registered blocks.
        free_block_queue: The free blocks, next victim first.

    Raises:
        ConfigError: Fewer than 2 blocks, or no such policy.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool = True,
        hash_block_size: int = 16,
        *,
        enable_kv_cache_events: bool = False,
        eviction_policy: PolicyChoice = "lru",
    ) -> None:
        if not isinstance(num_gpu_blocks, int) or num_gpu_blocks < 2:
            raise ConfigError(f"a pool needs at least 2 blocks (block 0 is the null block), got {num_gpu_blocks!r}")
        require_positive(hash_block_size=hash_block_size)
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.blocks = make_blocks(num_gpu_blocks)
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self._null_blocks: tuple[KVCacheBlock, ...] = ()
        self.policy = make_policy(eviction_policy)
        self._free: RunQueue | PolicyUnits
        if type(self.policy) is LRU:
            self._free = self.policy.serve_runs(BlockRun(self.blocks[:0:-1]))  # overwritten from its end
        else:
            self.policy.release(self.blocks[1:], ())
            self._free = PolicyUnits(self.policy)
        self.free_block_queue = free_block_queue(self.policy)
        self._leaves_dead = isinstance(self.policy, LRU)
        self.prefix_index = PrefixIndex()
        self._event_log = EventLog()

    def __repr__(self) -> str:
        return (
            f"BlockPool(num_gpu_blocks={len(self.blocks)}, free={self.get_num_free_blocks()}, "
            f"cached={len(self.prefix_index)}, enable_caching={self.enable_caching})"
        )

    def get_num_free_blocks(self) -> int:
        """Blocks nobody holds, cached ones included. O(1)."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the pool that is held, from 0 to 1, the null block left out. O(1)."""
        return 1.0 - self.get_num_free_blocks() / (len(self.blocks) - 1)

    def null_blocks(self, count: int) -> tuple[KVCacheBlock, ...]:
        """The null block ``count`` times. O(count), or O(1) if as many were asked for last."""
        if len(self._null_blocks) != count:
            self._null_blocks = (self.null_block,) * count
        return self._null_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes the policy's next victims, out of the index too, with a reference count of 1. O(num_blocks).

        Raises:
            CountError: The count is negative or no whole number.
            OutOfBlocksError: Fewer are free; none is taken.
        """
        if not isinstance(num_blocks, int) or num_blocks < 0:
            raise CountError(f"num_blocks must be a whole number and not negative, got {num_blocks!r}")
        if num_blocks > self.get_num_free_blocks():
            raise OutOfBlocksError(
                f"{num_blocks} blocks asked for, {self.get_num_free_blocks()} are free: "
                "check get_num_free_blocks() first, and preempt a request if they are needed"
            )
        return self.hand_out([num_blocks])[0]

    def hand_out(self, counts: Sequence[int]) -> list[list[KVCacheBlock]]:
        """As :meth:`get_new_blocks` for each of some block tables, without its checks: for the coordinator, which knows
        that so many are free. The same blocks in the same order as one call for each."""
        if len(counts) == 1 and counts[0] == 1:
            # One more block in decoding: a third of the time.
            block = self._take_one()
            block.run = None
            block.num_holders = 1
            return [[block]]
        taken = self._take(sum(counts))
        groups = []
        start = 0
        for count in counts:
            blocks = taken[start : start + count] if len(counts) > 1 else taken
            if count > MAX_LOOSE_BLOCKS:
                BlockRun([*blocks], 1)
            else:
                for block in blocks:
                    block.run = None
                    block.num_holders = 1
            groups.append(blocks)
            start += count
        return groups

    def _take(self, num_blocks: int) -> list[KVCacheBlock]:
        """The policy's next victims, out of the index."""
        taken = []
        for blocks, hashes, group_id in self._free.take(num_blocks):
            if hashes is not None:
                self._leave_index(blocks, hashes, group_id)
            taken += blocks
        return taken

    def _take_one(self) -> KVCacheBlock:
        """The policy's next victim, out of the index."""
        block, prefix_hash, group_id = self._free.take_one()
        if prefix_hash is not None:
            self._leave_index([block], [prefix_hash], group_id)
        return block

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Takes one more reference to each block, out of the free queue if need be. Null blocks are passed over. O(n).

        Raises:
            ForeignBlockError: A block is not of this pool; none was touched.
        """
        blocks = [block for block in blocks if block is not self.null_block]
        for block in blocks:
            self.require_own(block)
        self._hold(units_with_repeats(blocks))

    def hold(self, blocks: list[KVCacheBlock]) -> None:
        """As :meth:`touch`, without its checks: for the managers, which take what they looked up. No block twice, no
        null blocks."""
        self._hold(units_of(blocks))

    def _hold(self, units: list[Unit]) -> None:
        free = []
        for unit in units:
            if not unit.num_holders:
                free.append(unit)
            unit.num_holders += 1
        if free:
            self._free.reuse(free)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Gives back one reference to each block, the one to overwrite first in front. Null blocks are passed over.
        O(n).

        Raises:
            ForeignBlockError: A block is not of this pool; nothing was freed.
            DoubleFreeError: A block would be freed more often than it is held; nothing was freed.
        """
        blocks = [block for block in ordered_blocks if block is not self.null_block]
        for block in blocks:
            self.require_own(block)
        for block, times in Counter(blocks).items():
            if times > block.ref_cnt:
                raise DoubleFreeError(
                    f"block {block.block_id} is held {block.ref_cnt} times and cannot be freed {times} times: "
                    "free each block once for every get_new_blocks or touch"
                )
        self._release(units_with_repeats(blocks[::-1]))

    def give_back(self, blocks: list[KVCacheBlock]) -> None:
        """Gives back one reference to each block, the last block first (rule 4), without the checks of
        :meth:`free_blocks`: for the managers, which free what they hold.

        Args:
            blocks: A part of what somebody holds, in its order, nothing left out; no null blocks.
        """
        if len(blocks) == 1:
            # What a window leaves in decoding: half the time.
            unit = unit_of(blocks[0])
            unit.num_holders -= 1
            if not unit.num_holders:
                if unit.is_hashed:
                    self._free.release([], [unit])
                else:
                    self._free.release([unit], [])
            return
        self._release(units_of(blocks, as_held=True))

    def give_back_some(self, blocks: list[KVCacheBlock], *, spent: bool) -> None:
        """As :meth:`give_back`, for blocks between which others stay; ``spent``: they are to be overwritten before all
        others, though they can be hit."""
        self._release(units_of(blocks), spent=spent)

    def _release(self, units: list[Unit], *, spent: bool = False) -> None:
        unhashed = []
        hashed = []
        for unit in reversed(units):
            unit.num_holders = held = unit.num_holders - 1
            if not held:
                if unit.is_hashed and not spent:
                    hashed.append(unit)
                else:
                    unhashed.append(unit)
        if len(hashed) > 1:
            hashed = joined(hashed[::-1])[::-1]
        if unhashed or hashed:
            self._free.release(unhashed, hashed)

    def require_own(self, block: KVCacheBlock) -> None:
        """Makes sure that a block is of this pool. O(1).

        Raises:
            ForeignBlockError: It is not.
        """
        if not 0 <= block.block_id < len(self.blocks) or self.blocks[block.block_id] is not block:
            raise ForeignBlockError(
                f"{block!r} is not a block of this pool; use the blocks that its own calls returned"
            )

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: Sequence[int]) -> list[KVCacheBlock] | None:
        """The block of each group registered under a prefix hash; None if one of them has none. O(groups)."""
        blocks = [self.prefix_index.get(block_hash, group_id) for group_id in kv_cache_group_ids]
        return None if None in blocks else cast("list[KVCacheBlock]", blocks)

    def cache_full_blocks(
        self,
        request: RequestLike,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """Registers ``blocks[num_cached_blocks:num_full_blocks]`` of a request. O(blocks).

        Args:
            request: Whose blocks they are.
            blocks: Its block table in the group.
            num_cached_blocks: Leading blocks that are registered already.
            num_full_blocks: Leading blocks that are full.
            block_size: Tokens per block of the group, a multiple of the hash block size.
            kv_cache_group_id: The group.
            block_mask: For each block of the range, whether a hit can ever use it; None: all.

        Raises:
            ConfigError: The block size is no multiple of the hash block size; nothing was registered.
            CountError: The range does not lie within the blocks and the request's hashes; nothing was registered.
            ForeignBlockError: A block is not of this pool; nothing was registered.
            DuplicateBlockError: A block is registered already, or comes twice; nothing was registered.
        """
        if block_size < 1 or block_size % self.hash_block_size:
            raise ConfigError(f"block_size must be a multiple of {self.hash_block_size}, got {block_size}")
        num_hashed_blocks = len(request.block_hashes) * self.hash_block_size // block_size
        if not 0 <= num_cached_blocks <= num_full_blocks <= min(len(blocks), num_hashed_blocks):
            raise CountError(
                f"cannot register blocks {num_cached_blocks} to {num_full_blocks} of {request.request_id!r}: "
                f"it has {len(blocks)} blocks, and hashes for {num_hashed_blocks}"
            )
        new_blocks = [block for block in blocks[num_cached_blocks:num_full_blocks] if block is not self.null_block]
        for block in new_blocks:
            self.require_own(block)
            if block.prefix_hash is not None:
                raise DuplicateBlockError(f"{block!r} is registered already: count it among num_cached_blocks")
        for block, times in Counter(new_blocks).items():
            if times > 1:
                raise DuplicateBlockError(f"{block!r} cannot hold {times} blocks of one request")
        if num_full_blocks > num_cached_blocks:
            mask = block_mask or [True] * (num_full_blocks - num_cached_blocks)
            self.register(request, [*blocks], num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, mask)

    def register(
        self,
        request: RequestLike,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None,
    ) -> None:
        """As :meth:`cache_full_blocks`, without its checks: for the managers, which know.

        At least one block; without a mask, null blocks only at the start.
        """
        scale = block_size // self.hash_block_size
        positions: Sequence[int] = range(num_cached_blocks, num_full_blocks)
        new_blocks = blocks[num_cached_blocks:num_full_blocks]
        if block_mask is not None or new_blocks[0].is_null:
            mask = block_mask or repeat(True, len(new_blocks))
            usable = [use and not block.is_null for block, use in zip(new_blocks, mask, strict=True)]
            new_blocks = [*compress(new_blocks, usable)]
            positions = [*compress(positions, usable)]
        stored: Sequence[int] = ()
        if len(new_blocks) == 1:
            if self.prefix_index.add(request, blocks, positions[0], scale, kv_cache_group_id):
                stored = positions
        elif new_blocks:
            stored = self.prefix_index.add_n(request, new_blocks, positions, scale, kv_cache_group_id)
        if self.enable_kv_cache_events:
            registered = range(num_cached_blocks, num_full_blocks)
            self._event_log.add_stored(
                cast(EventRequest, request), stored, registered, scale, block_size, kv_cache_group_id
            )

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Takes blocks out of the prefix index; those in use stay with their requests. O(n).

        Raises:
            ForeignBlockError: An id is not of this pool; nothing was evicted.
        """
        ids: list[Any] = list(block_ids)  # compiled code would refuse other types without a word on what is right
        for block_id in ids:
            if not isinstance(block_id, int) or not 0 <= block_id < len(self.blocks):
                raise ForeignBlockError(
                    f"block ids of this pool go from 0 to {len(self.blocks) - 1}, got {shown(block_id)}"
                )
        blocks = [self.blocks[block_id] for block_id in dict.fromkeys(ids)]
        blocks = [block for block in blocks if block.prefix_hash is not None]
        for group_id, of_group in groupby(blocks, lambda block: block.group_id):
            some = [*of_group]
            self._leave_index(some, [cast(bytes, block.prefix_hash) for block in some], group_id)
        for unit in units_of(sorted(blocks, key=place_in_run)):
            clear_notes(unit)
        self._bury([block for block in blocks if not block.ref_cnt])

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block, if no block is held; else changes nothing and answers False. O(cached blocks)."""
        if self.get_num_free_blocks() != len(self.blocks) - 1:
            return False
        dead = [] if self._leaves_dead else [block for block in self.policy if block.prefix_hash is not None]
        self.prefix_index.clear()
        self._bury(dead)
        if self.enable_kv_cache_events:
            self._event_log.add_cleared()
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call, oldest first. O(1)."""
        return self._event_log.take()

    def _bury(self, dead: list[KVCacheBlock]) -> None:
        """Free blocks that have left the index go before all others. Under `lru` they stay where they are, as in vLLM:
        there they come to the front by themselves."""
        if dead and not self._leaves_dead:
            self.policy.reuse(dead)
            self.policy.release(dead, ())

    def _leave_index(self, blocks: list[KVCacheBlock], hashes: list[bytes], group_id: int) -> None:
        """Takes blocks of a group out of the index."""
        if self.enable_kv_cache_events:
            self._event_log.add_removed(hashes, group_id)
        self.prefix_index.remove_n(blocks, hashes, group_id)

    def check_invariants(self, holders: Mapping[int, int] | None = None) -> None:
        """Compares every block with the queue, the index, and with who holds it. O(pool).

        Args:
            holders: How many requests hold each block id; None to leave that out.

        Raises:
            InvariantError: The first disagreement found.
        """
        check_pool(self.blocks, self.free_block_queue, holders)
        self.prefix_index.check_invariants(self.blocks)
