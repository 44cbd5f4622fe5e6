"""The pool hands blocks out, shares them, makes them hittable, and takes them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from kvcore import (
    AllBlocksCleared,
    BlockHasher,
    BlockPool,
    BlockRemoved,
    BlockStored,
    ConfigError,
    CountError,
    DuplicateBlockError,
    ForeignBlockError,
    InvariantError,
    KVCacheBlock,
)
from kvcore.request import Request
from kvcore.run_queue import RunQueue
from kvcore.units import note, unit_of

HASHER = BlockHasher(4)


def make_pool(num_usable_blocks: int, **settings: bool) -> BlockPool:
    return BlockPool(num_usable_blocks + 1, hash_block_size=4, **settings)


def make_request(tokens: Iterable[int]) -> Request:
    return Request("r", tokens, block_hasher=HASHER)


def ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def free_queue(pool: BlockPool) -> RunQueue:
    assert isinstance(pool.free_block_queue, RunQueue)
    return pool.free_block_queue


def queue(pool: BlockPool) -> list[int]:
    return ids(pool.free_block_queue.get_all_free_blocks())


def cached(pool: BlockPool, tokens: range) -> list[KVCacheBlock]:
    """New blocks that hold ``tokens``, registered."""
    request = make_request(tokens)
    blocks = pool.get_new_blocks(len(tokens) // 4)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), 4, 0)
    return blocks


class TestHandingOut:
    def test_all_blocks_but_the_null_block_are_free_at_first(self) -> None:
        pool = make_pool(4)
        assert ids(pool.blocks) == [0, 1, 2, 3, 4]
        assert pool.null_block is pool.blocks[0]
        assert pool.null_block.is_null
        assert queue(pool) == [1, 2, 3, 4]
        assert pool.get_usage() == 0.0
        assert "free=4, cached=0" in repr(pool)

    def test_blocks_leave_from_the_head_with_one_reference(self) -> None:
        pool = make_pool(4)
        blocks = pool.get_new_blocks(3)
        assert ids(blocks) == [1, 2, 3]
        assert all(block is pool.blocks[block.block_id] for block in blocks)  # made once, never again
        assert [block.ref_cnt for block in blocks] == [1, 1, 1]
        assert pool.get_num_free_blocks() == 1
        assert pool.get_usage() == 0.75
        assert pool.get_new_blocks(0) == []
        pool.get_new_blocks(1)
        assert pool.get_usage() == 1.0
        pool.check_invariants()

    def test_a_cached_block_leaves_the_index_when_it_is_handed_out_again_and_not_before(self) -> None:
        pool = make_pool(3)
        blocks = cached(pool, range(8))
        pool.free_blocks(reversed(blocks))
        assert queue(pool) == [3, 2, 1]
        assert len(pool.prefix_index) == 2
        assert ids(pool.get_new_blocks(2)) == [3, 2]
        assert len(pool.prefix_index) == 1
        assert pool.blocks[2].block_hash is None
        assert pool.blocks[1].block_hash is not None
        pool.check_invariants()


class TestSharing:
    def test_a_held_block_gets_one_more_reference(self) -> None:
        pool = make_pool(4)
        (block,) = pool.get_new_blocks(1)
        pool.touch([block])
        assert block.ref_cnt == 2
        assert queue(pool) == [2, 3, 4]

    def test_a_free_block_leaves_the_middle_of_the_queue(self) -> None:
        pool = make_pool(4)
        pool.touch([pool.blocks[3], pool.blocks[2]])
        assert queue(pool) == [1, 4]
        assert [block.ref_cnt for block in pool.blocks] == [0, 0, 1, 1, 0]
        pool.check_invariants()

    def test_null_blocks_are_passed_over(self) -> None:
        pool = make_pool(2)
        pool.touch([pool.null_block, pool.blocks[1]])
        pool.free_blocks([pool.null_block, pool.blocks[1], pool.null_block])
        assert queue(pool) == [1, 2]
        pool.check_invariants()


class TestTakingBack:
    def test_a_block_is_free_when_its_last_holder_lets_go(self) -> None:
        pool = make_pool(2)
        blocks = pool.get_new_blocks(1)
        pool.touch(blocks)
        pool.free_blocks(blocks)
        assert queue(pool) == [2]
        pool.free_blocks(blocks)
        assert queue(pool) == [1, 2]

    def test_hashed_blocks_go_to_the_back_and_others_to_the_front_each_in_the_given_order(self) -> None:
        pool = make_pool(7)
        hashed = cached(pool, range(8))
        plain = pool.get_new_blocks(3)
        assert (ids(hashed), ids(plain)) == ([1, 2], [3, 4, 5])
        pool.free_blocks([plain[2], hashed[1], plain[0], hashed[0], plain[1]])
        assert queue(pool) == [5, 3, 4, 6, 7, 2, 1]
        pool.check_invariants()

    def test_any_iterable_will_do(self) -> None:
        pool = make_pool(3)
        pool.free_blocks(iter(pool.get_new_blocks(2)))
        assert queue(pool) == [1, 2, 3]

    def test_the_policy_tells_the_order_in_which_blocks_would_be_taken(self) -> None:
        pool = make_pool(5)
        hashed, plain = cached(pool, range(8)), pool.get_new_blocks(2)
        pool.free_blocks([*hashed, *plain])
        assert ids(pool.policy) == queue(pool) == [3, 4, 5, 1, 2]
        assert len(pool.policy) == 5
        assert ids(pool.get_new_blocks(5)) == [3, 4, 5, 1, 2]


class TestRegistering:
    def test_only_the_given_range_of_a_table_is_registered(self) -> None:
        pool = make_pool(4)
        request = make_request(range(16))
        blocks = pool.get_new_blocks(4)
        pool.cache_full_blocks(request, blocks, 1, 3, 4, 0)
        assert [block.block_hash is not None for block in blocks] == [False, True, True, False]
        assert pool.get_cached_block(request.block_hashes[1], [0]) == [blocks[1]]

    def test_null_blocks_and_masked_ones_are_left_out(self) -> None:
        pool = make_pool(4, enable_kv_cache_events=True)
        request = make_request(range(16))
        blocks = [pool.null_block, *pool.get_new_blocks(3)]
        pool.cache_full_blocks(request, blocks, 0, 4, 4, 0, [True, False, True, True])
        assert [block.block_hash is not None for block in blocks] == [False, False, True, True]
        (event,) = pool.take_events()
        assert isinstance(event, BlockStored)
        assert event.block_hashes == request.block_hashes[2:]
        assert event.token_ids == list(range(16))
        pool.check_invariants()

    @pytest.mark.parametrize("null_at", [0, 1, 2])
    def test_the_null_block_is_left_out_wherever_it_stands(self, null_at: int) -> None:
        pool = make_pool(4)
        blocks = pool.get_new_blocks(2)
        blocks.insert(null_at, pool.null_block)
        pool.cache_full_blocks(make_request(range(12)), blocks, 0, 3, 4, 0)
        assert [block.block_hash is None for block in blocks] == [place == null_at for place in range(3)]
        pool.check_invariants()

    def test_a_range_beyond_the_blocks_or_the_hashes_is_refused(self) -> None:
        pool = make_pool(4)
        blocks = pool.get_new_blocks(3)
        for request, first, stop in (
            (make_request(range(16)), 0, 4),
            (make_request(range(11)), 0, 3),
            (make_request(range(16)), -1, 2),
            (make_request(range(16)), 2, 1),
        ):
            with pytest.raises(CountError, match="cannot register blocks"):
                pool.cache_full_blocks(request, blocks, first, stop, 4, 0)
        assert len(pool.prefix_index) == 0

    def test_a_registered_block_or_one_of_another_pool_is_refused_and_none_registered(self) -> None:
        pool, other_pool = make_pool(4), make_pool(4)
        request = make_request(range(8))
        own, foreign = pool.get_new_blocks(2), other_pool.get_new_blocks(1)
        with pytest.raises(ForeignBlockError, match="not a block of this pool"):
            pool.cache_full_blocks(request, [own[0], *foreign], 0, 2, 4, 0)
        pool.cache_full_blocks(request, own, 1, 2, 4, 0)
        with pytest.raises(DuplicateBlockError, match="registered already: count it among num_cached_blocks"):
            pool.cache_full_blocks(request, own, 0, 2, 4, 0)
        assert [block.block_id for block in pool.prefix_index] == [own[1].block_id]
        pool.check_invariants()

    def test_a_block_that_comes_twice_is_refused_and_none_registered(self) -> None:
        pool = make_pool(4)
        block, other = pool.get_new_blocks(2)
        with pytest.raises(DuplicateBlockError, match="cannot hold 2 blocks of one request"):
            pool.cache_full_blocks(make_request(range(12)), [block, other, block], 0, 3, 4, 0)
        assert len(pool.prefix_index) == 0
        pool.cache_full_blocks(make_request(range(12)), [pool.null_block, pool.null_block, block], 0, 3, 4, 0)
        pool.check_invariants()

    @pytest.mark.parametrize("block_size", [0, -4, 2, 6])
    def test_a_block_size_that_hashes_do_not_fit_is_refused(self, block_size: int) -> None:
        pool = make_pool(4)
        with pytest.raises(ConfigError, match="block_size must be a multiple of 4, got"):
            pool.cache_full_blocks(make_request(range(24)), pool.get_new_blocks(2), 0, 2, block_size, 0)
        assert len(pool.prefix_index) == 0

    def test_an_empty_range_registers_nothing(self) -> None:
        pool = make_pool(4, enable_kv_cache_events=True)
        pool.cache_full_blocks(make_request(range(8)), pool.get_new_blocks(2), 1, 1, 4, 0)
        assert len(pool.prefix_index) == 0
        assert pool.take_events() == []

    def test_a_block_of_several_hash_blocks_is_known_by_the_last_of_them(self) -> None:
        pool = make_pool(2)
        request = make_request(range(24))
        blocks = pool.get_new_blocks(2)
        pool.cache_full_blocks(request, blocks, 0, 2, 12, 0)
        assert [block.prefix_hash for block in blocks] == [request.block_hashes[2], request.block_hashes[5]]

    def test_a_prefix_that_collides_with_another_one_is_not_registered(self) -> None:
        pool = make_pool(4, enable_kv_cache_events=True)
        ours, theirs = make_request(range(100, 108)), make_request(range(8))
        cached(pool, range(8))
        pool.take_events()
        ours.block_hashes[1] = theirs.block_hashes[1]  # as a weak hash could have it
        blocks = pool.get_new_blocks(2)
        pool.cache_full_blocks(ours, blocks, 0, 2, 4, 0)
        assert [block.block_hash is not None for block in blocks] == [True, False]
        assert pool.get_cached_block(theirs.block_hashes[1], [0]) == [pool.blocks[2]]
        (event,) = pool.take_events()
        assert isinstance(event, BlockStored)
        assert event.block_hashes == [ours.block_hashes[0]]
        pool.check_invariants()


class TestForgetting:
    def test_an_evicted_block_stays_with_its_holder(self) -> None:
        pool = make_pool(3)
        blocks = cached(pool, range(8))
        pool.evict_blocks([1])
        assert blocks[0].block_hash is None
        assert blocks[0].ref_cnt == 1
        assert len(pool.prefix_index) == 1
        pool.free_blocks(reversed(blocks))
        assert queue(pool) == [1, 3, 2]  # what cannot be hit any more goes to the front
        pool.check_invariants()

    def test_an_evicted_block_keeps_its_place_in_the_queue(self) -> None:
        pool = make_pool(3)
        pool.free_blocks(cached(pool, range(8)))
        assert queue(pool) == [3, 1, 2]
        pool.evict_blocks([1])
        assert queue(pool) == [3, 1, 2]

    def test_a_reset_forgets_all_blocks_and_keeps_the_order_of_the_queue(self) -> None:
        pool = make_pool(4, enable_kv_cache_events=True)
        blocks = cached(pool, range(8))
        also = cached(pool, range(8))
        assert pool.reset_prefix_cache() is False
        assert len(pool.prefix_index) == 2
        pool.free_blocks([*blocks, *also])
        pool.take_events()
        assert pool.reset_prefix_cache() is True
        assert len(pool.prefix_index) == 0
        assert all(block.block_hash is None for block in pool.blocks)
        assert queue(pool) == [1, 2, 3, 4]
        assert pool.take_events() == [AllBlocksCleared()]
        pool.check_invariants()


class TestEvents:
    def test_tell_what_was_stored_removed_and_cleared_in_this_order(self) -> None:
        pool = make_pool(2, enable_kv_cache_events=True)
        request = make_request(range(8))
        blocks = cached(pool, range(8))
        pool.free_blocks(blocks)
        pool.get_new_blocks(1)
        pool.evict_blocks([1, 2, 2])
        pool.free_blocks([pool.blocks[1]])
        pool.reset_prefix_cache()
        assert pool.take_events() == [
            BlockStored(request.block_hashes, None, list(range(8)), 4, group_idx=0, extra_keys=[None, None]),
            BlockRemoved(request.block_hashes[:1], group_idx=0),
            BlockRemoved(request.block_hashes[1:], group_idx=0),
            AllBlocksCleared(),
        ]
        assert pool.take_events() == []

    def test_are_not_kept_unless_asked_for(self) -> None:
        pool = make_pool(2)
        pool.free_blocks(cached(pool, range(8)))
        pool.get_new_blocks(1)
        assert pool.take_events() == []


def count_a_holder_too_many(pool: BlockPool) -> None:
    unit_of(pool.blocks[1]).num_holders = 2


def queue_a_held_block(pool: BlockPool) -> None:
    free_queue(pool).put_last([unit_of(pool.blocks[1])])


def lose_a_free_block(pool: BlockPool) -> None:
    free_queue(pool).unlink(unit_of(pool.blocks[4]))


def count_a_reference_of_a_free_block(pool: BlockPool) -> None:
    unit_of(pool.blocks[4]).num_holders = 1


def free_a_block_below_zero(pool: BlockPool) -> None:
    unit_of(pool.blocks[4]).num_holders = -1


def hold_the_null_block(pool: BlockPool) -> None:
    pool.null_block.num_holders = 1


def register_the_null_block(pool: BlockPool) -> None:
    note(pool.null_block, [b"hash"], None, 0, 0, is_first=True)


def queue_the_null_block(pool: BlockPool) -> None:
    free_queue(pool).put_last([pool.null_block])


def make_the_null_block_a_common_one(pool: BlockPool) -> None:
    pool.null_block.is_null = False


def make_a_second_null_block(pool: BlockPool) -> None:
    pool.blocks[4].is_null = True


def miscount_the_queue(pool: BlockPool) -> None:
    free_queue(pool).num_free_blocks += 1


def link_a_free_block_back_to_another(pool: BlockPool) -> None:
    third, _, fifth = [unit_of(block) for block in pool.blocks[3:6]]
    fifth.prev_free_block = third


def link_a_free_block_on_to_itself(pool: BlockPool) -> None:
    fourth = unit_of(pool.blocks[4])
    fourth.next_free_block = fourth


def put_a_block_elsewhere_in_its_run(pool: BlockPool) -> None:
    pool.blocks[4].offset += 1


def note_contents_of_no_block(pool: BlockPool) -> None:
    assert pool.blocks[4].run is not None
    pool.blocks[4].run.spans = []


def keep_a_hash_beside_that_of_the_run(pool: BlockPool) -> None:
    pool.blocks[4].own_hash = b"another"


def say_that_a_block_is_not_registered(pool: BlockPool) -> None:
    pool.blocks[1].is_hashed = False


def say_that_a_run_is_registered(pool: BlockPool) -> None:
    assert pool.blocks[4].run is not None
    pool.blocks[4].run.is_hashed = True


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (count_a_holder_too_many, "<block 1: ref_cnt=2.* is held by 1 block tables"),
        (queue_a_held_block, "<block 1: .* is in the free queue; blocks with ref_cnt 0, and no others, belong there"),
        (lose_a_free_block, "<block 4: .* is not in the free queue; blocks with ref_cnt 0"),
        (count_a_reference_of_a_free_block, "<block 4: ref_cnt=1> is in the free queue"),
        (free_a_block_below_zero, "<block 4: ref_cnt=-1> is in the free queue"),
        (hold_the_null_block, "the null block is held, registered or queued"),
        (register_the_null_block, "the null block is held, registered or queued"),
        (queue_the_null_block, "the null block is held, registered or queued"),
        (make_the_null_block_a_common_one, "the null block is held, registered or queued"),
        (make_a_second_null_block, "block 4 says it is the null block"),
        (miscount_the_queue, "the free queue holds 3 blocks and counts 4"),
        (link_a_free_block_back_to_another, "the free queue is linked wrongly at <run of 1 blocks: <block 5"),
        (link_a_free_block_on_to_itself, "the free queue is linked wrongly at <block 4"),
        (put_a_block_elsewhere_in_its_run, "<block 4: ref_cnt=0> is not in its run: <run of 3 blocks"),
        (note_contents_of_no_block, "<run of 3 blocks: .* has 0 hashes or contents for 3 blocks"),
        (keep_a_hash_beside_that_of_the_run, "<block 4: .* keeps a hash or contents beside those of its run"),
        (
            say_that_a_block_is_not_registered,
            "<block 1: .* has a hash and no place in the index, or",
        ),
        (say_that_a_run_is_registered, "<run of 3 blocks: .* has hashes and no place in the index, or a place and no"),
    ],
)
def test_damage_is_found_and_named(damage: Callable[[BlockPool], None], message: str) -> None:
    pool = make_pool(5)
    cached(pool, range(8))
    pool.check_invariants({1: 1, 2: 1})
    damage(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check_invariants({1: 1, 2: 1})
