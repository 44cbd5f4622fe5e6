"""Measures what metrics cost: the same work with and without them, in short slices in turn, so that whatever else the
machine does falls on both alike; several times with new managers, since where objects lie in memory counts too.

    python -m tests.bench.metrics_cost
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from statistics import fmean, median

from kvcore import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request
from kvcore.metrics import CacheMetrics
from tests.bench.workloads import BLOCK_SIZE, random_tokens

DECODING_REQUESTS, DECODING_PROMPT_TOKENS, STEPS_PER_SLICE = 256, 200, 2
CHURN_LIVE, CHURN_FAMILIES, CHURN_TOKENS = 16, 8, 1_024
REQUESTS_PER_STEP, REQUESTS_PER_SLICE = 4, 8
KEPT = 0.3
"""Share of the slices that count, the fastest: in the others something else took the processor, or a step was measured
that the variant measures one in many of. What that costs is a variant of its own."""

VARIANTS: dict[str, dict[str, float]] = {
    "hits and evictions counted": {},
    "and 200 blocks watched": {"watched_blocks": 200},
    "and one step in 500 measured": {"step_sample_rate": 0.002},
    "all of these": {"watched_blocks": 200, "step_sample_rate": 0.002},
    "every step measured": {"step_sample_rate": 1.0},
}
"""Settings of :class:`CacheMetrics`."""

HASHER = BlockHasher(BLOCK_SIZE, seed="0")


class Subject:
    """A manager with metrics or, without settings for them, none; and how to tell them of a step."""

    def __init__(self, settings: dict[str, float] | None, num_blocks: int) -> None:
        spec = FullAttentionSpec(BLOCK_SIZE, 1, 1, "float32")
        config = KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, 1 << 20, log_stats=settings is not None)
        self.step: Callable[[], object] = lambda: None
        if settings is not None:
            self.step = CacheMetrics(self.manager, **settings).step  # type: ignore[arg-type]

    def admit(self, request: Request) -> None:
        blocks, num_hit = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks) is not None
        request.num_computed_tokens = request.num_tokens


def decode(settings: dict[str, float] | None, num_slices: int) -> Iterator[None]:
    """Some steps of all requests in each slice."""
    rng = random.Random(0)
    num_tokens = DECODING_PROMPT_TOKENS + num_slices * STEPS_PER_SLICE
    subject = Subject(settings, DECODING_REQUESTS * (num_tokens // BLOCK_SIZE + 2))
    requests = [
        Request(f"r{i}", random_tokens(rng, DECODING_PROMPT_TOKENS), block_hasher=HASHER)
        for i in range(DECODING_REQUESTS)
    ]
    for request in requests:
        subject.admit(request)
        request.append_output_token_ids(5)
    manager, next_step = subject.manager, subject.step
    while True:
        yield
        for number in range(STEPS_PER_SLICE):
            next_step()
            for request in requests:
                manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
                request.append_output_token_ids(7 + number)


def churn(settings: dict[str, float] | None, num_slices: int) -> Iterator[None]:
    """In each slice, some steps that admit and free a few requests each, in a full pool."""
    rng = random.Random(0)
    subject = Subject(settings, 4_096)
    families = [random_tokens(rng, CHURN_TOKENS) for _ in range(CHURN_FAMILIES)]
    live: list[Request] = []
    requests = [
        Request(f"r{i}", families[i % CHURN_FAMILIES] + random_tokens(rng, CHURN_TOKENS), block_hasher=HASHER)
        for i in range(8 * REQUESTS_PER_SLICE)
    ]
    for first in cycle(range(0, len(requests), REQUESTS_PER_SLICE)):
        yield
        for number, request in enumerate(requests[first : first + REQUESTS_PER_SLICE]):
            if number % REQUESTS_PER_STEP == 0:
                subject.step()
            subject.admit(request)
            live.append(request)
            if len(live) > CHURN_LIVE:
                freed = live.pop(0)
                subject.manager.free(freed)
                freed.num_computed_tokens = 0


def cost(work: Callable[..., Iterator[None]], settings: dict[str, float], num_slices: int) -> float:
    """What metrics add to the time of a slice, as a share of it."""
    order = [0, 1]
    random.shuffle(order)
    slices = {which: work(settings if which else None, num_slices) for which in order}
    times: tuple[list[float], list[float]] = ([], [])
    for part in slices.values():
        next(part)
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_slices):
            random.shuffle(order)
            for which in order:
                start = time.thread_time()
                next(slices[which])
                times[which].append(time.thread_time() - start)
    finally:
        gc.enable()
    kept = round(KEPT * num_slices)
    without, with_metrics = (fmean(sorted(values)[:kept]) for values in times)
    return with_metrics / without - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=15, help="new managers; the median of them counts; default: %(default)s"
    )
    parser.add_argument("--slices", type=int, default=200, help="of each round; default: %(default)s")
    args = parser.parse_args()
    for work in (decode, churn):
        for title, settings in VARIANTS.items():
            rounds = [cost(work, settings, args.slices) for _ in range(args.rounds)]
            print(f"{work.__name__:6} with {title:30} {median(rounds):+.1%}", flush=True)


if __name__ == "__main__":
    main()
