"""What no policy can beat: a pool that knows the rest of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from kvcore.replay_pool import NUM_RANGES, check_pool_size, num_blocks_needed
from kvcore.replay_results import Histogram, ReplayResult
from kvcore.replay_trace import MOONCAKE_BLOCK_SIZE, TraceRequest

ALL_KNOWING = "all-knowing"
"""Name of the bound in results."""

_NEVER = 1 << 62


def replay_all_knowing(
    requests: Sequence[TraceRequest],
    num_blocks: int,
    *,
    block_size: int = MOONCAKE_BLOCK_SIZE,
    outputs: str = "ignore",
) -> ReplayResult:
    """The bound: as :func:`kvcore.replay.replay`, under a policy that knows the rest of the trace.

    It overwrites the block whose next use is farthest away (L. Belady, 1966), of a prefix the end first. A block that
    will be filled again before anyone asks for it is of no use until then. Every use of a block is one of those before
    it in its prefix, so that none of them goes before it. It need not hold a request's blocks while the request runs,
    however many run at once, so that no policy of a real pool comes quite as far. O(n log n) in the blocks of the
    trace.

    Raises:
        CountError: The pool has no block.
    """
    check_pool_size(num_blocks)
    with_output = outputs != "ignore"
    runs = [num_blocks_needed(r, block_size, with_output=with_output) <= num_blocks for r in requests]
    # What a request leaves in the cache, and how many of it, from the start, it asks for.
    left = [[*r.hash_ids, *(r.output_ids if outputs == "cache" else ())] for r in requests]
    next_uses = _next_uses(requests, left, runs)
    cached: dict[int, tuple[int, int]] = {}  # the block's entry in the heap that counts; older ones are passed over
    heap: list[tuple[int, int, int]] = []
    released_at: dict[int, int] = {}
    ages = [0] * NUM_RANGES
    num_requests_hit = num_asked = num_hit = 0
    for request, ids, uses, fits in zip(requests, left, next_uses, runs, strict=True):
        num_asked += len(request.hash_ids)
        if not fits:
            continue
        askable = request.num_askable
        hits = next((i for i, hash_id in enumerate(ids[:askable]) if hash_id not in cached), askable)
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
        num_refused=runs.count(False),
        num_waited=0,
        num_requests_hit=num_requests_hit,
        num_blocks_asked=num_asked,
        num_blocks_hit=num_hit,
        num_tokens=sum(request.num_prompt_tokens(block_size) for request in requests),
        num_evictions=sum(ages),
        age_at_eviction=Histogram.of(ages),
    )


def _next_uses(
    requests: Sequence[TraceRequest], left: Sequence[Sequence[int]], runs: Sequence[bool]
) -> list[list[int]]:
    """For each request that runs, when each of the blocks it leaves is asked for next, as a request's number."""
    following: dict[int, int] = {}
    uses: list[list[int]] = [[] for _ in requests]
    for index in range(len(requests) - 1, -1, -1):
        if runs[index]:
            uses[index] = [following.get(hash_id, _NEVER) for hash_id in left[index]]
            askable = requests[index].num_askable
            following.update(dict.fromkeys(left[index][:askable], index))
            following.update(dict.fromkeys(left[index][askable:], _NEVER))
    return uses
