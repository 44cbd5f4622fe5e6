"""The queue threaded through the blocks, against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcore import FreeKVCacheBlockQueue, KVCacheBlock


def make_blocks(n: int) -> list[KVCacheBlock]:
    return [KVCacheBlock(block_id) for block_id in range(n)]


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


class TestTheQueue:
    def test_gives_its_blocks_out_in_the_order_they_came(self) -> None:
        queue = FreeKVCacheBlockQueue(make_blocks(4))
        assert len(queue) == queue.num_free_blocks == 4
        assert queue.popleft().block_id == 0
        assert ids(queue.popleft_n(2)) == [1, 2]
        assert ids(queue.get_all_free_blocks()) == [3]
        assert queue.popleft_n(0) == []
        assert queue.popleft_n(1)[0].block_id == 3
        assert len(queue) == 0
        assert queue.get_all_free_blocks() == []

    def test_can_be_empty_from_the_start_and_filled_later(self) -> None:
        queue = FreeKVCacheBlockQueue([])
        assert queue.get_all_free_blocks() == []
        blocks = make_blocks(3)
        queue.append(blocks[2])
        queue.prepend_n(blocks[:2])
        assert ids(queue.get_all_free_blocks()) == [0, 1, 2]

    def test_puts_blocks_in_front_with_the_first_of_them_as_the_head(self) -> None:
        blocks = make_blocks(5)
        queue = FreeKVCacheBlockQueue(blocks[:2])
        queue.prepend_n(blocks[2:])
        assert ids(queue.get_all_free_blocks()) == [2, 3, 4, 0, 1]

    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_lets_a_block_go_wherever_it_stands(self, position: int) -> None:
        blocks = make_blocks(3)
        queue = FreeKVCacheBlockQueue(blocks)
        queue.remove(blocks[position])
        assert queue.get_all_free_blocks() == [block for block in blocks if block is not blocks[position]]
        assert (blocks[position].prev_free_block, blocks[position].next_free_block) == (None, None)
        queue.append(blocks[position])
        assert queue.get_all_free_blocks()[-1] is blocks[position]

    @given(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=4))
    def test_takes_any_iterable_of_blocks_none_included(self, behind: list[int], before: list[int]) -> None:
        queue = FreeKVCacheBlockQueue(make_blocks(2))
        queue.append_n(KVCacheBlock(10 + i) for i in behind)
        queue.prepend_n(KVCacheBlock(20 + i) for i in before)
        assert ids(list(queue)) == [20 + i for i in before] + [0, 1] + [10 + i for i in behind]


class QueueAgainstAList(RuleBasedStateMachine):
    """Every operation of the queue, and the same one on a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = make_blocks(12)
        self.queue = FreeKVCacheBlockQueue(self.blocks[:6])
        self.model = self.blocks[:6]

    def outside(self) -> list[KVCacheBlock]:
        return [block for block in self.blocks if block not in self.model]

    @precondition(lambda self: self.model)
    @rule()
    def popleft(self) -> None:
        assert self.queue.popleft() is self.model.pop(0)

    @rule(data=st.data())
    def popleft_n(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.model)))
        assert self.queue.popleft_n(n) == self.model[:n]
        del self.model[:n]

    @precondition(lambda self: self.outside())
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.outside()))
        self.queue.append(block)
        self.model.append(block)

    @rule(data=st.data())
    def append_n(self, data: st.DataObject) -> None:
        blocks = data.draw(st.permutations(self.outside()))
        blocks = blocks[: data.draw(st.integers(0, len(blocks)))]
        self.queue.append_n(blocks)
        self.model += blocks

    @rule(data=st.data())
    def prepend_n(self, data: st.DataObject) -> None:
        blocks = data.draw(st.permutations(self.outside()))
        blocks = blocks[: data.draw(st.integers(0, len(blocks)))]
        self.queue.prepend_n(blocks)
        self.model[:0] = blocks

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.model))
        self.queue.remove(block)
        self.model.remove(block)

    @invariant()
    def both_hold_the_same(self) -> None:
        assert self.queue.get_all_free_blocks() == list(self.queue) == self.model
        assert self.queue.num_free_blocks == len(self.queue) == len(self.model)

    @invariant()
    def links_agree_in_both_directions(self) -> None:
        for before, after in zip(self.model, self.model[1:], strict=False):
            assert before.next_free_block is after
            assert after.prev_free_block is before
        for block in self.outside():
            assert (block.prev_free_block, block.next_free_block) == (None, None)


TestTheQueueAgainstAList = QueueAgainstAList.TestCase
TestTheQueueAgainstAList.settings = settings(stateful_step_count=20)
