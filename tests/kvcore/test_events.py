"""KV events: enough for a mirror to know what can be hit, and under which hash."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVCacheManager,
    LoRAAdapter,
    MultiModalItem,
    Request,
)
from kvcore.testing import admit, make_manager, make_request


def manager_of(*groups: str, num_blocks: int = 40, **options: Any) -> KVCacheManager:
    return make_manager(num_blocks, groups=groups or ("full",), enable_kv_cache_events=True, **options)


def test_the_blocks_of_a_prompt_are_stored_in_one_event() -> None:
    manager = manager_of()
    request = make_request("a", range(10), manager)
    admit(manager, request)
    assert manager.take_events() == [
        BlockStored(
            block_hashes=request.block_hashes,
            parent_block_hash=None,
            token_ids=list(range(8)),
            block_size=4,
            extra_keys=[None, None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
    ]
    assert manager.take_events() == []


def test_later_blocks_name_the_one_before_them_as_their_parent() -> None:
    manager = manager_of()
    request = make_request("a", range(10), manager)
    admit(manager, request)
    manager.take_events()
    request.append_output_token_ids([10, 11])
    manager.allocate_slots(request, 2)
    (event,) = manager.take_events()
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash == request.block_hashes[1]
    assert event.block_hashes == request.block_hashes[2:]
    assert event.token_ids == [8, 9, 10, 11]


def test_blocks_that_were_hit_are_not_stored_again() -> None:
    manager = manager_of()
    admit(manager, make_request("a", range(8), manager))
    manager.take_events()
    request = make_request("b", [*range(8), 20, 21, 22, 23], manager)
    assert admit(manager, request) == 8
    (event,) = manager.take_events()
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.token_ids) == (request.block_hashes[2:], [20, 21, 22, 23])


def test_a_step_that_fills_no_block_stores_nothing() -> None:
    manager = manager_of()
    request = make_request("a", range(5), manager)
    admit(manager, request)
    manager.take_events()
    request.append_output_token_ids(5)
    manager.allocate_slots(request, 1)
    assert manager.take_events() == []


def test_extra_keys_come_without_tags_and_the_adapter_by_name_too() -> None:
    manager = manager_of()
    request = make_request(
        "a",
        range(12),
        manager,
        cache_salt="tenant",
        lora=LoRAAdapter("french", "/adapters/french"),
        mm_items=[MultiModalItem("image", 2, 4)],
    )
    admit(manager, request)
    (event,) = manager.take_events()
    assert isinstance(event, BlockStored)
    assert event.lora_name == "french"
    assert event.lora_id is None
    assert event.extra_keys == [("french", ("image", 2), "tenant"), ("french", ("image", -2)), ("french",)]


def test_each_group_tells_its_kind_and_a_window_its_length() -> None:
    manager = manager_of("full", "sliding:6", "chunked:16")
    admit(manager, make_request("a", range(8), manager))
    events = manager.take_events()
    assert all(isinstance(event, BlockStored) for event in events)
    assert [(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in events] == [  # type: ignore[union-attr]
        (0, "full_attention", None),
        (1, "sliding_window", 6),
        (2, "chunked_local_attention", None),
    ]


def test_a_block_is_removed_under_its_hash_and_group_when_it_is_handed_out_again() -> None:
    manager = manager_of(num_blocks=4)
    first = make_request("a", range(8), manager)
    admit(manager, first)
    manager.free(first)
    manager.take_events()
    admit(manager, make_request("b", range(100, 107), manager))
    # Block 3 was never used, block 2 was the tail of the first request.
    assert manager.take_events()[0] == BlockRemoved([first.block_hashes[1]], group_idx=0)


def test_a_reset_clears_all_at_once() -> None:
    manager = manager_of()
    request = make_request("a", range(8), manager)
    admit(manager, request)
    manager.free(request)
    manager.take_events()
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def test_a_refused_reset_tells_nothing() -> None:
    manager = manager_of()
    admit(manager, make_request("a", range(8), manager))
    manager.take_events()
    assert not manager.reset_prefix_cache()
    assert manager.take_events() == []


@pytest.mark.parametrize(
    "switch_off", [lambda: manager_of(enable_caching=False), lambda: make_manager(40, enable_kv_cache_events=False)]
)
def test_there_are_none_without_caching_or_unless_asked_for(switch_off: Callable[[], KVCacheManager]) -> None:
    manager = switch_off()
    request = make_request("a", range(8), manager)
    admit(manager, request)
    manager.free(request)
    admit(manager, make_request("b", range(150), manager))
    assert manager.take_events() == []


def mirrored(known: dict[tuple[int | None, bytes], int], events: Iterable[KVCacheEvent]) -> None:
    """Keeps, for each group and hash, how many blocks can be hit under it, from events alone."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            known.clear()
            continue
        for block_hash in event.block_hashes:
            key = (event.group_idx, block_hash)
            known[key] = known.get(key, 0) + (1 if isinstance(event, BlockStored) else -1)
            if not known[key]:
                del known[key]


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "free", "evict", "reset"]), st.integers(0, 2), st.integers(1, 20)),
        max_size=30,
    )
)
def test_a_mirror_that_hears_all_events_knows_what_is_in_the_index(operations: list[tuple[str, int, int]]) -> None:
    manager = manager_of("full", "sliding:6", num_blocks=24)
    known: dict[tuple[int | None, bytes], int] = {}
    running: list[Request] = []
    for number, (operation, prefix, length) in enumerate(operations):
        if operation == "admit":
            request = make_request(str(number), range(100 * prefix, 100 * prefix + length), manager)
            hits, num_hit_tokens = manager.get_computed_blocks(request)
            if manager.allocate_slots(request, length - num_hit_tokens, num_hit_tokens, hits) is not None:
                running.append(request)
        elif operation == "free" and running:
            manager.free(running.pop(length % len(running)))
        elif operation == "evict":
            manager.evict_blocks([length])
        elif operation == "reset":
            manager.reset_prefix_cache()
        mirrored(known, manager.take_events())
        expected: dict[tuple[int | None, bytes], int] = {}
        for block in manager.block_pool.blocks:
            if block.prefix_hash is not None:
                key = (block.group_id, block.prefix_hash)
                expected[key] = expected.get(key, 0) + 1
        assert known == expected
