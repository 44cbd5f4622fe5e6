"""Capacity: what the report claims, against what a manager admits and against counting block by block."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import (
    ChunkedLocalAttentionSpec,
    ConfigError,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    Request,
    SlidingWindowSpec,
)
from kvcore.planning import capacity_report, plan_kv_cache

FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32", sliding_window=10)
PAGE = 4 * 2 * 2 * 8 * 4  # tokens, keys and values, heads, elements, bytes


def config_of(num_blocks: int, *specs: KVCacheSpec) -> KVCacheConfig:
    """One layer for each spec."""
    return plan_kv_cache({f"layers.{i}": spec for i, spec in enumerate(specs)}, num_blocks=num_blocks, group_size=1)


@st.composite
def specs(draw: st.DrawFn) -> KVCacheSpec:
    sizes = {"block_size": draw(st.sampled_from((2, 4, 8))), "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}
    kind = draw(st.sampled_from((FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)))
    if kind is SlidingWindowSpec:
        return SlidingWindowSpec(**sizes, sliding_window=draw(st.integers(1, 30)))
    if kind is ChunkedLocalAttentionSpec:
        return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=draw(st.integers(1, 30)))
    return FullAttentionSpec(**sizes)


@st.composite
def configs(draw: st.DrawFn) -> KVCacheConfig:
    return config_of(draw(st.integers(2, 80)), *draw(st.lists(specs(), min_size=1, max_size=3)))


def first_needed_token(spec: KVCacheSpec, num_computed: int) -> int:
    """The first token that a query at position ``num_computed`` reads, by the definition of each kind of attention."""
    if isinstance(spec, SlidingWindowSpec):
        return max(num_computed - (spec.sliding_window - 1), 0)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return num_computed // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


def blocks_held(spec: KVCacheSpec, num_computed: int, num_new: int) -> int:
    """Blocks that hold a token which a step of ``num_new`` tokens reads or writes, counted one by one."""
    tokens = range(first_needed_token(spec, num_computed), num_computed + num_new)
    return len({token // spec.block_size for token in tokens})


def most_blocks_held(spec: KVCacheSpec, length: int, step: int) -> int:
    """The most blocks that any way of cutting a request into steps of at most ``step`` tokens holds at once."""
    return max(blocks_held(spec, computed, min(step, length - computed)) for computed in range(length))


def admits(manager: KVCacheManager, request: Request, step: int) -> bool:
    num_tokens = min(step, request.num_tokens)
    return manager.allocate_slots(request, num_tokens, full_sequence_must_fit=True) is not None


# What it says of a small pool, with the numbers spelled out


def test_full_attention_fits_as_many_tokens_as_it_has_slots() -> None:
    report = capacity_report(config_of(11, FULL), max_model_len=100, request_lengths=(1, 4, 5, 40, 41))
    assert report.usable_blocks == 10
    assert report.tokens_per_request == report.total_tokens == 40
    assert [(x.blocks_per_request, x.max_requests) for x in report.lengths] == [
        (1, 10),
        (1, 10),
        (2, 5),
        (10, 1),
        (11, 0),
    ]
    assert [x.total_tokens for x in report.lengths] == [10, 40, 25, 40, 0]


def test_a_window_holds_only_what_it_reads_and_the_tokens_in_flight() -> None:
    report = capacity_report(
        config_of(41, FULL, WINDOW), max_model_len=120, request_lengths=(120,), max_in_flight_tokens=8
    )
    # A step of 8 tokens reads 9 before them: 17 tokens lie in at most 5 blocks, 6 counting one that begins too early.
    assert [group.max_blocks_per_request for group in report.groups] == [30, 6]
    assert report.lengths[0].blocks_per_request == 36
    # The 4 blocks left take one more request of 8 tokens: two blocks in each group.
    assert report.total_tokens == 120 + 8


def test_without_a_limit_on_tokens_in_flight_a_window_saves_nothing() -> None:
    report = capacity_report(config_of(41, FULL, WINDOW), max_model_len=120)
    assert report.lengths[0].blocks_per_request == 60
    assert report.tokens_per_request == 80


def test_the_longest_request_is_reported_where_no_length_is_asked_for() -> None:
    report = capacity_report(config_of(41, FULL), max_model_len=50)
    assert [length.num_tokens for length in report.lengths] == [50]


def test_padding_is_counted_per_block_and_per_request() -> None:
    layers = {"a": FULL, "b": FULL, "c": replace(FULL, num_kv_heads=1, head_size=12), "d": WINDOW}
    config = plan_kv_cache(layers, num_blocks=10, group_size=2, pad_pages=True)
    report = capacity_report(config, max_model_len=8)
    two_layers, one_layer, window = report.groups
    assert report.bytes_per_block == 2 * PAGE
    assert (two_layers.padded_layers, two_layers.padded_bytes_per_block) == (0, 0)
    # One layer is missing, and 12 of 16 elements per token are used in the other.
    assert (one_layer.padded_layers, one_layer.padded_bytes_per_block) == (1, PAGE + PAGE // 4)
    assert (window.padded_layers, window.padded_bytes_per_block) == (1, PAGE)
    assert report.lengths[0].padded_bytes_per_request == 2 * (PAGE + PAGE // 4) + 2 * PAGE
    assert report.total_bytes == sum(tensor.size for tensor in config.kv_cache_tensors)


def test_a_token_costs_less_once_no_window_reads_it() -> None:
    report = capacity_report(config_of(10, FULL, WINDOW, WINDOW), max_model_len=8)
    assert report.bytes_per_token == 3 * PAGE // 4
    assert report.bytes_per_old_token == PAGE // 4


def test_a_config_written_by_hand_needs_no_tensors() -> None:
    groups = (KVCacheGroupSpec(["a", "b"], FULL), KVCacheGroupSpec(["c"], WINDOW))
    report = capacity_report(KVCacheConfig(num_blocks=11, kv_cache_groups=groups), max_model_len=20)
    assert report.bytes_per_block == 2 * PAGE
    assert report.tokens_per_request == 20


def test_a_pool_with_fewer_blocks_than_groups_fits_nothing() -> None:
    report = capacity_report(config_of(3, FULL, WINDOW, replace(WINDOW, sliding_window=5)), max_model_len=8)
    assert (report.tokens_per_request, report.total_tokens, report.lengths[0].max_requests) == (0, 0, 0)


# Against a manager


@given(config=configs(), max_model_len=st.integers(1, 120), step=st.none() | st.integers(1, 40))
def test_a_manager_admits_the_longest_request_and_none_that_is_longer(
    config: KVCacheConfig, max_model_len: int, step: int | None
) -> None:
    longest = capacity_report(config, max_model_len=max_model_len, max_in_flight_tokens=step).tokens_per_request

    def admitted(num_tokens: int) -> bool:
        manager = KVCacheManager(config, max_model_len, max_in_flight_tokens=step)
        return admits(manager, Request("r", [0] * num_tokens), step or max_model_len)

    assert longest == 0 or admitted(longest)
    assert longest == max_model_len or not admitted(longest + 1)


@given(config=configs(), max_model_len=st.integers(1, 120), data=st.data())
def test_a_manager_admits_exactly_as_many_requests_as_the_report_says(
    config: KVCacheConfig, max_model_len: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, max_model_len))
    report = capacity_report(config, max_model_len=max_model_len, request_lengths=(length,))
    manager = KVCacheManager(config, max_model_len)
    admitted = 0
    while admits(manager, Request(str(admitted), [admitted] * length), length):
        admitted += 1
    assert admitted == report.lengths[0].max_requests


@given(config=configs(), max_model_len=st.integers(1, 120))
def test_a_manager_filled_with_the_longest_requests_holds_the_total_tokens(
    config: KVCacheConfig, max_model_len: int
) -> None:
    manager = KVCacheManager(config, max_model_len)
    total = 0
    for number, length in enumerate([max_model_len] * config.num_blocks + list(range(max_model_len, 0, -1))):
        if admits(manager, Request(str(number), [number] * length), length):
            total += length
    assert total == capacity_report(config, max_model_len=max_model_len).total_tokens


@given(config=configs(), max_model_len=st.integers(1, 120), step=st.integers(1, 40), data=st.data())
def test_all_requests_that_fit_reach_their_full_length_together_however_their_steps_fall(
    config: KVCacheConfig, max_model_len: int, step: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, max_model_len))
    report = capacity_report(config, max_model_len=max_model_len, request_lengths=(length,), max_in_flight_tokens=step)
    manager = KVCacheManager(config, max_model_len, max_in_flight_tokens=step)
    requests = [Request(str(i), [i] * length) for i in range(report.lengths[0].max_requests)]
    rng = random.Random(data.draw(st.integers(0, 1000)))
    growing = list(requests)
    while growing:
        request = rng.choice(growing)
        num_tokens = min(rng.randint(1, step), length - request.num_computed_tokens)
        first = request.num_computed_tokens == 0
        assert manager.allocate_slots(request, num_tokens, full_sequence_must_fit=first) is not None
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == length:
            growing.remove(request)
    manager.check_invariants()


# Against counting


@given(spec=specs(), length=st.integers(1, 120), step=st.integers(1, 40))
def test_no_way_of_cutting_a_request_into_steps_holds_more_blocks_than_reported(
    spec: KVCacheSpec, length: int, step: int
) -> None:
    report = capacity_report(
        config_of(2, spec), max_model_len=120, request_lengths=(length,), max_in_flight_tokens=step
    )
    assert most_blocks_held(spec, length, step) <= report.lengths[0].blocks_per_request


@given(spec=specs(), step=st.integers(1, 40))
def test_some_way_of_cutting_a_long_request_into_steps_holds_the_reported_blocks_but_for_one(
    spec: KVCacheSpec, step: int
) -> None:
    # Long enough for a chunk of up to 30 tokens to begin everywhere in a block of up to 8, and to be read to its end.
    length = 9 * 30 + 40
    report = capacity_report(config_of(2, spec), max_model_len=length, max_in_flight_tokens=step)
    claimed, held = report.lengths[0].blocks_per_request, most_blocks_held(spec, length, step)
    assert claimed - 1 <= held <= claimed
    if isinstance(spec, FullAttentionSpec):
        assert held == claimed


@given(config=configs(), max_model_len=st.integers(1, 120), step=st.none() | st.integers(1, 40))
def test_a_longer_request_never_takes_fewer_blocks_and_padding_never_exceeds_its_blocks(
    config: KVCacheConfig, max_model_len: int, step: int | None
) -> None:
    report = capacity_report(
        config,
        max_model_len=max_model_len,
        request_lengths=range(1, max_model_len + 1),
        max_in_flight_tokens=step,
    )
    blocks = [length.blocks_per_request for length in report.lengths]
    assert blocks == sorted(blocks)
    for length in report.lengths:
        assert 0 <= length.padded_bytes_per_request < length.blocks_per_request * report.bytes_per_block
        assert length.max_requests * length.blocks_per_request <= report.usable_blocks


# The table


def test_the_table_names_groups_blocks_tokens_and_requests() -> None:
    config = plan_kv_cache({"a": WINDOW, "b": WINDOW, "c": WINDOW, "d": FULL, "e": FULL}, num_blocks=1001, group_size=2)
    text = str(capacity_report(config, max_model_len=400, request_lengths=(40, 400), max_in_flight_tokens=20))
    # Windows: 9 + 20 tokens, in 8 blocks and one more. In all: 8 requests leave 56 blocks, 38 for full layers.
    assert text == (
        "memory         1,001 blocks x 1.00 KiB = 1,001.00 KiB\n"
        "usable         1,000 blocks (block 0 is the null block)\n"
        "a token takes  640 B, 256 B once no window reads it\n"
        "one request    up to 400 of 400 tokens (max_model_len)\n"
        "all requests   3,352 tokens, when they are as long as they can be\n"
        "in one step    up to 20 tokens of a request\n"
        "\n"
        "group  attention  layers  block size   page  padding/block  bytes/token  max blocks\n"
        "    0  window 10       2           4  512 B              -          256           9\n"
        "    1  window 10       1           4  512 B  512 B (50.0%)          128           9\n"
        "    2  full            2           4  512 B              -          256         100\n"
        "\n"
        "request length  blocks      memory           padding  requests  tokens in all\n"
        "            40      28   28.00 KiB  4.50 KiB (16.1%)        35          1,400\n"
        "           400     118  118.00 KiB   4.50 KiB (3.8%)         8          3,200"
    )


def test_equal_groups_share_a_row_of_the_table() -> None:
    specs = [WINDOW, WINDOW, FULL, WINDOW, FULL]
    text = str(capacity_report(config_of(10, *specs), max_model_len=8))
    rows = [line.split()[0:3] for line in text.splitlines() if "window 10" in line or " full " in line]
    assert rows == [["0-2", "window", "10"], ["3-4", "full", "1"]]


def test_chunks_are_named_by_their_length_and_memory_by_the_largest_unit() -> None:
    chunk = ChunkedLocalAttentionSpec(16, 8, 128, "bfloat16", attention_chunk_size=8192)
    report = capacity_report(plan_kv_cache({"a": chunk}, memory_bytes=3 * 2**30 // 2), max_model_len=8)
    assert "chunks of 8,192" in str(report)
    assert "24,576 blocks x 64.00 KiB = 1.50 GiB" in str(report)
    assert "a whole request" in str(report)


def test_a_spec_of_the_callers_own_is_named_by_its_class() -> None:
    class EveryOtherToken(KVCacheSpec):
        pass

    report = capacity_report(config_of(5, EveryOtherToken(4, 2, 8, "float32")), max_model_len=8)
    assert "EveryOtherToken" in str(report)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_len": 0}, "max_model_len must be a whole number of at least 1, got 0"),
        ({"max_model_len": 8.0}, "max_model_len must be a whole number"),
        (
            {"max_model_len": 8, "request_lengths": (8, 0)},
            "a request length must be a whole number of at least 1, got 0",
        ),
        ({"max_model_len": 8, "request_lengths": (9,)}, "9 tokens is longer than max_model_len=8"),
        ({"max_model_len": 8, "max_in_flight_tokens": 0}, "max_in_flight_tokens must be a whole number"),
    ],
)
def test_lengths_that_cannot_be_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        capacity_report(config_of(10, FULL), **arguments)  # type: ignore[arg-type]
