"""Sliding windows: what is needed, what is freed, and what makes a hit."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCacheManager
from kvcore.testing import admit, free_block_ids, make_manager, make_request


def with_blocks_left(window: int, left: Iterable[int]) -> KVCacheManager:
    """A cache of 6 blocks of tokens 0, 1, 2, ..., of which those at the places ``left`` are still there."""
    manager = make_manager(20, groups=[f"sliding:{window}"])
    request = make_request("a", range(24), manager)
    manager.allocate_slots(request, 24)
    assert manager.get_block_ids("a") == ([1, 2, 3, 4, 5, 6],)
    manager.free(request)
    manager.evict_blocks({*range(1, 7)} - {place + 1 for place in left})
    return manager


def hit(manager: KVCacheManager, num_tokens: int = 25) -> list[int]:
    blocks, num_hit_tokens = manager.get_computed_blocks(make_request("b", range(num_tokens), manager))
    (block_ids,) = blocks.get_block_ids()
    assert num_hit_tokens == 4 * len(block_ids)
    return block_ids


@pytest.mark.parametrize(
    ("window", "left", "expected"),
    [
        # Windows of 2 to 5 tokens need 1 to 4 tokens before, hence one block.
        (2, [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 6]),
        (5, [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 6]),
        (5, [0, 3], [0, 0, 0, 4]),
        (5, [], []),
        # Windows of 6 to 9 tokens need two blocks.
        (6, [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 5, 6]),
        (9, [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 5, 6]),
        (9, [0, 1, 3, 4], [0, 0, 0, 4, 5]),
        (9, [0, 1, 3, 5], [1, 2]),
        (9, [1, 3, 5], []),
        (9, [0, 2, 4], [1]),
        # A window longer than the prompt needs all of it.
        (100, [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]),
        (100, [0, 1, 2, 4, 5], [1, 2, 3]),
        (100, [1, 2, 3, 4, 5], []),
        # A window of one token reads nothing before it.
        (1, [], [0, 0, 0, 0, 0, 0]),
    ],
)
def test_a_hit_is_the_rightmost_run_that_covers_the_window_or_one_from_the_start(
    window: int, left: list[int], expected: list[int]
) -> None:
    assert hit(with_blocks_left(window, left)) == expected


@given(window=st.integers(1, 30), left=st.sets(st.integers(0, 5)), num_tokens=st.integers(1, 30))
def test_a_hit_is_the_longest_prefix_whose_next_token_finds_all_it_reads(
    window: int, left: set[int], num_tokens: int
) -> None:
    def works(num_blocks: int) -> bool:
        first_read = max(4 * num_blocks - (window - 1), 0)
        return all(place in left for place in range(first_read // 4, num_blocks))

    best = max(n for n in range((num_tokens - 1) // 4 + 1) if works(n))
    first_read = max(4 * best - (window - 1), 0)
    manager = with_blocks_left(window, left)
    assert hit(manager, num_tokens) == [place + 1 if place >= first_read // 4 else 0 for place in range(best)]


@pytest.mark.parametrize("window", [1, 2, 5, 6, 9, 100])
def test_a_decoding_request_holds_what_the_next_token_reads(window: int) -> None:
    manager = make_manager(40, groups=[f"sliding:{window}"])
    request = make_request("a", range(4), manager)
    manager.allocate_slots(request, 4)
    request.num_computed_tokens = 4
    for position in range(4, 60):
        request.append_output_token_ids(position)
        assert manager.allocate_slots(request, 1) is not None
        first_read = max(position - (window - 1), 0)
        (table,) = manager.get_block_ids("a")
        assert [bool(block_id) for block_id in table] == [4 * i + 3 >= first_read for i in range(position // 4 + 1)]
        manager.check_invariants()
        request.num_computed_tokens += 1
    assert 39 - len(free_block_ids(manager)) == sum(map(bool, table))


def test_several_blocks_left_at_once_are_freed_the_last_one_first() -> None:
    manager = make_manager(11, groups=["sliding:2"])
    request = make_request("a", range(16), manager)
    admit(manager, request)
    request.append_output_token_ids(16)
    manager.allocate_slots(request, 1)
    assert free_block_ids(manager) == [6, 7, 8, 9, 10, 3, 2, 1]


def test_a_refused_step_may_free_what_the_window_has_left_and_changes_nothing_else() -> None:
    manager = make_manager(6, groups=["full", "sliding:2"])
    request = make_request("a", range(8), manager)
    manager.allocate_slots(request, 8)
    request.num_computed_tokens = 8
    assert manager.get_block_ids("a") == ([1, 2], [3, 4])
    assert free_block_ids(manager) == [5]
    request.append_output_token_ids(range(8, 13))
    # Two blocks in each group, and only block 5 and what the window has left are there.
    assert manager.allocate_slots(request, 5) is None
    assert manager.get_block_ids("a") == ([1, 2], [0, 4])
    assert free_block_ids(manager) == [5, 3]
    assert len(manager.block_pool.prefix_index) == 4
    manager.check_invariants()
    assert manager.allocate_slots(request, 4) is not None
    assert manager.get_block_ids("a") == ([1, 2, 5], [0, 4, 3])
    manager.check_invariants()


def test_a_block_once_left_comes_back_only_by_a_new_lookup() -> None:
    manager = make_manager(10, groups=["sliding:5"])
    request = make_request("a", range(8), manager)
    manager.allocate_slots(request, 8)
    request.num_computed_tokens = 8
    request.append_output_token_ids(8)
    manager.allocate_slots(request, 1)
    assert manager.get_block_ids("a") == ([0, 2, 3],)
    assert hit(manager, 5) == [1]
    admit(manager, make_request("b", range(5), manager))
    assert manager.get_block_ids("a") == ([0, 2, 3],)
    assert manager.get_block_ids("b")[0][0] == 1


def test_delayed_registration_passes_over_what_the_window_has_left() -> None:
    manager = make_manager(10, groups=["sliding:5"])
    request = make_request("a", range(12), manager)
    manager.allocate_slots(request, 8, delay_cache_blocks=True)
    request.num_computed_tokens = 8
    manager.allocate_slots(request, 4, delay_cache_blocks=True)
    # Block 1 was left before it was registered: it went to the head of the queue, and was handed out at once.
    assert manager.get_block_ids("a") == ([0, 2, 1],)
    assert len(manager.block_pool.prefix_index) == 0
    manager.cache_blocks(request, 12)
    assert sorted(block.block_id for block in manager.block_pool.prefix_index) == [1, 2]
    manager.check_invariants()


def test_a_window_has_no_common_prefix() -> None:
    manager = make_manager(20, groups=["full", "sliding:6"])
    admit(manager, make_request("a", range(9), manager))
    admit(manager, make_request("b", range(9), manager))
    assert manager.get_num_common_prefix_blocks("a") == [2, 0]
