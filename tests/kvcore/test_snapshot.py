"""Snapshots: what they say of a pool, and that they can be written and read back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCacheManager, Request
from kvcore.errors import FileFormatError
from kvcore.id_runs import from_runs, to_runs
from kvcore.snapshot import BlockSnapshot, SharedPrefix, Snapshot, load_snapshots, save_snapshots
from kvcore.testing import admit, free_block_ids, make_manager, make_request
from tests.kvcore.oracle import specs_of
from tests.kvcore.test_soak import Traffic

GROUPS = ["full", "sliding:6", "full sliding:6 chunked:8", "sliding:3/2 chunked:12/8 full/4"]


@pytest.fixture
def manager() -> KVCacheManager:
    """Ten blocks: 1 and 2 shared by a and b, 3 and 4 a's, 5 b's, all else new."""
    manager = make_manager(11)
    admit(manager, make_request("a", [*range(8), 10, 11, 12, 13, 14], manager))
    admit(manager, make_request("b", [*range(8), 20, 21], manager))
    return manager


def holder_of(manager: KVCacheManager, name: str) -> Request:
    request = manager._holders[name].request
    assert isinstance(request, Request)
    return request


def states(snapshot: Snapshot) -> list[str]:
    return [block.state for block in snapshot.blocks]


def test_a_snapshot_says_of_each_block_what_it_is(manager: KVCacheManager) -> None:
    snapshot = manager.snapshot("two of them")
    assert states(snapshot) == ["null", "shared", "shared", "used", "used", "used", *["empty"] * 5]
    assert snapshot.label == "two of them"
    assert snapshot.usage == manager.usage == 0.5
    assert snapshot.counts == {"null": 1, "shared": 2, "used": 3, "cached": 0, "empty": 5}
    assert snapshot.holders == {1: ("a", "b"), 2: ("a", "b"), 3: ("a",), 4: ("a",), 5: ("b",)}
    assert [request.tables for request in snapshot.requests] == [((1, 2, 3, 4),), ((1, 2, 5),)]
    assert [block.position for block in snapshot.blocks[1:5]] == [0, 1, 2, None]
    assert snapshot.blocks[1].parent_hash is None
    assert snapshot.blocks[3].parent_hash == snapshot.blocks[2].prefix_hash

    manager.free(holder_of(manager, "a"))
    after = manager.snapshot()
    assert states(after) == ["null", "used", "used", "cached", "empty", "used", *["empty"] * 5]
    assert after.queue == (4, 6, 7, 8, 9, 10, 3)
    assert after.queue_places[3] == 6
    assert states(snapshot)[3] == "used", "a snapshot stays what it was"


@pytest.mark.parametrize("groups", GROUPS)
def test_a_snapshot_agrees_with_the_books_after_any_traffic(groups: str) -> None:
    manager = make_manager(60, groups=specs_of(groups), max_model_len=160)
    traffic = Traffic(manager, seed=11)
    previous = None
    for _ in range(20):
        traffic.operate(20)
        snapshot = previous = manager.snapshot(previous=previous)
        assert list(snapshot.queue) == free_block_ids(manager)
        assert [block.ref_cnt for block in snapshot.blocks] == [block.ref_cnt for block in manager.block_pool.blocks]
        registered = {block.block_id: block for block in snapshot.blocks if block.prefix_hash is not None}
        assert registered.keys() == {block.block_id for block in manager.block_pool.prefix_index}
        for block_id, block in registered.items():
            pool_block = manager.block_pool.blocks[block_id]
            assert block.group_id == pool_block.group_id
            first = manager.block_pool.prefix_index.get(bytes.fromhex(block.prefix_hash or ""), pool_block.group_id)
            assert block.duplicate == (first is not pool_block)
        for request in snapshot.requests:
            assert request.tables == tuple(map(tuple, manager.get_block_ids(request.request_id)))
            for group_id, table in enumerate(request.tables):
                for position, block_id in enumerate(table):
                    if block_id in registered:
                        assert registered[block_id].position == position
                        assert registered[block_id].group_id == group_id
        assert Snapshot.from_json(snapshot.to_json()) == snapshot


def test_what_comes_before_a_cached_block_is_known_from_an_earlier_snapshot_or_from_a_request(
    manager: KVCacheManager,
) -> None:
    earlier = manager.snapshot()
    a, b = holder_of(manager, "a"), holder_of(manager, "b")
    manager.free(a)
    manager.free(b)

    def positions(snapshot: Snapshot) -> list[int | None]:
        return [snapshot.blocks[block_id].position for block_id in (1, 2, 3)]

    assert positions(manager.snapshot()) == [None, None, None]
    assert positions(manager.snapshot(previous=earlier)) == [0, 1, 2]
    assert positions(manager.snapshot(known_requests=[b])) == [0, 1, None]
    manager.reset_prefix_cache()
    assert positions(manager.snapshot(previous=earlier)) == [None, None, None]


def test_a_pinned_block_is_held_by_its_pins_and_in_no_table() -> None:
    manager = make_manager(10)
    request = make_request("a", range(9), manager)
    admit(manager, request)
    manager.free(request)
    manager.residency.pin(request)
    block = manager.snapshot().blocks[1]
    assert (block.ref_cnt, block.num_pins, block.state) == (1, 1, "used")
    assert manager.snapshot().holders == {}


def test_groups_are_described_in_words() -> None:
    manager = make_manager(10, groups=["full", "sliding:6", "chunked:8"])
    assert [str(group) for group in manager.snapshot().groups] == [
        "full attention, 4 tokens a block",
        "window of 6, 4 tokens a block",
        "chunks of 8, 4 tokens a block",
    ]


# Shared prefixes


def run(manager: KVCacheManager, prompts: dict[str, list[int]]) -> Snapshot:
    for name, prompt in prompts.items():
        admit(manager, make_request(name, prompt, manager))
    return manager.snapshot()


def test_each_set_of_requests_that_goes_together_is_one_shared_prefix_the_longest_first() -> None:
    base = [1] * 8
    prompts = {
        "a": [*base, *[2] * 8, 3],
        "b": [*base, *[2] * 8, 4],
        "c": [*base, 5],
        "alone": [9] * 9,
    }
    snapshot = run(make_manager(30), prompts)
    assert snapshot.shared_prefixes() == [
        SharedPrefix(0, (1, 2, 3, 4), 16, ("a", "b")),
        SharedPrefix(0, (1, 2), 8, ("a", "b", "c")),
    ]


def test_a_request_whose_table_ends_where_others_go_on_shares_all_of_it() -> None:
    manager = make_manager(30)
    long = make_request("long", range(17), manager)
    admit(manager, long)
    short = make_request("short", range(9), manager)
    hits, num_hit = manager.get_computed_blocks(short)
    manager.allocate_slots(short, 0, num_hit, hits)
    assert manager.snapshot().shared_prefixes() == [SharedPrefix(0, (1, 2), 8, ("long", "short"))]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=6))
def test_shared_prefixes_are_those_that_comparing_all_tables_finds(prompts: list[list[int]]) -> None:
    manager = make_manager(200, block_size=2)
    snapshot = run(manager, {str(number): prompt for number, prompt in enumerate(prompts)})
    tables = {request.request_id: request.tables[0] for request in snapshot.requests}
    expected = {}
    for table in tables.values():
        for length in range(1, len(table) + 1):
            together = tuple(name for name, other in tables.items() if other[:length] == table[:length])
            if len(together) > 1:
                expected[together] = max(expected.get(together, ()), table[:length], key=len)
    assert {prefix.request_ids: prefix.block_ids for prefix in snapshot.shared_prefixes()} == expected


# Files


def test_snapshots_are_read_back_from_a_file_as_they_were(tmp_path: Path, manager: KVCacheManager) -> None:
    steps = [manager.snapshot("first"), manager.snapshot("\ud800 \u2028 </script>")]
    save_snapshots(tmp_path / "pool.jsonl", steps)
    assert load_snapshots(tmp_path / "pool.jsonl") == steps


def test_a_snapshot_holds_no_token(manager: KVCacheManager) -> None:
    secret = make_request("c", [31337] * 9, manager)
    admit(manager, secret)
    assert "31337" not in manager.snapshot().to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no snapshot"),
        ("{}\n", 'line 1: this is no snapshot: JSON with "kvcore_snapshot"'),
        ("[]\n", "line 1: this is no snapshot"),
        ("nonsense\n", "line 1: this snapshot cannot be read"),
        ('{"kvcore_snapshot": 99}\n', "format 99, this version of kvcore reads 1"),
        ('{"kvcore_snapshot": 1}\n', "line 1: this snapshot cannot be read: KeyError"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_text(text)
    with pytest.raises(FileFormatError) as raised:
        load_snapshots(path)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_blocks", 1, "a pool has two blocks at least"),
        ("queue", "500", "block 500 is not in a pool"),
        ("queue", "1-999999999999", "block 999999999999 is not in a pool"),
    ],
)
def test_a_snapshot_that_cannot_be_of_a_pool_is_refused(
    manager: KVCacheManager, name: str, value: object, message: str
) -> None:
    values = json.loads(manager.snapshot().to_json())
    with pytest.raises(FileFormatError, match=message):
        Snapshot.from_json(json.dumps({**values, name: value}))


def test_a_broken_line_behind_good_ones_is_named(tmp_path: Path, manager: KVCacheManager) -> None:
    path = tmp_path / "pool.jsonl"
    line = manager.snapshot().to_json()
    path.write_text(f"{line}\n{line[:-5]}\n")
    with pytest.raises(FileFormatError, match="line 2"):
        load_snapshots(path)
    with pytest.raises(FileFormatError, match="cannot read"):
        load_snapshots(tmp_path / "missing")


def test_only_blocks_with_something_to_say_are_written(manager: KVCacheManager) -> None:
    values = json.loads(manager.snapshot().to_json())
    assert [block["block_id"] for block in values["blocks"]] == [1, 2, 3, 4, 5]
    assert values["queue"] == "6-10"
    assert values["blocks"][0]["position"] == 0, "the first position is no missing one"


def test_a_block_that_says_it_is_other_than_it_was_is_another(manager: KVCacheManager) -> None:
    block = manager.snapshot().blocks[1]
    assert dataclasses.replace(block, ref_cnt=1).state == "used"
    assert BlockSnapshot(7).state == "empty"


@given(st.lists(st.integers(0, 30)))
def test_runs_are_read_back_as_the_ids_they_were_written_from(ids: list[int]) -> None:
    assert list(from_runs(to_runs(ids), 1 + max(ids, default=0))) == ids


@pytest.mark.parametrize(
    ("ids", "text"),
    [([], ""), ([5], "5"), ([1, 2], "1 2"), ([1, 2, 3, 9, 8, 7, 4], "1-3 9-7 4"), ([3, 3, 3], "3 3 3")],
)
def test_neighbours_are_joined_from_three_on(ids: list[int], text: str) -> None:
    assert to_runs(ids) == text
