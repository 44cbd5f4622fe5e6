"""Runs of blocks, cut and joined as their blocks fare differently, against books that have an entry for each block."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcore import BlockHasher, BlockPool, KVCacheBlock, Request
from kvcore.block_run import BlockRun
from kvcore.blocks import Unit
from kvcore.contents import TokenSpan
from kvcore.errors import QueueError
from kvcore.eviction import LRU
from kvcore.run_queue import RunQueue
from kvcore.testing import admit, make_manager, make_request, table
from kvcore.units import blocks_of, count_held, joined, note, unit_of, units_of

HASHER = BlockHasher(4)


def make_run(num_blocks: int, position: int = 0) -> tuple[BlockRun, list[KVCacheBlock]]:
    blocks = [KVCacheBlock(block_id) for block_id in range(1, num_blocks + 1)]
    run = BlockRun([*blocks], 1)
    note(run, [bytes([block.block_id]) for block in blocks], None, position, 3, is_first=True)
    return run, blocks


class TestCutting:
    @given(num_blocks=st.integers(2, 40), data=st.data())
    def test_leaves_every_block_with_what_was_said_of_it(self, num_blocks: int, data: st.DataObject) -> None:
        _, blocks = make_run(num_blocks, position=7)
        for _ in range(data.draw(st.integers(1, 8))):
            first = data.draw(st.integers(0, num_blocks - 1))
            stop = data.draw(st.integers(first + 1, num_blocks))
            cut = [block for unit in units_of(blocks[first:stop]) for block in blocks_of(unit)]
            assert cut == blocks[first:stop]
        for position, block in enumerate(blocks, 7):
            assert (block.prefix_hash, block.position) == (bytes([block.block_id]), position)
            assert (block.ref_cnt, block.group_id) == (1, 3)

    def test_the_longer_part_stays_the_run(self) -> None:
        run, blocks = make_run(10)
        assert run.cut(7)[0] is run
        assert run.cut(2)[1] is run
        assert blocks_of(run) == blocks[2:7]

    def test_does_nothing_where_a_run_has_these_blocks_only(self) -> None:
        run, blocks = make_run(4)
        assert units_of(blocks) == [run]
        assert units_of(blocks[2:]) == [blocks[2].run]
        assert units_of(blocks) == [run, blocks[2].run]
        assert unit_of(blocks[1]) is blocks[1]
        assert units_of(blocks) == [run, blocks[1], blocks[2].run]

    def test_blocks_out_of_order_are_units_of_their_own(self) -> None:
        _, blocks = make_run(4)
        assert [blocks_of(unit) for unit in units_of([blocks[0], blocks[1], blocks[3], blocks[2]])] == [
            blocks[:2],
            [blocks[3]],
            [blocks[2]],
        ]

    @given(num_blocks=st.integers(2, 200), data=st.data())
    def test_a_run_forgets_the_blocks_that_left_it(self, num_blocks: int, data: st.DataObject) -> None:
        run, blocks = make_run(num_blocks)
        unit: Unit = run
        while isinstance(unit, BlockRun) and len(unit) > 1:
            step = data.draw(st.integers(1, len(unit) - 1))
            unit = unit.cut(unit.start + step)[data.draw(st.integers(0, 1))]
            if isinstance(unit, BlockRun):
                assert len(unit.blocks) <= 2 * len(unit)
                assert unit.hashes is not None
                assert len(unit.hashes) == len(unit.blocks)
        assert blocks_of(unit)[0] in blocks

    def test_a_window_that_moves_on_leaves_nothing_behind(self) -> None:
        run, blocks = make_run(100)
        for block in blocks[:-2]:
            assert unit_of(block) is block
            assert len(run.blocks) <= 2 * len(run)
        assert blocks_of(run) == blocks[-2:]

    def test_counts_the_blocks_that_are_held_so_often(self) -> None:
        _, blocks = make_run(6)
        unit_of(blocks[2]).num_holders = 2
        assert [count_held(blocks, times) for times in (0, 1, 2)] == [0, 5, 1]
        assert count_held([], 1) == 0


class TestTheQueue:
    def test_a_run_is_overwritten_from_its_end(self) -> None:
        run, blocks = make_run(4)
        queue = RunQueue(run)
        assert queue.get_all_free_blocks() == blocks[::-1]
        assert queue.take_one() == (blocks[3], b"\4", 3)
        assert queue.take(2) == [([blocks[2], blocks[1]], [b"\3", b"\2"], 3)]
        assert (len(queue), list(queue)) == (1, [blocks[0]])

    @given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), data=st.data())
    def test_keeps_its_order_when_a_run_in_it_is_cut(self, sizes: list[int], data: st.DataObject) -> None:
        runs = [make_run(size)[0] for size in sizes]
        queue = RunQueue(runs[0])
        queue.put_first(runs[1:3])
        queue.put_last(runs[3:])
        order = queue.get_all_free_blocks()
        assert order == [block for run in runs[1:3] + runs[:1] + runs[3:] for block in reversed(blocks_of(run))]
        for block in data.draw(st.permutations(order)):
            unit_of(block)
            assert queue.get_all_free_blocks() == order
        assert len(list(queue.units())) == len(order) == queue.num_free_blocks
        taken = queue.take(data.draw(st.integers(0, len(order))))
        assert [block for blocks, _, _ in taken for block in blocks] + list(queue) == order


class TestJoining:
    def loose(self, *, verified: bool, position: int) -> KVCacheBlock:
        block = KVCacheBlock(position + 1)
        spans = [TokenSpan(None, 0, 9, b"", {})] if verified else None
        note(block, [bytes([position])], spans, position, 0, is_first=True)
        return block

    def test_makes_one_run_of_neighbours(self) -> None:
        blocks = [self.loose(verified=True, position=position) for position in range(3)]
        (run,) = joined([*blocks])
        assert blocks_of(run) == blocks
        assert [block.prefix_hash for block in blocks] == [b"\0", b"\1", b"\2"]
        assert [block.position for block in blocks] == [0, 1, 2]
        assert all(block.content is not None for block in blocks)

    def test_keeps_apart_what_does_not_go_together(self) -> None:
        trusted, verified = self.loose(verified=False, position=0), self.loose(verified=True, position=1)
        assert joined([trusted, verified]) == [trusted, verified]
        assert joined([self.loose(verified=True, position=0), far := self.loose(verified=True, position=2)])[1] is far

    def test_leaves_long_runs_alone(self) -> None:
        first, second = make_run(8)[0], make_run(8, position=8)[0]
        assert joined([first, second]) == [first, second]


class TestARequest:
    def test_has_its_prompt_in_one_run_and_what_it_decodes_block_by_block(self) -> None:
        manager = make_manager(40)
        request = make_request("a", range(33), manager)
        admit(manager, request)
        for token in range(100, 130):
            assert manager.allocate_slots(request, 1) is not None
            request.append_output_token_ids(token)
            request.num_computed_tokens += 1
        blocks = [manager.block_pool.blocks[block_id] for block_id in table(manager, request)]
        assert {id(block.run) for block in blocks[:8]} == {id(blocks[0].run)}
        assert [block.run for block in blocks[9:]] == [None] * 7
        manager.free(request)
        manager.check_invariants()
        again = make_request("b", [*range(33), *range(100, 129)], manager)
        assert [block.block_id for block in manager.get_computed_blocks(again)[0].blocks[0]] == [
            block.block_id for block in blocks[:15]
        ]

    def test_is_found_by_itself_and_in_runs_alike(self) -> None:
        """The answer does not depend on how the blocks came."""
        prompt = [*range(50)]
        found = []
        for chunk in (1, 3, 7, 16, 50):
            manager = make_manager(60)
            request = make_request("a", prompt, manager)
            while request.num_computed_tokens < len(prompt):
                step = min(chunk, len(prompt) - request.num_computed_tokens)
                assert manager.allocate_slots(request, step) is not None
                request.num_computed_tokens += step
            ids = table(manager, request)
            hits, num_tokens = manager.get_computed_blocks(make_request("b", prompt, manager))
            assert [block.block_id for block in hits.blocks[0]] == ids[: num_tokens // 4]
            found.append(num_tokens)
        assert found == [48] * 5

    def test_a_second_copy_of_a_prefix_is_one_run_too(self) -> None:
        manager = make_manager(120)
        requests = [make_request(name, range(200), manager) for name in ("a", "b")]
        lookups = [manager.get_computed_blocks(request) for request in requests]
        for request, (hits, num_tokens) in zip(requests, lookups, strict=True):
            assert num_tokens == 0
            manager.allocate_slots(request, 200, 0, hits)
        first, other = (table(manager, request) for request in requests)
        second = [manager.block_pool.blocks[block_id] for block_id in other]
        assert {id(block.run) for block in second} == {id(second[0].run)}
        hits, num_tokens = manager.get_computed_blocks(make_request("c", range(200), manager))
        assert num_tokens == 196
        assert [block.block_id for block in hits.blocks[0]] == first[:49]
        manager.evict_blocks(first[20:35])
        hits, num_tokens = manager.get_computed_blocks(make_request("d", range(200), manager))
        assert [block.block_id for block in hits.blocks[0]] == first[:20] + other[20:35] + first[35:49]
        manager.evict_blocks(first)
        assert second[0].run is not None
        assert not second[0].run.is_first
        hits, num_tokens = manager.get_computed_blocks(make_request("e", range(200), manager))
        assert [block.block_id for block in hits.blocks[0]] == other[:49]
        assert second[0].run.is_first  # and the next lookup takes it as a whole


class TestFragments:
    @pytest.mark.parametrize("algorithm", ["xxh3", "sha256_raw"])
    def test_of_a_prefix_are_found_as_the_whole_was_and_come_together_again(self, algorithm: str) -> None:
        manager = make_manager(120)
        hasher = BlockHasher(4, algorithm)
        prefix = [*range(400)]
        first = make_request("first", prefix, manager, block_hasher=hasher)
        admit(manager, first)
        ids = table(manager, first)
        manager.free(first)
        rng = random.Random(0)
        for _ in range(200):
            part = [*prefix[: 4 * rng.randrange(1, 100)], 2**32 - 1]
            request = make_request("part", part, manager, block_hasher=hasher)
            assert admit(manager, request) == len(part) - 1
            assert table(manager, request)[:-1] == ids[: len(part) // 4]
            manager.free(request)
            manager.check_invariants()
        units = {id(block.run or block) for block in manager.block_pool.blocks if block.prefix_hash is not None}
        assert len(units) <= 20


class LRUOfBlocks(LRU):
    """The same order, but not the very class: the pool tells it of blocks, and not of runs."""


class PoolAgainstLists(RuleBasedStateMachine):
    """A pool, called with blocks in any order and any number of times, against counts, a list of free ids, and the
    hashes and positions of registered ones."""

    NUM_BLOCKS = 12
    POLICY: type[LRU] = LRU

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS + 1, hash_block_size=4, eviction_policy=self.POLICY)
        self.free = [*range(1, self.NUM_BLOCKS + 1)]
        self.held: Counter[int] = Counter()
        self.hashes: dict[int, tuple[bytes, int]] = {}
        self.first_token = count(step=4 * self.NUM_BLOCKS)

    def blocks(self, ids: list[int]) -> list[KVCacheBlock]:
        return [self.pool.blocks[block_id] for block_id in ids]

    @rule(data=st.data())
    def get_new_blocks(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.free)))
        taken, self.free = self.free[:n], self.free[n:]
        assert [block.block_id for block in self.pool.get_new_blocks(n)] == taken
        self.held.update(taken)
        for block_id in taken:
            self.hashes.pop(block_id, None)

    @rule(ids=st.lists(st.integers(0, NUM_BLOCKS), max_size=8))
    def touch(self, ids: list[int]) -> None:
        self.pool.touch(self.blocks(ids))
        self.held.update(block_id for block_id in ids if block_id)
        self.free = [block_id for block_id in self.free if not self.held[block_id]]

    @rule(data=st.data())
    def free_blocks(self, data: st.DataObject) -> None:
        holds = data.draw(st.permutations(sorted(self.held.elements())))
        ids = holds[: data.draw(st.integers(0, len(holds)))]
        self.pool.free_blocks(self.blocks(ids))
        unhashed, hashed = [], []
        for block_id in ids:
            self.held[block_id] -= 1
            if not self.held[block_id]:
                (hashed if block_id in self.hashes else unhashed).append(block_id)
        self.free = unhashed + self.free + hashed

    @rule(data=st.data(), group=st.integers(0, 1))
    def cache_full_blocks(self, data: st.DataObject, group: int) -> None:
        unhashed = [block_id for block_id in self.held if self.held[block_id] and block_id not in self.hashes]
        ids = data.draw(st.permutations(unhashed))
        mask = data.draw(st.none() | st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        first_token = next(self.first_token)
        tokens = range(first_token, first_token + max(4 * len(ids), 1))
        request = Request("r", tokens, block_hasher=HASHER)
        self.pool.cache_full_blocks(request, self.blocks(ids), 0, len(ids), 4, group, mask)
        for i, block_id in enumerate(ids):
            if mask is None or mask[i]:
                self.hashes[block_id] = request.block_hashes[i], i

    @rule(ids=st.lists(st.integers(0, NUM_BLOCKS), max_size=6))
    def evict(self, ids: list[int]) -> None:
        self.pool.evict_blocks(ids)
        for block_id in ids:
            self.hashes.pop(block_id, None)

    @rule()
    def reset(self) -> None:
        if self.pool.reset_prefix_cache():
            assert len(self.free) == self.NUM_BLOCKS
            self.hashes.clear()

    @invariant()
    def both_agree(self) -> None:
        self.pool.check_invariants({block_id: times for block_id, times in self.held.items() if times})
        assert [block.block_id for block in self.pool.free_block_queue] == self.free
        registered = [block for block in self.pool.blocks if block.prefix_hash]
        assert {block.block_id: (block.prefix_hash, block.position) for block in registered} == self.hashes
        assert self.pool.get_num_free_blocks() == len(self.free)


TestThePoolAgainstLists = PoolAgainstLists.TestCase
TestThePoolAgainstLists.settings = settings(stateful_step_count=30)


class PoolOfBlocksAgainstLists(PoolAgainstLists):
    POLICY = LRUOfBlocks


TestAPoolWithAPolicyOfBlocksAgainstLists = PoolOfBlocksAgainstLists.TestCase
TestAPoolWithAPolicyOfBlocksAgainstLists.settings = settings(stateful_step_count=30)


class TestTheQueueOfAPoolByHand:
    """What :class:`FreeKVCacheBlockQueue` has works on a pool's queue too, whatever runs the blocks are in."""

    def make_pool(self) -> tuple[BlockPool, RunQueue]:
        pool = BlockPool(7)
        queue = pool.free_block_queue
        assert isinstance(queue, RunQueue)
        return pool, queue

    def test_takes_from_the_head(self) -> None:
        pool, queue = self.make_pool()
        assert queue.popleft() is pool.blocks[1]
        assert queue.popleft_n(3) == pool.blocks[2:5]
        assert (list(queue), len(queue)) == (pool.blocks[5:], 2)
        for n in (-1, 3):
            with pytest.raises(QueueError, match=f"cannot take {n} blocks from a queue of 2"):
                queue.popleft_n(n)
        assert len(queue) == 2

    def test_takes_out_of_the_middle_and_puts_at_either_end(self) -> None:
        pool, queue = self.make_pool()
        third = pool.blocks[3]
        queue.remove(third)
        assert [block.block_id for block in queue] == [1, 2, 4, 5, 6]
        with pytest.raises(QueueError, match="not in the free queue"):
            queue.remove(third)
        queue.append(third)
        assert [block.block_id for block in queue] == [1, 2, 4, 5, 6, 3]
        with pytest.raises(QueueError, match="in the free queue already"):
            queue.append(third)
        queue.remove_n([pool.blocks[5], pool.blocks[2]])
        queue.prepend_n([pool.blocks[2], pool.blocks[5]])
        assert [block.block_id for block in queue] == [2, 5, 1, 4, 6, 3]
        pool.check_invariants({})
        assert pool.get_new_blocks(6) == [pool.blocks[block_id] for block_id in (2, 5, 1, 4, 6, 3)]
