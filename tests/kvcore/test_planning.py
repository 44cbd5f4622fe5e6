"""Planning: groups of equal size, pages of equal size, as many blocks as the memory buys."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcore import (
    ChunkedLocalAttentionSpec,
    ConfigError,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)
from kvcore.planning import plan_kv_cache

FULL = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype="bfloat16")
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=4, head_size=64, dtype="bfloat16", sliding_window=512)
CHUNK = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=4, head_size=64, dtype="bfloat16", attention_chunk_size=256
)
PAGE = 16 * 2 * 4 * 64 * 2  # tokens, keys and values, heads, elements, bytes


def named(*specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}


def five_to_one(num_layers: int) -> dict[str, KVCacheSpec]:
    """As in Gemma 3: every sixth layer has full attention, the others a window."""
    return named(*(FULL if (i + 1) % 6 == 0 else WINDOW for i in range(num_layers)))


def group_sizes(config: KVCacheConfig) -> list[int]:
    return [len(group.layer_names) for group in config.kv_cache_groups]


@st.composite
def models(draw: st.DrawFn) -> dict[str, KVCacheSpec]:
    """Layers of one to four kinds in any order, with pages that are whole multiples of one another."""
    kinds = draw(
        st.lists(
            st.sampled_from((FULL, WINDOW, CHUNK, replace(WINDOW, sliding_window=100))).flatmap(
                lambda spec: st.builds(
                    lambda heads, tokens: replace(spec, num_kv_heads=heads, block_size=tokens),
                    st.sampled_from((1, 2, 8)),
                    st.sampled_from((16, 32)),
                )
            ),
            min_size=1,
            max_size=4,
        )
    )
    return named(*draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=40)))


# The layout


def test_five_window_layers_to_one_full_layer_make_six_groups_that_share_every_tensor() -> None:
    config = plan_kv_cache(five_to_one(30), num_blocks=10)
    # Five full layers, so groups of five: twenty-five window layers fill five of them.
    assert group_sizes(config) == [5] * 6
    assert [group.kv_cache_spec for group in config.kv_cache_groups] == [WINDOW] * 5 + [FULL]
    assert config.kv_cache_groups[0].layer_names == ("layers.0", "layers.6", "layers.12", "layers.18", "layers.24")
    assert config.kv_cache_groups[5].layer_names == ("layers.5", "layers.11", "layers.17", "layers.23", "layers.29")
    assert [tensor.shared_by for tensor in config.kv_cache_tensors] == [
        tuple(f"layers.{6 * i + j}" for j in range(6)) for i in range(5)
    ]
    assert {tensor.size for tensor in config.kv_cache_tensors} == {10 * PAGE}


def test_a_model_of_one_kind_gets_one_group_with_a_tensor_for_each_layer() -> None:
    config = plan_kv_cache(named(*[FULL] * 7), num_blocks=10)
    assert group_sizes(config) == [7]
    assert [tensor.shared_by for tensor in config.kv_cache_tensors] == [(f"layers.{i}",) for i in range(7)]


def test_layers_that_do_not_fill_their_groups_leave_the_last_tensors_to_the_others() -> None:
    # Gemma 3 4B: 29 window layers in six groups of five leave one place empty.
    config = plan_kv_cache(five_to_one(34), num_blocks=10)
    assert group_sizes(config) == [5, 5, 5, 5, 5, 4, 5]
    assert [len(tensor.shared_by) for tensor in config.kv_cache_tensors] == [7, 7, 7, 7, 6]


def test_kinds_of_almost_equal_number_are_padded_to_the_larger_instead_of_split_by_the_smaller() -> None:
    config = plan_kv_cache(named(*[WINDOW] * 12, *[FULL] * 13), num_blocks=10)
    assert group_sizes(config) == [12, 13]
    # From 1.5 times on the smaller decides: 18 layers are two groups of nine beside twelve.
    assert group_sizes(plan_kv_cache(named(*[WINDOW] * 12, *[FULL] * 18), num_blocks=10)) == [12, 9, 9]


def test_the_caller_can_choose_the_group_size() -> None:
    specs = named(*[WINDOW] * 30, *[FULL] * 20)
    assert group_sizes(plan_kv_cache(specs, num_blocks=10)) == [15, 15, 20]
    config = plan_kv_cache(specs, num_blocks=10, group_size=10)
    assert group_sizes(config) == [10] * 5
    assert len(config.kv_cache_tensors) == 10


def test_specs_may_come_as_pairs() -> None:
    specs = five_to_one(12)
    assert plan_kv_cache(iter(specs.items()), num_blocks=10) == plan_kv_cache(specs, num_blocks=10)


@given(specs=models(), group_size=st.none() | st.integers(1, 50))
def test_every_layer_is_in_one_group_and_one_tensor_and_no_tensor_holds_two_layers_of_a_group(
    specs: dict[str, KVCacheSpec], group_size: int | None
) -> None:
    config = plan_kv_cache(specs, num_blocks=10, group_size=group_size)
    in_groups = [name for group in config.kv_cache_groups for name in group.layer_names]
    in_tensors = [name for tensor in config.kv_cache_tensors for name in tensor.shared_by]
    assert sorted(in_groups) == sorted(in_tensors) == sorted(specs)
    group_of = {name: i for i, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
    for i, tensor in enumerate(config.kv_cache_tensors):
        assert len({group_of[name] for name in tensor.shared_by}) == len(tensor.shared_by)
        for name in tensor.shared_by:
            assert config.kv_cache_groups[group_of[name]].layer_names[i] == name
    assert all(0 < size <= (group_size or len(specs)) for size in group_sizes(config))


@given(specs=models(), group_size=st.none() | st.integers(1, 50))
def test_the_empty_places_of_a_kind_are_fewer_than_a_group(
    specs: dict[str, KVCacheSpec], group_size: int | None
) -> None:
    config = plan_kv_cache(specs, num_blocks=10, group_size=group_size)
    tensors = len(config.kv_cache_tensors)
    assert tensors == max(group_sizes(config))
    empty: Counter[KVCacheSpec] = Counter()
    for group in config.kv_cache_groups:
        empty[group.kv_cache_spec] += tensors - len(group.layer_names)
    assert all(places < tensors for places in empty.values())


# Pages


def test_a_kind_with_fewer_heads_gets_longer_blocks_so_that_all_pages_are_equal() -> None:
    config = plan_kv_cache(named(FULL, replace(WINDOW, num_kv_heads=1)), num_blocks=10)
    full, window = (group.kv_cache_spec for group in config.kv_cache_groups)
    assert full == FULL
    assert window == replace(WINDOW, num_kv_heads=1, block_size=64)
    assert window.page_size_bytes == full.page_size_bytes == PAGE


def test_layers_that_become_equal_by_longer_blocks_are_of_one_kind() -> None:
    config = plan_kv_cache(named(FULL, replace(FULL, block_size=32)), num_blocks=10)
    assert group_sizes(config) == [2]
    assert config.kv_cache_groups[0].kv_cache_spec.block_size == 32


@given(specs=models())
def test_only_the_block_size_of_a_layer_changes_and_only_by_a_whole_multiple(specs: dict[str, KVCacheSpec]) -> None:
    config = plan_kv_cache(specs, num_blocks=10)
    assert len({group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups}) == 1
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            assert group.kv_cache_spec.block_size % specs[name].block_size == 0
            assert replace(group.kv_cache_spec, block_size=specs[name].block_size) == specs[name]


def test_pages_that_cannot_be_made_equal_are_refused_with_block_sizes_that_would_do() -> None:
    three_heads = replace(WINDOW, num_kv_heads=3)
    with pytest.raises(ConfigError) as refusal:
        plan_kv_cache(named(FULL, three_heads), num_blocks=10)
    message = str(refusal.value)
    assert "'layers.1'" in message
    assert "16 x 768 = 12,288" in message
    assert "16 x 1,024 = 16,384" in message
    assert "block sizes 64 and 48" in message
    assert "4,096 of 16,384 bytes (25.0%)" in message
    config = plan_kv_cache(named(replace(FULL, block_size=48), replace(three_heads, block_size=64)), num_blocks=10)
    assert {group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups} == {49_152}


def test_pages_may_be_padded_instead_and_hold_as_many_tokens_as_fit() -> None:
    # 3/8 of the page: two blocks fit, a quarter stays unused.
    config = plan_kv_cache(
        named(replace(FULL, num_kv_heads=8), replace(WINDOW, num_kv_heads=3)), num_blocks=10, pad_pages=True
    )
    full, window = (group.kv_cache_spec for group in config.kv_cache_groups)
    assert window.block_size == 32
    assert window.page_size_bytes * 4 == full.page_size_bytes * 3
    assert [tensor.size for tensor in config.kv_cache_tensors] == [10 * full.page_size_bytes]


# Memory


def test_num_blocks_is_what_the_memory_buys() -> None:
    assert plan_kv_cache(five_to_one(34), memory_bytes=100 * 5 * PAGE).num_blocks == 100
    assert plan_kv_cache(five_to_one(34), memory_bytes=100 * 5 * PAGE - 1).num_blocks == 99


@given(specs=models(), group_size=st.none() | st.integers(1, 50), memory=st.integers(1, 10**10))
def test_the_tensors_fit_into_the_memory_and_one_more_block_would_not(
    specs: dict[str, KVCacheSpec], group_size: int | None, memory: int
) -> None:
    try:
        config = plan_kv_cache(specs, memory_bytes=memory, group_size=group_size)
    except ConfigError:
        two_blocks = plan_kv_cache(specs, num_blocks=2, group_size=group_size)
        assert sum(tensor.size for tensor in two_blocks.kv_cache_tensors) > memory
        return
    used = sum(tensor.size for tensor in config.kv_cache_tensors)
    assert used <= memory < used + used // config.num_blocks
    assert config == plan_kv_cache(specs, num_blocks=config.num_blocks, group_size=group_size)


def test_memory_for_one_block_is_refused_with_what_two_blocks_take() -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_kv_cache(five_to_one(34), memory_bytes=10 * PAGE - 1)
    assert f"5 layers x {PAGE:,} bytes = {5 * PAGE:,} bytes" in str(refusal.value)
    assert f"at least {10 * PAGE:,} bytes" in str(refusal.value)
    assert plan_kv_cache(five_to_one(34), memory_bytes=10 * PAGE).num_blocks == 2


@given(specs=models(), spare=st.integers(0, 2**20))
def test_the_memory_a_refusal_asks_for_is_enough(specs: dict[str, KVCacheSpec], spare: int) -> None:
    needed = sum(tensor.size for tensor in plan_kv_cache(specs, num_blocks=2).kv_cache_tensors)
    assume(needed - 1 - spare > 0)
    with pytest.raises(ConfigError, match=f"{needed:,}"):
        plan_kv_cache(specs, memory_bytes=needed - 1 - spare)
    assert plan_kv_cache(specs, memory_bytes=needed + spare).num_blocks >= 2


# Mistakes


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({}, "no layers"),
        (3, "mapping from layer name"),
        ([FULL], "mapping from layer name"),
        ([("a", FULL), ("a", FULL)], "'a' is used twice"),
        ([("", FULL)], "not empty"),
        ([(1, FULL)], "a layer name must be a string"),
        ({"a": "full"}, "'a' needs a KVCacheSpec"),
        ({"a": None}, "leave out layers that cache nothing"),
    ],
)
def test_layers_without_a_name_or_a_spec_are_refused(specs: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_kv_cache(specs, num_blocks=10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "got neither"),
        ({"memory_bytes": 10**9, "num_blocks": 10}, "got both"),
        ({"memory_bytes": 0}, "memory_bytes must be a whole number of at least 1, got 0"),
        ({"memory_bytes": 1e9}, "memory_bytes must be a whole number of at least 1, got 1000000000.0"),
        ({"num_blocks": 1}, "num_blocks must be a whole number of at least 2, got 1"),
        ({"num_blocks": True}, "num_blocks must be a whole number"),
        ({"num_blocks": 10, "group_size": 0}, "group_size must be a whole number of at least 1, got 0"),
    ],
)
def test_sizes_that_say_nothing_or_nonsense_are_refused(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_kv_cache(five_to_one(12), **sizes)  # type: ignore[arg-type]
