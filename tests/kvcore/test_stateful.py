"""Random operations on every kind of cache, against the rules written down a second time."""

from __future__ import annotations

import pytest

from kvcore import ComputedTokensError, KVCacheBlocks, KVCacheManager, Request
from kvcore.testing import ShadowMemory, admit, assert_eviction_order, make_manager, make_request, table
from tests.kvcore.oracle import AnythingGoes, Cache, run_machine

CACHES = {
    "full": Cache("full"),
    "full, one token a block": Cache("full/1", (8, 16, 40)),
    "sliding": Cache("sliding:6"),
    "sliding, as wide as a block": Cache("sliding:4"),
    "sliding, one token wide": Cache("sliding:1"),
    "full and sliding": Cache("full sliding:6", (8, 16, 30)),
    "full and three windows": Cache("full sliding:5 sliding:5 sliding:9", (12, 24, 48)),
    "window first, then full, then window": Cache("sliding:11 full sliding:3", (10, 20, 40)),
    "two windows": Cache("sliding:3 sliding:10", (8, 16, 30)),
    "chunked": Cache("chunked:8"),
    "chunked, chunks that end inside a block": Cache("chunked:6"),
    "chunked, several chunks in a block": Cache("chunked:3"),
    "full and chunked": Cache("full chunked:8", (8, 16, 30)),
    "full and chunks that end inside a block": Cache("chunked:6 full", (8, 16, 30)),
    "sliding and chunked": Cache("sliding:6 chunked:10", (8, 16, 30)),
    "caching off": Cache("full sliding:6 chunked:8", (8, 16, 30), options={"enable_caching": False}),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_hits_tables_and_eviction_order_follow_the_rules_for_a_few_random_operations(cache: Cache) -> None:
    run_machine(cache, thorough=False)


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_hits_tables_and_eviction_order_follow_the_rules_for_many_random_operations(cache: Cache) -> None:
    run_machine(cache, thorough=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups", ["full", "sliding:6", "chunked:6", "full sliding:6", "sliding:3/2 chunked:12/8 full/4"]
)
@pytest.mark.parametrize(
    "options", [{}, {"enable_caching": False}, {"window_retention": "ends"}], ids=["cached", "not cached", "ends"]
)
def test_no_call_corrupts_the_books_whatever_its_arguments(groups: str, options: dict[str, object]) -> None:
    run_machine(Cache(groups, options=options), thorough=True, machine=AnythingGoes)


@pytest.mark.parametrize("groups", [["chunked:6"], ["sliding:1"], ["full", "chunked:6"]])
def test_a_prompt_beyond_max_model_len_is_hit_only_up_to_it(groups: list[str]) -> None:
    manager = make_manager(30, groups=groups, max_model_len=20)
    first, second = (make_request(name, range(26), manager) for name in ("first", "second"))
    manager.allocate_slots(first, 26)
    hits, num_hit = manager.get_computed_blocks(second)
    assert num_hit in (16, 20)
    assert manager.allocate_slots(second, 2, num_hit, hits) is not None
    manager.check_invariants()


def test_a_batch_with_a_request_that_claims_too_much_grows_nobody() -> None:
    manager = make_manager(10)
    first, second = (make_request(name, range(12), manager) for name in ("first", "second"))
    for request in (first, second):
        manager.allocate_slots(request, 4)
    first.num_computed_tokens = 4
    second.num_computed_tokens = 5
    with pytest.raises(ComputedTokensError):
        manager.grow([first, second])
    assert table(manager, first) == [1]
    manager.check_invariants()


def run_to_the_end(manager: KVCacheManager, request: Request, chunk: int) -> bool:
    """Prefills the rest in steps; False: one of them did not fit."""
    while rest := request.num_tokens - request.num_computed_tokens:
        if manager.allocate_slots(request, min(chunk, rest)) is None:
            return False
        request.num_computed_tokens += min(chunk, rest)
    return True


@pytest.mark.parametrize("groups", [["full"], ["sliding:8"], ["chunked:8"], ["chunked:6"], ["full", "sliding:8"]])
@pytest.mark.parametrize("num_shared", [0, 4, 8, 11, 16])
def test_a_request_admitted_because_all_of_it_fits_comes_to_its_end_with_nobody_else_growing(
    groups: list[str], num_shared: int
) -> None:
    admitted = 0
    for num_blocks in range(4, 30):
        manager = make_manager(num_blocks, groups=groups, max_model_len=60, max_in_flight_tokens=4)
        other = make_request("other", [*range(num_shared), 100], manager)
        if not run_to_the_end(manager, other, chunk=4):
            continue
        request = make_request("request", range(44), manager)
        hits, num_hit = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, 4, num_hit, hits, full_sequence_must_fit=True) is None:
            continue
        request.num_computed_tokens = num_hit + 4
        assert run_to_the_end(manager, request, chunk=4), f"stuck after {request.num_computed_tokens} tokens"
        admitted += 1
    assert admitted > 4


def test_a_running_request_fits_as_a_whole_if_it_does_with_the_blocks_its_window_has_left() -> None:
    def after_8_tokens() -> tuple[KVCacheManager, Request]:
        manager = make_manager(5, groups=["sliding:4"], max_model_len=60)
        request = make_request("request", range(20), manager)
        manager.allocate_slots(request, 8)
        request.num_computed_tokens = 8
        return manager, request

    def grow(*, must_fit: bool) -> KVCacheBlocks | None:
        manager, request = after_8_tokens()
        return manager.allocate_slots(request, 12, full_sequence_must_fit=must_fit)

    # Two blocks are held, two are free, and three more are needed: the window has left the first one.
    assert grow(must_fit=False) is not None
    assert grow(must_fit=True) is not None


@pytest.mark.parametrize("num_new_tokens", [8, 11, 16])
def test_a_prompt_beyond_max_model_len_gets_slots_up_to_it_and_registers_nothing_beyond(num_new_tokens: int) -> None:
    manager = make_manager(20, max_model_len=10)
    request = make_request("request", range(16), manager)
    assert manager.allocate_slots(request, num_new_tokens) is not None
    manager.check_invariants()
    assert len(table(manager, request)) == -(-min(num_new_tokens, 10) // 4)
    assert len(manager.block_pool.prefix_index) == 2
    manager.free(request)
    manager.check_invariants()


def test_tokens_without_slots_are_never_registered_as_computed() -> None:
    manager = make_manager(20, groups=["sliding:4"])
    shadow = ShadowMemory(manager)
    request = make_request("request", range(40), manager)
    manager.allocate_slots(request, 4)
    shadow.write(request, 0, 4)
    request.num_computed_tokens = 30
    with pytest.raises(ComputedTokensError):
        manager.allocate_slots(request, 4)
    other = make_request("other", range(40), manager)
    blocks, num_hit = manager.get_computed_blocks(other)
    shadow.check_hit(other, blocks, num_hit)
    assert num_hit == 4


def test_a_request_that_goes_back_after_rejected_drafts_writes_over_them_and_caches_only_what_was_accepted() -> None:
    manager = make_manager(20)
    shadow = ShadowMemory(manager)
    request = make_request("request", range(6), manager)
    admit(manager, request)
    shadow.write(request, 0, 6)
    request.append_output_token_ids(6)
    # One sampled token and five drafts end with position 11, the last of the third block.
    manager.allocate_slots(request, 6)
    shadow.write(request, 6, 12, draft_token_ids=[90, 91, 92, 93, 94])
    assert len(manager.block_pool.prefix_index) == 1
    # The first draft is accepted: 90, and another token after it.
    request.append_output_token_ids([90, 8])
    request.num_computed_tokens = 8
    manager.allocate_slots(request, 1)
    shadow.write(request, 8, 9)
    shadow.check_reads(request, 8, 9)
    assert len(manager.block_pool.prefix_index) == 2
    manager.free(request)
    # The third block holds drafts and was never registered: it is overwritten first.
    assert_eviction_order(manager, [3, 4, 5, ...])
    again = make_request("again", [*range(7), 90, 8, 92, 93, 94, 0], manager)
    blocks, num_hit = manager.get_computed_blocks(again)
    shadow.check_hit(again, blocks, num_hit)
    assert num_hit == 8
