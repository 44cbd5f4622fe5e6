"""Chunked local attention: nothing before the start of the current chunk."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCacheManager
from kvcore.testing import make_manager, make_request


def with_blocks_left(chunk: int, left: Iterable[int]) -> KVCacheManager:
    """A cache of 6 blocks of tokens 0, 1, 2, ..., of which those at the places ``left`` are still there."""
    manager = make_manager(20, groups=[f"chunked:{chunk}"])
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
    ("chunk", "num_tokens", "left", "expected"),
    [
        # Chunks of 8 tokens: 0-7, 8-15, 16-23.
        (8, 8, [0], [1]),
        (8, 8, [], []),
        (8, 9, [], [0, 0]),
        (8, 15, [2], [0, 0, 3]),
        (8, 15, [0, 1, 3], [0, 0]),
        (8, 25, [], [0, 0, 0, 0, 0, 0]),
        # Chunks of 16: 0-15, 16-31. Of a chunk's blocks, the first miss ends the hit.
        (16, 24, [4], [0, 0, 0, 0, 5]),
        (16, 24, [5], [0, 0, 0, 0]),
        (16, 16, [0, 1, 2, 3, 4, 5], [1, 2, 3]),
        (16, 16, [0, 2, 3], [1]),
        # Chunks of 10 begin inside blocks: 0-9, 10-19, 20-29. Block 2 holds tokens 8 to 11.
        (10, 17, [2, 3], [0, 0, 3, 4]),
        (10, 17, [0, 1, 3], [1, 2]),
        (10, 17, [1, 3], []),
        (10, 25, [5], [0, 0, 0, 0, 0, 6]),
        (10, 25, [], [0, 0, 0, 0, 0]),
    ],
)
def test_a_hit_begins_with_the_block_in_which_the_chunk_does(
    chunk: int, num_tokens: int, left: list[int], expected: list[int]
) -> None:
    assert hit(with_blocks_left(chunk, left), num_tokens) == expected


@given(chunk=st.integers(1, 30), left=st.sets(st.integers(0, 5)), num_tokens=st.integers(1, 25))
def test_a_hit_can_be_trusted_and_none_in_the_same_chunk_is_longer(chunk: int, left: set[int], num_tokens: int) -> None:
    def places_read(num_blocks: int) -> range:
        return range(4 * num_blocks // chunk * chunk // 4, num_blocks)

    def works(num_blocks: int) -> bool:
        return all(place in left for place in places_read(num_blocks))

    block_ids = hit(with_blocks_left(chunk, left), num_tokens)
    longest = (num_tokens - 1) // 4
    assert works(len(block_ids))
    needed = places_read(len(block_ids))
    assert block_ids == [place + 1 if place in needed else 0 for place in range(len(block_ids))]
    start = 4 * longest // chunk * chunk
    assert not any(works(n) for n in range(len(block_ids) + 1, longest + 1) if 4 * n >= start)


@pytest.mark.parametrize("chunk", [1, 3, 4, 8, 10, 100])
def test_a_decoding_request_holds_what_the_next_token_reads(chunk: int) -> None:
    manager = make_manager(40, groups=[f"chunked:{chunk}"])
    request = make_request("a", range(4), manager)
    manager.allocate_slots(request, 4)
    request.num_computed_tokens = 4
    for position in range(4, 60):
        request.append_output_token_ids(position)
        assert manager.allocate_slots(request, 1) is not None
        first_read = position // chunk * chunk
        (table,) = manager.get_block_ids("a")
        assert [bool(block_id) for block_id in table] == [4 * i + 3 >= first_read for i in range(position // 4 + 1)]
        manager.check_invariants()
        request.num_computed_tokens += 1


def test_a_chunk_has_no_common_prefix() -> None:
    manager = make_manager(20, groups=["chunked:16"])
    for name in ("a", "b"):
        manager.allocate_slots(make_request(name, range(9), manager), 9)
    assert manager.get_num_common_prefix_blocks("a") == [0]
