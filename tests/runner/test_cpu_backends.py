"""The backends for a CPU against attention written out in float64, on random steps whose unused cache is NaN."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.attention import AttentionBackend, cohorts, pieces, spans
from runner.attention import native_backend as backend_module
from runner.attention.native_backend import NativeBackend
from runner.attention.torch_backend import TorchBackend
from runner.errors import RunnerError
from runner.native.build import NativeUnavailableError
from runner.native.kernels import native_kernels
from tests.runner.native_checks import WrappedTensor, use_kernels
from tests.runner.paged_reference import difference, random_step, spec_of


def skip_without_native_kernels() -> None:
    try:
        native_kernels()
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels: {error}")


def native_backend(monkeypatch: pytest.MonkeyPatch, width: str = "") -> NativeBackend:
    """With kernels for that width of vectors; skips the test where there are none."""
    use_kernels(width, monkeypatch, backend_module)
    return NativeBackend()


@pytest.fixture(params=["torch", "torch in small pieces", "native", "native in small pieces", "native, narrow"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    if "in small pieces" in request.param:
        monkeypatch.setattr(pieces, "QUERIES_PER_PIECE", 5)
        monkeypatch.setattr(pieces, "FEW_QUERIES", 3)
        monkeypatch.setattr(cohorts, "MOST_OWN_SLOTS", 40)
        monkeypatch.setattr(cohorts, "MIN_SHARED_TOKENS", 1)
        monkeypatch.setattr(spans, "MOST_PARTS", 10)
    if "native" in request.param:
        return native_backend(monkeypatch, "narrow" if "narrow" in request.param else "")
    return TorchBackend()


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
def test_mixed_prefills_and_decodes_equal_the_reference_and_ignore_unused_nan(
    backend: AttentionBackend, kind: str, with_sinks: bool, softcap: float | None
) -> None:
    spec = spec_of(kind, block_size=4, num_kv_heads=2, head_size=8, reach=11)
    lengths = [(0, 1), (0, 13), (30, 1), (17, 9), (16, 1), (8, 8), (3, 1), (40, 1), (0, 30), (2, 1)]
    assert difference(backend, 1, spec, lengths, group_size=3, with_sinks=with_sinks, softcap=softcap) < 1e-5


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
def test_decodes_that_share_a_prefix_equal_the_reference(
    backend: AttentionBackend, kind: str, with_sinks: bool, softcap: float | None
) -> None:
    spec = spec_of(kind, block_size=16, num_kv_heads=3, head_size=8, reach=100)
    # The first fills the last shared block in this very step, and has nothing else to read.
    lengths = [(79, 1), (80, 1), (95, 1), (83, 1), (110, 1), (81, 4), (90, 2), (80, 3), (87, 7), (80, 40)]
    kwargs = {"group_size": 2, "num_shared_blocks": 5, "with_sinks": with_sinks, "softcap": softcap}
    assert difference(backend, 2, spec, lengths, **kwargs) < 1e-5


def test_a_prefix_computed_in_this_step_is_read_by_others_in_this_step(backend: AttentionBackend) -> None:
    spec = spec_of("full", block_size=16, num_kv_heads=2, head_size=8, reach=1)
    assert difference(backend, 3, spec, [(0, 100), (96, 5), (96, 1), (97, 1)], num_shared_blocks=6) < 1e-5


@pytest.mark.parametrize("make_backend", [TorchBackend, NativeBackend])
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_any_step_equals_the_reference(
    make_backend: Callable[[], AttentionBackend], data: st.DataObject, seed: int
) -> None:
    backend = make_backend()
    if isinstance(backend, NativeBackend):
        skip_without_native_kernels()
    kind = data.draw(st.sampled_from(["full", "sliding", "chunked"]))
    block_size = data.draw(st.sampled_from([1, 2, 4, 16, 48, 100]))
    spec = spec_of(
        kind,
        block_size,
        num_kv_heads=data.draw(st.sampled_from([1, 2, 3])),
        head_size=data.draw(st.sampled_from([1, 4, 16, 40])),
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
        backend,
        seed,
        spec,
        lengths,
        group_size=data.draw(st.sampled_from([1, 3, 9])),
        num_shared_blocks=num_shared_blocks,
        softcap=data.draw(st.sampled_from([None, 3.0])),
        with_sinks=data.draw(st.booleans()),
    )
    assert found < 1e-5


@pytest.mark.parametrize(("head_size", "group_size"), [(256, 1), (256, 5), (80, 17), (24, 40), (7, 2), (128, 8)])
def test_heads_of_any_size_and_number_equal_the_reference(
    backend: AttentionBackend, head_size: int, group_size: int
) -> None:
    spec = spec_of("full", block_size=8, num_kv_heads=2, head_size=head_size, reach=1)
    lengths = [(70, 1), (63, 2), (200, 5), (0, 1), (65, 1)]
    assert difference(backend, 4, spec, lengths, group_size=group_size) < 1e-5


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
def test_bfloat16_equals_the_reference_up_to_its_rounding(backend: AttentionBackend, kind: str) -> None:
    spec = spec_of(kind, block_size=16, num_kv_heads=2, head_size=24, reach=40, dtype="bfloat16")
    lengths = [(79, 1), (80, 1), (300, 1), (83, 7), (80, 40), (0, 33)]
    # Values of about 1 are up to 2^-8 apart, and weights are rounded by torch before they multiply values.
    assert difference(backend, 5, spec, lengths, group_size=3, softcap=20.0, with_sinks=True) < 2**-6


def test_one_backend_serves_steps_of_any_size_and_type_in_turn(backend: AttentionBackend) -> None:
    for seed, past in enumerate([5, 200, 3, 90]):
        spec = spec_of("full", 16, num_kv_heads=1 + seed % 2, head_size=8, reach=1)
        assert difference(backend, seed, spec, [(past, 1), (past, 1), (past, 20)]) < 1e-5


@pytest.mark.parametrize("which", range(3))
def test_the_native_backend_refuses_what_is_more_than_its_memory(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("full", 4, num_kv_heads=2, head_size=8, reach=1)
    step = random_step(random.Random(0), spec, [(5, 1)], num_query_heads=2)
    backend = native_backend(monkeypatch)
    given = [step.query, step.key, step.value]
    given[which] = WrappedTensor(given[which])
    with pytest.raises(RunnerError, match=r"of class Tensor, WrappedTensor.*attention_backend='torch'"):
        backend.forward(*given, step.kv_cache, backend.plan(step.batch.groups[0]), scale=1.0)
