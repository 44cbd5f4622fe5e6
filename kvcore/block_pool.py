"""The pool: hands blocks out, shares them, makes them hittable, and takes them back."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, cast

from kvcore.blocks import FreeKVCacheBlockQueue, KVCacheBlock
from kvcore.errors import (
    ConfigError,
    CountError,
    DoubleFreeError,
    DuplicateBlockError,
    ForeignBlockError,
    InvariantError,
    OutOfBlocksError,
)
from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvcore.eviction import LRU, PolicyChoice, free_block_queue, make_policy
from kvcore.extra_keys import untagged
from kvcore.prefix_index import PrefixIndex
from kvcore.request import EventRequest, RequestLike
from kvcore.spec import require_positive


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
        self.blocks = _make_blocks(num_gpu_blocks)
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self._null_blocks: tuple[KVCacheBlock, ...] = ()
        self.policy = make_policy(eviction_policy, self.blocks[1:])
        self.free_block_queue = free_block_queue(self.policy)
        self._leaves_dead = isinstance(self.policy, LRU)
        self.prefix_index = PrefixIndex()
        self._events: list[KVCacheEvent] = []

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

    # -- handing out and taking back ------------------------------------------------------------------------------

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
        return self.hand_out(num_blocks)

    def hand_out(self, num_blocks: int) -> list[KVCacheBlock]:
        """As :meth:`get_new_blocks`, without its checks: for the coordinator, which knows that they are free."""
        blocks = self.policy.take(num_blocks)
        self._unregister(blocks)
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Takes one more reference to each block, out of the free queue if need be. Null blocks are passed over. O(n).

        Raises:
            ForeignBlockError: A block is not of this pool; none was touched.
        """
        blocks = [block for block in blocks if block is not self.null_block]
        for block in blocks:
            self.require_own(block)
        free = dict.fromkeys(block for block in blocks if not block.ref_cnt)  # each once, however often it is touched
        self.policy.reuse([*free])
        for block in blocks:
            block.ref_cnt += 1

    def hold(self, blocks: Sequence[KVCacheBlock]) -> None:
        """As :meth:`touch`, without its checks: for the managers, which take what they looked up. No block twice, no
        null blocks."""
        free = []
        for block in blocks:
            if block.ref_cnt:
                block.ref_cnt += 1
            else:
                block.ref_cnt = 1
                free.append(block)
        if free:
            self.policy.reuse(free)

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
        self.release(blocks)

    def release(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """As :meth:`free_blocks`, without its checks: for the managers, which free what they hold. No null blocks."""
        unhashed = []
        hashed = []
        for block in ordered_blocks:
            block.ref_cnt = held = block.ref_cnt - 1
            if not held:
                if block.prefix_hash is None:
                    unhashed.append(block)
                else:
                    hashed.append(block)
        self.policy.release(unhashed, hashed)

    def release_spent(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """As :meth:`release`, for blocks that are to be overwritten before all others, though they can be hit."""
        freed = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                freed.append(block)
        self.policy.release(freed, ())

    def require_own(self, block: KVCacheBlock) -> None:
        """Makes sure that a block is of this pool. O(1).

        Raises:
            ForeignBlockError: It is not.
        """
        if not 0 <= block.block_id < len(self.blocks) or self.blocks[block.block_id] is not block:
            raise ForeignBlockError(
                f"{block!r} is not a block of this pool; use the blocks that its own calls returned"
            )

    # -- the prefix index -----------------------------------------------------------------------------------------

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
        """Registers ``blocks[num_cached_blocks:num_full_blocks]`` of a request. O(blocks registered).

        Args:
            request: Whose blocks they are.
            blocks: Its block table in the group.
            num_cached_blocks: Leading blocks that are registered already.
            num_full_blocks: Leading blocks that are full.
            block_size: Tokens per block of the group, a multiple of the hash block size.
            kv_cache_group_id: The group.
            block_mask: For each block of the range, whether a hit can ever use it; None: all.

        Raises:
            CountError: The range does not lie within the blocks and the request's hashes; nothing was registered.
            ForeignBlockError: A block is not of this pool; nothing was registered.
            DuplicateBlockError: A block is registered already; nothing was registered.
        """
        num_hashed_blocks = len(request.block_hashes) * self.hash_block_size // block_size
        if not 0 <= num_cached_blocks <= num_full_blocks <= min(len(blocks), num_hashed_blocks):
            raise CountError(
                f"cannot register blocks {num_cached_blocks} to {num_full_blocks} of {request.request_id!r}: "
                f"it has {len(blocks)} blocks, and hashes for {num_hashed_blocks}"
            )
        for block in blocks[num_cached_blocks:num_full_blocks]:
            self.require_own(block)
            if block.prefix_hash is not None:
                raise DuplicateBlockError(f"{block!r} is registered already: count it among num_cached_blocks")
        mask = block_mask or repeat(True, num_full_blocks - num_cached_blocks)
        new_blocks = blocks[num_cached_blocks:num_full_blocks]
        mask = [use and not block.is_null for block, use in zip(new_blocks, mask, strict=True)]
        if mask:
            self.register(request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, mask)

    def register(
        self,
        request: RequestLike,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None,
    ) -> None:
        """As :meth:`cache_full_blocks`, without its checks: for the managers, which know.

        At least one block; null blocks only at the start, or masked out.
        """
        scale = block_size // self.hash_block_size
        indices = range(num_cached_blocks * scale + scale - 1, num_full_blocks * scale, scale)
        new_blocks = blocks[num_cached_blocks:num_full_blocks]
        usable = None
        if block_mask is not None or new_blocks[0].is_null:
            mask = block_mask or repeat(True, len(new_blocks))
            usable = [use and not block.is_null for block, use in zip(new_blocks, mask, strict=True)]
        stored = self.prefix_index.add_n(request, new_blocks, indices, kv_cache_group_id, usable)
        if self.enable_kv_cache_events:
            blocks_range = range(num_cached_blocks, num_full_blocks)
            self._events.append(
                _stored_event(cast(EventRequest, request), stored, blocks_range, scale, block_size, kv_cache_group_id)
            )

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Takes blocks out of the prefix index; those in use stay with their requests. O(n).

        Raises:
            ForeignBlockError: An id is not of this pool; nothing was evicted.
        """
        ids: list[Any] = list(block_ids)  # compiled code would refuse other types without a word on what is right
        for block_id in ids:
            if not isinstance(block_id, int) or not 0 <= block_id < len(self.blocks):
                raise ForeignBlockError(f"block ids of this pool go from 0 to {len(self.blocks) - 1}, got {block_id!r}")
        blocks = [self.blocks[block_id] for block_id in dict.fromkeys(ids)]
        dead = [block for block in blocks if not block.ref_cnt and block.prefix_hash is not None]
        self._unregister(blocks)
        self._bury(dead)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block, if no block is held; else changes nothing and answers False. O(cached blocks)."""
        if self.get_num_free_blocks() != len(self.blocks) - 1:
            return False
        dead = [] if self._leaves_dead else [block for block in self.policy if block.prefix_hash is not None]
        self.prefix_index.clear()
        self._bury(dead)
        if self.enable_kv_cache_events:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call, oldest first. O(1)."""
        events, self._events = self._events, []
        return events

    def _bury(self, dead: list[KVCacheBlock]) -> None:
        """Free blocks that have left the index go before all others. Under `lru` they stay where they are, as in vLLM:
        there they come to the front by themselves."""
        if dead and not self._leaves_dead:
            self.policy.reuse(dead)
            self.policy.release(dead, ())

    def _unregister(self, blocks: list[KVCacheBlock]) -> None:
        if self.enable_kv_cache_events:
            for block in dict.fromkeys(blocks):
                if block.prefix_hash is not None:
                    self._events.append(BlockRemoved([block.prefix_hash], group_idx=block.group_id))
        self.prefix_index.remove_n(blocks)

    # -- checking -------------------------------------------------------------------------------------------------

    def check_invariants(self, holders: Mapping[int, int] | None = None) -> None:
        """Compares every block with the queue, the index, and with who holds it. O(pool).

        Args:
            holders: How many requests hold each block id; None to leave that out.

        Raises:
            InvariantError: The first disagreement found.
        """
        null = self.null_block
        if not null.is_null or null.ref_cnt or null.prefix_hash is not None or null.next_free_block is not None:
            raise InvariantError(f"the null block is held, registered or queued: {null!r}")
        queued = self._check_queue()
        for block in self.blocks[1:]:
            if block.is_null:
                raise InvariantError(f"block {block.block_id} says it is the null block")
            if (block.ref_cnt == 0) != (block.block_id in queued) or block.ref_cnt < 0:
                raise InvariantError(
                    f"{block!r} is {'in' if block.block_id in queued else 'not in'} the free queue; "
                    "blocks with ref_cnt 0, and no others, belong there"
                )
            if holders is not None and block.ref_cnt != holders.get(block.block_id, 0):
                raise InvariantError(f"{block!r} is held by {holders.get(block.block_id, 0)} block tables")
        self.prefix_index.check_invariants(self.blocks)

    def _check_queue(self) -> set[int]:
        queued: set[int] = set()
        linked = isinstance(self.free_block_queue, FreeKVCacheBlockQueue)
        before = None
        for block in self.free_block_queue:
            if block.block_id in queued or (linked and before is not None and block.prev_free_block is not before):
                raise InvariantError(f"the free queue is linked wrongly at {block!r}")
            queued.add(block.block_id)
            before = block
        if len(queued) != self.free_block_queue.num_free_blocks:
            raise InvariantError(f"the free queue holds {len(queued)} blocks and counts {len(self.free_block_queue)}")
        return queued


def _make_blocks(count: int) -> list[KVCacheBlock]:
    """All blocks of a pool, with the garbage collector off meanwhile.

    It would go through the blocks made so far again and again, and find nothing: with it on, a million blocks take
    three times as long.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return [KVCacheBlock(block_id) for block_id in range(count)]
    finally:
        if was_enabled:
            gc.enable()


def _stored_event(
    request: EventRequest, stored: Sequence[int], blocks: range, scale: int, block_size: int, group_id: int
) -> BlockStored:
    """The event for those of a group's ``blocks`` that end with the hashes ``stored``."""
    extra_keys = request.extra_keys
    keys = extra_keys.of_blocks(blocks.start, blocks.stop, block_size)
    hashes = request.block_hashes
    return BlockStored(
        block_hashes=[hashes[i] for i in stored],
        parent_block_hash=hashes[blocks.start * scale - 1] if blocks.start else None,
        token_ids=list(request.token_ids[blocks.start * block_size : blocks.stop * block_size]),
        block_size=block_size,
        lora_name=extra_keys.lora.name if extra_keys.lora else None,
        extra_keys=[untagged(keys[i // scale]) if i // scale in keys else None for i in stored] or None,
        group_idx=group_id,
    )
