"""Who computes what in a step, on real books and without a model."""

from __future__ import annotations

import random

import pytest

from kvcore.hashing import BlockHasher
from kvcore.manager import KVCacheManager
from kvcore.request import Request
from kvcore.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, SlidingWindowSpec
from runner.errors import RequestRefusedError
from runner.scheduler import Scheduler

BLOCK_SIZE = 4
FULL = FullAttentionSpec(BLOCK_SIZE, 1, 8, "float32")
WINDOW = SlidingWindowSpec(BLOCK_SIZE, 1, 8, "float32", 8)
HASHER = BlockHasher(BLOCK_SIZE, seed=0)


def scheduler_with(
    num_blocks: int,
    *,
    tokens_a_step: int = 32,
    num_seqs: int = 8,
    specs: tuple[KVCacheSpec, ...] = (FULL,),
    watermark_blocks: int = 0,
    growth_tokens: int = 0,
    max_overtakes: int = 0,
) -> Scheduler:
    """``num_blocks`` to use, beside the null block. Strictly in order, and without room to grow, unless asked for."""
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks + 1, groups)
    manager = KVCacheManager(config, max_model_len=1000, max_in_flight_tokens=tokens_a_step)
    return Scheduler(
        manager,
        max_num_batched_tokens=tokens_a_step,
        max_num_seqs=num_seqs,
        watermark_blocks=watermark_blocks,
        growth_tokens=growth_tokens,
        max_overtakes=max_overtakes,
    )


def add(
    scheduler: Scheduler, name: str, num_tokens: int, *, first_token: int | None = None, priority: int = 0
) -> Request:
    start = 1000 * ord(name[0]) if first_token is None else first_token
    request = Request(name, range(start, start + num_tokens), block_hasher=HASHER, priority=priority)
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


def names(requests: list[Request]) -> list[str]:
    return [request.request_id for request in requests]


def test_no_prompt_is_begun_next_to_one_that_still_needs_the_room() -> None:
    scheduler = scheduler_with(8, tokens_a_step=8)
    add(scheduler, "a", 20)  # 5 blocks, of which it has 2 after the first step
    add(scheduler, "b", 4)  # 1 block
    add(scheduler, "c", 16)  # 4 blocks: as many as seem to be free in the third step, but a needs more
    assert run_step(scheduler) == {"a": 8}
    assert run_step(scheduler) == {"a": 8}
    assert run_step(scheduler) == {"a": 4, "b": 4}
    assert run_step(scheduler) == {"a": 1, "b": 1}
    assert names(scheduler.waiting) == ["c"]


def test_two_long_prompts_are_not_begun_together_where_only_one_can_be_finished() -> None:
    scheduler = scheduler_with(8, tokens_a_step=12)
    add(scheduler, "a", 9)
    add(scheduler, "b", 20)
    add(scheduler, "c", 12)
    assert run_step(scheduler) == {"a": 9, "b": 3}  # b: 1 block of the 5 that it will have
    scheduler.remove(scheduler.running[0])
    # 7 blocks are free, 3 of them more than b needs to finish: not enough for c next to it, before b has its own.
    assert run_step(scheduler) == {"b": 12}
    assert scheduler.num_preemptions == 0


def test_the_most_urgent_are_admitted_first_and_preempted_last() -> None:
    scheduler = scheduler_with(6)
    add(scheduler, "a", 8, priority=1)
    add(scheduler, "b", 8, priority=2)
    add(scheduler, "c", 8, priority=2)
    assert run_step(scheduler) == {"a": 8, "b": 8, "c": 8}
    scheduler.remove(scheduler.running[1])
    add(scheduler, "d", 8, priority=2)
    add(scheduler, "e", 8, priority=0)
    assert run_step(scheduler) == {"a": 1, "c": 1}
    # e came last and is next.
    assert names(scheduler.waiting) == ["e", "d"]
    scheduler.remove(scheduler.running[1])
    assert run_step(scheduler) == {"a": 1, "e": 8}
    while scheduler.num_preemptions == 0:
        run_step(scheduler)
    # a was admitted before e, and is less urgent.
    assert names(scheduler.running) == ["e"]
    assert names(scheduler.waiting) == ["a", "d"]


def test_within_the_least_urgent_priority_the_last_admitted_is_preempted() -> None:
    scheduler = scheduler_with(8)
    for name, priority in (("a", 5), ("b", 5), ("c", 0), ("d", 5)):
        add(scheduler, name, 8, priority=priority)
    assert run_step(scheduler) == {"c": 8, "a": 8, "b": 8, "d": 8}
    # All need a third block. d gives up two, for c and a, and then b is the last.
    assert run_step(scheduler) == {"c": 1, "a": 1}
    assert names(scheduler.waiting) == ["b", "d"]


def test_an_urgent_request_that_waits_takes_no_blocks_from_those_that_run() -> None:
    scheduler = scheduler_with(5)
    first = add(scheduler, "a", 17, priority=9)
    run_step(scheduler)
    add(scheduler, "b", 4, priority=0)
    assert run_step(scheduler) == {"a": 1}
    scheduler.remove(first)
    assert run_step(scheduler) == {"b": 4}


def test_a_large_request_may_be_overtaken_so_often_and_then_nothing_goes_before_it() -> None:
    scheduler = scheduler_with(8, max_overtakes=2)
    first = add(scheduler, "a", 15)  # 4 blocks
    run_step(scheduler)
    add(scheduler, "b", 20)  # 5 blocks: not next to a
    for name in "cdef":
        add(scheduler, name, 2)  # 1 block each
    assert run_step(scheduler) == {"a": 1, "c": 2, "d": 2}
    assert run_step(scheduler) == {"a": 1, "c": 1, "d": 1}
    assert names(scheduler.waiting) == ["b", "e", "f"]
    assert scheduler.manager.block_pool.get_num_free_blocks() == 1
    scheduler.remove(first)
    # A block was free for e, but b has been overtaken twice.
    assert run_step(scheduler) == {"b": 20, "c": 1, "d": 1, "e": 2}


def test_nobody_is_overtaken_by_the_less_urgent() -> None:
    scheduler = scheduler_with(8, max_overtakes=5)
    add(scheduler, "a", 15)
    run_step(scheduler)
    add(scheduler, "b", 20)
    add(scheduler, "c", 3, priority=1)
    assert run_step(scheduler) == {"a": 1}


def test_one_step_looks_at_no_more_requests_than_may_overtake() -> None:
    scheduler = scheduler_with(8, max_overtakes=2)
    add(scheduler, "a", 15)
    run_step(scheduler)
    for name in "bcd":
        add(scheduler, name, 20)
    add(scheduler, "e", 3)
    assert run_step(scheduler) == {"a": 1}
    add(scheduler, "f", 3, priority=-1)
    assert run_step(scheduler) == {"a": 1, "f": 3}


def test_the_watermark_is_left_free_next_to_others_and_waived_for_one_alone() -> None:
    scheduler = scheduler_with(8, watermark_blocks=3)
    first = add(scheduler, "a", 12)
    add(scheduler, "b", 10)
    assert run_step(scheduler) == {"a": 12}  # 3 and 3 blocks, and 2 would be left
    scheduler.remove(first)
    assert run_step(scheduler) == {"b": 10}
    scheduler.remove(scheduler.running[0])
    scheduler.check_fits(30, 3)
    add(scheduler, "c", 30)
    assert run_step(scheduler) == {"c": 30}


def test_each_that_runs_must_have_room_to_grow_before_another_is_admitted() -> None:
    scheduler = scheduler_with(8, growth_tokens=8)
    add(scheduler, "a", 8)  # 2 blocks, and 2 to grow into
    add(scheduler, "b", 8)
    add(scheduler, "c", 1)
    assert run_step(scheduler) == {"a": 8, "b": 8}
    for _ in range(8):
        assert run_step(scheduler) == {"a": 1, "b": 1}
    assert scheduler.num_preemptions == 0


def test_a_removed_request_may_be_added_again_under_its_name() -> None:
    scheduler = scheduler_with(8)
    for _ in range(2):
        request = add(scheduler, "a", 8)
        run_step(scheduler)
        scheduler.remove(request)
    scheduler.remove(add(scheduler, "a", 8))
    assert scheduler.schedule() == []


def test_removing_an_unknown_request_is_an_error() -> None:
    scheduler = scheduler_with(5)
    with pytest.raises(ValueError, match="is not here"):
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
