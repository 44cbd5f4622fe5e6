"""Whole models on the flash backend, through the engine, against the torch backend; flash-attn is a stand-in."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from runner import Engine, EngineConfig, SamplingParams
from runner.attention import BACKENDS
from tests.runner.flash_stand_ins import backend_of
from tests.runner.recorded_ops import RecordedOps
from tests.runner.small_models import random_prompts, small_model

MAX_TOKENS = 12


@dataclass(frozen=True)
class Run:
    """Greedy answers, and the logits of every step with the requests they belong to."""

    tokens: list[list[int]]
    cached: list[int]
    steps: list[tuple[list[str], torch.Tensor]]


def run(
    architecture: str,
    prompts: list[list[int]],
    *,
    dtype: torch.dtype,
    capture: RecordedOps | None = None,
    **config: Any,
) -> Run:
    """All prompts together, in chunks, after the first of them has left its blocks in the cache."""
    model = small_model(architecture).to(dtype)
    engine = Engine(copy.deepcopy(model), config=EngineConfig(max_num_batched_tokens=200, **config))
    for kv_cache in engine.model_runner.kv_caches.values():
        kv_cache[1:].fill_(1000)  # what the last owner left; block 0 has no owner
    engine.generate(prompts[:1], SamplingParams(max_tokens=1))
    steps: list[tuple[list[str], torch.Tensor]] = []
    if capture is not None:
        engine.model_runner.capture_graphs(required=True, capture=capture)
    execute = engine.model_runner.execute

    def recorded(sequences: Any) -> torch.Tensor:
        logits = execute(sequences)
        steps.append(([s.request_id for s in sequences if s.samples], logits.clone()))
        return logits

    engine.model_runner.execute = recorded  # type: ignore[method-assign]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    engine.manager.check_invariants()
    return Run([output.token_ids for output in outputs], [output.num_cached_tokens for output in outputs], steps)


def error(run: Run, reference: Run) -> float:
    """Relative difference of logits, over the steps before two answers differ."""
    squares = [0.0, 0.0]
    for (ids, logits), (others, expected) in zip(run.steps, reference.steps, strict=True):
        assert ids == others
        squares[0] += float((logits - expected).square().sum())
        squares[1] += float(expected.square().sum())
        if not torch.equal(logits.argmax(-1), expected.argmax(-1)):
            break
    return (squares[0] / squares[1]) ** 0.5


@pytest.mark.parametrize(
    ("version", "architecture"),
    [(2, "llama"), (2, "gemma3-hybrid"), (3, "gemma2-softcap"), (4, "gemma3-hybrid"), (4, "gpt-oss-sinks")],
)
def test_a_model_in_bf16_equals_the_torch_backend_within_rounding(
    version: int, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "flash", lambda device: backend_of(version))
    prompts = random_prompts([290, 3, 300, 90, 17], shared=280)
    block_size = backend_of(version).default_block_size
    torch_config = {"attention_backend": "torch", "block_size": block_size, "num_blocks": 300}
    exact = run(architecture, prompts, dtype=torch.float32, **torch_config)
    rounded = run(architecture, prompts, dtype=torch.bfloat16, **torch_config)
    flash = run(architecture, prompts, dtype=torch.bfloat16, attention_backend="flash", num_blocks=300)
    assert flash.cached == exact.cached
    assert flash.cached[2] == 280 // block_size * block_size, "the second long prompt begins with blocks of the first"
    # As far from the truth as the torch backend is in the same precision, or nearer.
    assert error(flash, exact) < 1.5 * error(rounded, exact)
    captured = RecordedOps()
    replayed = run(
        architecture, prompts, dtype=torch.bfloat16, capture=captured, attention_backend="flash", num_blocks=300
    )
    assert captured.num_replays >= MAX_TOKENS // 2
    assert error(replayed, exact) < 1.5 * error(rounded, exact)
    # Where rounding leaves no doubt about the first token, it is the same.
    first, truth = flash.steps[0][1], exact.steps[0][1]
    best = truth.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * (rounded.steps[0][1] - truth).abs().max()
    assert torch.equal(first.argmax(-1)[clear], truth.argmax(-1)[clear])
