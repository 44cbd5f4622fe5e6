"""Blocks by themselves."""

from __future__ import annotations

import pytest

from kvcore import KVCacheBlock
from kvcore.units import note


class TestABlock:
    def test_starts_free_unregistered_and_outside_any_queue(self) -> None:
        block = KVCacheBlock(7)
        assert (block.block_id, block.ref_cnt, block.block_hash, block.is_null) == (7, 0, None, False)
        assert (block.prev_free_block, block.next_free_block) == (None, None)

    def test_is_known_to_the_index_by_its_prefix_hash_and_its_group_in_four_bytes(self) -> None:
        block = KVCacheBlock(7)
        note(block, [b"hash"], None, 0, 258, is_first=True)
        assert block.block_hash == b"hash\x00\x00\x01\x02"

    def test_holds_nothing_but_its_slots(self) -> None:
        with pytest.raises(AttributeError):
            KVCacheBlock(7).tokens = [1, 2, 3]  # type: ignore[attr-defined]

    def test_reads_well_in_a_debugger(self) -> None:
        block = KVCacheBlock(7)
        block.num_holders = 2
        assert repr(block) == "<block 7: ref_cnt=2>"
        note(block, [bytes(range(16))], None, 0, 0, is_first=True)
        assert repr(block) == "<block 7: ref_cnt=2, hash=00010203, group=0>"
        block.is_null = True
        assert repr(block).startswith("<block null: ")
