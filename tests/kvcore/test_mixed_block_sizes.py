"""Groups with different block sizes: one hit length, and only what a hit can use is registered."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from kvcore import BlockHasher, ConfigError, KVCacheManager
from kvcore.testing import ShadowMemory, admit, make_manager, make_request, table
from tests.kvcore.oracle import Books, Cache, run_machine, specs_of

CACHES = {
    "full 8, sliding 4": Cache("full/8 sliding:6/4", (8, 16, 30)),
    "full 8, narrow sliding 4": Cache("full/8 sliding:4/4", (8, 16, 30)),
    "sliding 16, full 4": Cache("sliding:20/16 full/4", (8, 16, 30)),
    "narrow sliding 2, full 8": Cache("sliding:3/2 full/8", (12, 24, 40)),
    "chunked 8, full 4": Cache("chunked:8/8 full/4", (8, 16, 30)),
    "chunks that end inside blocks of 8, full 4": Cache("chunked:12/8 full/4", (8, 16, 30)),
    "chunks that end inside blocks of 4, sliding 2": Cache("chunked:6/4 sliding:5/2", (10, 20, 40)),
    "chunked 2, sliding 8": Cache("chunked:6/2 sliding:9/8", (10, 20, 40)),
    "no block size a multiple of the other": Cache("full/6 sliding:5/4", (8, 16, 30)),
    "three block sizes": Cache("sliding:3/2 sliding:9/8 full/4", (14, 26, 50)),
    "hashes of 2 tokens": Cache("full/4 sliding:7/8", (8, 16, 30), options={"hash_block_size": 2}),
    "hashes of 2 tokens, blocks of one size": Cache("full/4 sliding:7/4", (8, 16, 30), options={"hash_block_size": 2}),
    "one group, hashes of 1 token": Cache("sliding:6/4", options={"hash_block_size": 1}),
    "SHA-256": Cache("full/8 sliding:6/4", (8, 16, 30), lambda size: BlockHasher(size, "sha256_cbor")),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_groups_with_different_block_sizes_follow_the_rules_for_a_few_random_operations(cache: Cache) -> None:
    run_machine(cache, thorough=False)


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_groups_with_different_block_sizes_follow_the_rules_for_many_random_operations(cache: Cache) -> None:
    run_machine(cache, thorough=True)


def cached_once(groups: str, num_tokens: int, num_blocks: int = 40) -> tuple[KVCacheManager, Books, ShadowMemory]:
    """A cache through which one request has passed, prefilled at once."""
    manager = make_manager(num_blocks, groups=specs_of(groups), max_model_len=num_tokens)
    books = Books(manager)
    shadow = ShadowMemory(manager)
    request = make_request("first", range(num_tokens), manager)
    answer = manager.allocate_slots(request, num_tokens)
    books.allocated(request, answer, num_tokens)
    shadow.write(request, 0, num_tokens)
    manager.free(request)
    books.freed(request)
    return manager, books, shadow


@pytest.mark.parametrize(
    ("groups", "num_tokens"),
    [
        ("full/8 sliding:6/4", 25),
        ("full/4 sliding:10/8", 25),
        ("chunked:12/8 full/4", 25),
        ("chunked:12/4 sliding:5/8", 25),
        ("sliding:4/2 sliding:7/4", 13),
        ("full/6 sliding:5/4", 25),
    ],
)
def test_whichever_blocks_are_lost_the_longest_hit_that_every_group_can_serve_is_found(
    groups: str, num_tokens: int
) -> None:
    registered = list(cached_once(groups, num_tokens)[1].registered)
    assert 6 <= len(registered) <= 9
    lengths = set()
    for lost in chain.from_iterable(combinations(registered, n) for n in range(len(registered) + 1)):
        manager, books, shadow = cached_once(groups, num_tokens)
        manager.evict_blocks(lost)
        books.evicted(lost)
        request = make_request("second", range(num_tokens), manager)
        blocks, num_hit = manager.get_computed_blocks(request)
        assert (num_hit, list(blocks.get_block_ids())) == books.longest_hit(request), lost
        shadow.check_hit(request, blocks, num_hit)
        lengths.add(num_hit)
    assert lengths >= {0, (num_tokens - 1) // books.alignment * books.alignment}


def test_full_blocks_of_8_and_a_window_of_6_in_blocks_of_4_hit_at_multiples_of_8() -> None:
    manager = make_manager(20, groups=specs_of("full/8 sliding:6/4"))
    first = make_request("first", range(20), manager)
    admit(manager, first)
    assert (table(manager, first, 0), table(manager, first, 1)) == ([1, 2, 3], [4, 5, 6, 7, 8])
    # 16 of 20 tokens end with a block in both groups: 2 blocks of 8, and 4 of 4.
    assert len(manager.block_pool.prefix_index) == 6

    second = make_request("second", range(20), manager)
    blocks, num_hit = manager.get_computed_blocks(second)
    # Token 16 reads back to token 11, in the third block of the window's group.
    assert (num_hit, blocks.get_block_ids()) == (16, ([1, 2], [0, 0, 6, 7]))

    manager.evict_blocks([7])
    blocks, num_hit = manager.get_computed_blocks(second)
    # Not 12, which the window's group could serve: the other one has no block that ends there.
    assert (num_hit, blocks.get_block_ids()) == (8, ([1], [4, 5]))

    manager.evict_blocks([4])
    assert manager.get_computed_blocks(second)[1] == 0


def test_a_window_registers_only_blocks_that_a_hit_of_all_groups_can_end_with() -> None:
    manager = make_manager(30, groups=specs_of("full/16 sliding:4/4"))
    request = make_request("first", range(40), manager)
    admit(manager, request)
    # A hit ends at 16 or 32; the window of 4 then reads the last 3 tokens, one block.
    registered = [block_id for block_id in table(manager, request, 1) if manager.block_pool.blocks[block_id].block_hash]
    assert registered == [table(manager, request, 1)[3], table(manager, request, 1)[7]]
    hit = manager.get_computed_blocks(make_request("second", range(40), manager))
    assert hit[1] == 32
    assert hit[0].get_block_ids()[1] == [0] * 7 + registered[1:]


def test_decoding_registers_a_block_when_the_last_group_has_filled_one() -> None:
    manager = make_manager(20, groups=specs_of("full/8 sliding:6/4"))
    request = make_request("first", range(7), manager)
    admit(manager, request)
    sizes = []
    for token in range(7, 18):
        request.append_output_token_ids(token)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        sizes.append(len(manager.block_pool.prefix_index))
    # Tokens 8 and 16 close a block of 8 and, with it, two blocks of 4.
    assert sizes == [3] * 8 + [6] * 3


def test_requests_hashed_at_another_size_than_the_manager_are_refused() -> None:
    manager = make_manager(20, groups=specs_of("full/8 sliding:6/4"))
    request = make_request("first", range(20), manager, block_hasher=BlockHasher(8))
    with pytest.raises(ConfigError, match=r"BlockHasher\(4"):
        manager.get_computed_blocks(request)


def test_a_hash_block_size_that_does_not_divide_every_block_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="must divide the block size of every group"):
        make_manager(20, groups=specs_of("full/8 sliding:6/4"), hash_block_size=8)
