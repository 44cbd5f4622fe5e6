"""The index of cached blocks, through the pool that fills it, against a dictionary of lists."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcore import BlockHasher, BlockPool, InvariantError, KVCacheBlock, Request
from kvcore.units import clear_notes, unit_of

HASHER = BlockHasher(4)


def register(pool: BlockPool, first_token: int, num_blocks: int = 1, group: int = 0) -> list[KVCacheBlock]:
    """New blocks, registered for the prefix that begins with ``first_token``."""
    request = Request("r", range(first_token, first_token + 4 * num_blocks), block_hasher=HASHER)
    blocks = pool.get_new_blocks(num_blocks)
    pool.cache_full_blocks(request, blocks, 0, num_blocks, 4, group)
    return blocks


def prefix_hash(first_token: int) -> bytes:
    return Request("r", range(first_token, first_token + 4), block_hasher=HASHER).block_hashes[0]


def test_a_hash_names_the_block_registered_first_and_the_next_one_when_that_is_gone() -> None:
    pool = BlockPool(6, hash_block_size=4)
    first, second, third = (register(pool, 0)[0] for _ in range(3))
    assert len(pool.prefix_index) == 1
    for block in (first, second, third):
        assert pool.get_cached_block(prefix_hash(0), [0]) == [block]
        pool.evict_blocks([block.block_id])
        pool.check_invariants()
    assert pool.get_cached_block(prefix_hash(0), [0]) is None
    assert len(pool.prefix_index) == 0


def test_a_later_block_of_a_hash_can_go_before_the_first() -> None:
    pool = BlockPool(6, hash_block_size=4)
    first, second, third = (register(pool, 0)[0] for _ in range(3))
    pool.evict_blocks([second.block_id])
    assert pool.get_cached_block(prefix_hash(0), [0]) == [first]
    pool.evict_blocks([first.block_id])
    assert pool.get_cached_block(prefix_hash(0), [0]) == [third]
    pool.check_invariants()


def test_groups_keep_the_same_prefix_apart() -> None:
    pool = BlockPool(6, hash_block_size=4)
    (in_0,), (in_3,) = register(pool, 0, group=0), register(pool, 0, group=3)
    assert len(pool.prefix_index) == 2
    assert pool.get_cached_block(prefix_hash(0), [0]) == [in_0]
    assert pool.get_cached_block(prefix_hash(0), [3, 0]) == [in_3, in_0]
    assert pool.get_cached_block(prefix_hash(0), [0, 1]) is None
    pool.evict_blocks([in_0.block_id])
    assert pool.get_cached_block(prefix_hash(0), [0, 3]) is None
    assert pool.get_cached_block(prefix_hash(0), [3]) == [in_3]


def test_it_yields_every_registered_block_also_those_of_one_hash() -> None:
    pool = BlockPool(8, hash_block_size=4)
    blocks = [*register(pool, 0), *register(pool, 0), *register(pool, 100, 2), *register(pool, 0, group=1)]
    assert sorted(block.block_id for block in pool.prefix_index) == sorted(block.block_id for block in blocks)
    assert len(pool.prefix_index) == 4


class IndexAgainstADict(RuleBasedStateMachine):
    """Blocks registered and evicted in any order; the model keeps, for each key, its blocks in the order they came."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, hash_block_size=4)
        self.model: dict[tuple[int, int], list[KVCacheBlock]] = {}

    @precondition(lambda self: self.pool.get_num_free_blocks())
    @rule(first_token=st.sampled_from([0, 100]), group=st.integers(0, 1))
    def register(self, first_token: int, group: int) -> None:
        self.model.setdefault((first_token, group), []).extend(register(self.pool, first_token, group=group))

    @rule(block_ids=st.lists(st.integers(0, 8), max_size=4))
    def evict(self, block_ids: list[int]) -> None:
        self.pool.evict_blocks(block_ids)
        for key, blocks in list(self.model.items()):
            self.model[key] = [block for block in blocks if block.block_id not in block_ids]
            for block in blocks:
                if block.block_id in block_ids:
                    self.pool.free_blocks([block])

    @rule()
    def free_all_and_reset(self) -> None:
        for blocks in self.model.values():
            self.pool.free_blocks(blocks)
        self.model.clear()
        assert self.pool.reset_prefix_cache() is True

    @invariant()
    def both_answer_the_same(self) -> None:
        self.pool.check_invariants()
        for first_token in (0, 100):
            for group in (0, 1):
                blocks = self.model.get((first_token, group), [])
                assert self.pool.get_cached_block(prefix_hash(first_token), [group]) == (blocks[:1] or None)
        assert len(self.pool.prefix_index) == sum(map(bool, self.model.values()))
        registered = {block.block_id for blocks in self.model.values() for block in blocks}
        assert {block.block_id for block in self.pool.blocks if block.block_hash} == registered


TestTheIndexAgainstADict = IndexAgainstADict.TestCase
TestTheIndexAgainstADict.settings = settings(stateful_step_count=20)


def give_hash(block: KVCacheBlock, prefix_hash: bytes) -> None:
    assert unit_of(block) is block
    block.is_hashed = True
    block.own_hash = prefix_hash


def give_another_hash(pool: BlockPool) -> None:
    give_hash(pool.blocks[1], b"another")


def give_another_group(pool: BlockPool) -> None:
    unit_of(pool.blocks[1]).group = 1


def forget_the_hash(pool: BlockPool) -> None:
    clear_notes(unit_of(pool.blocks[3]))


def give_a_hash_to_an_unregistered_block(pool: BlockPool) -> None:
    give_hash(pool.blocks[4], b"another")


def give_another_hash_to_a_later_block_of_one_hash(pool: BlockPool) -> None:
    give_hash(pool.blocks[2], b"another")


def drop_the_first_block_of_one_hash(pool: BlockPool) -> None:
    del pool.prefix_index.table(0)[prefix_hash(0)]


def give_contents_to_an_unregistered_block(pool: BlockPool) -> None:
    assert unit_of(pool.blocks[4]) is pool.blocks[4]
    pool.blocks[4].own_span = pool.blocks[1].content


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (give_another_hash, "group 0 knows <block 1: .* by hash"),
        (give_another_group, "group 0 knows <block 1: .* by hash"),
        (forget_the_hash, "group 0 knows <block 3: .* by hash"),
        (give_a_hash_to_an_unregistered_block, "<block 4: .* disagree on whether it is registered"),
        (give_another_hash_to_a_later_block_of_one_hash, "group 0 knows <block 2: .* by hash"),
        (drop_the_first_block_of_one_hash, "stray duplicates"),
        (
            give_contents_to_an_unregistered_block,
            "<block 4: .* keeps the contents of a prefix it is not registered for",
        ),
    ],
)
def test_damage_is_found_and_named(damage: Callable[[BlockPool], None], message: str) -> None:
    pool = BlockPool(6, hash_block_size=4)
    register(pool, 0)
    register(pool, 0)
    register(pool, 100)
    pool.check_invariants()
    damage(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check_invariants()
