"""How the cost of an operation grows: with prompt length, pool size, number of groups, and length of the context.

Only the standard library is used here, since this module runs in a peer's interpreter too. A series is a list of
points; a point says what it was measured at, and seconds for each operation.
"""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.bench.workloads import (
    BLOCK_SIZE,
    DECODING_PROMPT_TOKENS,
    FULL,
    HYBRID,
    Adapter,
    Groups,
    Manager,
    Prompt,
    admit,
    allocate,
    random_tokens,
    start_decoding,
)

Point = dict[str, float]
"""``"at"``: where; each other key: an operation and its seconds, or bytes for memory."""

K = 1024
CHUNK_TOKENS = K
PROMPT_IN_POOL = 4 * K
PROMPT_IN_GROUPS = 32 * K
STEPS = 32
SHARING_REQUESTS = 64
GROUP_REQUESTS = 256
QUIET_STEPS = BLOCK_SIZE - 2 - DECODING_PROMPT_TOKENS % BLOCK_SIZE
"""Steps after admission in which a decoding request stays inside its last block."""


@dataclass(frozen=True)
class Measurement:
    """How to measure a point.

    Args:
        adapter: What is measured.
        repetitions: The median of so many counts.
        clock: Seconds.
    """

    adapter: Adapter
    repetitions: int
    clock: Callable[[], float]

    def seconds(self, call: Callable[[], Any]) -> float:
        # No collection first, unlike the workloads: with a large pool it would empty the processor's caches each time.
        start = self.clock()
        call()
        return self.clock() - start

    def medians(self, one_repetition: Callable[[int], Mapping[str, float]]) -> dict[str, float]:
        """Of each operation, over repetitions without collections in them."""
        rows = []
        for repetition in range(self.repetitions):
            gc.collect()
            gc.disable()
            try:
                rows.append(one_repetition(repetition))
            finally:
                gc.enable()
        return {operation: median([row[operation] for row in rows]) for operation in rows[0]}


def by_prompt_length(measurement: Measurement, lengths: Collection[int]) -> Iterator[Point]:
    """One request in an empty cache, then the same prompt again; one full-attention group."""
    for length in lengths:
        tokens = random_tokens(random.Random(0), length)

        def one_repetition(_: int, tokens: list[int] = tokens) -> dict[str, float]:
            prompt = Prompt(measurement.adapter, FULL, len(tokens), tokens=tokens)
            seconds = {"hash": measurement.seconds(lambda: prompt.make_request("discarded"))}
            return {**seconds, **_first_chunk(measurement, prompt), **_cold_and_warm(measurement, prompt)}

        yield {"at": length, **measurement.medians(one_repetition)}


def by_pool_size(measurement: Measurement, sizes: Collection[int]) -> Iterator[Point]:
    """A prompt of :data:`PROMPT_IN_POOL` tokens in a pool in which every block holds another cached prefix."""
    for size in sizes:
        manager = _aged_manager(measurement.adapter, size)
        gc.collect()
        gc.freeze()  # the collections between repetitions are then none of the pool's size

        def one_repetition(repetition: int, manager: Manager = manager) -> dict[str, float]:
            tokens = random_tokens(random.Random(repetition), PROMPT_IN_POOL)
            prompt = Prompt(measurement.adapter, FULL, tokens=tokens, manager=manager)
            return _cold_and_warm(measurement, prompt, name=str(repetition))

        yield {"at": size, **measurement.medians(one_repetition)}
        gc.unfreeze()


def start_up(measurement: Measurement, sizes: Collection[int]) -> Iterator[Point]:
    """Making the manager, and the Python memory it takes for each block of its pool."""
    for size in sizes:

        def one_repetition(_: int, size: int = size) -> dict[str, float]:
            gc.enable()  # as at the start of a program
            return {"start_up": measurement.seconds(lambda: measurement.adapter.make_manager(FULL, size))}

        yield {"at": size, **measurement.medians(one_repetition), "bytes_per_block": _memory(measurement, size) / size}


def by_groups(measurement: Measurement, counts: Collection[int]) -> Iterator[Point]:
    """One full-attention group and the rest with windows: a prompt of :data:`PROMPT_IN_GROUPS` tokens, and decoding."""
    tokens = random_tokens(random.Random(0), PROMPT_IN_GROUPS)
    for count in counts:
        groups = Groups(f"{count} groups", 1, count - 1)

        def one_repetition(_: int, groups: Groups = groups) -> dict[str, float]:
            prompt = Prompt(measurement.adapter, groups, len(tokens), tokens=tokens)
            manager, requests = start_decoding(measurement.adapter, groups, GROUP_REQUESTS)
            return {
                **_cold_and_warm(measurement, prompt),
                "quiet_step": _one_by_one(measurement, manager, requests, QUIET_STEPS),
                **_decoding(measurement, manager, requests),
            }

        yield {"at": count, **measurement.medians(one_repetition)}


def by_context_full(measurement: Measurement, lengths: Collection[int]) -> Iterator[Point]:
    """Decoding with one full-attention group, for requests that share a prompt of that length."""
    yield from _by_context(measurement, lengths, FULL)


def by_context_hybrid(measurement: Measurement, lengths: Collection[int]) -> Iterator[Point]:
    """Decoding with one full-attention group and five with windows, for requests that share a prompt of that length."""
    yield from _by_context(measurement, lengths, HYBRID)


def _by_context(measurement: Measurement, lengths: Collection[int], groups: Groups) -> Iterator[Point]:
    for length in lengths:
        prompts = [random_tokens(random.Random(0), length)] * SHARING_REQUESTS
        own_blocks = 8 + 2 * STEPS * measurement.repetitions // BLOCK_SIZE
        num_blocks = groups.count * (length // BLOCK_SIZE + SHARING_REQUESTS * own_blocks)
        manager = measurement.adapter.make_manager(groups, num_blocks)
        _, requests = start_decoding(measurement.adapter, groups, prompts=prompts, manager=manager)

        def one_repetition(_: int, manager: Manager = manager, requests: list[Any] = requests) -> dict[str, float]:
            return _decoding(measurement, manager, requests)

        yield {"at": length, **measurement.medians(one_repetition)}


SERIES: Mapping[str, tuple[Callable[[Measurement, Collection[int]], Iterator[Point]], tuple[int, ...]]] = {
    "prompt_length": (by_prompt_length, (K, 4 * K, 16 * K, 64 * K, 256 * K, 1024 * K)),
    "pool_size": (by_pool_size, (K, 4 * K, 16 * K, 64 * K, 256 * K, 1024 * K)),
    "start_up": (start_up, (K, 4 * K, 16 * K, 64 * K, 256 * K, 1024 * K)),
    "groups": (by_groups, (1, 2, 3, 4, 6, 8)),
    "context_full": (by_context_full, (K, 4 * K, 16 * K, 64 * K, 128 * K)),
    "context_hybrid": (by_context_hybrid, (K, 4 * K, 16 * K, 64 * K, 128 * K)),
}
"""Series by name: how it is measured, and where."""


def measure(
    adapter: Adapter,
    only: Collection[str] | None = None,
    *,
    repetitions: int,
    clock: Callable[[], float],
    quick: bool = False,
) -> dict[str, dict[str, list[Point]]]:
    """Measures the series named, or all of them; if ``quick``, at the first two points."""
    measurement = Measurement(adapter, repetitions, clock)
    result = {}
    for name, (series, points) in SERIES.items():
        if only and name not in only:
            continue
        result[name] = []
        for point in series(measurement, points[:2] if quick else points):
            print(f"  {adapter.name} {name} at {point['at']:,}", file=sys.stderr, flush=True)
            result[name].append(point)
    return {"series": result}


def _cold_and_warm(measurement: Measurement, prompt: Prompt, name: str = "") -> dict[str, float]:
    """A request that finds nothing, then another that finds the first one's blocks."""
    adapter, manager = measurement.adapter, prompt.manager
    first, second = prompt.make_request(f"{name}first"), prompt.make_request(f"{name}second")
    seconds = {"cold_admit": measurement.seconds(lambda: admit(adapter, manager, first))}
    seconds["free"] = measurement.seconds(lambda: manager.free(first))
    seconds["warm_lookup"] = measurement.seconds(lambda: adapter.look_up(manager, second))
    blocks, num_hit_tokens = adapter.look_up(manager, second)
    seconds["warm_alloc"] = measurement.seconds(lambda: allocate(manager, second, num_hit_tokens, blocks))
    manager.free(second)
    return seconds


def _first_chunk(measurement: Measurement, prompt: Prompt) -> dict[str, float]:
    """The first :data:`CHUNK_TOKENS` tokens of a prompt that is computed piece by piece."""
    request = prompt.make_request("chunked")
    seconds = measurement.seconds(lambda: prompt.manager.allocate_slots(request, CHUNK_TOKENS))
    prompt.manager.free(request)
    prompt.manager.reset_prefix_cache()
    return {"first_chunk": seconds}


def _one_by_one(measurement: Measurement, manager: Manager, requests: list[Any], steps: int) -> float:
    """Seconds per request and step of decoding, one call a request."""

    def run() -> None:
        for _ in range(steps):
            for request in requests:
                manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
                request.append_output_token_ids(7)

    return measurement.seconds(run) / steps / len(requests)


def _at_once(measurement: Measurement, manager: Any, requests: list[Any], steps: int) -> float:
    """The same, one call for all requests."""

    def run() -> None:
        for _ in range(steps):
            manager.grow(requests)
            for request in requests:
                request.num_computed_tokens += 1
                request.append_output_token_ids(7)

    return measurement.seconds(run) / steps / len(requests)


def _decoding(measurement: Measurement, manager: Manager, requests: list[Any]) -> dict[str, float]:
    """Decoding through whole blocks, in both ways if the manager has both."""
    seconds = {"decode": _one_by_one(measurement, manager, requests, STEPS)}
    if hasattr(manager, "grow"):
        seconds["decode_at_once"] = _at_once(measurement, manager, requests, STEPS)
    return seconds


def _aged_manager(adapter: Adapter, num_blocks: int) -> Manager:
    """A manager whose pool is full of cached blocks that nobody holds, freed in no particular order."""
    rng = random.Random(0)
    manager = adapter.make_manager(FULL, num_blocks)
    blocks_each = 64
    requests = []
    for i in range((num_blocks - 1) // blocks_each):
        tokens = array("H", rng.randbytes(2 * blocks_each * BLOCK_SIZE)).tolist()
        requests.append(adapter.make_request(f"old-{i}", tokens))
        admit(adapter, manager, requests[-1])
    rng.shuffle(requests)
    for request in requests:
        manager.free(request)
    return manager


def _memory(measurement: Measurement, num_blocks: int) -> int:
    """Bytes that Python allocates for a manager."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        manager = measurement.adapter.make_manager(FULL, num_blocks)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        del manager
        return after - before
    finally:
        tracemalloc.stop()
