"""A pool that requests of a trace run in, and what is counted while they do.

The calls to the pool are those of :class:`kvcore.KVCacheManager` for one group of full attention, and so are the
answers, at a fraction of the time: no tokens are made up, hashed or compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from kvcore.block_pool import BlockPool
from kvcore.blocks import KVCacheBlock
from kvcore.errors import CountError
from kvcore.eviction import PolicyChoice, policy_name
from kvcore.replay_results import Histogram, ReplayResult
from kvcore.replay_trace import TraceRequest
from kvcore.units import count_held

NUM_RANGES = 64
"""Ranges of a histogram that is being counted."""


class Running(NamedTuple):
    """A request that holds blocks."""

    request: TraceRequest
    hashes: list[bytes]
    table: list[KVCacheBlock]


class ReplayPool:
    """See the module.

    Args:
        num_blocks: Blocks beside the null block.
        policy: As for :class:`kvcore.KVCacheManager`.
        block_size: Tokens of a block.
        holds_outputs: A request holds blocks for its answer, too.
        caches_outputs: When it ends, the full ones among these can be hit.

    Raises:
        CountError: The pool has no block.
        ConfigError: There is no such policy.
    """

    def __init__(
        self, num_blocks: int, policy: PolicyChoice, *, block_size: int, holds_outputs: bool, caches_outputs: bool
    ) -> None:
        check_pool_size(num_blocks)
        self.num_waited = 0
        self._policy_choice = policy
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._holds_outputs = holds_outputs
        self._caches_outputs = caches_outputs
        self._pool = BlockPool(num_blocks + 1, hash_block_size=1, eviction_policy=policy)
        self._find = self._pool.prefix_index.table(0).__getitem__
        self._serve = getattr(self._pool.policy, "serve", None)
        self._released_at = [0] * (num_blocks + 1)
        self._ages = [0] * NUM_RANGES
        self._unknown = count()
        self._num_requests = self._num_refused = self._num_requests_hit = 0
        self._num_asked = self._num_hit = self._num_tokens = 0

    def ask(self, request: TraceRequest) -> bool:
        """Counts a request that comes; whether it fits if nothing else runs."""
        self._num_requests += 1
        self._num_asked += len(request.hash_ids)
        self._num_tokens += request.num_prompt_tokens(self._block_size)
        fits = self._num_needed(request) <= self._num_blocks
        self._num_refused += not fits
        return fits

    def start(self, request: TraceRequest) -> Running | None:
        """Gives a request its hits and new blocks; None if it does not fit now. O(its blocks)."""
        pool = self._pool
        num_full = len(request.hash_ids)
        hashes = [hash_id.to_bytes(17, "big") for hash_id in request.hash_ids]
        table: list[KVCacheBlock] = []
        with suppress(KeyError):  # `extend` keeps what it got before the miss
            table.extend(map(self._find, hashes))
        hits = min(len(table), request.num_askable)
        del table[hits:]
        num_new = self._num_needed(request) - hits
        if num_new > len(pool.policy) - count_held(table, 0):
            return None
        self._num_hit += hits
        self._num_requests_hit += hits > 0
        pool.hold(table)
        new_blocks = pool.get_new_blocks(num_new)
        now = self._num_asked - num_full
        for block in new_blocks:
            if released := self._released_at[block.block_id]:
                self._ages[(now - released).bit_length()] += 1
        table += new_blocks
        if hits < num_full:
            pool.register(_Hashed(hashes), table, hits, num_full, 1, 0, None)
        return Running(request, hashes, table)

    def finish(self, running: Running) -> None:
        """Takes the blocks of a request back. O(its blocks)."""
        request, hashes, table = running
        pool, released_at, now = self._pool, self._released_at, self._num_asked
        num_full = len(hashes)
        if self._caches_outputs:
            num_cached = request.num_cached_tokens(self._block_size, with_output=True) // self._block_size
            if num_cached > num_full:
                known = [hash_id.to_bytes(17, "big") for hash_id in request.output_ids[: num_cached - num_full]]
                # Where the trace does not say what was answered, nobody can ask for it.
                unknown = num_cached - num_full - len(known)
                hashes = [*hashes, *known, *(next(self._unknown).to_bytes(8, "big") for _ in range(unknown))]
                pool.register(_Hashed(hashes), table, num_full, num_cached, 1, 0, None)
                num_full = num_cached
        if self._serve is not None:
            self._serve(request, (table,))
        for block in table:
            released_at[block.block_id] = now
        for block in table[num_full:]:
            released_at[block.block_id] = 0  # nothing to hit
        pool.give_back(table)

    def result(self, name: str | None) -> ReplayResult:
        """What was counted; ``name`` is the policy's, None for its own."""
        return ReplayResult(
            policy=name or policy_name(self._policy_choice),
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            num_requests=self._num_requests,
            num_refused=self._num_refused,
            num_waited=self.num_waited,
            num_requests_hit=self._num_requests_hit,
            num_blocks_asked=self._num_asked,
            num_blocks_hit=self._num_hit,
            num_tokens=self._num_tokens,
            num_evictions=sum(self._ages),
            age_at_eviction=Histogram.of(self._ages),
        )

    def _num_needed(self, request: TraceRequest) -> int:
        return num_blocks_needed(request, self._block_size, with_output=self._holds_outputs)


class _Hashed:
    """What the pool reads of a request whose blocks it registers."""

    __slots__ = ("block_hashes",)

    request_id = ""
    num_tokens = num_computed_tokens = 0
    block_contents = None

    def __init__(self, block_hashes: Sequence[bytes]) -> None:
        self.block_hashes = block_hashes


def num_blocks_needed(request: TraceRequest, block_size: int, *, with_output: bool) -> int:
    """Blocks that a request holds."""
    return -(-request.num_cached_tokens(block_size, with_output=with_output) // block_size)


def check_pool_size(num_blocks: int) -> None:
    """Makes sure that a pool has blocks.

    Raises:
        CountError: It has none.
    """
    if not isinstance(num_blocks, int) or num_blocks < 1:
        raise CountError(f"a pool needs at least one block beside the null block, got {num_blocks!r}")
