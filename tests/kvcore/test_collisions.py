"""Hashes made weak on purpose: a collision may cost a recomputation, never a wrong hit, and loses nothing for good."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from kvcore import BlockHasher, KVCacheManager, Request, StaleHitError
from kvcore.testing import ShadowMemory, admit, free_block_ids, make_manager, make_request, table
from tests.kvcore.oracle import Cache, run_machine, specs_of


class WeakHasher(BlockHasher):
    """Keeps only a few bits of each digest, and chains them."""

    def __init__(self, block_size: int, *, bits: int, algorithm: str = "xxh3", verify_hits: bool = True) -> None:
        super().__init__(block_size, algorithm, seed=0, verify_hits=verify_hits)
        strong = self._digest
        self._digest = lambda data: bytes([strong(data)[0] >> (8 - bits)])


class LastDigitHasher(BlockHasher):
    """The hash of a prefix: the last digit of each block's first token. So 10, 20 and 30 collide, in any prefix."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, verify_hits=True)
        self.root = b""
        size = 4 * block_size
        self._digest = lambda data: data[:-size] + bytes([int.from_bytes(data[-size:][:4], "little") % 10])


CACHES = {
    f"{groups}, {bits} bits, {algorithm}": Cache(
        groups, (8, 16, 30), partial(WeakHasher, bits=bits, algorithm=algorithm)
    )
    for groups, bits, algorithm in [
        ("full", 1, "xxh3"),
        ("full", 3, "xxh3"),
        ("full", 8, "xxhash_cbor"),
        ("full", 3, "sha256"),
        ("sliding:6", 2, "xxh3"),
        ("sliding:6", 5, "xxhash"),
        ("chunked:6", 2, "xxh3"),
        ("full sliding:6", 2, "xxh3"),
        ("full sliding:5 sliding:9", 4, "xxh3"),
        ("full chunked:8", 3, "xxh3"),
        ("full/8 sliding:6/4", 2, "xxh3"),
        ("sliding:9/8 full/4", 3, "xxh3"),
        ("chunked:6/4 sliding:5/2", 3, "xxhash_cbor"),
    ]
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_colliding_hashes_never_give_a_wrong_hit_in_a_few_random_operations(cache: Cache) -> None:
    run_machine(cache, thorough=False)


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_colliding_hashes_never_give_a_wrong_hit_in_many_random_operations(cache: Cache) -> None:
    run_machine(cache, thorough=True)


def test_without_verification_weak_hashes_do_give_wrong_hits_and_shadow_memory_sees_them() -> None:
    manager = make_manager(20)
    shadow = ShadowMemory(manager)
    hasher = WeakHasher(4, bits=2, verify_hits=False)
    requests = [make_request(f"r{i}", [i] * 9, manager, block_hasher=hasher) for i in range(100)]
    first, other = next(
        (first, other)
        for first, other in itertools.combinations(requests, 2)
        if first.block_hashes == other.block_hashes and len(set(first.block_hashes)) == 2
    )
    admit(manager, first)
    shadow.write(first, 0, 9)
    blocks, num_hit = manager.get_computed_blocks(other)
    assert num_hit == 8
    with pytest.raises(AssertionError, match="another prefix"):
        shadow.check_hit(other, blocks, num_hit)


def test_a_prefix_with_the_same_hash_twice_does_not_hold_a_block_twice() -> None:
    """Not even where hashes are trusted: a block is hit only where it stood in its prefix."""
    manager = make_manager(20)
    hasher = WeakHasher(4, bits=1, verify_hits=False)
    requests = [make_request(f"r{i}", [*range(i, i + 13)], manager, block_hasher=hasher) for i in range(100)]
    one_hash = next(request for request in requests if len(set(request.block_hashes)) == 1)
    two = next(request for request in requests if request.block_hashes[:2] == [*{*request.block_hashes}])
    for request in (one_hash, two, one_hash):
        admit(manager, request)
        manager.check_invariants()
        manager.free(request)
        request.num_computed_tokens = 0
        manager.check_invariants()


# A letter stands for the block of 4 tokens that begins with its token. A collides with a, B with b, C with c.
BLOCKS = {"A": 10, "a": 20, "B": 11, "b": 21, "C": 12, "c": 22, "D": 13}


def colliding_request(name: str, manager: KVCacheManager, prefix: str) -> Request:
    """A request of the blocks named, and one token more, so that all of them can be hit."""
    hasher = LastDigitHasher(manager.coordinator.hash_block_size)
    token_ids = [token for block in prefix for token in (BLOCKS[block], 1, 2, 3)]
    return make_request(name, [*token_ids, 0], manager, block_hasher=hasher)


def serve(manager: KVCacheManager, prefix: str) -> Request:
    """Admits a request of these blocks and frees it, so that what was registered stays."""
    request = colliding_request(f"{prefix}-{len(free_block_ids(manager))}", manager, prefix)
    admit(manager, request)
    manager.free(request)
    return request


def num_hit_blocks(manager: KVCacheManager, prefix: str) -> int:
    """Blocks of 4 tokens that a request of these blocks would find."""
    return manager.get_computed_blocks(colliding_request("lookup", manager, prefix))[1] // 4


def block_of(manager: KVCacheManager, prefix: str, group: int = 0) -> int:
    """The block that holds the end of a prefix which is hit as a whole."""
    blocks, num_hit = manager.get_computed_blocks(colliding_request("lookup", manager, prefix))
    assert num_hit == 4 * len(prefix)
    return blocks.get_block_ids()[group][-1]


def test_a_prefix_whose_hash_names_another_prefix_is_not_hit() -> None:
    manager = make_manager(20)
    serve(manager, "AB")
    assert num_hit_blocks(manager, "AB") == 2
    assert num_hit_blocks(manager, "aB") == 0
    assert num_hit_blocks(manager, "Ab") == 1


def test_a_prefix_kept_out_by_a_collision_is_registered_once_the_other_one_is_gone() -> None:
    manager = make_manager(20)
    serve(manager, "A")
    serve(manager, "a")
    assert (num_hit_blocks(manager, "A"), num_hit_blocks(manager, "a")) == (1, 0)
    manager.evict_blocks([block_of(manager, "A")])
    serve(manager, "a")
    assert (num_hit_blocks(manager, "A"), num_hit_blocks(manager, "a")) == (0, 1)


def test_a_child_is_not_hit_under_a_parent_that_took_the_place_of_its_own() -> None:
    manager = make_manager(20)
    serve(manager, "AB")
    manager.evict_blocks([block_of(manager, "A")])
    serve(manager, "a")
    # The block of B is still registered, under a hash that aB has too.
    assert num_hit_blocks(manager, "aB") == 1
    assert num_hit_blocks(manager, "AB") == 0


def test_a_child_is_hit_again_once_its_parent_is_back() -> None:
    manager = make_manager(20)
    serve(manager, "ABC")
    child = block_of(manager, "AB")
    manager.evict_blocks([block_of(manager, "A")])
    serve(manager, "a")
    manager.evict_blocks([block_of(manager, "a")])
    serve(manager, "A")
    assert num_hit_blocks(manager, "ABC") == 3
    assert block_of(manager, "AB") == child


def test_a_child_is_hit_by_later_requests_too_after_its_parent_came_back_in_another_block() -> None:
    manager = make_manager(30)
    serve(manager, "ABCD")
    for prefix in ("A", "AB"):
        manager.evict_blocks([block_of(manager, prefix)])
        serve(manager, prefix)
        for _ in range(2):
            assert num_hit_blocks(manager, "ABCD") == 4


def test_a_grandchild_is_hit_across_a_parent_registered_by_a_request_with_other_children() -> None:
    manager = make_manager(30)
    serve(manager, "ABC")
    manager.evict_blocks([block_of(manager, "AB")])
    serve(manager, "ABD")
    assert num_hit_blocks(manager, "ABC") == 3
    assert num_hit_blocks(manager, "ABD") == 3


def test_a_running_request_goes_on_registering_below_a_prefix_it_took_over() -> None:
    manager = make_manager(30)
    first, second = (colliding_request(name, manager, "AB") for name in ("first", "second"))
    # Both computed at once, so that neither hits the other: every hash names two blocks.
    for request in (first, second):
        manager.allocate_slots(request, 9)
        request.num_computed_tokens = 9
    second.append_output_token_ids([1, 2, 3, BLOCKS["C"], 1, 2, 3])
    manager.allocate_slots(second, 7)
    manager.free(first)
    manager.free(second)
    third = make_request("third", [*second.all_token_ids, 9], manager, block_hasher=LastDigitHasher(4))
    assert manager.get_computed_blocks(third)[1] == 16


def test_when_the_first_of_two_blocks_of_a_hash_goes_the_second_is_hit_and_collisions_still_are_not() -> None:
    manager = make_manager(20)
    first, second, colliding = (
        colliding_request(name, manager, prefix) for name, prefix in (("1", "A"), ("2", "A"), ("3", "a"))
    )
    for request in (first, second, colliding):
        manager.allocate_slots(request, 5)
    assert block_of(manager, "A") == table(manager, first)[0]
    manager.evict_blocks(table(manager, first)[:1])
    assert block_of(manager, "A") == table(manager, second)[0]
    assert num_hit_blocks(manager, "a") == 0
    manager.evict_blocks(table(manager, second)[:1])
    assert (num_hit_blocks(manager, "A"), num_hit_blocks(manager, "a")) == (0, 0)


def overwrite(manager: KVCacheManager, block: str) -> None:
    """Lets a request of just this block pass through a pool of one."""
    assert free_block_ids(manager) == [1]
    request = make_request("passing", [BLOCKS[block], 1, 2, 3], manager, block_hasher=LastDigitHasher(4))
    manager.allocate_slots(request, 4)
    manager.free(request)


def test_hits_are_stale_when_their_block_was_overwritten_with_a_prefix_of_the_same_hash() -> None:
    manager = make_manager(2)
    overwrite(manager, "A")
    late = colliding_request("late", manager, "A")
    blocks, num_hit = manager.get_computed_blocks(late)
    assert num_hit == 4
    overwrite(manager, "a")
    assert blocks.blocks[0][0].block_hash == late.block_hashes[0] + bytes(4)
    with pytest.raises(StaleHitError):
        manager.allocate_slots(late, 0, num_hit, blocks)
    assert free_block_ids(manager) == [1]
    assert num_hit_blocks(manager, "a") == 1


def test_hits_stay_good_when_their_block_was_overwritten_with_the_same_prefix() -> None:
    manager = make_manager(2)
    overwrite(manager, "A")
    late = colliding_request("late", manager, "A")
    blocks, num_hit = manager.get_computed_blocks(late)
    overwrite(manager, "a")
    overwrite(manager, "A")
    assert manager.allocate_slots(late, 0, num_hit, blocks) is not None
    assert table(manager, late) == [1]


def test_hits_of_one_request_are_refused_for_another_that_collides_with_it() -> None:
    manager = make_manager(20)
    serve(manager, "A")
    blocks, num_hit = manager.get_computed_blocks(colliding_request("right", manager, "A"))
    with pytest.raises(StaleHitError):
        manager.allocate_slots(colliding_request("wrong", manager, "a"), 1, num_hit, blocks)


@pytest.mark.parametrize("groups", ["sliding:5", "chunked:4", "chunked:6"])
def test_equal_tokens_in_reach_are_no_hit_when_what_lies_out_of_reach_collides(groups: str) -> None:
    # The keys and values of B depend on the whole prefix, through the layers below, whatever the reach of one layer.
    manager = make_manager(20, groups=[groups])
    shadow = ShadowMemory(manager)
    first = colliding_request("first", manager, "ABC")
    admit(manager, first)
    shadow.write(first, 0, 13)
    manager.free(first)
    for prefix in ("ABC", "aBC", "AbC", "abC"):
        request = colliding_request(prefix, manager, prefix)
        assert request.block_hashes == first.block_hashes
        blocks, num_hit = manager.get_computed_blocks(request)
        shadow.check_hit(request, blocks, num_hit)
        # A hit that ends with a chunk reads nothing, and is always there.
        assert (num_hit == 12) == (prefix == "ABC" or groups in ("chunked:4", "chunked:6"))


def test_collisions_are_told_apart_in_groups_with_different_block_sizes() -> None:
    manager = make_manager(40, groups=specs_of("full/8 sliding:6/4"))
    serve(manager, "ABCD")
    assert num_hit_blocks(manager, "ABCD") == 4
    # The block of 8 that ends with B is found by a hash of its second half; the first half has to be the same too.
    assert num_hit_blocks(manager, "aBCD") == 0
    assert num_hit_blocks(manager, "ABcD") == 2
    assert num_hit_blocks(manager, "ABCB") == 2
    manager.evict_blocks([block_of(manager, "AB")])
    serve(manager, "aB")
    assert num_hit_blocks(manager, "ABCD") == 0


class ConstantHasher(BlockHasher):
    """Every prefix has the same hash."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, verify_hits=True)
        self._digest = lambda data: b"*"


def test_one_block_is_not_hit_at_two_positions_that_have_its_hash() -> None:
    manager = make_manager(20, groups=["sliding:6"])
    shadow = ShadowMemory(manager)
    hasher = ConstantHasher(4)
    first = make_request("first", range(12), manager, block_hasher=hasher)
    for num_tokens in (4, 4, 4):
        manager.evict_blocks(range(20))
        manager.allocate_slots(first, num_tokens)
        shadow.write(first, first.num_computed_tokens, first.num_computed_tokens + num_tokens)
        first.num_computed_tokens += num_tokens
    assert [bool(block.block_hash) for block in manager.get_blocks("first").blocks[0]] == [False, False, True]
    # The window after 12 tokens needs the second block too, which is not in the cache.
    second = make_request("second", range(13), manager, block_hasher=hasher)
    blocks, num_hit = manager.get_computed_blocks(second)
    shadow.check_hit(second, blocks, num_hit)
    assert num_hit == 0


def test_a_block_is_not_registered_beside_a_later_one_of_the_same_prefix_that_has_its_hash() -> None:
    manager = make_manager(20)
    hasher = ConstantHasher(4)
    first, second = (make_request(name, range(12), manager, block_hasher=hasher) for name in ("first", "second"))
    for computed in (0, 4, 8):
        manager.evict_blocks(range(20))
        first.num_computed_tokens = computed
        manager.allocate_slots(first, 4)
    last_block = table(manager, first)[2]
    manager.allocate_slots(second, 12)
    # Of the second request's blocks only the last one holds what the hash stands for.
    registered = [block.block_id for block in manager.block_pool.blocks if block.block_hash]
    assert registered == [last_block, table(manager, second)[2]]
    assert manager.get_computed_blocks(make_request("third", range(12), manager, block_hasher=hasher))[1] == 0


@pytest.mark.parametrize("hasher", [BlockHasher(1), WeakHasher(1, bits=8)], ids=["strong", "weak"])
@pytest.mark.parametrize("chunk", [1, 50, 128, 129, 400])
def test_long_prefixes_are_told_apart_at_the_token_where_they_part(chunk: int, hasher: BlockHasher) -> None:
    # Blocks of one token: with the weak hash, many of them collide in one request.
    manager = make_manager(500, block_size=1)
    shadow = ShadowMemory(manager)
    first = make_request("first", [7] * 400, manager, block_hasher=hasher)
    while rest := first.num_tokens - first.num_computed_tokens:
        computed, num_new = first.num_computed_tokens, min(chunk, rest)
        manager.allocate_slots(first, num_new)
        shadow.write(first, computed, computed + num_new)
        first.num_computed_tokens += num_new
    registered = [bool(manager.block_pool.blocks[block_id].block_hash) for block_id in table(manager, first)]
    num_in_a_row = [*registered, False].index(False)
    manager.free(first)
    for shared in (1, 49, 50, 51, 127, 128, 129, 255, 256, 257, 300, 400):
        for token in range(8, 40):
            second = make_request("second", [7] * shared + [token] * 3, manager, block_hasher=hasher)
            blocks, num_hit = manager.get_computed_blocks(second)
            shadow.check_hit(second, blocks, num_hit)
            assert num_hit == min(shared, num_in_a_row)


def test_blocks_registered_without_verification_are_not_hit_by_requests_that_verify() -> None:
    manager = make_manager(20)
    trusting, verifying = (BlockHasher(4, "xxh3", seed=0, verify_hits=verify) for verify in (False, True))
    first = make_request("first", range(9), manager, block_hasher=trusting)
    admit(manager, first)
    assert manager.get_computed_blocks(make_request("second", range(9), manager, block_hasher=trusting))[1] == 8
    assert manager.get_computed_blocks(make_request("third", range(9), manager, block_hasher=verifying))[1] == 0
