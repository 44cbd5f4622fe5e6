"""The Triton kernels against attention written out in float64, on steps whose unused cache and output are NaN.

On a GPU where there is one, otherwise in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runner.triton_steps import (
    DEVICE,
    a_step,
    assert_close,
    attended,
    decode_launch,
    expected,
    prefill_launch,
    spec_of,
    store_kv,
)

PAGE = 16
LENGTHS_AROUND_PAGES = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 5 * PAGE + 3]
KINDS = [
    ("full", 0),
    ("sliding", 1),
    ("sliding", 7),
    ("sliding", PAGE),
    ("sliding", 33),
    ("sliding", 500),
    ("chunked", 8),
    ("chunked", PAGE),
    ("chunked", 40),
]


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    """What the launcher allocates for itself is poisoned too."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def sinks_for(step_query: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-2, 2, step_query.shape[1], device=DEVICE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(dtype: str) -> None:
    step = a_step(1, spec_of(num_kv_heads=3, head_size=80), [(0, 5), (30, 20), (16, 1)], dtype=dtype)
    before = step.kv_cache.clone()
    slots = step.batch.groups[0].slot_mapping.clone()
    slots[[0, 7, -1]] = -1
    # As a projection gives them: heads strided, tokens far apart.
    wide = torch.randn(2, slots.shape[0], 7, 80, device=DEVICE).to(step.key.dtype)
    key, value = wide[0][:, 2:5], wide[1][:, ::2][:, :3]
    store_kv(key, value, step.kv_cache, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            before[slot // PAGE, 0, slot % PAGE] = key[token]
            before[slot // PAGE, 1, slot % PAGE] = value[token]
    torch.testing.assert_close(step.kv_cache, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "reach"), KINDS)
def test_prompts_of_any_length_around_a_page_equal_the_reference(kind: str, reach: int) -> None:
    step = a_step(2, spec_of(kind, reach=reach), [(0, n) for n in LENGTHS_AROUND_PAGES])
    assert_close(attended(step, prefill_launch(step)), expected(step))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("kind", "reach"), KINDS)
def test_single_queries_after_contexts_of_any_length_equal_the_reference(
    kind: str, reach: int, num_splits: int
) -> None:
    step = a_step(3, spec_of(kind, reach=reach), [(n - 1, 1) for n in LENGTHS_AROUND_PAGES])
    assert_close(attended(step, decode_launch(step, num_splits=num_splits)), expected(step))


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
def test_softcaps_and_sinks_equal_the_reference(softcap: float | None, with_sinks: bool, num_splits: int) -> None:
    step = a_step(4, spec_of("sliding", reach=700), [(900, 1), (3, 1), (40, 6)])
    sinks = sinks_for(step.query) if with_sinks else None
    output = attended(step, decode_launch(step, num_splits=num_splits), softcap=softcap, sinks=sinks)
    assert_close(output, expected(step, softcap=softcap, sinks=sinks))
    again = attended(step, prefill_launch(step, num_splits=num_splits), softcap=softcap, sinks=sinks)
    assert_close(again, expected(step, softcap=softcap, sinks=sinks))


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 6, 7, 8, 16, 24])
def test_any_number_of_query_heads_shares_a_key_head(group_size: int) -> None:
    step = a_step(5, spec_of(num_kv_heads=1), [(20, 1), (0, 9), (5, 2)], group_size=group_size)
    few = decode_launch(step)
    output = attended(step, few)
    many = prefill_launch(step, block_m=32, least_queries=few.shape.block_m // group_size + 1)
    rest = attended(step, many)
    # Each token is served by exactly one of the two.
    assert torch.equal(output.isnan(), ~rest.isnan())
    assert_close(torch.where(output.isnan(), rest, output), expected(step))


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [
        *((head_size, "float32") for head_size in (16, 32, 64, 80, 96, 112, 128, 192, 256)),
        *((head_size, dtype) for head_size in (32, 80, 128, 256) for dtype in ("float16", "bfloat16")),
    ],
)
def test_head_sizes_and_types_equal_the_reference(head_size: int, dtype: str) -> None:
    step = a_step(6, spec_of(num_kv_heads=1, head_size=head_size), [(33, 1), (0, 17), (50, 1)], dtype=dtype)
    assert_close(attended(step, prefill_launch(step)), expected(step))


@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize(("kind", "reach"), [("full", 0), ("sliding", 50)])
def test_pages_may_be_larger_or_smaller_than_the_steps_through_the_keys(
    kind: str, reach: int, block_size: int, block_n: int
) -> None:
    step = a_step(7, spec_of(kind, reach=reach, block_size=block_size, num_kv_heads=1), [(300, 1), (90, 1), (70, 20)])
    assert_close(attended(step, prefill_launch(step, block_n=block_n)), expected(step))
    output = attended(step, decode_launch(step, block_n=block_n, num_splits=2))[:2]
    assert_close(output, expected(step)[:2])


@pytest.mark.parametrize("num_splits", [1, 2, 3, pytest.param(40, marks=pytest.mark.slow)])
def test_contexts_of_any_length_may_be_cut_into_any_number_of_splits(num_splits: int) -> None:
    lengths = [(255, 1), (256, 1), (257, 1), (0, 1), (1500, 3), (511, 1)]
    step = a_step(8, spec_of(num_kv_heads=1), lengths)
    sinks = sinks_for(step.query)
    output = attended(step, decode_launch(step, block_n=64, num_splits=num_splits), sinks=sinks)
    assert_close(output, expected(step, sinks=sinks))


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_padded_rows_read_nothing_and_give_zeros(with_sinks: bool, num_splits: int) -> None:
    step = a_step(9, spec_of(), [(600, 1), (10, 1), (20, 1)])
    group = step.batch.groups[0]
    seq_lens, table = group.seq_lens.clone(), group.block_table.clone()
    seq_lens[1:] = 0
    table[1:] = 0  # the null block, which is NaN here
    sinks = sinks_for(step.query) if with_sinks else None
    for launch in decode_launch(step, num_splits=num_splits), prefill_launch(step, num_splits=num_splits):
        output = attended(step, launch, sinks=sinks, seq_lens=seq_lens, block_table=table)
        assert_close(output[:1], expected(step, sinks=sinks)[:1])
        assert not output[1:].any()


@pytest.mark.parametrize("num_splits", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "reach"), [("full", 0), ("sliding", 30), ("chunked", 50)])
def test_table_entries_that_no_query_needs_may_point_anywhere(kind: str, reach: int, num_splits: int) -> None:
    """A read through one of them would leave the cache by far, and end the process."""
    lengths = [(310, 1), (95, 2), (15, 1)]
    step = a_step(10, spec_of(kind, reach=reach), lengths)
    group = step.batch.groups[0]
    table = torch.full((3, 40), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    for row, (past, new) in enumerate(lengths):
        stop = -(-(past + new) // PAGE)
        needed = group.block_table[row, :stop]
        # What the window has left is the null block in the step's table.
        table[row, :stop] = torch.where(needed == 0, table[row, :stop], needed)
    for block_n in 16, 64:
        output = attended(step, decode_launch(step, block_n=block_n, num_splits=num_splits), block_table=table)
        assert_close(output, expected(step))
        output = attended(step, prefill_launch(step, block_n=block_n, num_splits=num_splits), block_table=table)
        assert_close(output, expected(step))


def test_pages_far_into_a_large_cache_are_found() -> None:
    """Offsets past two to the 31st elements. The memory is reserved, not used."""
    spec = spec_of(num_kv_heads=2, head_size=64, block_size=256)
    step = a_step(11, spec, [(200, 1)], dtype="float16")
    far = 2**31 // (2 * 256 * 2 * 64) + 1
    torch.use_deterministic_algorithms(False)  # no NaN in all of it
    cache = torch.empty((far + 2, *step.kv_cache.shape[1:]), dtype=torch.float16, device=DEVICE)
    cache[far] = step.kv_cache[int(step.batch.groups[0].block_table[0, 0])]
    step.batch.groups[0].slot_mapping.copy_(torch.tensor([far * 256 + 200]))
    step.kv_cache = cache
    table = torch.full_like(step.batch.groups[0].block_table, far)
    assert_close(attended(step, decode_launch(step), block_table=table), expected(step))


def test_queries_may_be_strided_views() -> None:
    step = a_step(12, spec_of(), [(40, 1), (0, 20)])
    reference = expected(step)
    wide = step.query.new_full((4, 21, 64), float("nan"))  # [Hq, T, 2 * D], as a rotary embedding leaves it
    wide[:, :, :32] = step.query.transpose(0, 1)
    step.query = wide[:, :, :32].transpose(0, 1)
    assert_close(attended(step, prefill_launch(step)), reference)


@pytest.mark.slow
@settings(max_examples=15 if DEVICE == "cpu" else 8, derandomize=True)  # each compiles kernels of its own on a GPU
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_any_step_equals_the_reference(data: st.DataObject, seed: int) -> None:
    kind, group_size = data.draw(st.sampled_from(["full", "sliding", "chunked"])), data.draw(st.integers(1, 8))
    spec = spec_of(
        kind,
        block_size=data.draw(st.sampled_from([16, 32, 64])),
        num_kv_heads=data.draw(st.sampled_from([1, 2, 3])),
        head_size=data.draw(st.sampled_from([32, 48])),
        reach=data.draw(st.integers(1, 150)),
    )
    past = st.one_of(st.sampled_from([0, 15, 16, 17, 31, 32, 63, 64, 127, 128]), st.integers(0, 300))
    lengths = data.draw(st.lists(st.tuples(past, st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=5))
    step = a_step(seed, spec, lengths, group_size=group_size)
    softcap = data.draw(st.sampled_from([None, 4.0]))
    sinks = sinks_for(step.query) if data.draw(st.booleans()) else None
    block_n, num_splits = data.draw(st.sampled_from([16, 32, 64])), data.draw(st.sampled_from([1, 2, 4]))
    few = decode_launch(step, block_n=block_n, num_splits=num_splits)
    output = attended(step, few, softcap=softcap, sinks=sinks)
    many = prefill_launch(
        step,
        block_m=data.draw(st.sampled_from([16, 32])),
        block_n=block_n,
        num_splits=num_splits,
        least_queries=few.shape.block_m // group_size + 1,
    )
    rest = attended(step, many, softcap=softcap, sinks=sinks)
    assert torch.equal(output.isnan(), ~rest.isnan())
    assert_close(torch.where(output.isnan(), rest, output), expected(step, softcap=softcap, sinks=sinks))
