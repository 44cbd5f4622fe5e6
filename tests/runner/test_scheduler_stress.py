"""Hundreds of requests through a pool that holds three of them, on real books and without a model."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from kvcore.hashing import BlockHasher
from kvcore.manager import KVCacheManager
from kvcore.request import Request
from kvcore.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, SlidingWindowSpec
from runner.scheduler import Scheduler

BLOCK_SIZE = 4
LONGEST = 100
FULL = FullAttentionSpec(BLOCK_SIZE, 1, 8, "float32")
WINDOW = SlidingWindowSpec(BLOCK_SIZE, 1, 8, "float32", 12)
HASHER = BlockHasher(BLOCK_SIZE, seed=0)
TOKENS_A_STEP = 48
MAX_OVERTAKES = 8


@dataclass
class Wanted:
    """A request and what becomes of it."""

    request: Request
    max_tokens: int
    finished_at: int | None = None
    first_step: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.request.num_prompt_tokens + self.max_tokens

    @property
    def ideal(self) -> int:
        """Tokens computed if it is never preempted and finds nothing: all but the last one of the output."""
        return self.num_tokens - 1


@dataclass
class Load:
    """Requests on their way through a scheduler; tokens are made up."""

    scheduler: Scheduler
    rng: random.Random
    open: dict[str, Wanted] = field(default_factory=dict)
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    done: list[Wanted] = field(default_factory=list)
    num_computed: int = 0
    num_steps: int = 0

    def add(
        self, name: str, num_tokens: int, max_tokens: int, *, priority: int = 0, start: int | None = None
    ) -> Wanted:
        self.scheduler.check_fits(num_tokens, max_tokens)
        first = self.rng.randrange(10**6) if start is None else start
        request = Request(name, range(first, first + num_tokens), block_hasher=HASHER, priority=priority)
        self.open[name] = wanted = Wanted(request, max_tokens)
        self.scheduler.add(request)
        return wanted

    def step(self) -> None:
        before = list(self.scheduler.running)
        scheduled = self.scheduler.schedule()
        assert scheduled, "a step without work while requests are open"
        assert sum(item.num_new_tokens for item in scheduled) <= TOKENS_A_STEP
        running = [item.request for item in scheduled]
        for name in self.scheduler.take_released():
            self.tables.pop(name, None)
        assert len({request.request_id for request in running}) == len(running)
        for item in scheduled:
            # What is in the step has slots for its tokens.
            end = item.request.num_computed_tokens + item.num_new_tokens
            tables = self.scheduler.manager.get_block_ids(item.request.request_id)
            assert all(len(ids) * BLOCK_SIZE >= end for ids in tables)
            # Whoever appends what is new to a request's tables, and drops those of the released, has its tables.
            kept = self.tables.setdefault(item.request.request_id, [[] for _ in tables])
            if item.new_blocks is not None:
                for table, ids in zip(kept, item.new_blocks.get_block_ids(), strict=True):
                    table += ids
            for table, ids in zip(kept, tables, strict=True):
                assert [block for block, now in zip(table, ids, strict=True) if now] == [now for now in ids if now]
            assert item.token_ids == item.request.all_token_ids[end - item.num_new_tokens : end]
        # Every request that decodes is in the step, unless it was just preempted.
        for request in before:
            if request in self.scheduler.running and request.num_tokens - request.num_computed_tokens == 1:
                assert request in running
        sampling = [item.request for item in scheduled if item.samples]
        self.scheduler.complete(scheduled)
        self.num_computed += sum(item.num_new_tokens for item in scheduled)
        for request in running:
            wanted = self.open[request.request_id]
            wanted.first_step = self.num_steps if wanted.first_step is None else wanted.first_step
        for request in sampling:
            request.append_output_token_ids(self.rng.randrange(10**6))
            wanted = self.open[request.request_id]
            if request.num_tokens == wanted.num_tokens:
                self.end(wanted)
        self.num_steps += 1

    def end(self, wanted: Wanted) -> None:
        wanted.finished_at = self.num_steps
        self.scheduler.remove(wanted.request)
        self.done.append(self.open.pop(wanted.request.request_id))

    def check_nothing_is_left(self) -> None:
        assert not self.open
        assert not self.scheduler.waiting
        assert not self.scheduler.running
        assert not self.scheduler._turns
        assert self.scheduler.manager.usage == 0
        self.scheduler.manager.check_invariants()


def load_on_a_pool_for_three(seed: int, specs: tuple[KVCacheSpec, ...] = (FULL,), *, caching: bool = True) -> Load:
    blocks_of_one = sum(spec.max_blocks_per_request(LONGEST - 1, TOKENS_A_STEP) for spec in specs)
    config = KVCacheConfig(3 * blocks_of_one + 1, [KVCacheGroupSpec([f"{i}"], spec) for i, spec in enumerate(specs)])
    manager = KVCacheManager(config, LONGEST, max_in_flight_tokens=TOKENS_A_STEP, enable_caching=caching)
    scheduler = Scheduler(
        manager,
        max_num_batched_tokens=TOKENS_A_STEP,
        max_num_seqs=32,
        watermark_blocks=config.num_blocks // 100,
        growth_tokens=BLOCK_SIZE,
        max_overtakes=MAX_OVERTAKES,
    )
    return Load(scheduler, random.Random(seed))


def random_lengths(rng: random.Random) -> tuple[int, int]:
    """Half of them as long as may be, so that three fill the pool; the others of all lengths."""
    num_tokens = LONGEST if rng.random() < 0.5 else rng.randint(2, LONGEST)
    max_tokens = rng.randint(1, num_tokens - 1)
    return num_tokens - max_tokens, max_tokens


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)], ids=["full", "hybrid"])
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_500_requests_all_finish_and_little_is_computed_twice(
    seed: int, caching: bool, specs: tuple[KVCacheSpec, ...]
) -> None:
    load = load_on_a_pool_for_three(seed, specs, caching=caching)
    ideal = sum(load.add(f"r{i}", *random_lengths(load.rng)).ideal for i in range(500))
    while load.open:
        load.step()
        if load.num_steps % 50 == 0:
            load.scheduler.manager.check_invariants()
    assert len(load.done) == 500
    assert load.scheduler.num_preemptions > 0
    assert load.num_computed <= 1.5 * ideal
    load.check_nothing_is_left()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_aborts_at_any_time_leave_nothing_behind(seed: int) -> None:
    load = load_on_a_pool_for_three(seed)
    rng = load.rng
    num_added = num_aborted = 0
    aborted_from: set[str] = set()
    while num_added < 500 or load.open:
        for _ in range(rng.randint(0, 3)):
            if num_added < 500:
                # Half of them begin alike, so that what is aborted is shared too.
                start = rng.choice([None, 7])
                load.add(f"r{num_added}", *random_lengths(rng), priority=rng.randint(0, 2), start=start)
                num_added += 1
        if load.open:
            load.step()
        while load.open and rng.random() < 0.1:
            places: dict[str, list[Request]] = defaultdict(list)
            for place, requests in (("running", load.scheduler.running), ("waiting", load.scheduler.waiting)):
                for request in requests:
                    places[f"{place}, preempted before" if request.num_preemptions else place].append(request)
            place = rng.choice(list(places))
            aborted_from.add(place)
            wanted = load.open[rng.choice(places[place]).request_id]
            load.end(wanted)
            num_aborted += 1
        if load.num_steps % 10 == 0:
            load.scheduler.manager.check_invariants()
    assert num_aborted > 50
    assert aborted_from == {"running", "waiting", "running, preempted before", "waiting, preempted before"}
    load.check_nothing_is_left()


def test_the_more_urgent_of_many_are_done_sooner() -> None:
    load = load_on_a_pool_for_three(0)
    for i in range(150):
        load.add(f"r{i}", *random_lengths(load.rng), priority=i % 3)
    while load.open:
        load.step()
        running, waiting = load.scheduler.running, load.scheduler.waiting
        assert [request.priority for request in running] == sorted(request.priority for request in running)
        assert [request.priority for request in waiting] == sorted(request.priority for request in waiting)
    finished = {
        priority: [w.finished_at or 0 for w in load.done if w.request.priority == priority] for priority in (0, 1, 2)
    }
    assert sum(finished[0]) < sum(finished[1]) < sum(finished[2])
    # Nobody is begun while somebody more urgent has not been.
    for urgent, less in ((0, 1), (1, 2)):
        last_urgent = max(w.first_step or 0 for w in load.done if w.request.priority == urgent)
        assert all((w.first_step or 0) >= last_urgent for w in load.done if w.request.priority == less)
    preempted = [sum(w.request.num_preemptions for w in load.done if w.request.priority == p) for p in (0, 1, 2)]
    assert sum(preempted) == load.scheduler.num_preemptions
    load.check_nothing_is_left()


def test_large_requests_get_their_turn_in_a_stream_of_small_ones_that_never_ends() -> None:
    load = load_on_a_pool_for_three(0)
    num_added = 0

    def add_small() -> None:
        nonlocal num_added
        num_added += 1
        load.add(f"small {num_added}", 12, 20)

    for _ in range(20):
        add_small()
    for i in range(3):
        load.add(f"large {i}", LONGEST - 5, 5)
    while any(name.startswith("large") for name in load.open):
        # There are always small ones that would fit.
        while len(load.open) < 40:
            add_small()
        load.step()
        assert all(turn.num_overtakes <= MAX_OVERTAKES for turn in load.scheduler._turns.values())
    names = [wanted.request.request_id for wanted in load.done]
    assert [name for name in names if name.startswith("large")] == ["large 0", "large 1", "large 2"]
    # Small ones did go before the large, but no more than may.
    later = [wanted for wanted in load.done if int(wanted.request.request_id.split()[1]) > 20]
    first_large = next(wanted for wanted in load.done if wanted.request.request_id == "large 0")
    overtakers = [w for w in later if w.first_step is not None and w.first_step < (first_large.first_step or 0)]
    assert 0 < len(overtakers) <= MAX_OVERTAKES
    for wanted in list(load.open.values()):
        load.end(wanted)
    load.check_nothing_is_left()
