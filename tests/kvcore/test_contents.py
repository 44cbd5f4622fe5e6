"""A hash that is not collision-resistant is never trusted alone: what is hit must hold the request's own prefix.

Collisions are staged: a request is given the hashes of another one, as a weak hash, or an attacker, could bring about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import BlockHasher, KVCacheManager, LoRAAdapter, MultiModalItem, Request, StaleHitError
from kvcore.contents import MAX_GROWN_BLOCKS
from kvcore.spec import KVCacheSpec
from kvcore.testing import admit, make_manager, make_spec, table

VERIFIED = BlockHasher(4, "xxh3")
TRUSTED = BlockHasher(4, "xxh3", seed=0, verify_hits=False)
FRENCH = LoRAAdapter("french", "/adapters/french")


def request(name: str, tokens: Iterable[int], hasher: BlockHasher = VERIFIED, **extra: Any) -> Request:
    return Request(name, tokens, block_hasher=hasher, **extra)


def colliding(
    name: str, tokens: Iterable[int], other: Request, hasher: BlockHasher = VERIFIED, **extra: Any
) -> Request:
    """A request with all hashes of another one."""
    mine = request(name, tokens, hasher, **extra)
    mine.block_hashes[:] = other.block_hashes[: len(mine.block_hashes)]
    return mine


def cached(manager: KVCacheManager, tokens: Iterable[int], **extra: Any) -> Request:
    """A finished request whose blocks are in the cache."""
    finished = request("cached", tokens, **extra)
    admit(manager, finished)
    manager.free(finished)
    return finished


def hit(manager: KVCacheManager, request: Request) -> int:
    return manager.get_computed_blocks(request)[1]


@pytest.mark.parametrize("position", [0, 3, 4, 9, 15])
def test_a_hit_ends_before_the_first_block_with_other_tokens(position: int) -> None:
    manager = make_manager(20)
    other = cached(manager, range(16))
    tokens = [*range(16), 16]
    tokens[position] = 99
    assert hit(manager, colliding("a", tokens, other)) == position // 4 * 4
    assert hit(manager, request("b", range(17))) == 16


def test_a_true_hit_is_found_however_the_blocks_were_registered() -> None:
    manager = make_manager(40)
    first = request("first", range(6))
    admit(manager, first)
    for token in range(6, 40):  # block by block
        first.append_output_token_ids(token)
        assert manager.allocate_slots(first, 1) is not None
        first.num_computed_tokens += 1
    assert hit(manager, request("again", range(41))) == 40
    second = request("second", [*range(20), *range(500, 520)])  # part by hit, part by itself
    assert admit(manager, second) == 20
    assert hit(manager, request("third", [*range(20), *range(500, 521)])) == 40
    assert hit(manager, request("fourth", [*range(20), *range(500, 510), *range(600, 620)])) == 28


@pytest.mark.parametrize(
    "weak_hash",
    [lambda place: place, lambda place: place % 3, lambda place: 0],
    ids=["its place", "its place modulo 3", "nothing"],
)
@given(
    one=st.lists(st.integers(0, 1), min_size=1, max_size=24),
    other=st.lists(st.integers(0, 1), min_size=1, max_size=24),
    third=st.lists(st.integers(0, 1), min_size=1, max_size=24),
)
def test_even_if_a_hash_says_no_more_than_where_a_block_stands_only_equal_prefixes_are_hit(
    weak_hash: Callable[[int], int], one: list[int], other: list[int], third: list[int]
) -> None:
    manager = make_manager(60)
    admitted: list[list[int]] = []
    for number, tokens in enumerate((one, other, third)):
        mine = request(str(number), tokens)
        mine.block_hashes[:] = [bytes([weak_hash(i)]) * 16 for i in range(len(mine.block_hashes))]
        hits, num_hit_tokens = manager.get_computed_blocks(mine)
        if num_hit_tokens:
            assert any(tokens[:num_hit_tokens] == before[:num_hit_tokens] for before in admitted)
        assert manager.allocate_slots(mine, len(tokens) - num_hit_tokens, num_hit_tokens, hits) is not None
        manager.check_invariants()
        admitted.append(tokens)


def with_hashes(mine: Request, hash_of: Callable[[int], bytes]) -> None:
    mine.block_hashes[:] = [hash_of(i) for i in range(len(mine.block_hashes))]


@pytest.mark.parametrize("modulus", [1, 2, 100], ids=["nothing", "whether it is odd", "its place"])
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=2, max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=40),
    question=st.lists(st.integers(0, 1), min_size=1, max_size=30),
)
def test_answers_that_share_a_beginning_and_part_are_told_apart_under_the_weakest_hash(
    modulus: int, prompts: list[list[int]], steps: list[tuple[int, int]], question: list[int]
) -> None:
    def hash_of(place: int) -> bytes:
        return bytes([place % modulus]) * 16

    manager = make_manager(60)
    running = [request(str(number), tokens) for number, tokens in enumerate(prompts)]
    for mine in running:
        with_hashes(mine, hash_of)
        admit(manager, mine)
    for number, token in steps:
        mine = running[number % len(running)]
        mine.append_output_token_ids(token)
        with_hashes(mine, hash_of)
        assert manager.allocate_slots(mine, 1) is not None
        mine.num_computed_tokens += 1
    asking = request("asking", question)
    with_hashes(asking, hash_of)
    (found,) = manager.get_computed_blocks(asking)[0].get_block_ids()
    for i, block_id in enumerate(found):
        stop = 4 * (i + 1)
        holders = [mine for mine in running if block_id in table(manager, mine)]
        assert any(
            table(manager, mine)[i] == block_id and mine.all_token_ids[:stop] == question[:stop] for mine in holders
        )
    manager.check_invariants()


def test_different_answers_to_one_prompt_are_all_found_to_their_ends() -> None:
    manager = make_manager(60)
    running = [request(str(number), range(5)) for number in range(3)]
    for mine in running:
        admit(manager, mine)
    for step in range(23):
        for number, mine in enumerate(running):
            mine.append_output_token_ids(100 * number + step)
            assert manager.allocate_slots(mine, 1) is not None
            mine.num_computed_tokens += 1
    for mine in running:
        assert hit(manager, request("again", [*mine.all_token_ids, 1])) == 28


@pytest.mark.parametrize("groups", [["full"], ["full", make_spec("sliding:600", 8)], [make_spec("full", 8)]], ids=str)
@pytest.mark.parametrize(
    "extra", [{}, {"lora": FRENCH}, {"mm_items": [MultiModalItem("video", 0, 400)]}], ids=["plain", "adapter", "video"]
)
def test_the_blocks_of_a_long_answer_share_spans(groups: list[str | KVCacheSpec], extra: dict[str, Any]) -> None:
    manager = make_manager(600, groups=groups, hash_block_size=4)
    mine = request("mine", range(8), **extra)
    admit(manager, mine)
    for token in range(4 * 128):
        mine.append_output_token_ids(token)
        assert manager.allocate_slots(mine, 1) is not None
        mine.num_computed_tokens += 1
    for blocks in manager.get_blocks("mine").blocks:
        spans = {block.content for block in blocks}
        assert None not in spans
        assert len(spans) <= 1 + 128 // MAX_GROWN_BLOCKS + 1
    manager.check_invariants()
    assert hit(manager, request("again", [*mine.all_token_ids, 1], **extra)) == 4 * 130
    # The last token differs, and a hit ends where every group has a block.
    aligned = manager.coordinator.single_type_managers[0].alignment_tokens
    other = colliding("other", [*mine.all_token_ids[:-1], 0, 1], mine, **extra)
    assert hit(manager, other) == 4 * 129 // aligned * aligned


def test_another_adapter_is_told_apart_inside_a_span_that_grew() -> None:
    manager = make_manager(200)
    mine = request("mine", range(8), mm_items=[MultiModalItem("image", 45, 3)])
    admit(manager, mine)
    for token in range(80):
        mine.append_output_token_ids(token)
        assert manager.allocate_slots(mine, 1) is not None
        mine.num_computed_tokens += 1
    (blocks,) = manager.get_blocks("mine").blocks
    assert blocks[10].content is blocks[12].content  # the image lies in the block between them
    tokens = [*mine.all_token_ids, 1]
    assert hit(manager, request("same", tokens, mm_items=[MultiModalItem("image", 45, 3)])) == 88
    assert hit(manager, colliding("other", tokens, mine, mm_items=[MultiModalItem("another", 45, 3)])) == 44
    assert hit(manager, colliding("none", tokens, mine)) == 44


@pytest.mark.parametrize(
    "extra",
    [
        {"cache_salt": "another tenant"},
        {"lora": FRENCH},
        {"mm_items": [MultiModalItem("image", 1, 2)]},
    ],
    ids=["salt", "adapter", "image"],
)
def test_equal_tokens_under_other_extra_keys_are_no_hit(extra: dict[str, Any]) -> None:
    manager = make_manager(20)
    plain = cached(manager, range(8))
    assert hit(manager, colliding("a", range(9), plain, **extra)) == 0
    manager.reset_prefix_cache()
    keyed = cached(manager, range(8), **extra)
    assert hit(manager, colliding("b", range(9), keyed)) == 0
    assert hit(manager, request("c", range(9), **extra)) == 8


def test_an_image_in_a_later_block_ends_the_hit_there() -> None:
    manager = make_manager(20)
    cat = cached(manager, range(16), mm_items=[MultiModalItem("cat", 9, 2)])
    dog = colliding("dog", range(17), cat, mm_items=[MultiModalItem("dog", 9, 2)])
    assert hit(manager, dog) == 8


def test_an_equal_block_after_another_beginning_is_no_hit_in_a_window() -> None:
    # A window looks up the last blocks first: the beginning must be compared although its blocks are not needed.
    manager = make_manager(20, groups=["sliding:5"])
    other = cached(manager, range(16))
    assert hit(manager, request("same", range(17))) == 16
    assert hit(manager, colliding("a", [99, *range(1, 17)], other)) == 0


def test_one_hash_for_two_places_of_a_prefix_is_a_hit_only_at_one_of_them() -> None:
    manager = make_manager(20)
    one, other = request("one", [0] * 12), request("other", [0] * 13)
    for mine in (one, other):
        mine.block_hashes[1] = mine.block_hashes[0]
    admit(manager, one)
    assert manager.get_block_ids("one") == ([1, 2, 3],)
    blocks, num_hit_tokens = manager.get_computed_blocks(other)
    assert (blocks.get_block_ids(), num_hit_tokens) == (([1],), 4)
    manager.evict_blocks([1])
    assert hit(manager, other) == 0
    manager.check_invariants()


def test_hits_handed_over_late_are_compared_again() -> None:
    manager = make_manager(20)
    other = cached(manager, range(8))
    hits, _ = manager.get_computed_blocks(request("b", range(9)))
    mine = colliding("a", range(100, 109), other)
    with pytest.raises(StaleHitError, match="no longer holds block 0 of 'a'"):
        manager.allocate_slots(mine, 1, 8, hits)


def test_of_two_prefixes_with_one_hash_the_first_stays_registered_and_the_other_never_is() -> None:
    manager = make_manager(20)
    first = request("first", range(8))
    admit(manager, first)
    second = colliding("second", range(100, 108), first)
    assert admit(manager, second) == 0
    assert table(manager, second) == [3, 4]
    assert manager.block_pool.blocks[3].block_hash is None
    assert hit(manager, colliding("third", range(100, 109), first)) == 0
    assert hit(manager, request("fourth", range(9))) == 8
    manager.free(first)
    manager.free(second)
    manager.check_invariants()


def test_blocks_registered_under_a_trusted_hash_are_no_hit_where_hits_are_verified() -> None:
    manager = make_manager(20)
    admit(manager, request("trusting", range(8), TRUSTED))
    doubting = BlockHasher(4, "xxh3", seed=0)
    assert hit(manager, request("doubting", range(9), doubting)) == 0
    assert hit(manager, request("also trusting", range(9), TRUSTED)) == 8
    assert admit(manager, request("doubting too", range(8), doubting)) == 0
    manager.check_invariants()


def test_without_verification_a_collision_is_believed() -> None:
    manager = make_manager(20)
    other = request("cached", range(8), TRUSTED)
    admit(manager, other)
    assert hit(manager, colliding("a", range(100, 109), other, TRUSTED)) == 8


@pytest.mark.parametrize("num_blocks", [63, 64, 65, 128, 200])
def test_long_prompts_are_compared_to_the_end(num_blocks: int) -> None:
    manager = make_manager(500)
    num_tokens = 4 * num_blocks
    other = cached(manager, range(num_tokens))
    assert hit(manager, request("same", range(num_tokens + 1))) == num_tokens
    for position in (num_tokens - 1, num_tokens // 2, 0):
        tokens = [*range(num_tokens + 1)]
        tokens[position] = 10**6
        assert hit(manager, colliding("a", tokens, other)) == position // 4 * 4


def test_a_shared_prefix_can_be_compared_with_several_continuations_in_turn() -> None:
    manager = make_manager(60)
    for branch in range(3):
        cached(manager, [*range(20), *range(100 * branch + 100, 100 * branch + 112)])
    for branch in (2, 0, 1, 0):
        again = request("again", [*range(20), *range(100 * branch + 100, 100 * branch + 113)])
        assert hit(manager, again) == 32
        assert admit(manager, again) == 32
        manager.free(again)
        manager.check_invariants()
    assert hit(manager, request("new branch", [*range(20), *range(900, 913)])) == 20
