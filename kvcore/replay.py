"""Runs a trace through the books, to see what a pool of some size finds under some policy.

Requests run one after another, prompts only. Each hash id is one full block, and one more token follows the last, so
that all of them can be hit (rule 6). A request takes its hits, is handed new blocks, and gives all of them back; the
answers are those of :class:`kvcore.KVCacheManager` with the same calls, at a fraction of the time: no tokens are made
up, hashed or compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from heapq import heappop, heappush

from kvcore.block_pool import BlockPool
from kvcore.blocks import KVCacheBlock
from kvcore.errors import CountError
from kvcore.eviction import PolicyChoice, policy_name
from kvcore.replay_results import Histogram, ReplayResult, TraceSummary
from kvcore.replay_trace import MOONCAKE_BLOCK_SIZE, TraceRequest

ALL_KNOWING = "all-knowing"
"""Name of the bound in results."""

_NUM_RANGES = 64
_NEVER = 1 << 62


def replay(
    requests: Iterable[TraceRequest],
    num_blocks: int,
    policy: PolicyChoice = "lru",
    *,
    block_size: int = MOONCAKE_BLOCK_SIZE,
    name: str | None = None,
) -> ReplayResult:
    """Runs a trace through a pool. O(blocks of the trace + pool); 1 to 4 microseconds a block.

    Args:
        requests: The trace; read once, request by request.
        num_blocks: Blocks of the pool beside the null block.
        policy: As for :class:`kvcore.KVCacheManager`.
        block_size: Tokens of a block, for counts in tokens.
        name: The policy's name in the result; None: its own.

    Raises:
        CountError: The pool has no block.
        ConfigError: There is no such policy.
    """
    _check_size(num_blocks)
    pool = BlockPool(num_blocks + 1, hash_block_size=1, eviction_policy=policy)
    find = pool.prefix_index.table(0).__getitem__
    serve = getattr(pool.policy, "serve", None)
    num_requests = num_refused = num_requests_hit = num_asked = num_hit = 0
    released_at = [0] * (num_blocks + 1)
    ages = [0] * _NUM_RANGES
    for request in requests:
        num_full = len(request.hash_ids)
        num_requests += 1
        num_asked += num_full
        if num_full + 1 > num_blocks:
            num_refused += 1
            continue
        hashes = [hash_id.to_bytes(8, "big") for hash_id in request.hash_ids]
        table: list[KVCacheBlock] = []
        with suppress(KeyError):  # `extend` keeps what it got before the miss
            table.extend(map(find, hashes))
        hits = len(table)
        num_hit += hits
        num_requests_hit += hits > 0
        pool.hold(table)
        new_blocks = pool.get_new_blocks(num_full + 1 - hits)
        for block in new_blocks:
            if released := released_at[block.block_id]:
                ages[(num_asked - num_full - released).bit_length()] += 1
        table += new_blocks
        if hits < num_full:
            pool.register(_Hashed(hashes), table, hits, num_full, 1, 0, None)
        if serve is not None:
            serve(request, (table,))
        for block in table:
            released_at[block.block_id] = num_asked
        released_at[table[-1].block_id] = 0  # the token after the last full block: nothing to hit
        table.reverse()
        pool.release(table)
    return ReplayResult(
        policy=name or policy_name(policy),
        num_blocks=num_blocks,
        block_size=block_size,
        num_requests=num_requests,
        num_refused=num_refused,
        num_requests_hit=num_requests_hit,
        num_blocks_asked=num_asked,
        num_blocks_hit=num_hit,
        num_tokens=num_asked * block_size + num_requests,
        num_evictions=sum(ages),
        age_at_eviction=Histogram.of(ages),
    )


def replay_all_knowing(
    requests: Sequence[TraceRequest], num_blocks: int, *, block_size: int = MOONCAKE_BLOCK_SIZE
) -> ReplayResult:
    """The bound: as :func:`replay`, under a policy that knows the rest of the trace.

    It overwrites the block whose next use is farthest away (L. Belady, 1966), of a prefix the end first. Every use of a
    block is one of those before it in its prefix, so that none of them goes before it. It need not hold a request's
    blocks while the request runs, so that no policy of a real pool comes quite as far. O(n log n) in the blocks of the
    trace.

    Raises:
        CountError: The pool has no block.
    """
    _check_size(num_blocks)
    next_uses = _next_uses(requests, num_blocks)
    cached: dict[int, tuple[int, int]] = {}  # the block's entry in the heap that counts; older ones are passed over
    heap: list[tuple[int, int, int]] = []
    released_at: dict[int, int] = {}
    ages = [0] * _NUM_RANGES
    num_refused = num_requests_hit = num_asked = num_hit = 0
    for request, uses in zip(requests, next_uses, strict=True):
        ids = request.hash_ids
        num_asked += len(ids)
        if uses is None:
            num_refused += 1
            continue
        hits = next((i for i, hash_id in enumerate(ids) if hash_id not in cached), len(ids))
        num_hit += hits
        num_requests_hit += hits > 0
        for depth, (hash_id, next_use) in enumerate(zip(ids, uses, strict=True)):
            cached[hash_id] = (-next_use, -depth)
            heappush(heap, (-next_use, -depth, hash_id))
            released_at[hash_id] = num_asked
        while len(cached) > num_blocks:
            next_use, depth, hash_id = heappop(heap)
            if cached.get(hash_id) == (next_use, depth):
                del cached[hash_id]
                ages[(num_asked - released_at[hash_id]).bit_length()] += 1
    return ReplayResult(
        policy=ALL_KNOWING,
        num_blocks=num_blocks,
        block_size=block_size,
        num_requests=len(requests),
        num_refused=num_refused,
        num_requests_hit=num_requests_hit,
        num_blocks_asked=num_asked,
        num_blocks_hit=num_hit,
        num_tokens=num_asked * block_size + len(requests),
        num_evictions=sum(ages),
        age_at_eviction=Histogram.of(ages),
    )


def summarize(requests: Iterable[TraceRequest]) -> TraceSummary:
    """What a trace is like, whatever the pool. O(blocks of the trace)."""
    num_requests = num_blocks = longest = 0
    used_at: dict[int, int] = {}
    distances = [0] * _NUM_RANGES
    for request in requests:
        ids = request.hash_ids
        for hash_id in ids:
            if (used := used_at.get(hash_id)) is not None:
                distances[(num_blocks - used).bit_length()] += 1
        num_requests += 1
        num_blocks += len(ids)
        longest = max(longest, len(ids))
        used_at.update(dict.fromkeys(ids, num_blocks))
    return TraceSummary(num_requests, num_blocks, len(used_at), longest, Histogram.of(distances))


class _Hashed:
    """What the pool reads of a request whose blocks it registers."""

    __slots__ = ("block_hashes",)

    request_id = ""
    num_tokens = num_computed_tokens = 0
    block_contents = None

    def __init__(self, block_hashes: list[bytes]) -> None:
        self.block_hashes = block_hashes


def _next_uses(requests: Sequence[TraceRequest], num_blocks: int) -> list[list[int] | None]:
    """For each request, when each of its blocks is used next, as a request's number; None for one that cannot run."""
    following: dict[int, int] = {}
    uses: list[list[int] | None] = [None] * len(requests)
    for index in range(len(requests) - 1, -1, -1):
        ids = requests[index].hash_ids
        if len(ids) + 1 <= num_blocks:
            uses[index] = [following.get(hash_id, _NEVER) for hash_id in ids]
            following.update(dict.fromkeys(ids, index))
    return uses


def _check_size(num_blocks: int) -> None:
    if not isinstance(num_blocks, int) or num_blocks < 1:
        raise CountError(f"a pool needs at least one block beside the null block, got {num_blocks!r}")
