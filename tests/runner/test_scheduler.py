"""Who computes what in a step, on real books and without a model."""

from __future__ import annotations

import random

import pytest

from kvcore.hashing import BlockHasher
from kvcore.manager import KVCacheManager
from kvcore.request import Request
from kvcore.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from runner.errors import RequestRefusedError
from runner.scheduler import Scheduler

BLOCK_SIZE = 4
FULL = FullAttentionSpec(BLOCK_SIZE, 1, 8, "float32")
WINDOW = SlidingWindowSpec(BLOCK_SIZE, 1, 8, "float32", 8)
HASHER = BlockHasher(BLOCK_SIZE, seed=0)


def scheduler_with(
    num_blocks: int, *, tokens_a_step: int = 32, num_seqs: int = 8, specs: tuple[FullAttentionSpec, ...] = (FULL,)
) -> Scheduler:
    """``num_blocks`` to use, beside the null block."""
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks + 1, groups)
    manager = KVCacheManager(config, max_model_len=1000, max_in_flight_tokens=tokens_a_step)
    return Scheduler(manager, max_num_batched_tokens=tokens_a_step, max_num_seqs=num_seqs)


def add(scheduler: Scheduler, name: str, num_tokens: int, *, first_token: int | None = None) -> Request:
    start = 1000 * ord(name[0]) if first_token is None else first_token
    request = Request(name, range(start, start + num_tokens), block_hasher=HASHER)
    scheduler.add(request)
    return request


def run_step(scheduler: Scheduler) -> dict[str, int]:
    """Schedule, pretend to compute; the tokens each request computed."""
    scheduled = scheduler.schedule()
    sampling = [item.request for item in scheduled if item.samples]
    scheduler.complete(scheduled)
    for request in sampling:
        request.append_output_token_ids(random.Random(request.num_tokens).randrange(10**6))
    scheduler.manager.check_invariants()
    return {item.request.request_id: item.num_new_tokens for item in scheduled}


def test_decodes_go_first_and_a_long_prompt_is_computed_in_chunks_beside_them() -> None:
    scheduler = scheduler_with(100, tokens_a_step=10)
    add(scheduler, "a", 5)
    add(scheduler, "b", 4)
    assert run_step(scheduler) == {"a": 5, "b": 4}
    add(scheduler, "c", 20)
    assert run_step(scheduler) == {"a": 1, "b": 1, "c": 8}
    assert run_step(scheduler) == {"a": 1, "b": 1, "c": 8}
    assert run_step(scheduler) == {"a": 1, "b": 1, "c": 4}
    assert run_step(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_a_request_waits_until_all_of_it_fits_next_to_those_that_run() -> None:
    scheduler = scheduler_with(6, tokens_a_step=8)
    first = add(scheduler, "a", 13)  # 4 blocks
    add(scheduler, "b", 12)  # 3 blocks; 2 would fit at first
    assert run_step(scheduler) == {"a": 8}
    assert run_step(scheduler) == {"a": 5}
    assert run_step(scheduler) == {"a": 1}
    scheduler.remove(first)
    assert run_step(scheduler) == {"b": 8}


def test_no_more_requests_run_at_once_than_allowed() -> None:
    scheduler = scheduler_with(100, num_seqs=2)
    for name in "abc":
        add(scheduler, name, 3)
    assert run_step(scheduler) == {"a": 3, "b": 3}
    assert run_step(scheduler) == {"a": 1, "b": 1}


def test_when_blocks_run_out_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    scheduler = scheduler_with(6)
    requests = [add(scheduler, name, 8) for name in "abc"]  # 2 blocks each: full
    add(scheduler, "d", 4)
    assert run_step(scheduler) == {"a": 8, "b": 8, "c": 8}
    # Each now needs a third block: c gives up two, for a and b.
    assert run_step(scheduler) == {"a": 1, "b": 1}
    assert scheduler.num_preemptions == 1
    assert [request.request_id for request in scheduler.waiting] == ["c", "d"]
    assert requests[2].num_computed_tokens == 0
    assert requests[2].num_preemptions == 1
    scheduler.remove(requests[0])
    # Its 8 prompt tokens are not all overwritten, and the token it had generated is part of it now.
    assert run_step(scheduler) == {"b": 1, "c": 9}


def test_the_request_that_cannot_grow_is_itself_preempted_if_it_came_last() -> None:
    scheduler = scheduler_with(4)
    add(scheduler, "a", 7)
    add(scheduler, "b", 8)
    run_step(scheduler)
    assert run_step(scheduler) == {"a": 1}
    assert [request.request_id for request in scheduler.waiting] == ["b"]


def test_requests_admitted_in_one_step_share_the_prefix_that_the_first_of_them_computes() -> None:
    scheduler = scheduler_with(20)
    for name in "abc":
        add(scheduler, name, 10, first_token=1)
    assert run_step(scheduler) == {"a": 10, "b": 2, "c": 2}


def test_a_request_that_can_never_fit_is_refused_with_the_arithmetic() -> None:
    scheduler = scheduler_with(10, specs=(FULL, WINDOW), tokens_a_step=16)
    with pytest.raises(
        RequestRefusedError, match=r"900 prompt tokens \+ 101 tokens of output = 1,001 tokens, more than"
    ):
        scheduler.check_fits(900, 101)
    with pytest.raises(
        RequestRefusedError,
        match=r"20 prompt tokens \+ 10 tokens of output can need 8 of 4 tokens \+ 7 of 4 tokens = 15 blocks, "
        r"and the cache has 10",
    ):
        scheduler.check_fits(20, 10)
    scheduler.check_fits(10, 3)


def test_a_request_that_needs_the_whole_cache_is_admitted_and_finishes() -> None:
    scheduler = scheduler_with(5)
    scheduler.check_fits(17, 4)
    request = add(scheduler, "a", 17)
    while request.num_tokens < 21:
        assert run_step(scheduler)
    scheduler.remove(request)
    assert scheduler.manager.usage == 0


def test_removing_an_unknown_request_is_an_error() -> None:
    scheduler = scheduler_with(5)
    with pytest.raises(ValueError, match="not in"):
        scheduler.remove(Request("x", [1]))


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (WINDOW,)], ids=["full", "hybrid", "window"])
@pytest.mark.parametrize("seed", range(4))
def test_many_requests_through_a_small_pool_all_finish(seed: int, specs: tuple[FullAttentionSpec, ...]) -> None:
    rng = random.Random(seed)
    scheduler = scheduler_with(14 * len(specs), tokens_a_step=12, num_seqs=6, specs=specs)
    wanted = {}
    for i in range(60):
        num_tokens, max_tokens = rng.randint(1, 30), rng.randint(1, 20)
        scheduler.check_fits(num_tokens, max_tokens)
        request = add(scheduler, f"r{i}", num_tokens, first_token=rng.choice([1, 5000]))
        wanted[request.request_id] = (request, num_tokens + max_tokens)
    for _ in range(5000):
        assert sum(run_step(scheduler).values()) <= 12
        for request in list(scheduler.running):
            if request.num_tokens == wanted[request.request_id][1]:
                scheduler.remove(request)
                del wanted[request.request_id]
        if not wanted:
            break
    assert not wanted
    assert scheduler.num_preemptions > 0
    assert scheduler.manager.usage == 0
