"""The design, taught by examples small enough to follow on paper. Block size 4 throughout; block 0 is the null block.

Every number here follows from the rules of DESIGN.md; the comments say which step gives it.
"""

from __future__ import annotations

import pytest

from kvcore import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    Request,
    SlidingWindowSpec,
)
from kvcore.testing import admit, free_block_ids

HASHER = BlockHasher(4)
FULL = FullAttentionSpec(4, 1, 1, "bfloat16")


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(4, 1, 1, "bfloat16", tokens)


def chunks_of(tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(4, 1, 1, "bfloat16", tokens)


def cache(num_blocks: int, *specs: KVCacheSpec) -> KVCacheManager:
    """A cache of blocks 1 to ``num_blocks`` (and the null block), one group for each spec."""
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs or (FULL,))]
    return KVCacheManager(KVCacheConfig(num_blocks + 1, groups), max_model_len=1000)


def request(name: str, *tokens: int) -> Request:
    return Request(name, tokens, block_hasher=HASHER)


def decode(manager: KVCacheManager, request: Request, token: int) -> None:
    """One step: ``token`` was sampled, and its keys and values are computed."""
    request.append_output_token_ids(token)
    assert manager.allocate_slots(request, 1) is not None
    request.num_computed_tokens += 1


def table(manager: KVCacheManager, name: str) -> list[int]:
    (only,) = manager.get_block_ids(name)
    return only


def references(manager: KVCacheManager, *block_ids: int) -> list[int]:
    return [manager.block_pool.blocks[block_id].ref_cnt for block_id in block_ids]


def index_size(manager: KVCacheManager) -> int:
    return len(manager.block_pool.prefix_index)


def hit(manager: KVCacheManager, request: Request) -> tuple[tuple[list[int], ...], int]:
    """What a lookup finds, without taking it."""
    blocks, num_tokens = manager.get_computed_blocks(request)
    return blocks.get_block_ids(), num_tokens


FIRST_EIGHT = range(100, 108)


class TestTwoRequestsOf12And10TokensShareTheirFirst8:
    def test_while_both_run_the_shared_blocks_have_two_references(self) -> None:
        manager = cache(10)
        a = request("a", *FIRST_EIGHT, 1, 2, 3, 4)
        b = request("b", *FIRST_EIGHT, 5, 6)
        assert (index_size(manager), free_block_ids(manager)) == (0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])

        # 12 tokens are 3 blocks, taken from the head of the queue. All are full, hence in the index.
        assert admit(manager, a) == 0
        assert table(manager, "a") == [1, 2, 3]
        assert references(manager, 1, 2, 3) == [1, 1, 1]
        assert index_size(manager) == 3
        assert free_block_ids(manager) == [4, 5, 6, 7, 8, 9, 10]
        assert manager.usage == pytest.approx(3 / 10)

        # 8 of b's tokens are found; the other 2 go to a block of its own, which they do not fill.
        assert admit(manager, b) == 8
        assert table(manager, "b") == [1, 2, 4]
        assert references(manager, 1, 2, 3, 4) == [2, 2, 1, 1]
        assert index_size(manager) == 3
        assert free_block_ids(manager) == [5, 6, 7, 8, 9, 10]
        assert manager.usage == pytest.approx(4 / 10)
        assert manager.get_num_common_prefix_blocks("a") == [2]

        # a goes: nobody else holds block 3. It stays in the index, at the back of the queue.
        manager.free(a)
        assert references(manager, 1, 2, 3, 4) == [1, 1, 0, 1]
        assert index_size(manager) == 3
        assert free_block_ids(manager) == [5, 6, 7, 8, 9, 10, 3]
        assert table(manager, "b") == [1, 2, 4]

        # b goes: block 4 was never full and cannot be hit, so that it is the next one to be overwritten; of the blocks
        # that can be hit, the tail of the chain comes before its head.
        manager.free(b)
        assert references(manager, 1, 2, 3, 4) == [0, 0, 0, 0]
        assert index_size(manager) == 3
        assert free_block_ids(manager) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
        assert manager.usage == 0.0
        manager.check_invariants()

    def test_with_the_first_freed_before_the_second_arrives_the_blocks_are_taken_out_of_the_queue_again(self) -> None:
        manager = cache(10)
        a = request("a", *FIRST_EIGHT, 1, 2, 3, 4)
        b = request("b", *FIRST_EIGHT, 5, 6)

        admit(manager, a)
        manager.free(a)
        assert references(manager, 1, 2, 3) == [0, 0, 0]
        assert index_size(manager) == 3  # free, yet hittable until they are overwritten
        assert free_block_ids(manager) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]

        assert hit(manager, b) == (([1, 2],), 8)
        assert free_block_ids(manager) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]  # looking takes nothing

        assert admit(manager, b) == 8
        assert table(manager, "b") == [1, 2, 4]
        assert references(manager, 1, 2, 3, 4) == [1, 1, 0, 1]
        assert index_size(manager) == 3
        assert free_block_ids(manager) == [5, 6, 7, 8, 9, 10, 3]

        manager.free(b)
        assert index_size(manager) == 3
        assert free_block_ids(manager) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
        manager.check_invariants()


class TestSixteenTokensFreedTailFirst:
    def test_three_quarters_of_them_are_hit_by_a_second_request(self) -> None:
        manager = cache(8)
        a = request("a", *range(16))
        admit(manager, a)
        assert table(manager, "a") == [1, 2, 3, 4]
        assert free_block_ids(manager) == [5, 6, 7, 8]

        manager.free(a)
        assert free_block_ids(manager) == [5, 6, 7, 8, 4, 3, 2, 1]
        assert index_size(manager) == 4

        # b agrees with a in 12 of 16 tokens. Blocks 1, 2, 3 leave the middle and the end of the queue; block 5 is new.
        b = request("b", *range(12), 90, 91, 92, 93)
        assert admit(manager, b) == 12
        assert table(manager, "b") == [1, 2, 3, 5]
        assert free_block_ids(manager) == [6, 7, 8, 4]
        assert index_size(manager) == 5

        manager.free(b)
        assert free_block_ids(manager) == [6, 7, 8, 4, 5, 3, 2, 1]

        # c needs 5 blocks. It overwrites the blocks that were never used, then both tails: the shared head survives.
        c = request("c", *range(200, 220))
        assert admit(manager, c) == 0
        assert table(manager, "c") == [6, 7, 8, 4, 5]
        assert free_block_ids(manager) == [3, 2, 1]
        assert index_size(manager) == 5 - 2 + 5
        assert hit(manager, request("d", *range(16))) == (([1, 2, 3],), 12)
        manager.check_invariants()

    def test_an_equal_prompt_also_hits_only_three_quarters_since_its_last_token_must_be_computed(self) -> None:
        manager = cache(8)
        a = request("a", *range(16))
        admit(manager, a)
        manager.free(a)

        b = request("b", *range(16))
        assert admit(manager, b) == 12  # at most 15 tokens, hence 3 full blocks
        assert table(manager, "b") == [1, 2, 3, 5]
        # Blocks 4 and 5 now hold the same prefix: both keep their place, under one key of the index.
        assert manager.block_pool.blocks[4].block_hash == manager.block_pool.blocks[5].block_hash is not None
        assert index_size(manager) == 4
        # One token more, and the whole of a is found: 4 blocks, the last of them the one registered first.
        assert hit(manager, request("c", *range(16), 7)) == (([1, 2, 3, 4],), 16)


class TestAHashNamesTheWholePrefix:
    def test_a_second_block_equal_to_the_first_block_of_another_request_is_no_hit(self) -> None:
        manager = cache(10)
        admit(manager, request("a", 1, 2, 3, 4, 5, 6, 7, 8))
        # The keys and values of tokens 1, 2, 3, 4 depend on what stands before them.
        b = request("b", 9, 9, 9, 9, 1, 2, 3, 4, 0)
        assert hit(manager, b) == (([],), 0)
        admit(manager, b)
        assert table(manager, "a") == [1, 2]
        assert table(manager, "b") == [3, 4, 5]
        assert index_size(manager) == 4
        assert references(manager, 1, 2, 3, 4, 5) == [1, 1, 1, 1, 1]

    def test_a_first_block_equal_to_the_second_block_of_another_request_is_no_hit(self) -> None:
        manager = cache(10)
        admit(manager, request("a", 1, 2, 3, 4, 5, 6, 7, 8))
        assert hit(manager, request("b", 5, 6, 7, 8, 1, 2, 3, 4, 0)) == (([],), 0)

    def test_the_first_miss_ends_a_lookup_whatever_comes_after_it(self) -> None:
        manager = cache(10)
        admit(manager, request("a", *range(12)))
        manager.evict_blocks([2])
        assert index_size(manager) == 2
        assert hit(manager, request("b", *range(13))) == (([1],), 4)


class TestThePartlyFilledTail:
    def test_it_is_registered_when_it_fills_up_and_not_before(self) -> None:
        manager = cache(10)
        a = request("a", 0, 1, 2, 3, 4, 5)
        admit(manager, a)
        assert table(manager, "a") == [1, 2]
        assert index_size(manager) == 1  # block 2 holds 2 of 4 tokens
        same_eight_and_one = request("b", 0, 1, 2, 3, 4, 5, 6, 7, 8)
        assert hit(manager, same_eight_and_one) == (([1],), 4)

        decode(manager, a, 6)
        assert table(manager, "a") == [1, 2]
        assert index_size(manager) == 1
        decode(manager, a, 7)
        assert table(manager, "a") == [1, 2]
        assert index_size(manager) == 2
        assert hit(manager, same_eight_and_one) == (([1, 2],), 8)

        decode(manager, a, 8)
        assert table(manager, "a") == [1, 2, 3]
        assert index_size(manager) == 2

    def test_a_sampled_token_counts_only_in_the_step_that_computes_it(self) -> None:
        manager = cache(10)
        a = request("a", 0, 1, 2)
        admit(manager, a)
        a.append_output_token_ids(3)  # the block's tokens are known now, its last keys and values are not
        assert index_size(manager) == 0
        assert manager.allocate_slots(a, 1) is not None
        assert index_size(manager) == 1

    def test_draft_tokens_fill_blocks_that_are_not_registered(self) -> None:
        manager = cache(10)
        a = request("a", 0, 1, 2, 3, 4, 5)
        assert manager.allocate_slots(a, 6, num_lookahead_tokens=4) is not None
        assert table(manager, "a") == [1, 2, 3]  # slots for 10 tokens
        assert index_size(manager) == 1  # of 6 known ones


class TestASlidingWindowOf6Tokens:
    """A token reads itself and the 5 before it: 5 tokens, hence 2 blocks, make a hit."""

    def test_decoding_frees_a_block_when_the_window_has_left_it(self) -> None:
        manager = cache(8, window(6))
        a = request("a", *range(8))
        admit(manager, a)
        assert table(manager, "a") == [1, 2]

        # The step of token 8 reads tokens 3 to 8: block 1 holds token 3.
        decode(manager, a, 8)
        assert table(manager, "a") == [1, 2, 3]
        # The step of token 9 reads tokens 4 to 9: block 1 is left. It was full, so that it goes to the back, hittable.
        decode(manager, a, 9)
        assert table(manager, "a") == [0, 2, 3]
        assert references(manager, 1, 2, 3) == [0, 1, 1]
        assert free_block_ids(manager) == [4, 5, 6, 7, 8, 1]
        assert index_size(manager) == 2

        for token in (10, 11, 12):
            decode(manager, a, token)
        # The step of token 12 reads tokens 7 to 12: token 7 is the last one of block 2.
        assert table(manager, "a") == [0, 2, 3, 4]
        decode(manager, a, 13)
        assert table(manager, "a") == [0, 0, 3, 4]
        assert free_block_ids(manager) == [5, 6, 7, 8, 1, 2]

        manager.free(a)  # block 4 is not full: front; block 3 is: back
        assert free_block_ids(manager) == [4, 5, 6, 7, 8, 1, 2, 3]
        manager.check_invariants()

    def test_blocks_the_window_has_left_are_freed_before_new_ones_are_taken(self) -> None:
        manager = cache(4, window(6))
        a = request("a", *range(16))
        admit(manager, a)  # one step for all: within it, every token is read
        assert table(manager, "a") == [1, 2, 3, 4]
        assert free_block_ids(manager) == []

        # The step of token 16 reads tokens 11 to 16. Blocks 1 and 2 are freed, the later one first; that one is reused.
        decode(manager, a, 16)
        assert table(manager, "a") == [0, 0, 3, 4, 2]
        assert free_block_ids(manager) == [1]
        assert index_size(manager) == 3  # 1, 3, 4
        manager.check_invariants()

    def test_a_prefix_is_hit_in_the_middle_with_null_before_it(self) -> None:
        manager = cache(8, window(6))
        a = request("a", *range(16))
        admit(manager, a)
        manager.free(a)
        b = request("b", *range(17))

        # The rightmost 2 blocks: token 16 reads tokens 11 to 15, which lie in them.
        assert hit(manager, b) == (([0, 0, 3, 4],), 16)
        # Without block 1 it is the same: nothing reads it.
        manager.evict_blocks([1])
        assert hit(manager, b) == (([0, 0, 3, 4],), 16)
        # Without block 4, the run of blocks 2 and 3 is the rightmost one: token 12 reads tokens 7 to 11.
        manager.evict_blocks([4])
        assert hit(manager, b) == (([0, 2, 3],), 12)
        assert admit(manager, b) == 12
        assert table(manager, "b") == [0, 2, 3, 5, 6]
        assert references(manager, 1, 2, 3, 4, 5, 6) == [0, 1, 1, 0, 1, 1]
        manager.check_invariants()

    def test_a_run_too_short_for_the_window_is_a_hit_only_at_the_first_block(self) -> None:
        manager = cache(8, window(6))
        a = request("a", *range(16))
        admit(manager, a)
        manager.free(a)
        b = request("b", *range(17))

        manager.evict_blocks([3])
        assert hit(manager, b) == (([1, 2],), 8)  # block 4 alone is too short, blocks 1 and 2 are not
        manager.evict_blocks([2])
        assert hit(manager, b) == (([1],), 4)  # all there is before token 4
        manager.evict_blocks([1])
        assert hit(manager, b) == (([],), 0)


class TestAHybridModelHasOneHitLength:
    def test_groups_take_blocks_of_one_pool_and_register_the_same_prefix_apart(self) -> None:
        manager = cache(20, FULL, window(6))
        admit(manager, request("a", *range(16)))
        assert manager.get_block_ids("a") == ([1, 2, 3, 4], [5, 6, 7, 8])
        assert index_size(manager) == 8
        hashes = [manager.block_pool.blocks[block_id].block_hash for block_id in (1, 5)]
        assert None not in hashes
        assert hashes[0][:-4] == hashes[1][:-4]
        assert [block_hash[-4:] for block_hash in hashes] == [b"\0\0\0\0", b"\0\0\0\1"]

    def test_what_the_window_misses_shortens_the_hit_of_full_attention(self) -> None:
        manager = cache(20, FULL, window(6))
        a = request("a", *range(16))
        admit(manager, a)
        manager.free(a)
        b = request("b", *range(17))
        assert hit(manager, b) == (([1, 2, 3, 4], [0, 0, 7, 8]), 16)
        manager.evict_blocks([8])
        assert hit(manager, b) == (([1, 2, 3], [0, 6, 7]), 12)

    def test_what_full_attention_misses_shortens_the_hit_of_the_window(self) -> None:
        manager = cache(20, FULL, window(6))
        a = request("a", *range(16))
        admit(manager, a)
        manager.free(a)
        b = request("b", *range(17))
        manager.evict_blocks([3])
        assert hit(manager, b) == (([1, 2], [5, 6]), 8)
        # Now the window has only block 6 before token 8, too short a run, and nothing before token 4.
        manager.evict_blocks([5])
        assert hit(manager, b) == (([], []), 0)

    def test_groups_are_asked_again_until_none_shortens_the_hit(self) -> None:
        # Windows of 5 and 9 tokens: the first needs 1 block before the end of a hit, the second 2.
        manager = cache(20, FULL, window(5), window(9))
        a = request("a", *range(16))
        admit(manager, a)
        assert manager.get_block_ids("a") == ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
        manager.free(a)
        b = request("b", *range(17))
        assert hit(manager, b) == (([1, 2, 3, 4], [0, 0, 0, 8], [0, 0, 11, 12]), 16)

        # Full attention accepts 16 tokens, the short window too, the long one shortens to 12. There the short window
        # misses block 7, and shortens to 8; that suits the others.
        manager.evict_blocks([7, 12])
        assert hit(manager, b) == (([1, 2], [0, 6], [9, 10]), 8)
        assert admit(manager, b) == 8
        manager.check_invariants()


class TestChunkedLocalAttentionInChunksOf8Tokens:
    """Tokens 0 to 7 read each other, 8 to 15 do, and so on; a chunk is 2 blocks."""

    def test_a_hit_holds_the_blocks_of_the_current_chunk_and_null_before_it(self) -> None:
        manager = cache(8, chunks_of(8))
        a = request("a", *range(16))
        manager.allocate_slots(a, 16)  # without a lookup, which would let it begin at token 8: see the next test
        assert table(manager, "a") == [1, 2, 3, 4]
        manager.free(a)

        # 14 tokens, of which at most 13 may be hit, hence 12: token 12 reads from token 8 on.
        b = request("b", *range(14))
        assert hit(manager, b) == (([0, 0, 3],), 12)
        # The scan starts at the chunk: it does not matter that the blocks before it are gone.
        manager.evict_blocks([1, 2])
        assert hit(manager, b) == (([0, 0, 3],), 12)
        # Without block 3 the hit ends where the chunk begins: the token there reads nothing before it.
        manager.evict_blocks([3])
        assert hit(manager, b) == (([0, 0],), 8)

        assert admit(manager, b) == 8
        assert table(manager, "b") == [0, 0, 5, 6]
        manager.check_invariants()

    def test_a_hit_that_ends_with_a_chunk_needs_no_block_at_all(self) -> None:
        manager = cache(8, chunks_of(8))
        assert hit(manager, request("new", *range(17))) == (([0, 0, 0, 0],), 16)
        assert hit(manager, request("shorter", *range(16))) == (([0, 0],), 8)
        assert hit(manager, request("in its first chunk", *range(8))) == (([],), 0)

    def test_the_blocks_of_a_chunk_are_freed_together_when_the_next_chunk_begins(self) -> None:
        manager = cache(8, chunks_of(8))
        a = request("a", *range(7))
        admit(manager, a)
        decode(manager, a, 7)
        assert table(manager, "a") == [1, 2]
        decode(manager, a, 8)
        assert table(manager, "a") == [0, 0, 3]
        assert free_block_ids(manager) == [4, 5, 6, 7, 8, 2, 1]  # freed before block 3 was taken, the later one first
        manager.check_invariants()

    def test_a_block_that_the_chunk_begins_inside_is_kept(self) -> None:
        manager = cache(8, chunks_of(6))
        a = request("a", *range(7))
        admit(manager, a)
        decode(manager, a, 7)  # reads tokens 6 and 7; block 2 holds tokens 4 to 7
        assert table(manager, "a") == [0, 2]
        manager.free(a)
        # 8 tokens: token 8 reads from token 6 on, so that block 2 is needed and block 1 is not.
        b = request("b", *range(9))
        assert hit(manager, b) == (([0, 2],), 8)
        manager.evict_blocks([2])
        assert hit(manager, b) == (([1],), 4)
        manager.check_invariants()
