"""Block tables as arrays say what the manager's lists say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import (
    BlockHasher,
    ConfigError,
    CountError,
    DuplicateRequestError,
    FullAttentionSpec,
    HitHandoverError,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    SlidingWindowSpec,
    UnknownRequestError,
)
from kvcore.block_table import BlockTable, BlockTables

CONFIG = KVCacheConfig(
    200,
    [
        KVCacheGroupSpec(["full"], FullAttentionSpec(4, 1, 1, "float32")),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(4, 1, 1, "float32", 6)),
    ],
)


class TestBlockTable:
    def test_rows_grow_at_the_end(self) -> None:
        table = BlockTable(2, 4, 16)
        table.append(1, [5, 6])
        table.append(1, [9])
        assert table.array[1, :3].tolist() == [5, 6, 9]
        assert table.num_blocks.tolist() == [0, 3]
        assert table.array.dtype == table.num_blocks.dtype == np.int32

    def test_changed_rows_are_told_once(self) -> None:
        table = BlockTable(4, 4, 16)
        table.append(3, [1])
        table.append(0, [2])
        table.append(3, [])
        assert table.take_changed_rows() == [0, 3]
        assert table.take_changed_rows() == []
        table.append(2, [])
        assert table.take_changed_rows() == []
        table.clear(0)
        assert table.take_changed_rows() == [0]

    def test_a_row_that_would_get_too_long_is_refused_and_keeps_its_blocks(self) -> None:
        table = BlockTable(1, 3, 16)
        table.append(0, [1, 2])
        with pytest.raises(CountError, match="max_num_blocks is 3"):
            table.append(0, [3, 4])
        assert table.num_blocks.tolist() == [2]
        assert table.array[0].tolist() == [1, 2, 0]

    @pytest.mark.parametrize("row", [-1, 2])
    def test_a_row_that_is_not_there_is_refused(self, row: int) -> None:
        table = BlockTable(2, 3, 16)
        with pytest.raises(CountError, match="rows go from 0 to 1"):
            table.append(row, [1])
        with pytest.raises(CountError, match="rows go from 0 to 1"):
            table.clear(row)

    @pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
    def test_sizes_below_one_are_refused(self, sizes: tuple[int, int, int]) -> None:
        with pytest.raises(ConfigError, match="at least 1"):
            BlockTable(*sizes)

    def test_a_slot_is_the_blocks_page_and_the_offset_in_it(self) -> None:
        table = BlockTable(2, 3, 4)
        table.append(0, [7, 3])
        table.append(1, [5])
        slots = table.slot_mapping([0, 0, 1, 0], [0, 6, 3, 4])
        assert slots.tolist() == [7 * 4, 3 * 4 + 2, 5 * 4 + 3, 3 * 4]
        assert slots.dtype == np.int64
        assert table.slot_mapping([], []).tolist() == []

    @pytest.mark.parametrize(("row", "position"), [(0, 8), (0, -1), (1, 0)])
    def test_a_position_without_a_block_is_refused(self, row: int, position: int) -> None:
        table = BlockTable(2, 3, 4)
        table.append(0, [7, 3])
        with pytest.raises(CountError, match=f"row {row} has no block for position {position}"):
            table.slot_mapping([0, row], [0, position])

    @pytest.mark.parametrize("row", [-4, -1, 2, 99])
    def test_a_row_that_is_not_there_has_no_slots(self, row: int) -> None:
        table = BlockTable(2, 3, 4)
        table.append(0, [7])
        with pytest.raises(CountError, match="rows go from 0 to 1, got"):
            table.slot_mapping([0, row], [3, 3])

    def test_no_tokens_have_no_slots(self) -> None:
        assert BlockTable(2, 3, 4).slot_mapping([], []).tolist() == []


class TestBlockTables:
    @pytest.mark.parametrize("blocks", [None, ([1], [2]), KVCacheBlocks(((),)), KVCacheBlocks(((), (), ()))], ids=repr)
    def test_what_is_not_blocks_of_each_group_is_refused_and_takes_no_row(self, blocks: Any) -> None:
        tables = BlockTables(CONFIG, 1, 100)
        with pytest.raises(HitHandoverError, match="KVCacheBlocks of 2 groups; got"):
            tables.add("a", blocks)
        tables.add("a", KVCacheBlocks(((KVCacheBlock(5),), (KVCacheBlock(6),))))
        with pytest.raises(HitHandoverError, match="KVCacheBlocks of 2 groups; got"):
            tables.append("a", blocks)
        assert [table.num_blocks.tolist() for table in tables.tables] == [[1], [1]]

    def test_a_row_that_would_get_too_long_in_one_group_keeps_its_blocks_in_all(self) -> None:
        tables = BlockTables(CONFIG, 1, 8)
        tables.add("a", KVCacheBlocks(((KVCacheBlock(1),), (KVCacheBlock(2), KVCacheBlock(3)))))
        with pytest.raises(CountError, match="cannot take 1 more"):
            tables.append("a", KVCacheBlocks(((KVCacheBlock(4),), (KVCacheBlock(5),))))
        assert [table.num_blocks.tolist() for table in tables.tables] == [[1], [2]]

    def test_rows_are_given_out_and_taken_back(self) -> None:
        tables = BlockTables(CONFIG, max_num_reqs=2, max_model_len=40)
        none = KVCacheBlocks(((), ()))
        first, second = tables.add("a", none), tables.add("b", none)
        assert {first, second} == {0, 1}
        with pytest.raises(CountError, match="max_num_reqs"):
            tables.add("c", none)
        with pytest.raises(DuplicateRequestError, match="'a'"):
            tables.add("a", none)
        tables.remove("a")
        assert len(tables) == 1
        assert tables.add("c", none) == first

    def test_a_request_without_a_row_is_refused(self) -> None:
        tables = BlockTables(CONFIG, max_num_reqs=2, max_model_len=40)
        for call in (tables.row, tables.remove):
            with pytest.raises(UnknownRequestError, match="'a'"):
                call("a")
        with pytest.raises(UnknownRequestError, match="'a'"):
            tables.append("a", KVCacheBlocks(((), ())))

    @given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), steps=st.integers(0, 20))
    def test_they_follow_the_manager_through_prefill_and_decode(self, lengths: list[int], steps: int) -> None:
        manager = KVCacheManager(CONFIG, 60)
        hasher = BlockHasher(4, seed="0")
        tables = BlockTables(CONFIG, max_num_reqs=5, max_model_len=60)
        requests = [Request(f"r{i}", [1] * length, block_hasher=hasher) for i, length in enumerate(lengths)]
        for request in requests:
            hits, num_hit = manager.get_computed_blocks(request)
            assert manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hits) is not None
            tables.add(request.request_id, manager.get_blocks(request.request_id))
            request.num_computed_tokens = request.num_tokens
        for _ in range(steps):
            for request in requests:
                request.append_output_token_ids(1)
            growth = manager.grow(requests)
            assert growth.num_grown == len(requests)
            for index, blocks in growth.new_blocks.items():
                tables.append(requests[index].request_id, blocks)
            for request in requests:
                request.num_computed_tokens += 1
        for request in requests:
            row = tables.row(request.request_id)
            for table, block_ids in zip(tables.tables, manager.get_block_ids(request.request_id), strict=True):
                ours = table.array[row, : table.num_blocks[row]].tolist()
                assert len(ours) == len(block_ids)
                # Where the manager has null, a window has left; the array keeps the id that was there.
                assert [mine for mine, block_id in zip(ours, block_ids, strict=True) if block_id] == [
                    block_id for block_id in block_ids if block_id
                ]

    def test_a_request_with_too_many_blocks_gets_no_row(self) -> None:
        tables = BlockTables(CONFIG, max_num_reqs=1, max_model_len=8)
        with pytest.raises(CountError, match="max_num_blocks is 2"):
            tables.add("a", KVCacheBlocks(([KVCacheBlock(i) for i in (1, 2, 3)], ())))
        assert len(tables) == 0
        assert tables.add("b", KVCacheBlocks(([KVCacheBlock(1)], ()))) == 0
        assert tables.tables[0].num_blocks.tolist() == [1]
