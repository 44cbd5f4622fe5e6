"""The facade: the life of a request, and the switches that a scheduler has."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcore import (
    BlockHasher,
    BlockStored,
    InvariantError,
    KVCacheBlocks,
    KVCacheManager,
    Request,
)
from kvcore.contents import PrefixContents
from kvcore.extra_keys import ExtraKeys
from kvcore.hashing import pack_tokens
from kvcore.testing import admit, free_block_ids, make_manager, make_request, make_spec, table
from kvcore.units import unit_of


def cached_blocks(manager: KVCacheManager) -> list[int]:
    return sorted(block.block_id for block in manager.block_pool.prefix_index)


def fill_cache(manager: KVCacheManager, num_tokens: int, first_token: int = 0) -> None:
    """Leaves the blocks of tokens ``first_token``, ... in the cache."""
    request = make_request(f"filler {first_token}", range(first_token, first_token + num_tokens), manager)
    admit(manager, request)
    manager.free(request)


class TestTheLifeOfARequest:
    def test_from_a_prefill_in_chunks_to_the_end(self) -> None:
        manager = make_manager(10)
        request = make_request("a", range(10), manager)
        answers = []
        for num_new_tokens in (3, 5, 2):
            new = manager.allocate_slots(request, num_new_tokens)
            assert new is not None
            answers.append(new.get_block_ids()[0])
            request.num_computed_tokens += num_new_tokens
        assert answers == [[1], [2], [3]]
        for token in range(10, 14):
            request.append_output_token_ids(token)
            new = manager.allocate_slots(request, 1)
            assert new is not None
            answers.append(new.get_block_ids()[0])
            request.num_computed_tokens += 1
        assert answers == [[1], [2], [3], [], [], [4], []]
        assert manager.get_block_ids("a") == ([1, 2, 3, 4],)
        assert cached_blocks(manager) == [1, 2, 3]
        manager.free(request)
        assert free_block_ids(manager) == [4, 5, 6, 7, 8, 9, 3, 2, 1]

    def test_a_preempted_request_finds_its_own_blocks_when_it_comes_back(self) -> None:
        manager = make_manager(10)
        request = make_request("a", range(10), manager)
        admit(manager, request)
        request.append_output_token_ids([10, 11, 12])
        manager.allocate_slots(request, 3)
        request.num_computed_tokens = 13
        manager.free(request)
        request.num_computed_tokens = 0
        assert admit(manager, request) == 12  # its output too
        assert table(manager, request)[:3] == [1, 2, 3]
        manager.check_invariants()

    def test_an_id_can_be_used_again_when_it_is_free(self) -> None:
        manager = make_manager(10)
        first = make_request("a", range(5), manager)
        admit(manager, first)
        manager.free(first)
        second = make_request("a", range(100, 105), manager)
        assert admit(manager, second) == 0
        manager.free(second)
        assert manager.usage == 0.0

    def test_a_request_without_hashes_shares_nothing(self) -> None:
        manager = make_manager(10)
        request = Request("a", range(9))
        assert admit(manager, request) == 0
        assert cached_blocks(manager) == []
        for token in range(9, 14):
            request.append_output_token_ids(token)
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        assert table(manager, request) == [1, 2, 3, 4]
        manager.cache_blocks(request, 12)
        assert cached_blocks(manager) == []
        manager.free(request)
        assert free_block_ids(manager) == [4, 3, 2, 1, 5, 6, 7, 8, 9]

    def test_usage_is_the_share_of_blocks_held(self) -> None:
        manager = make_manager(9)
        request = make_request("a", range(16), manager)
        assert manager.usage == 0.0
        admit(manager, request)
        assert manager.usage == 0.5
        manager.free(request)
        assert manager.usage == 0.0  # cached blocks are free


class TestRefusal:
    def test_what_does_not_fit_is_refused_and_nothing_happens(self) -> None:
        manager = make_manager(5, enable_kv_cache_events=True)
        fill_cache(manager, 8)
        manager.take_events()
        order = free_block_ids(manager)
        request = make_request("a", range(20), manager)
        hits, num_hit_tokens = manager.get_computed_blocks(request)
        assert num_hit_tokens == 8
        assert manager.allocate_slots(request, 12, 8, hits) is None
        assert free_block_ids(manager) == order
        assert cached_blocks(manager) == [1, 2]
        assert manager.take_events() == []
        manager.check_invariants()
        assert manager.allocate_slots(request, 8, 8, hits) is not None  # a smaller step does fit

    def test_a_running_request_is_refused_its_next_block_and_keeps_the_others(self) -> None:
        manager = make_manager(3)
        request = make_request("a", range(8), manager)
        admit(manager, request)
        request.append_output_token_ids(8)
        for _ in range(2):
            assert manager.allocate_slots(request, 1) is None
            assert manager.get_block_ids("a") == ([1, 2],)
            manager.check_invariants()
        manager.free(request)

    def test_reserved_blocks_stay_free(self) -> None:
        manager = make_manager(6)  # 5 free
        request = make_request("a", range(12), manager)
        assert manager.allocate_slots(request, 12, reserved_blocks=3) is None
        assert manager.allocate_slots(request, 12, reserved_blocks=2) is not None
        request.num_computed_tokens = 12
        request.append_output_token_ids(12)
        assert manager.allocate_slots(request, 1, reserved_blocks=2) is None
        assert manager.allocate_slots(request, 1, reserved_blocks=1) is not None

    def test_reserved_blocks_do_not_stop_a_request_that_needs_none(self) -> None:
        manager = make_manager(3)
        request = make_request("a", range(6), manager)
        admit(manager, request)
        request.append_output_token_ids(6)
        assert manager.allocate_slots(request, 1, reserved_blocks=1) is None  # none is free, one is to be
        assert manager.allocate_slots(request, 1) is not None

    def test_a_watermark_holds_for_admission_only(self) -> None:
        manager = make_manager(9, watermark=0.25)  # 2 of 9 blocks, 8 of which are free
        big = make_request("big", range(28), manager)
        assert manager.allocate_slots(big, 28) is None
        request = make_request("a", range(24), manager)
        assert manager.allocate_slots(request, 24) is not None  # 6 blocks, 2 stay free
        request.num_computed_tokens = 24
        request.append_output_token_ids([24, 25, 26, 27, 28])
        assert manager.allocate_slots(request, 5) is not None  # the running request may use them
        assert free_block_ids(manager) == []

    def test_without_a_watermark_the_last_block_can_be_given_to_a_new_request(self) -> None:
        manager = make_manager(9)
        assert manager.allocate_slots(make_request("a", range(32), manager), 32) is not None

    def test_hits_in_use_by_others_cost_nothing(self) -> None:
        manager = make_manager(5)  # 4 free
        admit(manager, make_request("a", range(12), manager))
        request = make_request("b", range(13), manager)
        assert admit(manager, request) == 12  # 1 block was left
        assert table(manager, request) == [1, 2, 3, 4]


class TestTheFullSequenceMustFit:
    def test_not_only_its_next_chunk(self) -> None:
        manager = make_manager(10)  # 9 free
        too_long = make_request("a", range(40), manager)
        assert manager.allocate_slots(too_long, 4, full_sequence_must_fit=True) is None
        assert manager.allocate_slots(too_long, 4) is not None
        manager.free(too_long)
        fits = make_request("b", range(36), manager)
        assert manager.allocate_slots(fits, 4, full_sequence_must_fit=True) is not None
        assert manager.get_block_ids("b") == ([2],)  # asked for, not taken

    def test_counting_what_it_has_and_what_it_hits(self) -> None:
        manager = make_manager(10)
        fill_cache(manager, 16)
        other = make_request("other", range(100, 116), manager)
        assert manager.allocate_slots(other, 16) is not None  # 5 are free, 4 of them cached
        request = make_request("a", range(20), manager)
        hits, num_hit_tokens = manager.get_computed_blocks(request)
        assert num_hit_tokens == 16
        assert manager.allocate_slots(request, 1, 16, hits, full_sequence_must_fit=True) is not None
        request.num_computed_tokens = 17
        assert manager.allocate_slots(request, 1, full_sequence_must_fit=True) is not None
        request.append_output_token_ids([1])
        request.num_computed_tokens = 18
        assert manager.allocate_slots(request, 1, full_sequence_must_fit=True) is None  # 21 tokens are 6 blocks

    def test_but_a_window_only_what_it_holds_at_once_if_the_tokens_in_flight_are_bounded(self) -> None:
        # A window of 6 with at most 4 tokens in flight: 9 tokens, which begin inside a block, hence 4 blocks.
        def fits(num_free_blocks: int, **settings: Any) -> bool:
            manager = make_manager(num_free_blocks + 1, groups=["sliding:6"], **settings)
            request = make_request("a", range(100, 140), manager)
            return manager.allocate_slots(request, 4, full_sequence_must_fit=True) is not None

        assert [fits(n, max_in_flight_tokens=4) for n in (3, 4)] == [False, True]
        assert [fits(n) for n in (4, 9, 10)] == [False, False, True]
        assert [fits(n, max_in_flight_tokens=1000) for n in (9, 10)] == [False, True]

    @pytest.mark.parametrize("groups", [["sliding:6"], ["chunked:8"], ["chunked:6"]])
    def test_and_what_was_admitted_so_then_runs_to_its_end_alone(self, groups: list[str]) -> None:
        for num_free_blocks in range(1, 8):
            manager = make_manager(num_free_blocks + 1, groups=groups, max_in_flight_tokens=4)
            request = make_request("a", range(100, 141), manager)
            if manager.allocate_slots(request, 4, full_sequence_must_fit=True) is None:
                continue
            request.num_computed_tokens = 4
            while request.num_computed_tokens < 41:
                step = min(4, 41 - request.num_computed_tokens)
                assert manager.allocate_slots(request, step, full_sequence_must_fit=True) is not None
                request.num_computed_tokens += step
            manager.check_invariants()
            break
        else:
            pytest.fail("never fits, although 7 blocks are enough")

    def test_no_more_than_the_longest_sequence(self) -> None:
        manager = make_manager(3, max_model_len=8)
        request = make_request("a", range(8), manager)
        assert manager.allocate_slots(request, 1, full_sequence_must_fit=True) is not None

    def test_with_blocks_to_spare_for_the_watermark(self) -> None:
        manager = make_manager(10, watermark=0.1)
        assert manager.allocate_slots(make_request("a", range(36), manager), 1, full_sequence_must_fit=True) is None
        assert manager.allocate_slots(make_request("b", range(32), manager), 1, full_sequence_must_fit=True) is not None


class TestSlots:
    def test_lookahead_tokens_get_slots_and_are_never_registered(self) -> None:
        manager = make_manager(10)
        request = make_request("a", range(6), manager)
        manager.allocate_slots(request, 6, num_lookahead_tokens=10)
        assert table(manager, request) == [1, 2, 3, 4]
        assert cached_blocks(manager) == [1]
        request.num_computed_tokens = 6
        request.append_output_token_ids([6, 7])
        manager.allocate_slots(request, 2, num_lookahead_tokens=8)
        assert table(manager, request) == [1, 2, 3, 4]
        assert cached_blocks(manager) == [1, 2]

    def test_known_tokens_in_lookahead_slots_are_not_registered_either(self) -> None:
        manager = make_manager(10)
        request = make_request("a", range(12), manager)
        manager.allocate_slots(request, 4, num_lookahead_tokens=8)  # a chunk of a prompt: the rest is not computed yet
        assert table(manager, request) == [1, 2, 3]
        assert cached_blocks(manager) == [1]

    def test_draft_tokens_among_the_new_ones_are_not_registered_before_they_are_accepted(self) -> None:
        manager = make_manager(10)
        request = make_request("a", range(6), manager)
        admit(manager, request)
        request.append_output_token_ids(6)
        manager.allocate_slots(request, 4)  # one token, three drafts: positions 6 to 9
        assert table(manager, request) == [1, 2, 3]
        assert cached_blocks(manager) == [1]
        request.append_output_token_ids([7, 8])  # one draft was accepted, another token sampled
        request.num_computed_tokens = 8
        manager.allocate_slots(request, 1)
        assert cached_blocks(manager) == [1, 2]
        manager.check_invariants()

    def test_no_slot_lies_beyond_the_longest_sequence(self) -> None:
        manager = make_manager(10, max_model_len=10)
        request = make_request("a", range(9), manager)
        manager.allocate_slots(request, 9, num_lookahead_tokens=20)
        assert table(manager, request) == [1, 2, 3]
        request.num_computed_tokens = 9
        request.append_output_token_ids(9)
        assert manager.allocate_slots(request, 1, num_lookahead_tokens=20) is not None
        assert table(manager, request) == [1, 2, 3]

    def test_each_group_grows_when_its_own_last_block_is_full(self) -> None:
        manager = make_manager(30, groups=[make_spec("full", 8), make_spec("full", 4)])
        request = make_request("a", range(3), manager)
        admit(manager, request)
        for num_tokens in range(4, 30):
            request.append_output_token_ids(num_tokens)
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
            assert [len(ids) for ids in manager.get_block_ids("a")] == [-(-num_tokens // 8), -(-num_tokens // 4)]
            manager.check_invariants()

    def test_a_step_inside_the_last_block_answers_with_no_blocks_in_every_group(self) -> None:
        manager = make_manager(20, groups=["full", "sliding:6"])
        request = make_request("a", range(5), manager)
        admit(manager, request)
        request.append_output_token_ids(5)
        new = manager.allocate_slots(request, 1)
        assert new is not None
        assert new.get_block_ids() == ([], [])


class TestDelayedRegistration:
    def test_blocks_are_registered_when_the_data_has_arrived(self) -> None:
        manager = make_manager(10)
        request = make_request("a", range(13), manager)
        manager.allocate_slots(request, 1, num_external_computed_tokens=12, delay_cache_blocks=True)
        assert table(manager, request) == [1, 2, 3, 4]
        assert cached_blocks(manager) == []
        manager.cache_blocks(request, 9)
        assert cached_blocks(manager) == [1, 2]
        manager.cache_blocks(request, 4)  # less than before is nothing to do
        manager.cache_blocks(request, 12)
        manager.cache_blocks(request, 12)
        assert cached_blocks(manager) == [1, 2, 3]
        manager.check_invariants()

    def test_blocks_freed_before_that_were_never_hittable(self) -> None:
        manager = make_manager(10)
        request = make_request("a", range(12), manager)
        manager.allocate_slots(request, 12, delay_cache_blocks=True)
        manager.free(request)
        assert free_block_ids(manager) == [3, 2, 1, 4, 5, 6, 7, 8, 9]
        assert manager.get_computed_blocks(make_request("b", range(12), manager))[1] == 0

    def test_the_next_step_registers_them_unless_told_otherwise(self) -> None:
        manager = make_manager(10)
        request = make_request("a", range(6), manager)
        manager.allocate_slots(request, 6, delay_cache_blocks=True)
        request.num_computed_tokens = 6
        request.append_output_token_ids(6)
        manager.allocate_slots(request, 1, delay_cache_blocks=True)
        assert cached_blocks(manager) == []
        request.num_computed_tokens = 7
        request.append_output_token_ids(7)
        manager.allocate_slots(request, 1)
        assert cached_blocks(manager) == [1, 2]

    def test_hits_are_taken_without_it_all_the_same(self) -> None:
        manager = make_manager(10)
        fill_cache(manager, 8)
        request = make_request("a", range(13), manager)
        hits, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, 1, 8, hits, num_external_computed_tokens=4, delay_cache_blocks=True)
        assert cached_blocks(manager) == [1, 2]
        manager.cache_blocks(request, 12)
        assert len(cached_blocks(manager)) == 3

    def test_external_tokens_may_come_with_nothing_to_compute_yet(self) -> None:
        manager = make_manager(10)
        request = make_request("a", range(9), manager)
        new = manager.allocate_slots(request, 0, num_external_computed_tokens=8, delay_cache_blocks=True)
        assert new is not None
        assert table(manager, request) == [1, 2]
        request.num_computed_tokens = 8
        assert manager.allocate_slots(request, 1) is not None
        assert table(manager, request) == [1, 2, 3]
        assert cached_blocks(manager) == [1, 2]

    def test_all_hits_and_nothing_to_compute_yet_will_do_too(self) -> None:
        manager = make_manager(10)
        fill_cache(manager, 8)
        request = make_request("a", range(9), manager)
        hits, _ = manager.get_computed_blocks(request)
        new = manager.allocate_slots(request, 0, 8, hits)
        assert new is not None
        assert new.get_block_ids() == ([],)
        assert table(manager, request) == [1, 2]


class TestHits:
    def test_a_lookup_takes_nothing_and_can_be_repeated(self) -> None:
        manager = make_manager(10)
        fill_cache(manager, 8)
        request = make_request("a", range(9), manager)
        order = free_block_ids(manager)
        first, second = manager.get_computed_blocks(request), manager.get_computed_blocks(request)
        assert first == second
        assert free_block_ids(manager) == order
        assert manager.allocate_slots(request, 1, 8, first[0]) is not None

    def test_an_older_lookup_is_good_as_long_as_its_blocks_are(self) -> None:
        manager = make_manager(10)
        fill_cache(manager, 8)
        fill_cache(manager, 8, first_token=100)
        request = make_request("a", range(9), manager)
        hits, _ = manager.get_computed_blocks(request)
        manager.get_computed_blocks(make_request("another", range(100, 109), manager))
        manager.evict_blocks([3])  # of the other prefix
        assert manager.allocate_slots(request, 1, 8, hits) is not None
        assert table(manager, request)[:2] == [1, 2]
        manager.check_invariants()

    def test_two_requests_may_take_what_one_lookup_found(self) -> None:
        manager = make_manager(10)
        fill_cache(manager, 8)
        hits, _ = manager.get_computed_blocks(make_request("lookup", range(9), manager))
        for name in ("a", "b"):
            assert manager.allocate_slots(make_request(name, range(9), manager), 1, 8, hits) is not None
        assert [manager.block_pool.blocks[block_id].ref_cnt for block_id in (1, 2)] == [2, 2]
        manager.check_invariants()

    def test_blocks_that_others_have_taken_since_the_lookup_can_still_be_shared(self) -> None:
        manager = make_manager(10)
        fill_cache(manager, 8)
        request = make_request("a", range(9), manager)
        hits, _ = manager.get_computed_blocks(request)
        admit(manager, make_request("b", range(10), manager))
        assert manager.allocate_slots(request, 1, 8, hits) is not None
        assert manager.block_pool.blocks[1].ref_cnt == 2
        manager.check_invariants()

    def test_hits_need_not_be_taken(self) -> None:
        manager = make_manager(10)
        fill_cache(manager, 8)
        request = make_request("a", range(9), manager)
        manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 9) is not None
        assert table(manager, request) == [3, 4, 5]
        manager.check_invariants()

    @pytest.mark.parametrize("salt", [None, "", "tenant"])
    def test_only_equal_salts_share(self, salt: str | None) -> None:
        manager = make_manager(20)
        admit(manager, make_request("a", range(8), manager, cache_salt="tenant"))
        admit(manager, make_request("b", range(8), manager))
        hit = manager.get_computed_blocks(make_request("c", range(9), manager, cache_salt=salt))
        assert hit[0].get_block_ids() == (([1, 2],) if salt == "tenant" else ([3, 4],))

    def test_a_hash_block_size_smaller_than_the_block_size_changes_no_hit(self) -> None:
        for hash_block_size in (1, 2, 4):
            manager = make_manager(20, hash_block_size=hash_block_size)
            fill_cache(manager, 10)
            assert cached_blocks(manager) == [1, 2]
            blocks, num_tokens = manager.get_computed_blocks(make_request("a", range(10), manager))
            assert (blocks.get_block_ids(), num_tokens) == (([1, 2],), 8)


class TestAnswers:
    def test_the_blocks_of_a_request_are_a_snapshot(self) -> None:
        manager = make_manager(10)
        request = make_request("a", range(4), manager)
        admit(manager, request)
        before = manager.get_blocks("a")
        request.append_output_token_ids(4)
        manager.allocate_slots(request, 1)
        assert before.get_block_ids() == ([1],)
        assert manager.get_blocks("a").get_block_ids() == manager.get_block_ids("a") == ([1, 2],)
        assert manager.get_blocks("a").blocks[0][0] is manager.block_pool.blocks[1]

    def test_changing_the_lists_of_ids_changes_no_table(self) -> None:
        manager = make_manager(10)
        admit(manager, make_request("a", range(4), manager))
        manager.get_block_ids("a")[0].clear()
        assert manager.get_block_ids("a") == ([1],)

    def test_blocks_can_be_added_group_by_group(self) -> None:
        manager = make_manager(20, groups=["full", "sliding:6"])
        fill_cache(manager, 8)
        request = make_request("a", range(9), manager)
        hits, _ = manager.get_computed_blocks(request)
        new = manager.allocate_slots(request, 1, 8, hits)
        assert new is not None
        assert (hits + new).get_block_ids() == manager.get_block_ids("a")
        assert (new.new_empty() + hits).get_block_ids() == hits.get_block_ids()
        assert hits.new_empty().get_block_ids() == ([], [])

    def test_blocks_of_different_numbers_of_groups_cannot(self) -> None:
        with pytest.raises(ValueError, match="group"):
            KVCacheBlocks(([],)) + KVCacheBlocks(([], []))

    def test_it_says_what_it_is_and_how_full(self) -> None:
        manager = make_manager(10, groups=["full", "sliding:6"])
        admit(manager, make_request("a", range(5), manager))
        text = repr(manager)
        assert text.startswith("KVCacheManager(HybridKVCacheCoordinator, groups=2, requests=1, BlockPool(")
        assert "free=5" in text


@dataclass
class OwnRequest:
    """A request of an engine that has a class for them already."""

    request_id: str
    tokens: array[int]
    hasher: BlockHasher
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    block_contents: PrefixContents | None = None
    extra_keys: ExtraKeys = field(default_factory=lambda: ExtraKeys(None, (), None))

    def __post_init__(self) -> None:
        self.hasher.extend(self.block_hashes, self.tokens, {})

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.hasher.extend(self.block_hashes, self.tokens, {})

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def token_ids(self) -> array[int]:
        return self.tokens


class TestRequestsOfTheCallersOwnClass:
    HASHER = BlockHasher(4, "sha256_raw")

    def test_are_admitted_grown_and_freed_like_others(self) -> None:
        manager = make_manager(10, enable_kv_cache_events=True)
        request = OwnRequest("a", pack_tokens(range(6)), self.HASHER)
        assert manager.get_computed_blocks(request)[1] == 0
        assert manager.allocate_slots(request, 6) is not None
        request.num_computed_tokens = 6
        for token in (6, 7, 8):
            request.append(token)
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        assert manager.get_block_ids("a") == ([1, 2, 3],)
        assert cached_blocks(manager) == [1, 2]
        stored = [event for event in manager.take_events() if isinstance(event, BlockStored)]
        assert [event.token_ids for event in stored] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        manager.free(request)
        manager.check_invariants()

    def test_share_with_requests_of_this_package(self) -> None:
        manager = make_manager(20)
        admit(manager, Request("a", range(8), block_hasher=self.HASHER))
        request = OwnRequest("b", pack_tokens(range(9)), self.HASHER)
        hits, num_hit_tokens = manager.get_computed_blocks(request)
        assert (hits.get_block_ids(), num_hit_tokens) == (([1, 2],), 8)
        assert manager.allocate_slots(request, 1, 8, hits) is not None
        assert manager.get_num_common_prefix_blocks("b") == [2]

    def test_are_counted_in_the_stats(self) -> None:
        manager = make_manager(20, log_stats=True)
        manager.get_computed_blocks(OwnRequest("a", pack_tokens(range(9)), self.HASHER))
        stats = manager.make_prefix_cache_stats()
        assert stats is not None
        assert (stats.requests, stats.queries) == (1, 9)


def a_table_without_a_request(manager: KVCacheManager) -> None:
    manager.coordinator.single_type_managers[0].req_to_blocks["ghost"] = []


def counts_of_a_request_that_is_gone(manager: KVCacheManager) -> None:
    del manager.coordinator.single_type_managers[0].num_cached_block["a"]


def null_in_the_middle(manager: KVCacheManager) -> None:
    manager.coordinator.single_type_managers[0].req_to_blocks["a"][1] = manager.block_pool.null_block


def more_registered_than_there_is(manager: KVCacheManager) -> None:
    manager.coordinator.single_type_managers[0].num_cached_block["a"] = 4


def a_block_twice(manager: KVCacheManager) -> None:
    blocks = manager.coordinator.single_type_managers[0].req_to_blocks["a"]
    blocks[1] = blocks[0]


def a_block_of_another_group(manager: KVCacheManager) -> None:
    unit_of(manager.coordinator.single_type_managers[0].req_to_blocks["a"][0]).group = 1


def a_block_at_another_position(manager: KVCacheManager) -> None:
    unit_of(manager.coordinator.single_type_managers[0].req_to_blocks["a"][0]).first_position = 1


def a_block_that_nobody_counted(manager: KVCacheManager) -> None:
    manager.coordinator.single_type_managers[0].req_to_blocks["a"].append(manager.block_pool.blocks[9])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (a_table_without_a_request, "tables of .*'ghost'"),
        (counts_of_a_request_that_is_gone, "counts of different requests"),
        (null_in_the_middle, "only the first 0 blocks of 'a' may be null"),
        (more_registered_than_there_is, "more blocks of 'a' registered than it has"),
        (a_block_twice, "'a' holds a block twice: .*1, 1, 3"),
        (a_block_of_another_group, "'a' holds <block 1: .* of another group"),
        (a_block_at_another_position, "'a' holds <block 1: .* at 0, which says it is at 1"),
        (a_block_that_nobody_counted, "'a' holds a part of <run of 8 blocks: .* only"),
    ],
)
def test_damage_is_found_and_named(damage: Callable[[KVCacheManager], None], message: str) -> None:
    manager = make_manager(12)
    admit(manager, make_request("a", range(10), manager))
    manager.check_invariants()
    damage(manager)
    with pytest.raises(InvariantError, match=message):
        manager.check_invariants()
