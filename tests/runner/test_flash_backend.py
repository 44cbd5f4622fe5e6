"""The flash backend against stand-ins for flash-attn that are strict about what they are given."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kvcore.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from runner.attention import BACKENDS, AttentionLayer
from runner.attention.flash_backend import FlashAttentionBackend
from runner.attention.flash_versions import VERSIONS
from runner.batch import GroupBatch
from runner.errors import EngineConfigError, UnsupportedModelError
from tests.runner.backend_features import backends
from tests.runner.flash_stand_ins import STAND_INS, Refused, backend_of
from tests.runner.paged_reference import random_step, reference_attention

versions = pytest.mark.parametrize("version", sorted(STAND_INS))
PAGES = {2: [256, 512], 3: [1, 16, 48, 256], 4: [16, 64, 128, 256]}
HEAD_SIZES = {2: [8, 72, 128], 3: [8, 72, 128], 4: [16, 80, 128]}
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Unit in the last place: a stand-in's float64 rounds to within half of it."""


def spec_of(kind: str, block_size: int, num_kv_heads: int, head_size: int, reach: int) -> KVCacheSpec:
    if kind == "sliding":
        return SlidingWindowSpec(block_size, num_kv_heads, head_size, "bfloat16", reach)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(block_size, num_kv_heads, head_size, "bfloat16", reach)
    return FullAttentionSpec(block_size, num_kv_heads, head_size, "bfloat16")


def check_step(
    version: int,
    seed: int,
    spec: KVCacheSpec,
    lengths: list[tuple[int, int]],
    *,
    group_size: int = 1,
    softcap: float | None = None,
    with_sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    change: Callable[[GroupBatch], GroupBatch] = lambda batch: batch,
    capability: tuple[int, int] = (9, 0),
) -> None:
    """One random step equals the reference, in strided views like those that a model gives."""
    num_heads = spec.num_kv_heads * group_size
    step = random_step(random.Random(seed), spec, lengths, num_query_heads=num_heads, dtype=dtype)
    backend = backend_of(version, capability)
    if not backend.clears_what_it_skips(spec):
        step.kv_cache.nan_to_num_(nan=1000.0)
    sinks = torch.linspace(-2, 2, num_heads).to(dtype) if with_sinks else None
    scale = spec.head_size**-0.5
    query, key, value = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (step.query, step.key, step.value))
    plan = backend.plan(change(step.batch.groups[0]))
    output = backend.forward(query, key, value, step.kv_cache, plan, scale=scale, softcap=softcap, sinks=sinks)
    expected = reference_attention(step, spec, scale=scale, softcap=softcap, sinks=sinks)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=ROUNDING[dtype], atol=1e-6)


@versions
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_mixed_prefills_and_decodes_equal_the_reference(version: int, kind: str, softcap: float | None) -> None:
    spec = spec_of(kind, PAGES[version][0], num_kv_heads=2, head_size=HEAD_SIZES[version][0], reach=11)
    lengths = [(0, 1), (0, 13), (30, 1), (17, 9), (255, 1), (256, 8), (300, 1), (0, 40), (2, 1)]
    check_step(version, 1, spec, lengths, group_size=3, softcap=softcap)


@versions
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_decodes_equal_the_reference(version: int, kind: str) -> None:
    spec = spec_of(kind, PAGES[version][0], num_kv_heads=2, head_size=HEAD_SIZES[version][0], reach=37)
    check_step(version, 2, spec, [(0, 1), (15, 1), (16, 1), (255, 1), (256, 1), (700, 1)], group_size=2)


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=["Hopper", "Blackwell"])
def test_version_4_has_sinks(kind: str, capability: tuple[int, int]) -> None:
    spec = spec_of(kind, 16, num_kv_heads=2, head_size=32, reach=20)
    for lengths in [(0, 30), (60, 5), (12, 1)], [(5, 1), (60, 1)]:
        check_step(4, 3, spec, lengths, group_size=4, with_sinks=True, capability=capability)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_any_step_equals_the_reference(data: st.DataObject, seed: int) -> None:
    version = data.draw(st.sampled_from(sorted(STAND_INS)))
    spec = spec_of(
        data.draw(st.sampled_from(["full", "sliding"])),
        data.draw(st.sampled_from(PAGES[version])),
        num_kv_heads=data.draw(st.sampled_from([1, 2, 3])),
        head_size=data.draw(st.sampled_from(HEAD_SIZES[version])),
        reach=data.draw(st.integers(1, 300)),
    )
    new = st.just(1) if data.draw(st.booleans()) else st.integers(1, 12)
    check_step(
        version,
        seed,
        spec,
        data.draw(st.lists(st.tuples(st.integers(0, 300), new), min_size=1, max_size=4)),
        group_size=data.draw(st.sampled_from([1, 4])),
        softcap=data.draw(st.sampled_from([None, 3.0])),
        with_sinks=version == 4 and data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from(list(ROUNDING))),
    )


@versions
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_lengths_come_from_the_device_and_the_hosts_are_only_upper_bounds(version: int, kind: str) -> None:
    spec = spec_of(kind, PAGES[version][0], num_kv_heads=1, head_size=HEAD_SIZES[version][0], reach=9)
    lengths = [(0, 1), (40, 1), (270, 1)]
    check_step(version, 4, spec, lengths, change=lambda batch: replace(batch, context_lens=[4000] * 3))


@versions
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_padded_rows_write_nothing_and_give_zeros_and_tables_may_be_wider_than_used(version: int, kind: str) -> None:
    spec = spec_of(kind, PAGES[version][0], num_kv_heads=2, head_size=HEAD_SIZES[version][0], reach=9)
    step = random_step(random.Random(5), spec, [(40, 1), (3, 1)], num_query_heads=4, dtype=torch.bfloat16)
    step.kv_cache.nan_to_num_(nan=7.0)
    backend = backend_of(version)
    plan = backend.plan(step.batch.groups[0])
    padded = replace(
        plan,
        slot_mapping=F.pad(plan.slot_mapping, (0, 2), value=-1),
        query_start_loc=torch.arange(5, dtype=torch.int32),
        seq_lens=F.pad(plan.seq_lens, (0, 2)),
        block_table=F.pad(F.pad(plan.block_table, (0, 3), value=10**6), (0, 0, 0, 2)),
    )
    # What a padded token's key and value are is nobody's business.
    query, key, value = (F.pad(t, (0, 0, 0, 0, 0, 2), value=float("nan")) for t in (step.query, step.key, step.value))
    caches = step.kv_cache.clone(), step.kv_cache.clone()
    unpadded = backend.forward(step.query, step.key, step.value, caches[0], plan, scale=0.3)
    output = backend.forward(query, key, value, caches[1], padded, scale=0.3)
    assert torch.equal(output[:2], unpadded)
    assert torch.equal(output[2:], torch.zeros_like(output[2:]))
    assert torch.equal(*caches)
    assert not caches[0].isnan().any()


@pytest.mark.parametrize("version", [3, 4])
def test_with_long_pages_a_nan_behind_the_end_does_harm_as_the_class_says(version: int) -> None:
    spec = spec_of("full", 128, num_kv_heads=1, head_size=16, reach=0)
    step = random_step(random.Random(6), spec, [(60, 1)], num_query_heads=1, dtype=torch.bfloat16)
    backend = backend_of(version)
    plan = backend.plan(step.batch.groups[0])
    assert backend.forward(step.query, step.key, step.value, step.kv_cache, plan, scale=1.0).isnan().all()


def layer_of(spec: KVCacheSpec, **features: Any) -> AttentionLayer:
    return AttentionLayer("layers.7", spec, num_query_heads=4, **features)


@pytest.mark.parametrize(
    ("version", "capability", "layer", "message"),
    [
        (2, (8, 0), layer_of(spec_of("full", 16, 2, 64, 0)), r"pages of 16 tokens.*multiples of 256.*block_size=256"),
        (2, (8, 0), layer_of(spec_of("full", 300, 2, 64, 0)), r"pages of 300 tokens.*block_size=512.*prefix hits"),
        (2, (8, 0), layer_of(spec_of("full", 256, 2, 512, 0)), "head size of 512.*multiples of 8 up to 256"),
        (2, (8, 0), layer_of(spec_of("full", 256, 2, 64, 0), has_sinks=True), "sinks.*only version 4.*this is 2"),
        (3, (9, 0), layer_of(spec_of("full", 16, 2, 64, 0), has_sinks=True), "sinks.*only version 4.*this is 3"),
        (3, (9, 0), layer_of(spec_of("full", 16, 2, 257, 0)), "head size of 257"),
        (3, (9, 0), layer_of(spec_of("chunked", 16, 2, 64, 32)), "within chunks"),
        (4, (9, 0), layer_of(spec_of("chunked", 16, 2, 64, 32)), "within chunks"),
        (4, (9, 0), layer_of(spec_of("full", 16, 2, 72, 0)), "head size of 72.*multiples of 16"),
        (4, (10, 0), layer_of(spec_of("full", 16, 2, 192, 0)), "head size of 192.*up to 128, or 256, on this GPU"),
    ],
)
def test_what_a_version_cannot_compute_is_refused_with_layer_and_remedy(
    version: int, capability: tuple[int, int], layer: AttentionLayer, message: str
) -> None:
    good = layer_of(spec_of("full", 256, 2, 64, 0))
    backend = backend_of(version, capability)
    backend.check([good], device=torch.device("cpu"), dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=rf"^layers\.7 .*{message}") as caught:
        backend.check([good, layer], device=torch.device("cpu"), dtype=torch.bfloat16)
    (instead,) = re.findall(r"use attention_backend='(\w+)'$", str(caught.value))
    backends()[f"`{instead}`"].check([layer], device=torch.device("cuda"), dtype=torch.bfloat16)


@versions
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_what_is_not_refused_is_computed(version: int, kind: str) -> None:
    for capability in [(major, 0) for major in VERSIONS[version].capabilities]:
        for head_size in [8, 16, 24, 96, 160, 192, 256]:
            spec = spec_of(kind, VERSIONS[version].default_block_size, 1, head_size, 5)
            backend = backend_of(version, capability)
            try:
                backend.check([layer_of(spec)], device=torch.device("cpu"), dtype=torch.float16)
            except UnsupportedModelError:
                # The refusal is not in vain either.
                with pytest.raises(Refused):
                    check_step(version, 7, spec, [(20, 1)], dtype=torch.float16, capability=capability)
            else:
                check_step(version, 7, spec, [(20, 1)], dtype=torch.float16, capability=capability)


@pytest.mark.parametrize(("dtype", "instead"), [(torch.float32, "triton"), (torch.float64, "torch")])
def test_more_than_half_precision_is_refused(dtype: torch.dtype, instead: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"in float\d\d: pass dtype='bfloat16'.*'{instead}'"):
        backend_of(3).check([], device=torch.device("cpu"), dtype=dtype)


def test_a_cpu_is_refused() -> None:
    backend = FlashAttentionBackend(STAND_INS[2](), capability=(8, 0))
    with pytest.raises(UnsupportedModelError, match="runs on cuda, the model is on cpu: use attention_backend='torch'"):
        backend.check([], device=torch.device("cpu"), dtype=torch.bfloat16)
    with pytest.raises(EngineConfigError, match="the model is on cpu: use attention_backend='torch'"):
        BACKENDS["flash"](torch.device("cpu"))


def test_without_triton_nothing_could_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(EngineConfigError, match=r"Triton is not installed: run `pip install 'kvcore\[cuda\]'`"):
        FlashAttentionBackend.for_device("cuda", capability=(9, 0), load=lambda name: STAND_INS[3]())


@versions
def test_the_version_is_told_from_the_module(version: int) -> None:
    backend = backend_of(version)
    assert backend.version.number == version
    assert backend.default_block_size == (256 if version == 2 else 16)
    assert backend.supports_graphs
    assert repr(backend) == f"FlashAttentionBackend(flash-attn {version}, 9.0)"


def test_another_module_or_an_older_release_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(EngineConfigError, match=r"no flash-attn that is known here.*2: no flash_attn_with_kvcache"):
        FlashAttentionBackend(SimpleNamespace(__name__="numpy"))
    old = SimpleNamespace(
        __name__="flash_attn",
        flash_attn_with_kvcache=lambda q, cache_seqlens, block_table, window_size: None,
        flash_attn_varlen_func=lambda q, cu_seqlens_q, cu_seqlens_k: None,
    )
    with pytest.raises(EngineConfigError, match=r"2: no flash_attn_with_kvcache\(softcap=\.\.\.\)"):
        FlashAttentionBackend(old)


def loads(*numbers: int, **broken: Exception) -> Callable[[str], Any]:
    """An import where these versions are installed; ``v3=OSError(...)``: its import ends so."""

    def load(name: str) -> Any:
        for number, version in VERSIONS.items():
            if name == version.modules[0] and (error := broken.get(f"v{number}")):
                raise error
            if name == version.modules[0] and number in numbers:
                return STAND_INS[number]()
        if name == "flash_attn" and 4 in numbers:
            return SimpleNamespace(__name__="flash_attn", __file__=None)  # the empty package around flash_attn.cute
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    return load


@pytest.mark.parametrize(
    ("capability", "installed", "picked"),
    [
        ((8, 0), (2, 3, 4), 2),
        ((8, 9), (2,), 2),
        ((9, 0), (2, 3, 4), 3),
        ((9, 0), (2, 4), 4),
        ((9, 0), (2,), 2),
        ((10, 0), (2, 3, 4), 4),
        ((10, 3), (2, 3), 2),
        ((12, 0), (2, 4), 2),
    ],
)
def test_of_what_is_installed_that_is_picked_which_fits_the_gpu_best(
    capability: tuple[int, int], installed: tuple[int, ...], picked: int
) -> None:
    backend = FlashAttentionBackend.for_device("cuda", capability=capability, load=loads(*installed))
    assert backend.version.number == picked
    assert backend.describe().startswith(f"flash: flash-attn {picked} (compute capability {capability[0]}.")


def test_the_description_says_what_was_passed_over() -> None:
    broken = {"v3": OSError("undefined symbol"), "v4": ModuleNotFoundError("No module named 'cutlass'", name="cutlass")}
    backend = FlashAttentionBackend.for_device("cuda", capability=(9, 0), load=loads(2, **broken))
    assert backend.describe() == (
        "flash: flash-attn 2 (compute capability 9.0; flash-attn 3 cannot be imported: undefined symbol; "
        "flash-attn 4 cannot be imported: No module named 'cutlass')"
    )
    assert backend.page_note == "flash-attn 2 takes no pages under 256 tokens; attention_backend='triton' does"
    assert backend_of(3).page_note is None


@pytest.mark.parametrize(
    ("capability", "installed", "message"),
    [
        ((9, 0), (), r"9\.0 \(flash-attn 3 is not installed; .*: install one.*`pip install 'flash-attn>=2.*'triton'"),
        ((12, 0), (4,), r"12\.0 \(flash-attn 2 is not installed;.*4 is for .* 9\.x, 10\.x, 11\.x, this GPU has 12\.0"),
        ((8, 6), (3,), r"flash-attn 3 is for compute capability 9\.x, this GPU has 8\.6"),
        ((7, 5), (2, 3, 4), r"flash-attn 2 is for .*this GPU has 7\.5.*: use attention_backend='triton'$"),
    ],
)
def test_where_nothing_fits_the_error_says_what_was_found_and_what_helps(
    capability: tuple[int, int], installed: tuple[int, ...], message: str
) -> None:
    with pytest.raises(EngineConfigError, match=message):
        FlashAttentionBackend.for_device("cuda", capability=capability, load=loads(*installed))


def test_a_version_given_for_a_gpu_it_does_not_run_on_is_refused() -> None:
    with pytest.raises(EngineConfigError, match=r"flash-attn 3 is for compute capability 9\.x, this GPU has 10\.0"):
        FlashAttentionBackend(STAND_INS[3](), capability=(10, 0))
