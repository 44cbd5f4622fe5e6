"""Greedy tokens of the engine equal those of ``model.generate``, whatever the cache, the chunks and the pool do."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from runner import Engine, EngineConfig, SamplingParams
from tests.runner.small_models import ARCHITECTURES, WINDOW, generated_by_transformers, random_prompts, small_model

MAX_TOKENS = 20
QUICK = ["llama", "qwen2", "mistral", "gemma3-hybrid"]
"""Run every time; the others are marked slow."""

architectures = pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES]
)
WINDOWED = [
    (name, setting)
    for name, config in ARCHITECTURES.items()
    for setting in ("sliding_window", "attention_chunk_size")
    if getattr(config(), setting, None) == WINDOW
]
"""With the setting that says how far the window or chunk reaches."""


@dataclass(frozen=True)
class Case:
    """A model, prompts of mixed lengths up to five windows long, and what transformers makes of them."""

    model: PreTrainedModel
    prompts: list[list[int]]
    expected: list[list[int]]


@cache
def case(architecture: str) -> Case:
    torch.set_num_threads(1)
    model = small_model(architecture)
    prompts = random_prompts([3, 16, 17, 40, 64, 65, 90, 121], shared=33)
    expected = generated_by_transformers(model, prompts, MAX_TOKENS)
    # A model that says one thing over and over, or the same to everyone, would forgive any mistake.
    assert all(len(set(output)) > MAX_TOKENS // 2 for output in expected), expected
    assert len({tuple(output) for output in expected}) == len(prompts), expected
    return Case(model, prompts, expected)


def engine_for(architecture: str, **config: object) -> Engine:
    engine = Engine(copy.deepcopy(case(architecture).model), config=EngineConfig(**{"num_blocks": 600, **config}))  # type: ignore[arg-type]
    # What no request has written must have no influence.
    for kv_cache in engine.model_runner.kv_caches.values():
        kv_cache.fill_(float("nan"))
    return engine


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Generate, and check that the books are in order and no block is in use afterwards."""
    outputs = engine.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    engine.manager.check_invariants()
    assert engine.manager.usage == 0
    return [output.token_ids for output in outputs]


@architectures
def test_a_batch_equals_one_by_one_generation_with_the_cache_off_cold_and_warm(architecture: str) -> None:
    this = case(architecture)
    assert answers(engine_for(architecture, enable_caching=False), this.prompts) == this.expected
    engine = engine_for(architecture)
    assert answers(engine, this.prompts) == this.expected
    warm = engine.generate(this.prompts, SamplingParams(max_tokens=MAX_TOKENS))
    assert [output.token_ids for output in warm] == this.expected
    # All full blocks of each prompt are found, the last token's excepted.
    size = math.lcm(*(group.kv_cache_spec.block_size for group in engine.kv_cache_config.kv_cache_groups))
    assert [output.num_cached_tokens for output in warm] == [
        (len(prompt) - 1) // size * size for prompt in this.prompts
    ]


@architectures
@pytest.mark.parametrize("caching", [False, True], ids=["cache off", "cache on"])
def test_prompts_computed_in_chunks_equal_one_by_one_generation(architecture: str, caching: bool) -> None:
    this = case(architecture)
    engine = engine_for(architecture, max_num_batched_tokens=19, max_num_seqs=5, enable_caching=caching)
    assert answers(engine, this.prompts) == this.expected
    if caching:  # without a cache, a second time is the first time again
        assert answers(engine, this.prompts) == this.expected


@architectures
@pytest.mark.parametrize("caching", [False, True], ids=["cache off", "cache on"])
def test_requests_preempted_for_want_of_blocks_equal_one_by_one_generation(architecture: str, caching: bool) -> None:
    this = case(architecture)
    sizes = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 16, "enable_caching": caching}
    # Just enough for the longest request by itself.
    longest = max(map(len, this.prompts)) + MAX_TOKENS
    groups = engine_for(architecture, **sizes).kv_cache_config.kv_cache_groups
    num_blocks = 1 + sum(group.kv_cache_spec.max_blocks_per_request(longest, 16) for group in groups)
    engine = engine_for(architecture, **sizes, num_blocks=num_blocks)
    # The short ones first, so that many run at once and all grow.
    assert answers(engine, [*this.prompts[:3], *this.prompts]) == [*this.expected[:3], *this.expected]
    assert engine.scheduler.num_preemptions > 0


@architectures
def test_a_request_computed_beside_changing_others_equals_generation_alone(architecture: str) -> None:
    this = case(architecture)
    engine = engine_for(architecture, max_num_batched_tokens=32, max_num_seqs=32)
    outputs = {}
    for i, prompt in enumerate(this.prompts):
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS), request_id=str(i))
        for _ in range(3):
            outputs.update({output.request_id: output for output in engine.step() if output.finished})
    while engine.has_unfinished_requests:
        outputs.update({output.request_id: output for output in engine.step() if output.finished})
    assert [outputs[str(i)].token_ids for i in range(len(this.prompts))] == this.expected
    engine.manager.check_invariants()
    assert engine.manager.usage == 0


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "setting"), WINDOWED)
def test_the_models_are_such_that_a_window_of_one_token_more_would_be_noticed(architecture: str, setting: str) -> None:
    this = case(architecture)
    longer = small_model(architecture, **{setting: WINDOW + 1})
    assert generated_by_transformers(longer, this.prompts[-2:], MAX_TOKENS) != this.expected[-2:]


@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_any_block_size_gives_the_same_tokens(block_size: int) -> None:
    this = case("gemma3-hybrid")
    engine = engine_for("gemma3-hybrid", block_size=block_size, num_blocks=4000 // block_size)
    assert answers(engine, this.prompts) == this.expected
    assert answers(engine, this.prompts) == this.expected
