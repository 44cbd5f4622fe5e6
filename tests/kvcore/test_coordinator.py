"""The coordinator: one hit length for all groups, and hits taken in all of them before anything is handed out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcore import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    HybridKVCacheCoordinator,
    KVCacheBlocks,
    KVCacheCoordinatorNoPrefixCache,
    KVCacheManager,
    Request,
    SlidingWindowManager,
    UnitaryKVCacheCoordinator,
)
from kvcore.testing import admit, free_block_ids, make_manager, make_request


def finished(manager: KVCacheManager, name: str, tokens: Sequence[int]) -> Request:
    request = make_request(name, tokens, manager)
    admit(manager, request)
    manager.free(request)
    return request


def hit(manager: KVCacheManager, tokens: Sequence[int]) -> tuple[tuple[list[int], ...], int]:
    blocks, num_tokens = manager.get_computed_blocks(make_request("lookup", tokens, manager))
    return blocks.get_block_ids(), num_tokens


@pytest.mark.parametrize(
    ("groups", "enable_caching", "kind"),
    [
        (["full"], True, UnitaryKVCacheCoordinator),
        (["sliding:6"], True, UnitaryKVCacheCoordinator),
        (["full", "sliding:6"], True, HybridKVCacheCoordinator),
        (["full"], False, KVCacheCoordinatorNoPrefixCache),
        (["full", "sliding:6"], False, KVCacheCoordinatorNoPrefixCache),
    ],
)
def test_the_kind_that_fits_the_configuration_is_made(groups: list[str], enable_caching: bool, kind: type) -> None:
    manager = make_manager(10, groups=groups, enable_caching=enable_caching)
    assert type(manager.coordinator) is kind


def test_each_group_has_the_manager_of_its_kind_of_attention() -> None:
    managers = make_manager(10, groups=["full", "sliding:6", "chunked:8"]).coordinator.single_type_managers
    assert [type(manager) for manager in managers] == [
        FullAttentionManager,
        SlidingWindowManager,
        ChunkedLocalAttentionManager,
    ]
    assert "SlidingWindowManager(group=1" in repr(managers[1])


class TestWithoutCaching:
    def test_nothing_is_found_or_registered(self) -> None:
        manager = make_manager(20, groups=["full", "sliding:6"], enable_caching=False)
        request = make_request("a", range(10), manager)
        assert admit(manager, request) == 0
        assert len(manager.block_pool.prefix_index) == 0
        manager.cache_blocks(request, 8)
        assert len(manager.block_pool.prefix_index) == 0
        manager.free(request)
        assert hit(manager, range(10)) == (([], []), 0)
        found, num_tokens = manager.coordinator.find_longest_cache_hit(request, 9)
        assert (tuple(map(list, found)), num_tokens) == (([], []), 0)

    def test_blocks_grow_and_windows_free_as_ever(self) -> None:
        manager = make_manager(20, groups=["full", "sliding:6"], enable_caching=False)
        request = make_request("a", range(8), manager)
        admit(manager, request)
        for token in range(8, 14):
            request.append_output_token_ids(token)
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        assert [list(map(bool, table)) for table in manager.get_block_ids("a")] == [
            [True, True, True, True],
            [False, False, True, True],
        ]
        manager.check_invariants()


class TestOneHitLength:
    def test_it_ends_where_the_first_of_two_full_groups_misses(self) -> None:
        manager = make_manager(20, groups=["full", "full"])
        finished(manager, "a", range(16))
        assert hit(manager, range(17)) == (([1, 2, 3, 4], [5, 6, 7, 8]), 16)
        manager.evict_blocks([7])
        assert hit(manager, range(17)) == (([1, 2], [5, 6]), 8)
        manager.evict_blocks([1])
        assert hit(manager, range(17)) == (([], []), 0)

    def test_the_order_of_the_groups_does_not_matter(self) -> None:
        manager = make_manager(20, groups=["sliding:6", "full"])
        finished(manager, "a", range(16))
        manager.evict_blocks([4])
        assert hit(manager, range(17)) == (([0, 2, 3], [5, 6, 7]), 12)
        manager.evict_blocks([6])
        assert hit(manager, range(17)) == (([1], [5]), 4)

    def test_a_window_and_a_chunk_agree_too(self) -> None:
        manager = make_manager(30, groups=["full", "sliding:6", "chunked:8"])
        a = make_request("a", range(16), manager)
        admit(manager, a)
        assert manager.get_block_ids("a") == ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
        manager.free(a)
        # Token 16 begins a chunk: that group needs nothing.
        assert hit(manager, range(17)) == (([1, 2, 3, 4], [0, 0, 7, 8], [0, 0, 0, 0]), 16)
        manager.evict_blocks([8, 11])
        # The window shortens to 12, the chunk to 8, where it needs nothing either.
        assert hit(manager, range(17)) == (([1, 2], [5, 6], [0, 0]), 8)

    def test_full_attention_bounds_what_a_chunk_takes_for_granted(self) -> None:
        manager = make_manager(30, groups=["full", "chunked:8"])
        assert hit(manager, range(17)) == (([], []), 0)


class TestHitsAreTakenFirst:
    def test_no_group_is_handed_a_block_that_was_just_hit_in_another_one(self) -> None:
        manager = make_manager(9, groups=["full", "full"])
        finished(manager, "a", range(8))
        finished(manager, "b", range(100, 108))
        # The hits stand at the head of the queue, those of the second group too: they would be overwritten next.
        assert free_block_ids(manager) == [2, 1, 4, 3, 6, 5, 8, 7]
        request = make_request("c", range(13), manager)
        hits, num_hit_tokens = manager.get_computed_blocks(request)
        assert (hits.get_block_ids(), num_hit_tokens) == (([1, 2], [3, 4]), 8)
        new = manager.allocate_slots(request, 1, 8, hits, num_external_computed_tokens=4)
        assert new is not None
        assert manager.get_block_ids("c") == ([1, 2, 6, 8], [3, 4, 5, 7])
        manager.check_invariants()

    def test_hits_count_as_taken_when_asking_whether_the_rest_fits(self) -> None:
        manager = make_manager(9, groups=["full", "full"])
        finished(manager, "a", range(8))
        finished(manager, "b", range(100, 108))
        request = make_request("c", range(17), manager)
        hits, _ = manager.get_computed_blocks(request)
        before = free_block_ids(manager)
        # 5 blocks in each group, of which 2 are hits: 6 new ones, and 4 are free besides the hits.
        assert manager.allocate_slots(request, 9, 8, hits) is None
        assert free_block_ids(manager) == before
        assert len(manager.block_pool.prefix_index) == 8
        manager.check_invariants()

    def test_hits_that_external_tokens_push_out_of_the_window_are_left_where_they_are(self) -> None:
        manager = make_manager(20, groups=["full", "sliding:6"])
        finished(manager, "a", range(8))
        request = make_request("b", range(17), manager)
        hits, _ = manager.get_computed_blocks(request)
        assert hits.get_block_ids() == ([1, 2], [3, 4])
        # 16 tokens computed: token 16 reads tokens 11 to 16, hence nothing of the first two blocks.
        assert manager.allocate_slots(request, 1, 8, hits, num_external_computed_tokens=8) is not None
        full, window = manager.get_block_ids("b")
        assert full[:2] == [1, 2]
        assert window[:2] == [0, 0]
        assert all(window[2:])
        assert [manager.block_pool.blocks[block_id].ref_cnt for block_id in (1, 2, 3, 4)] == [1, 1, 0, 0]
        manager.check_invariants()

    def test_external_tokens_alone_leave_null_before_the_window(self) -> None:
        manager = make_manager(20, groups=["sliding:6"])
        request = make_request("a", range(17), manager)
        assert manager.allocate_slots(request, 1, num_external_computed_tokens=16) is not None
        assert manager.get_block_ids("a") == ([0, 0, 1, 2, 3],)
        assert len(manager.block_pool.prefix_index) == 2  # the external tokens' full blocks
        manager.free(request)
        manager.check_invariants()


def test_partial_hits_may_be_handed_over() -> None:
    manager = make_manager(20)
    finished(manager, "a", range(16))
    request = make_request("b", range(17), manager)
    hits, _ = manager.get_computed_blocks(request)
    shorter = KVCacheBlocks((hits.blocks[0][:2],))
    assert manager.allocate_slots(request, 9, 8, shorter) is not None
    assert manager.get_block_ids("b")[0][:2] == [1, 2]
    assert 3 not in manager.get_block_ids("b")[0]
    manager.check_invariants()
