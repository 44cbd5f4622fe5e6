"""The torch backend against attention written out in float64, on random steps whose unused cache is NaN."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from runner.attention import cohorts, torch_backend
from runner.attention.torch_backend import TorchBackend
from tests.runner.paged_reference import random_step, reference_attention


def spec_of(kind: str, block_size: int, num_kv_heads: int, head_size: int, reach: int) -> KVCacheSpec:
    if kind == "sliding":
        return SlidingWindowSpec(block_size, num_kv_heads, head_size, "float32", reach)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(block_size, num_kv_heads, head_size, "float32", reach)
    return FullAttentionSpec(block_size, num_kv_heads, head_size, "float32")


def difference(
    backend: TorchBackend,
    seed: int,
    spec: KVCacheSpec,
    lengths: list[tuple[int, int]],
    *,
    group_size: int = 1,
    num_shared_blocks: int = 0,
    softcap: float | None = None,
    with_sinks: bool = False,
) -> float:
    """Largest difference from the reference on one random step; NaN if anything unused came through."""
    step = random_step(
        random.Random(seed),
        spec,
        lengths,
        num_query_heads=spec.num_kv_heads * group_size,
        num_shared_blocks=num_shared_blocks,
    )
    sinks = torch.linspace(-2, 2, spec.num_kv_heads * group_size) if with_sinks else None
    scale = spec.head_size**-0.5
    output = backend.forward(
        step.query, step.key, step.value, step.kv_cache, backend.plan(step.batch.groups[0]),
        scale=scale, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    expected = reference_attention(step, spec, scale=scale, softcap=softcap, sinks=sinks)
    assert output.shape == expected.shape
    assert output.dtype == step.query.dtype
    return float((output.double() - expected).abs().max())


@pytest.fixture(params=["together", "in small pieces"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TorchBackend:
    if request.param == "in small pieces":
        monkeypatch.setattr(torch_backend, "QUERIES_PER_PIECE", 5)
        monkeypatch.setattr(torch_backend, "FEW_QUERIES", 3)
        monkeypatch.setattr(cohorts, "MOST_OWN_SLOTS", 40)
        monkeypatch.setattr(cohorts, "MIN_SHARED_TOKENS", 1)
    return TorchBackend()


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
def test_mixed_prefills_and_decodes_equal_the_reference_and_ignore_unused_nan(
    backend: TorchBackend, kind: str, with_sinks: bool, softcap: float | None
) -> None:
    spec = spec_of(kind, block_size=4, num_kv_heads=2, head_size=8, reach=11)
    lengths = [(0, 1), (0, 13), (30, 1), (17, 9), (16, 1), (8, 8), (3, 1), (40, 1), (0, 30), (2, 1)]
    assert difference(backend, 1, spec, lengths, group_size=3, with_sinks=with_sinks, softcap=softcap) < 1e-5


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
def test_decodes_that_share_a_prefix_equal_the_reference(
    backend: TorchBackend, kind: str, with_sinks: bool, softcap: float | None
) -> None:
    spec = spec_of(kind, block_size=16, num_kv_heads=3, head_size=8, reach=100)
    # The first fills the last shared block in this very step, and has nothing else to read.
    lengths = [(79, 1), (80, 1), (95, 1), (83, 1), (110, 1), (81, 4), (90, 2), (80, 3), (87, 7), (80, 40)]
    kwargs = {"group_size": 2, "num_shared_blocks": 5, "with_sinks": with_sinks, "softcap": softcap}
    assert difference(backend, 2, spec, lengths, **kwargs) < 1e-5


def test_a_prefix_computed_in_this_step_is_read_by_others_in_this_step(backend: TorchBackend) -> None:
    spec = spec_of("full", block_size=16, num_kv_heads=2, head_size=8, reach=1)
    assert difference(backend, 3, spec, [(0, 100), (96, 5), (96, 1), (97, 1)], num_shared_blocks=6) < 1e-5


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_any_step_equals_the_reference(data: st.DataObject, seed: int) -> None:
    kind = data.draw(st.sampled_from(["full", "sliding", "chunked"]))
    block_size = data.draw(st.sampled_from([1, 2, 4, 16, 48]))
    spec = spec_of(
        kind,
        block_size,
        num_kv_heads=data.draw(st.sampled_from([1, 2, 3])),
        head_size=data.draw(st.sampled_from([4, 16])),
        reach=data.draw(st.integers(1, 60)),
    )
    num_shared_blocks = data.draw(st.integers(0, 100 // block_size))
    shared = num_shared_blocks * block_size
    lengths = data.draw(
        st.lists(
            st.tuples(st.integers(shared, shared + 60), st.one_of(st.just(1), st.integers(1, 40))),
            min_size=1,
            max_size=6,
        )
    )
    found = difference(
        TorchBackend(),
        seed,
        spec,
        lengths,
        group_size=data.draw(st.sampled_from([1, 3])),
        num_shared_blocks=num_shared_blocks,
        softcap=data.draw(st.sampled_from([None, 3.0])),
        with_sinks=data.draw(st.booleans()),
    )
    assert found < 1e-5


def test_one_backend_serves_steps_of_any_size_and_type_in_turn() -> None:
    backend = TorchBackend()
    for seed, past in enumerate([5, 200, 3, 90]):
        spec = spec_of("full", 16, num_kv_heads=1 + seed % 2, head_size=8, reach=1)
        assert difference(backend, seed, spec, [(past, 1), (past, 1), (past, 20)]) < 1e-5
