"""Runs a trace through the books, to see what a pool of some size finds under some policy."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from kvcore.errors import ConfigError, CountError
from kvcore.eviction import PolicyChoice
from kvcore.replay_bound import ALL_KNOWING, replay_all_knowing
from kvcore.replay_pool import NUM_RANGES, ReplayPool, Running
from kvcore.replay_results import Histogram, ReplayResult, TraceSummary
from kvcore.replay_trace import MOONCAKE_BLOCK_SIZE, TraceRequest

__all__ = ["ALL_KNOWING", "OUTPUTS", "SECONDS_PER_TOKEN", "replay", "replay_all_knowing", "summarize"]

OUTPUTS = ("ignore", "hold", "cache")
"""What becomes of answers: they take no blocks; they take some that can never be hit; or some that can be hit later."""

SECONDS_PER_TOKEN = 0.03
"""How long a token of an answer takes, if nothing else is said."""


def replay(
    requests: Iterable[TraceRequest],
    num_blocks: int,
    policy: PolicyChoice = "lru",
    *,
    block_size: int = MOONCAKE_BLOCK_SIZE,
    outputs: str = "ignore",
    concurrency: int | None = None,
    seconds_per_token: float = SECONDS_PER_TOKEN,
    name: str | None = None,
) -> ReplayResult:
    """Runs a trace through a pool. O(blocks of the trace + pool); 1 to 12 microseconds a block.

    A request takes its hits and new blocks, for its prompt and, if asked, for its answer, and gives all of them back
    when it ends. Without ``concurrency`` the next one starts then. With it, a request starts when it arrives, or as
    soon as those before it have started, fewer than ``concurrency`` run and its blocks are there; it ends
    ``output_length * seconds_per_token`` later.

    Args:
        requests: The trace, in the order of arrival; read once, request by request.
        num_blocks: Blocks of the pool beside the null block.
        policy: As for :class:`kvcore.KVCacheManager`.
        block_size: Tokens of a block, for counts in tokens and for the blocks of answers.
        outputs: One of :data:`OUTPUTS`.
        concurrency: Most requests that hold blocks at once; None: one after another, whenever they arrived.
        seconds_per_token: How long a token of an answer takes.
        name: The policy's name in the result; None: its own.

    Raises:
        CountError: The pool has no block, nothing may run, or time runs backwards.
        ConfigError: There is no such policy, or no such way with outputs.
    """
    if outputs not in OUTPUTS:
        raise ConfigError(f"outputs must be one of {', '.join(OUTPUTS)}; got {outputs!r}")
    pool = ReplayPool(
        num_blocks,
        policy,
        block_size=block_size,
        holds_outputs=outputs != "ignore",
        caches_outputs=outputs == "cache",
    )
    if concurrency is None:
        for request in requests:
            if pool.ask(request) and (running := pool.start(request)) is not None:
                pool.finish(running)
        return pool.result(name)
    if not isinstance(concurrency, int) or concurrency < 1:
        raise CountError(f"concurrency must be a whole number of at least 1, got {concurrency!r}")
    if not seconds_per_token >= 0:
        raise CountError(f"seconds_per_token must not be negative, got {seconds_per_token!r}")
    _run_as_they_come(requests, pool, concurrency, 1000 * seconds_per_token)
    return pool.result(name)


def _run_as_they_come(
    requests: Iterable[TraceRequest], pool: ReplayPool, concurrency: int, ms_per_token: float
) -> None:
    now = arrival = 0.0
    running: list[tuple[float, int, Running]] = []  # a heap: when each ends, of those at once the first to start first

    def end_until_now() -> None:
        while running and running[0][0] <= now:
            pool.finish(heappop(running)[2])

    for number, request in enumerate(requests):
        arrival = max(arrival, request.timestamp)
        now = max(now, arrival)
        end_until_now()
        if not pool.ask(request):
            continue
        started = pool.start(request) if len(running) < concurrency else None
        while started is None:
            now = running[0][0]
            end_until_now()
            started = pool.start(request)
        pool.num_waited += now > arrival
        heappush(running, (now + ms_per_token * request.output_length, number, started))
    now = float("inf")
    end_until_now()


def summarize(requests: Iterable[TraceRequest]) -> TraceSummary:
    """What a trace is like, whatever the pool. O(blocks of the trace)."""
    num_requests = num_blocks = longest = 0
    used_at: dict[int, int] = {}
    distances = [0] * NUM_RANGES
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
