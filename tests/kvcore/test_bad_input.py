"""Mistakes of a caller, and what a malicious one would try: each has an error of its own that says what to do, and none
changes the books (rule 11)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

import kvcore
from kvcore import (
    BlockHasher,
    BlockPool,
    BlockStored,
    ChunkedLocalAttentionSpec,
    ComputedTokensError,
    ConfigError,
    CountError,
    DoubleFreeError,
    DuplicateRequestError,
    ExtraKeys,
    ForeignBlockError,
    FreeKVCacheBlockQueue,
    FullAttentionSpec,
    HitHandoverError,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheError,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    LoRAAdapter,
    MultiModalItem,
    OutOfBlocksError,
    PrefixContents,
    QueueError,
    Request,
    RequestProtocolError,
    SlidingWindowSpec,
    StaleHitError,
    TokenRangeError,
    UnknownRequestError,
)
from kvcore.hashing import pack_tokens
from kvcore.units import note

HASHER = BlockHasher(4)
FULL = FullAttentionSpec(4, 1, 1, "bfloat16")
WINDOW = SlidingWindowSpec(4, 1, 1, "bfloat16", 6)

NO_COUNTS: list[Any] = [-1, -(10**30), 0.5, 1.0, math.nan, math.inf]
NO_NUMBERS: list[Any] = ["1", None, [1]]
NOT_A_COUNT = r"whole numbers? and not negative, got "


def make_config(*specs: KVCacheSpec, num_blocks: int = 12) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs or (FULL,))])


def make_manager(*specs: KVCacheSpec, num_blocks: int = 12, **settings: Any) -> KVCacheManager:
    settings.setdefault("max_model_len", 1000)
    return KVCacheManager(make_config(*specs, num_blocks=num_blocks), enable_kv_cache_events=True, **settings)


def make_request(name: Any, tokens: Any, **extra: Any) -> Request:
    return Request(name, tokens, block_hasher=HASHER, **extra)


def running(manager: KVCacheManager, name: Any = "a", num_tokens: int = 6) -> Request:
    """A request whose prompt is computed."""
    request = make_request(name, range(num_tokens))
    assert manager.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens = num_tokens
    return request


def with_cached_prefix(*specs: KVCacheSpec, num_blocks: int = 12, num_tokens: int = 16) -> KVCacheManager:
    """A manager that nobody uses, with the blocks of tokens 0, 1, 2, ... in its cache."""
    manager = make_manager(*specs, num_blocks=num_blocks)
    manager.free(running(manager, "cached", num_tokens))
    return manager


def books_of_pool(pool: BlockPool) -> tuple[object, ...]:
    return (
        [(block.ref_cnt, block.block_hash, block.is_null) for block in pool.blocks],
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        pool.get_num_free_blocks(),
        sorted(block.block_id for block in pool.prefix_index),
        len(pool.prefix_index),
    )


def books_of(keeper: KVCacheManager | BlockPool) -> tuple[object, ...]:
    if isinstance(keeper, BlockPool):
        return books_of_pool(keeper)
    tables = {request_id: keeper.get_block_ids(request_id) for request_id in _running(keeper)}
    return *books_of_pool(keeper.block_pool), tables, keeper.usage


def _running(manager: KVCacheManager) -> list[Any]:
    return list(manager.coordinator.single_type_managers[0].req_to_blocks)


@contextmanager
def unchanged(*keepers: KVCacheManager | BlockPool) -> Iterator[None]:
    """What happens inside leaves tables, reference counts, queue, index and events as they were."""
    for keeper in keepers:
        keeper.take_events()
    before = [books_of(keeper) for keeper in keepers]
    yield
    for keeper, books in zip(keepers, before, strict=True):
        keeper.check_invariants()
        assert books_of(keeper) == books
        assert keeper.take_events() == []


@contextmanager
def refused(error: type[KVCacheError], words: str, *keepers: KVCacheManager | BlockPool) -> Iterator[None]:
    """What happens inside raises exactly this error with these words, and changes nothing."""
    with unchanged(*keepers), pytest.raises(error, match=words) as caught:
        yield
    assert caught.type is error


ERRORS = [getattr(kvcore, name) for name in kvcore.__all__ if name.endswith("Error")]


class TestTheFamilyOfErrors:
    @pytest.mark.parametrize("error", ERRORS)
    def test_an_engine_can_catch_them_all_by_one_name(self, error: type[Exception]) -> None:
        assert issubclass(error, KVCacheError)

    @pytest.mark.parametrize("error", [error for error in ERRORS if error is not KVCacheError])
    def test_each_is_a_built_in_error_too(self, error: type[Exception]) -> None:
        assert issubclass(error, (ValueError, KeyError, TypeError, AssertionError))

    def test_the_message_of_an_unknown_request_reads_as_text_although_it_is_a_key_error(self) -> None:
        assert str(UnknownRequestError("request 'a' holds no blocks")) == "request 'a' holds no blocks"


class TestFreeing:
    def test_a_request_twice(self) -> None:
        manager = make_manager()
        request = running(manager)
        other = running(manager, "b")
        manager.free(request)
        with refused(UnknownRequestError, "'a' holds no blocks: .* freed already", manager):
            manager.free(request)
        manager.free(other)

    def test_a_request_that_was_never_admitted(self) -> None:
        manager = make_manager()
        running(manager)
        with refused(UnknownRequestError, "'b' holds no blocks: it was never admitted", manager):
            manager.free(make_request("b", range(6)))

    def test_another_request_of_the_same_id_frees_nothing(self) -> None:
        manager = make_manager()
        running(manager)
        with refused(DuplicateRequestError, "'a' is in use by another request object: use unique ids", manager):
            manager.free(make_request("a", range(6)))

    def test_a_request_that_changed_its_id_while_running(self) -> None:
        manager = make_manager()
        request = running(manager)
        request.request_id = "b"
        with refused(UnknownRequestError, "'b' holds no blocks", manager):
            manager.free(request)
        request.request_id = "a"
        manager.free(request)
        assert manager.usage == 0.0


class TestGrowing:
    def test_a_request_that_was_never_admitted(self) -> None:
        manager = make_manager()
        request = make_request("a", range(6))
        request.num_computed_tokens = 5
        with refused(
            UnknownRequestError, "5 computed tokens but holds no blocks.*set num_computed_tokens to 0", manager
        ):
            manager.allocate_slots(request, 1)

    def test_a_request_that_was_freed(self) -> None:
        manager = make_manager()
        request = running(manager)
        manager.free(request)
        request.append_output_token_ids(9)
        with refused(UnknownRequestError, "freed already; set num_computed_tokens to 0 to admit it", manager):
            manager.allocate_slots(request, 1)
        request.num_computed_tokens = 0
        assert manager.allocate_slots(request, 7) is not None

    def test_another_request_of_the_same_id(self) -> None:
        manager = make_manager()
        running(manager)
        with refused(DuplicateRequestError, "'a' is in use by another request object.*free it before", manager):
            manager.allocate_slots(make_request("a", range(6)), 6)

    def test_another_request_of_the_same_id_that_would_need_no_block(self) -> None:
        manager = make_manager()
        running(manager)
        other = make_request("a", range(7))
        other.num_computed_tokens = 6
        with refused(DuplicateRequestError, "'a' is in use by another request object", manager):
            manager.allocate_slots(other, 1)

    @pytest.mark.parametrize(
        "ask",
        [
            lambda manager: manager.get_blocks("b"),
            lambda manager: manager.get_block_ids("b"),
            lambda manager: manager.get_num_common_prefix_blocks("b"),
            lambda manager: manager.cache_blocks(make_request("b", range(6)), 4),
        ],
        ids=["get_blocks", "get_block_ids", "get_num_common_prefix_blocks", "cache_blocks"],
    )
    def test_asking_about_a_request_that_holds_no_blocks(self, ask: Callable[[KVCacheManager], object]) -> None:
        manager = make_manager()
        running(manager)
        with refused(UnknownRequestError, "'b' holds no blocks", manager):
            ask(manager)

    def test_registering_blocks_of_another_request_of_the_same_id(self) -> None:
        manager = make_manager()
        request = make_request("a", range(6))
        manager.allocate_slots(request, 6, delay_cache_blocks=True)
        with refused(DuplicateRequestError, "in use by another request object", manager):
            manager.cache_blocks(make_request("a", range(100, 106)), 4)


class TestHits:
    def test_handed_over_twice(self) -> None:
        manager = with_cached_prefix()
        request = make_request("a", range(10))
        hits, num_hit_tokens = manager.get_computed_blocks(request)
        assert num_hit_tokens == 8
        assert manager.allocate_slots(request, 2, 8, hits) is not None
        with refused(
            HitHandoverError, "'a' is running and cannot take computed blocks again.*hand hits over once", manager
        ):
            manager.allocate_slots(request, 2, 8, hits)
        request.num_computed_tokens = 10
        request.append_output_token_ids(range(8))
        with refused(HitHandoverError, "hand hits over once", manager):
            manager.allocate_slots(request, 1, 8, hits)

    def test_handed_over_to_a_request_that_runs_without_any(self) -> None:
        manager = with_cached_prefix()
        request = make_request("a", range(10))
        hits, _ = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens = 1
        with refused(HitHandoverError, "is running", manager):
            manager.allocate_slots(request, 1, 8, hits)
        with refused(HitHandoverError, "is running", manager):
            manager.allocate_slots(request, 1, 0, hits)

    def test_external_tokens_handed_over_to_a_running_request(self) -> None:
        manager = make_manager()
        request = make_request("a", range(10))
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens = 1
        with refused(HitHandoverError, "is running and cannot take computed blocks again", manager):
            manager.allocate_slots(request, 1, num_external_computed_tokens=4)

    def test_handed_over_to_a_cache_that_is_off(self) -> None:
        manager = make_manager(enable_caching=False)
        block = manager.block_pool.blocks[1]
        with refused(HitHandoverError, "caching is off", manager):
            manager.allocate_slots(make_request("a", range(6)), 2, 4, KVCacheBlocks(([block],)))

    @pytest.mark.parametrize("specs", [(FULL,), (WINDOW,), (FULL, WINDOW)], ids=["full", "window", "hybrid"])
    def test_evicted_since_the_lookup(self, specs: tuple[KVCacheSpec, ...]) -> None:
        manager = with_cached_prefix(*specs)
        request = make_request("a", range(9))
        hits, num_hit_tokens = manager.get_computed_blocks(request)
        assert num_hit_tokens == 8
        manager.evict_blocks([hits.get_block_ids()[-1][-1]])
        with refused(StaleHitError, "no longer holds block 1 of 'a'.*call get_computed_blocks again", manager):
            manager.allocate_slots(request, 1, 8, hits)

    def test_overwritten_since_the_lookup(self) -> None:
        manager = with_cached_prefix(num_blocks=7)
        request = make_request("a", range(9))
        hits, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(make_request("b", range(100, 124)), 24)
        with refused(StaleHitError, "call get_computed_blocks again", manager):
            manager.allocate_slots(request, 1, 8, hits)

    def test_overwritten_and_free_again_since_the_lookup(self) -> None:
        manager = with_cached_prefix(num_blocks=7)
        request = make_request("a", range(9))
        hits, _ = manager.get_computed_blocks(request)
        other = make_request("b", range(100, 124))
        manager.allocate_slots(other, 24)
        manager.free(other)
        with refused(StaleHitError, "call get_computed_blocks again", manager):
            manager.allocate_slots(request, 1, 8, hits)

    def test_found_before_the_cache_was_reset(self) -> None:
        manager = with_cached_prefix()
        request = make_request("a", range(9))
        hits, _ = manager.get_computed_blocks(request)
        assert manager.reset_prefix_cache()
        with refused(StaleHitError, "call get_computed_blocks again", manager):
            manager.allocate_slots(request, 1, 8, hits)

    def test_found_before_the_cache_was_reset_and_filled_with_another_prefix(self) -> None:
        manager = with_cached_prefix()
        request = make_request("a", range(9))
        hits, _ = manager.get_computed_blocks(request)
        assert manager.reset_prefix_cache()
        others = [make_request(f"other{i}", range(100 * i, 100 * i + 16)) for i in (1, 2)]
        for other in others:
            manager.allocate_slots(other, 16)
        for other in others:
            manager.free(other)
        with refused(StaleHitError, "call get_computed_blocks again", manager):
            manager.allocate_slots(request, 1, 8, hits)

    def test_found_for_another_prefix(self) -> None:
        manager = with_cached_prefix()
        hits, _ = manager.get_computed_blocks(make_request("a", range(9)))
        with refused(StaleHitError, "no longer holds block 0 of 'b'", manager):
            manager.allocate_slots(make_request("b", range(100, 109)), 1, 8, hits)

    def test_found_for_the_same_tokens_under_another_salt(self) -> None:
        manager = with_cached_prefix()
        hits, _ = manager.get_computed_blocks(make_request("a", range(9)))
        with refused(StaleHitError, "no longer holds block 0 of 'b'", manager):
            manager.allocate_slots(make_request("b", range(9), cache_salt="another tenant"), 1, 8, hits)

    def test_given_to_a_request_without_hashes(self) -> None:
        manager = with_cached_prefix()
        hits, _ = manager.get_computed_blocks(make_request("a", range(9)))
        with unchanged(manager), pytest.raises(KVCacheError, match="'b'"):
            manager.allocate_slots(Request("b", range(9)), 1, 8, hits)

    @pytest.mark.parametrize("blocks", [[], [1], [1, 1], [2, 1], [0, 0], [1, 0], [0, 2], [1, 5]])
    def test_put_together_by_hand(self, blocks: list[int]) -> None:
        manager = with_cached_prefix()
        hits = KVCacheBlocks(([manager.block_pool.blocks[block_id] for block_id in blocks],))
        error = StaleHitError if len(blocks) == 2 else ComputedTokensError
        with refused(error, "get_computed_blocks", manager):
            manager.allocate_slots(make_request("a", range(9)), 1, 8, hits)

    def test_with_the_blocks_of_one_group_in_the_place_of_another(self) -> None:
        manager = with_cached_prefix(FULL, FULL)
        request = make_request("a", range(9))
        hits, _ = manager.get_computed_blocks(request)
        swapped = KVCacheBlocks((hits.blocks[1], hits.blocks[0]))
        with refused(StaleHitError, "in group 0", manager):
            manager.allocate_slots(request, 1, 8, swapped)

    def test_with_null_in_place_of_a_block_that_a_window_reads(self) -> None:
        manager = with_cached_prefix(WINDOW)
        request = make_request("a", range(17))
        hits, num_hit_tokens = manager.get_computed_blocks(request)
        assert hits.get_block_ids() == ([0, 0, 3, 4],)
        null = manager.block_pool.null_block
        with refused(StaleHitError, "no longer holds block 2", manager):
            manager.allocate_slots(request, 1, num_hit_tokens, KVCacheBlocks(([null, null, null, hits.blocks[0][3]],)))

    @pytest.mark.parametrize("running", [False, True])
    @pytest.mark.parametrize("kind", [list, tuple, str, int])
    def test_that_are_not_what_the_lookup_returned(self, kind: type, running: bool) -> None:
        manager = with_cached_prefix()
        request = make_request("a", range(9))
        if running:
            manager.allocate_slots(request, 4)
            request.num_computed_tokens = 4
        for hits in (kind(), kind("1")):
            with refused(HitHandoverError, f"must be a KVCacheBlocks.*got {kind.__name__}", manager):
                manager.allocate_slots(request, 1, new_computed_blocks=hits)

    @pytest.mark.parametrize("groups", [0, 1, 3])
    def test_with_a_wrong_number_of_groups(self, groups: int) -> None:
        manager = with_cached_prefix(FULL, WINDOW)
        request = make_request("a", range(9))
        hits, _ = manager.get_computed_blocks(request)
        wrong = KVCacheBlocks((hits.blocks * 2)[:groups])
        with refused(HitHandoverError, f"{groups} groups, the cache has 2", manager):
            manager.allocate_slots(request, 1, 8, wrong)

    @pytest.mark.parametrize("num_tokens", [0, 1, 4, 7, 9, 12])
    def test_with_another_number_of_tokens_than_the_lookup_answered(self, num_tokens: int) -> None:
        manager = with_cached_prefix()
        request = make_request("a", range(13))
        hits, _ = manager.get_computed_blocks(make_request("b", range(9)))
        with refused(ComputedTokensError, "pass both as get_computed_blocks returned them", manager):
            manager.allocate_slots(request, 1, num_tokens, hits)

    def test_with_tokens_but_without_blocks(self) -> None:
        manager = with_cached_prefix()
        with refused(ComputedTokensError, "brings 0 blocks", manager):
            manager.allocate_slots(make_request("a", range(9)), 1, 8)

    def test_with_more_blocks_than_the_request_has_tokens(self) -> None:
        manager = with_cached_prefix()
        hits, num_hit_tokens = manager.get_computed_blocks(make_request("a", range(17)))
        assert num_hit_tokens == 16
        with refused(ComputedTokensError, "has 10 tokens.* cannot have .* 16 ", manager):
            manager.allocate_slots(make_request("b", range(10)), 1, 16, hits)

    def test_with_more_external_tokens_than_the_request_has_left(self) -> None:
        manager = with_cached_prefix()
        request = make_request("a", range(9))
        hits, _ = manager.get_computed_blocks(request)
        with refused(ComputedTokensError, "has 9 tokens", manager):
            manager.allocate_slots(request, 0, 8, hits, num_external_computed_tokens=2)

    def test_of_another_cache(self) -> None:
        ours, theirs = with_cached_prefix(), with_cached_prefix()
        request = make_request("a", range(9))
        hits, _ = theirs.get_computed_blocks(request)
        with refused(ForeignBlockError, "not a block of this pool", ours, theirs):
            ours.allocate_slots(request, 1, 8, hits)

    @pytest.mark.parametrize("block_id", [1, -1, 10**6])
    def test_forged(self, block_id: int) -> None:
        manager = with_cached_prefix()
        original = manager.block_pool.blocks[1]
        forged = KVCacheBlock(block_id)
        assert original.prefix_hash is not None
        assert original.content is not None
        note(forged, [original.prefix_hash], [original.content], 0, 0, is_first=True)
        with refused(ForeignBlockError, "not a block of this pool", manager):
            manager.allocate_slots(make_request("a", range(5)), 1, 4, KVCacheBlocks(([forged],)))


class TestCounts:
    ARGUMENTS = (
        "num_new_tokens",
        "num_new_computed_tokens",
        "num_lookahead_tokens",
        "num_external_computed_tokens",
        "reserved_blocks",
    )

    @pytest.mark.parametrize("count", NO_COUNTS + NO_NUMBERS)
    @pytest.mark.parametrize("argument", ARGUMENTS)
    def test_that_are_none_when_a_request_is_admitted(self, argument: str, count: Any) -> None:
        manager = make_manager()
        running(manager, "other")
        with refused(CountError, NOT_A_COUNT, manager):
            manager.allocate_slots(make_request("a", range(9)), **{"num_new_tokens": 1, argument: count})

    @pytest.mark.parametrize("count", NO_COUNTS)
    @pytest.mark.parametrize("argument", ARGUMENTS)
    @pytest.mark.parametrize("num_tokens", [6, 8], ids=["inside its last block", "at the end of its last block"])
    def test_that_are_none_when_a_request_grows(self, num_tokens: int, argument: str, count: Any) -> None:
        manager = make_manager()
        request = running(manager, "a", num_tokens)
        request.append_output_token_ids(9)
        with refused(CountError, NOT_A_COUNT, manager):
            manager.allocate_slots(request, **{"num_new_tokens": 1, argument: count})

    @pytest.mark.parametrize("count", NO_NUMBERS)
    @pytest.mark.parametrize("argument", ["num_new_tokens", "num_lookahead_tokens"])
    @pytest.mark.parametrize("num_tokens", [6, 8], ids=["inside its last block", "at the end of its last block"])
    def test_that_are_no_numbers_when_a_request_grows(self, num_tokens: int, argument: str, count: Any) -> None:
        manager = make_manager()
        request = running(manager, "a", num_tokens)
        request.append_output_token_ids(9)
        # A step inside the last block does arithmetic before anything else, and Python itself objects.
        with unchanged(manager), pytest.raises((CountError, TypeError)):
            manager.allocate_slots(request, **{"num_new_tokens": 1, argument: count})

    @pytest.mark.parametrize("lookahead", [0, 4])
    def test_of_zero_new_tokens_where_nothing_else_is_to_do(self, lookahead: int) -> None:
        manager = make_manager()
        request = running(manager)
        with refused(CountError, "num_new_tokens must be at least 1 for 'a'", manager):
            manager.allocate_slots(request, 0, num_lookahead_tokens=lookahead)
        with refused(CountError, "num_new_tokens must be at least 1 for 'b'", manager):
            manager.allocate_slots(make_request("b", range(6)), 0, num_lookahead_tokens=lookahead)

    @pytest.mark.parametrize("argument", ["num_new_tokens", "num_lookahead_tokens", "reserved_blocks"])
    def test_too_large_to_fit_are_no_mistake_but_do_not_fit(self, argument: str) -> None:
        manager = make_manager()
        request = running(manager)
        with unchanged(manager):
            assert manager.allocate_slots(request, **{"num_new_tokens": 1, argument: 10**30}) is None
            assert manager.allocate_slots(make_request("b", [1]), **{"num_new_tokens": 1, argument: 10**30}) is None

    @pytest.mark.parametrize("argument", ["num_new_computed_tokens", "num_external_computed_tokens"])
    def test_of_computed_tokens_that_are_huge(self, argument: str) -> None:
        manager = make_manager()
        with refused(ComputedTokensError, "num_computed_tokens", manager):
            manager.allocate_slots(make_request("a", range(6)), 1, **{argument: 10**30})

    @pytest.mark.parametrize("count", [9, 10**30, -1, 6.0, 4.5, math.nan])
    @pytest.mark.parametrize("num_tokens", [6, 8], ids=["inside its last block", "at the end of its last block"])
    def test_of_computed_tokens_that_a_running_request_cannot_have(self, num_tokens: int, count: Any) -> None:
        manager = make_manager()
        request = running(manager, "a", num_tokens)
        request.num_computed_tokens = count
        with refused(
            ComputedTokensError, f"has {num_tokens} tokens.*check num_computed_tokens|num_computed_tokens of", manager
        ):
            manager.allocate_slots(request, 1)

    @pytest.mark.parametrize("count", [7, 10**30, -1, 0.0, 4.5, math.nan, "6", None])
    def test_of_computed_tokens_that_a_new_request_cannot_have(self, count: Any) -> None:
        manager = make_manager()
        request = make_request("a", range(6))
        request.num_computed_tokens = count
        with refused(ComputedTokensError, "has 6 tokens.*check num_computed_tokens|num_computed_tokens of", manager):
            manager.allocate_slots(request, 1)

    def test_of_computed_tokens_that_never_had_a_slot(self) -> None:
        # As after a step that was refused, and whose tokens are counted all the same.
        manager = make_manager()
        request = make_request("a", range(16))
        assert manager.allocate_slots(request, 4) is not None
        request.num_computed_tokens = 12
        with refused(ComputedTokensError, "slots for 4", manager):
            manager.allocate_slots(request, 4)

    @pytest.mark.parametrize("count", [9, -1, 8.0, 4.5, math.nan])
    def test_of_computed_tokens_that_one_of_a_batch_cannot_have(self, count: Any) -> None:
        manager = make_manager()
        requests = [running(manager, "a", 4), running(manager, "b", 8), running(manager, "c", 4)]
        requests[1].num_computed_tokens = count
        with refused(
            ComputedTokensError,
            "'b' has 8 tokens.*check num_computed_tokens|num_computed_tokens of request 'b' must",
            manager,
        ):
            manager.grow(requests)

    @pytest.mark.parametrize("count", NO_COUNTS + NO_NUMBERS)
    @pytest.mark.parametrize("argument", ["num_new_tokens", "num_lookahead_tokens"])
    def test_that_are_none_when_a_batch_grows(self, argument: str, count: Any) -> None:
        manager = make_manager()
        requests = [running(manager, "a", 4), running(manager, "b", 6)]
        with refused(CountError, NOT_A_COUNT, manager):
            manager.grow(requests, **{"num_new_tokens": 1, argument: count})

    @pytest.mark.parametrize("count", NO_COUNTS + NO_NUMBERS)
    def test_that_are_none_when_blocks_are_registered(self, count: Any) -> None:
        manager = make_manager()
        request = running(manager)
        with refused(CountError, NOT_A_COUNT, manager):
            manager.cache_blocks(request, count)

    @pytest.mark.parametrize("count", [9, 17, 10**30])
    def test_of_tokens_to_register_that_are_more_than_its_blocks_or_tokens(self, count: int) -> None:
        manager = make_manager()
        request = make_request("a", range(16))
        manager.allocate_slots(request, 8, delay_cache_blocks=True)
        with refused(ComputedTokensError, "has 16 tokens and slots for 8", manager):
            manager.cache_blocks(request, count)

    @pytest.mark.parametrize(("offset", "length"), [(-1, 3), (0, 0), (0, -1)])
    def test_of_a_multi_modal_item(self, offset: int, length: int) -> None:
        with pytest.raises(CountError, match="needs offset >= 0 and length >= 1"):
            MultiModalItem("image", offset, length)


BAD_TOKENS: list[Any] = [-1, 2**32, 2**70, -(2**70), 1.0, 1.5, math.nan, "1", None, [1, 2], b"1"]


class TestTokens:
    MESSAGE = "token ids must be whole numbers from 0 to 4294967295"

    @pytest.mark.parametrize("token", BAD_TOKENS, ids=repr)
    @pytest.mark.parametrize("position", [0, 3, 4, 5], ids=["first", "end of a block", "tail", "last"])
    @pytest.mark.parametrize("hasher", [HASHER, BlockHasher(4, "sha256_cbor"), None], ids=["xxh3", "cbor", "unhashed"])
    def test_out_of_range_in_a_prompt(self, hasher: BlockHasher | None, position: int, token: Any) -> None:
        tokens: list[Any] = [0, 1, 2, 3, 4, 5]
        tokens[position] = token
        with pytest.raises(TokenRangeError, match=self.MESSAGE):
            Request("a", tokens, block_hasher=hasher)

    def test_as_text(self) -> None:
        with pytest.raises(TokenRangeError, match=self.MESSAGE):
            make_request("a", "What is the capital of France?")  # not tokenized

    @pytest.mark.parametrize("token", BAD_TOKENS, ids=repr)
    @pytest.mark.parametrize("position", [0, 1, 4])
    @pytest.mark.parametrize("hasher", [HASHER, BlockHasher(4, "sha256_cbor"), None], ids=["xxh3", "cbor", "unhashed"])
    def test_out_of_range_in_a_list_appended(self, hasher: BlockHasher | None, position: int, token: Any) -> None:
        request = Request("a", range(6), block_hasher=hasher)
        hashes = list(request.block_hashes)
        tokens: list[Any] = [6, 7, 8, 9, 10]
        tokens[position] = token
        with pytest.raises(TokenRangeError, match=self.MESSAGE):
            request.append_output_token_ids(tokens)
        assert (request.num_tokens, request.all_token_ids) == (6, [0, 1, 2, 3, 4, 5])
        assert request.block_hashes == hashes
        request.append_output_token_ids([6, 7, 8, 9, 10])
        assert request.block_hashes == Request("b", range(11), block_hasher=hasher).block_hashes

    @pytest.mark.parametrize("token", [-1, 2**32, 2**70, -(2**70), 1.0, 1.5, math.nan, "a"], ids=repr)
    @pytest.mark.parametrize("num_tokens", [6, 7], ids=["inside a block", "at its last place"])
    def test_out_of_range_appended_one_by_one(self, num_tokens: int, token: Any) -> None:
        request = make_request("a", range(num_tokens))
        hashes = list(request.block_hashes)
        with pytest.raises(TokenRangeError, match=self.MESSAGE):
            request.append_output_token_ids(token)
        assert (request.num_tokens, request.all_token_ids) == (num_tokens, list(range(num_tokens)))
        assert request.block_hashes == hashes

    def test_out_of_range_hashed_for_a_request_of_another_class(self) -> None:
        with pytest.raises(TokenRangeError, match=rf"{self.MESSAGE}, got -1"):
            HASHER.hash_tokens([0, 1, -1, 3])

    def test_the_message_shows_the_token_at_fault(self) -> None:
        with pytest.raises(TokenRangeError, match=r"got -7$"):
            make_request("a", [True, 0, 2**32 - 1, -7, -8])

    def test_the_message_does_not_blame_a_numpy_integer(self) -> None:
        numpy = pytest.importorskip("numpy")
        with pytest.raises(TokenRangeError, match=r"got -7$"):
            make_request("a", [numpy.int64(1), -7])

    def test_an_empty_prompt(self) -> None:
        with pytest.raises(CountError, match="'a' has no prompt tokens; it needs at least one"):
            make_request("a", [])

    @pytest.mark.parametrize(
        "extra",
        [
            {"cache_salt": "\ud800"},
            {"lora": LoRAAdapter("\ud800", "path")},
            {"mm_items": [MultiModalItem("\ud800", 0, 2)]},
        ],
        ids=["salt", "adapter", "image"],
    )
    def test_a_name_that_cannot_be_encoded_is_refused_at_once_and_not_when_its_block_fills(
        self, extra: dict[str, Any]
    ) -> None:
        # A lone surrogate, which JSON can carry. The first block is not full yet: the engine would fall over it in the
        # middle of decoding.
        with pytest.raises(KVCacheError):
            make_request("a", range(3), **extra)


class TestHashBlockSizes:
    def test_a_request_hashed_at_another_block_size(self) -> None:
        manager = make_manager()
        for size in (2, 8):
            request = Request("a", range(16), block_hasher=BlockHasher(size))
            with refused(ConfigError, r"another block size than the manager's 4: .*BlockHasher\(4", manager):
                manager.get_computed_blocks(request)
            with refused(ConfigError, r"another block size than the manager's 4: .*BlockHasher\(4", manager):
                manager.allocate_slots(request, 16)

    def test_a_request_with_more_hashes_than_its_tokens_fill(self) -> None:
        manager = make_manager()
        request = make_request("a", range(8))
        request.num_tokens = 7
        with refused(ConfigError, "hashed at another block size", manager):
            manager.get_computed_blocks(request)

    @pytest.mark.parametrize("size", [0, -4, 3, 8, 4.0, 2.5, "4", True])
    def test_a_hash_block_size_that_does_not_divide_the_block_size(self, size: Any) -> None:
        with pytest.raises(ConfigError, match="hash_block_size"):
            make_manager(hash_block_size=size)

    @pytest.mark.parametrize("size", [0, -1, 1.5, 4.0, "4", None, True])
    def test_a_hasher_without_a_block_size(self, size: Any) -> None:
        with pytest.raises(ConfigError, match="block_size must be a whole number of at least 1"):
            BlockHasher(size)

    @pytest.mark.parametrize("algorithm", ["md5", "", None])
    def test_a_hasher_of_unknown_algorithm(self, algorithm: Any) -> None:
        with pytest.raises(ConfigError, match=r"algorithm must be one of xxh3, sha256_raw, .*; got"):
            BlockHasher(4, algorithm)


class TestConfigurations:
    @pytest.mark.parametrize("size", [0, -1, 1.5, "16", None, True])
    @pytest.mark.parametrize("name", ["block_size", "num_kv_heads", "head_size"])
    @pytest.mark.parametrize("kind", [FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec])
    def test_a_layer_without_size(self, kind: type[Any], name: str, size: Any) -> None:
        extra = {SlidingWindowSpec: (6,), ChunkedLocalAttentionSpec: (8,)}.get(kind, ())
        sizes = {"block_size": 4, "num_kv_heads": 1, "head_size": 1, name: size}
        with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 1"):
            kind(*sizes.values(), "bfloat16", *extra)

    @pytest.mark.parametrize("size", [0, -1, 1.5, "16", None, True])
    def test_a_window_or_a_chunk_without_size(self, size: Any) -> None:
        with pytest.raises(ConfigError, match="sliding_window must be a whole number of at least 1"):
            SlidingWindowSpec(4, 1, 1, "bfloat16", size)
        with pytest.raises(ConfigError, match="attention_chunk_size must be a whole number of at least 1"):
            ChunkedLocalAttentionSpec(4, 1, 1, "bfloat16", size)

    @pytest.mark.parametrize("dtype", ["float8", "torch.bfloat16", "", None, float])
    def test_an_unknown_dtype(self, dtype: Any) -> None:
        with pytest.raises(ConfigError, match=r"dtype must be one of .*bfloat16"):
            FullAttentionSpec(4, 1, 1, dtype)

    @pytest.mark.parametrize("groups", [[], (), None])
    def test_a_cache_without_groups(self, groups: Any) -> None:
        with pytest.raises(ConfigError, match="at least one group: pass KVCacheGroupSpec"):
            KVCacheConfig(10, groups)

    @pytest.mark.parametrize("num_blocks", [1, 0, -1, 2.5, "10", None, True])
    def test_a_cache_without_blocks(self, num_blocks: Any) -> None:
        with pytest.raises(ConfigError, match=r"at least 2 \(block 0 is the null block\)"):
            KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], FULL)])

    def test_a_layer_of_no_known_kind(self) -> None:
        with pytest.raises(ConfigError, match="one of FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec"):
            make_manager(KVCacheSpec(4, 1, 1, "bfloat16"))

    @pytest.mark.parametrize("policy", ["mru", "LRU", "", None, ["lru"]])
    def test_an_unknown_policy(self, policy: Any) -> None:
        with pytest.raises(ConfigError, match=r"eviction_policy must be one of .*lru"):
            make_manager(eviction_policy=policy)

    @pytest.mark.parametrize("watermark", [-0.01, 1.0, 2, math.nan, math.inf, "0.1", None])
    def test_a_watermark_that_is_no_share(self, watermark: Any) -> None:
        with pytest.raises(ConfigError, match="watermark is a share of the pool, from 0 to below 1"):
            make_manager(watermark=watermark)

    @pytest.mark.parametrize("length", [0, -1, 1.5, math.nan, "8", None])
    def test_a_model_without_length(self, length: Any) -> None:
        with pytest.raises(ConfigError, match="max_model_len"):
            make_manager(max_model_len=length)

    @pytest.mark.parametrize("tokens", [0, -1, 1.5, math.nan, "8"])
    def test_no_tokens_in_flight(self, tokens: Any) -> None:
        with pytest.raises(ConfigError, match="max_in_flight_tokens"):
            make_manager(max_in_flight_tokens=tokens)


class TestBlockIds:
    @pytest.mark.parametrize("block_id", [-1, 12, 10**30, "1", None, 1.0], ids=repr)
    def test_that_are_none_of_the_pool_evict_nothing(self, block_id: Any) -> None:
        manager = with_cached_prefix()
        with refused(ForeignBlockError, "block ids of this pool go from 0 to 11", manager):
            manager.evict_blocks([1, 2, block_id, 3])

    def test_may_name_blocks_that_are_not_cached(self) -> None:
        manager = with_cached_prefix()
        with unchanged(manager):
            manager.evict_blocks([0, 5, 11])
            manager.evict_blocks([])

    def test_may_come_twice(self) -> None:
        manager = with_cached_prefix()
        manager.evict_blocks(iter([1, 1]))
        manager.evict_blocks([1])
        assert len(manager.block_pool.prefix_index) == 3
        assert len(manager.take_events()) == 2  # the prefix stored, block 1 removed
        manager.check_invariants()


class TestResetting:
    def test_is_denied_while_a_request_holds_blocks(self) -> None:
        manager = make_manager(log_stats=True)
        request = running(manager)
        with unchanged(manager):
            assert manager.reset_prefix_cache() is False
        stats = manager.make_prefix_cache_stats()
        assert stats is not None
        assert stats.reset is False
        manager.free(request)
        assert manager.reset_prefix_cache() is True


class TestThePool:
    def test_a_block_freed_twice(self) -> None:
        pool = BlockPool(6)
        first, second = pool.get_new_blocks(2)
        pool.free_blocks([first])
        with refused(DoubleFreeError, "block 1 is held 0 times and cannot be freed 1 times", pool):
            pool.free_blocks([second, first])

    def test_a_block_freed_twice_in_one_call(self) -> None:
        pool = BlockPool(6)
        first, second = pool.get_new_blocks(2)
        with refused(
            DoubleFreeError, "block 1 is held 1 times and cannot be freed 2 times: free each block once", pool
        ):
            pool.free_blocks([second, first, first])

    def test_a_shared_block_may_be_freed_twice_in_one_call(self) -> None:
        pool = BlockPool(6)
        blocks = pool.get_new_blocks(1)
        pool.touch(blocks)
        pool.free_blocks(blocks * 2)
        assert pool.get_num_free_blocks() == 5
        pool.check_invariants()

    @pytest.mark.parametrize("held", [True, False], ids=["held", "free"])
    @pytest.mark.parametrize("call", ["free_blocks", "touch"])
    def test_a_block_of_another_pool(self, call: str, held: bool) -> None:
        ours, theirs = BlockPool(6), BlockPool(6)
        own = ours.get_new_blocks(1)
        foreign = theirs.get_new_blocks(3)[1]
        if not held:
            theirs.free_blocks([foreign])
        with refused(ForeignBlockError, "is not a block of this pool", ours, theirs):
            getattr(ours, call)([*own, foreign])

    def test_a_free_block_touched_twice_in_one_call_has_two_holders(self) -> None:
        pool = BlockPool(6)
        block = pool.blocks[3]
        pool.touch([block, block])
        assert block.ref_cnt == 2
        assert pool.get_num_free_blocks() == 4
        pool.check_invariants()

    def test_more_blocks_than_are_free(self) -> None:
        pool = BlockPool(6)
        pool.get_new_blocks(2)
        with refused(OutOfBlocksError, "4 blocks asked for, 3 are free: check get_num_free_blocks", pool):
            pool.get_new_blocks(4)

    def test_a_negative_number_of_blocks(self) -> None:
        pool = BlockPool(6)
        with unchanged(pool), pytest.raises((OutOfBlocksError, CountError), match="-1"):
            pool.get_new_blocks(-1)

    @pytest.mark.parametrize("num_blocks", [1, 0, -1])
    def test_a_pool_without_blocks(self, num_blocks: int) -> None:
        with pytest.raises(ConfigError, match="at least 2 blocks"):
            BlockPool(num_blocks)

    def test_the_null_block_is_passed_over(self) -> None:
        pool = BlockPool(6)
        with unchanged(pool):
            pool.touch([pool.null_block])
            pool.free_blocks([pool.null_block, pool.null_block])
            pool.evict_blocks([0])


class TestTheQueue:
    def test_a_block_put_in_twice(self) -> None:
        blocks = [KVCacheBlock(i) for i in range(3)]
        queue = FreeKVCacheBlockQueue(blocks)
        with pytest.raises(QueueError, match="is in the free queue already"):
            queue.append(blocks[1])
        assert queue.get_all_free_blocks() == blocks

    def test_a_block_taken_out_twice(self) -> None:
        blocks = [KVCacheBlock(i) for i in range(3)]
        queue = FreeKVCacheBlockQueue(blocks)
        queue.remove(blocks[1])
        with pytest.raises(QueueError, match="is not in the free queue"):
            queue.remove(blocks[1])
        assert queue.get_all_free_blocks() == [blocks[0], blocks[2]]
        assert queue.num_free_blocks == 2

    @pytest.mark.parametrize("n", [3, -1])
    def test_more_blocks_taken_than_it_has(self, n: int) -> None:
        blocks = [KVCacheBlock(i) for i in range(2)]
        queue = FreeKVCacheBlockQueue(blocks)
        with pytest.raises(QueueError, match=f"cannot take {n} blocks from a queue of 2"):
            queue.popleft_n(n)
        assert queue.get_all_free_blocks() == blocks

    def test_a_block_taken_from_an_empty_one(self) -> None:
        queue = FreeKVCacheBlockQueue([])
        with pytest.raises(QueueError, match="cannot take 1 blocks from a queue of 0"):
            queue.popleft()


@dataclass
class BareRequest:
    """Has less than the manager reads: it cannot tell what its hashes stand for."""

    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = BlockHasher(4, "sha256_raw").hash_tokens(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass
class EventlessRequest(BareRequest):
    """Has what the manager reads while events are off, and nothing else."""

    block_contents: None = None


class OwnRequest:
    """A request of the caller's own class, without hashes."""

    request_id = "own"
    num_computed_tokens = 0
    block_contents = None

    def __init__(self, num_tokens: object, block_hashes: Sequence[object] = ()) -> None:
        self.num_tokens = num_tokens
        self.block_hashes = block_hashes


class OwnEventRequest(OwnRequest):
    token_ids = range(13)

    def __init__(self, **attributes: object) -> None:
        super().__init__(13, BlockHasher(4).hash_tokens(self.token_ids))
        self.extra_keys: object = ExtraKeys(None, (), None)
        vars(self).update(attributes)


class TestRequests:
    @pytest.mark.parametrize(
        ("attributes", "error"),
        [
            ({"extra_keys": None}, "extra_keys of request 'own' must be an ExtraKeys, got a NoneType"),
            ({"block_contents": []}, "block_contents of request 'own' must be a PrefixContents or None, got a list"),
            ({"block_hashes": [b"a", b"b", None]}, "block_hashes of request 'own' must be bytes, got a NoneType"),
        ],
    )
    def test_that_have_what_is_read_in_another_type(self, attributes: dict[str, object], error: str) -> None:
        manager = KVCacheManager(make_config(), 1000, enable_kv_cache_events=True)
        for call in (manager.get_computed_blocks, lambda request: manager.allocate_slots(request, 13)):
            with refused(RequestProtocolError, error, manager):
                call(OwnEventRequest(**attributes))
        assert manager.allocate_slots(OwnEventRequest(), 13) is not None

    def test_whose_tokens_are_numpy_integers_have_plain_ones_in_events(self) -> None:
        numpy = pytest.importorskip("numpy")
        for token_ids in (numpy.arange(13), [*numpy.arange(13)]):
            manager = KVCacheManager(make_config(), 1000, enable_kv_cache_events=True)
            assert manager.allocate_slots(OwnEventRequest(token_ids=token_ids), 13) is not None
            (event,) = manager.take_events()
            assert isinstance(event, BlockStored)
            assert event.token_ids == [*range(12)]
            assert {*map(type, event.token_ids)} == {int}

    @pytest.mark.parametrize("num_tokens", [13.0, "13", None])
    def test_whose_count_of_tokens_is_no_whole_number(self, num_tokens: object) -> None:
        manager = KVCacheManager(make_config(), 1000)
        with refused(RequestProtocolError, "num_tokens of request 'own' must be an int, got a", manager):
            manager.allocate_slots(OwnRequest(num_tokens), 4)

    def test_whose_count_of_tokens_is_a_numpy_integer(self) -> None:
        # Compiled code takes it for no int; that must not show half way through a change.
        numpy = pytest.importorskip("numpy")
        manager = KVCacheManager(make_config(), 1000)
        with refused(RequestProtocolError, "must be an int, got a int64", manager):
            manager.allocate_slots(OwnRequest(numpy.int64(13)), 4)
        request = OwnRequest(13)
        assert manager.allocate_slots(request, 4) is not None
        request.num_computed_tokens, request.num_tokens = 4, numpy.int64(14)
        for _ in range(2):
            with suppress(TypeError):  # taken where kvcore is not compiled
                manager.allocate_slots(request, 4)
            manager.check_invariants()
        manager.free(request)
        assert manager.usage == 0

    def test_counts_of_other_integer_types_are_refused_with_what_to_do(self) -> None:
        numpy = pytest.importorskip("numpy")
        manager = make_manager()
        request = make_request("a", range(9))
        with refused(CountError, r"num_new_tokens must be .* got .*: make it an int\(\)", manager):
            manager.allocate_slots(request, numpy.int64(9))
        with refused(ForeignBlockError, r"got .*: make it an int\(\)", manager):
            manager.evict_blocks(numpy.array([1, 2]))
        with pytest.raises(ConfigError, match=r"must be a whole number of at least 1, got .*: make it an int\(\)"):
            make_manager(max_model_len=numpy.int64(9))
        assert manager.allocate_slots(request, 9) is not None
        request.num_computed_tokens = numpy.int64(9)
        request.append_output_token_ids(1)
        with refused(ComputedTokensError, r"num_computed_tokens of .* must be .*: make it an int\(\)", manager):
            manager.allocate_slots(request, 1)

    @pytest.mark.parametrize("token_ids", [list(range(9)), range(9)])
    def test_contents_of_tokens_that_are_not_packed_are_refused(self, token_ids: Any) -> None:
        with pytest.raises(RequestProtocolError, match=r"array\('I'\).*; got a "):
            PrefixContents(token_ids, ExtraKeys(None, (), None), 4)
        with pytest.raises(RequestProtocolError, match="and its ExtraKeys; got a array and a NoneType"):
            PrefixContents(pack_tokens(token_ids), None, 4)  # type: ignore[arg-type]

    @pytest.mark.parametrize("block_hash", [1, "a", memoryview(b"a")])
    def test_whose_hashes_are_not_bytes(self, block_hash: object) -> None:
        manager = KVCacheManager(make_config(), 1000)
        for call in (manager.get_computed_blocks, lambda request: manager.allocate_slots(request, 4)):
            with refused(RequestProtocolError, "block_hashes of request 'own' must be bytes, got a", manager):
                call(OwnRequest(13, [block_hash] * 3))

    def test_longer_than_the_longest_sequence_get_no_slots_beyond_it(self) -> None:
        manager = make_manager(max_model_len=8)
        request = make_request("a", range(20))
        assert manager.allocate_slots(request, 20) is not None
        assert manager.get_block_ids("a") == ([1, 2],)
        assert len(manager.block_pool.prefix_index) == 2
        manager.check_invariants()
        manager.free(request)
        manager.check_invariants()
        assert manager.usage == 0.0

    def test_of_a_class_that_cannot_tell_what_its_hashes_stand_for_are_refused(self) -> None:
        manager = make_manager()
        request: Any = BareRequest("a", list(range(9)))
        with unchanged(manager), pytest.raises(Exception, match="block_contents"):
            manager.allocate_slots(request, 9)

    def test_of_a_class_that_cannot_tell_its_tokens_are_refused_where_events_are_kept(self) -> None:
        request = EventlessRequest("a", list(range(9)))
        without_events = KVCacheManager(make_config(), 1000)
        assert without_events.allocate_slots(request, 9) is not None
        manager = make_manager()
        with unchanged(manager), pytest.raises(Exception, match=r"token_ids|extra_keys"):
            manager.allocate_slots(request, 9)

    @pytest.mark.parametrize("name", [None, 0, "", ("tenant", 1), b"a", 3.5], ids=repr)
    def test_may_have_ids_of_any_hashable_type(self, name: Any) -> None:
        manager = make_manager()
        request = running(manager, name)
        other = running(manager, "other")
        assert manager.get_block_ids(name) == ([1, 2],)
        with refused(DuplicateRequestError, "in use by another request object", manager):
            manager.allocate_slots(make_request(name, range(6)), 6)
        manager.free(request)
        manager.free(other)
        assert manager.usage == 0.0

    def test_without_a_hashable_id_are_refused(self) -> None:
        manager = make_manager()
        with unchanged(manager), pytest.raises(TypeError, match="unhashable"):
            manager.allocate_slots(make_request(["a"], range(6)), 6)
