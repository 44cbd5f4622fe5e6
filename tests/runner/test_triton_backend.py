"""The Triton backend: whole steps against the float64 reference, captured steps, refusals, and whole models.

On a GPU where there is one, otherwise in Triton's interpreter.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

# First: where there is no GPU, it makes Triton interpret.
from tests.runner.triton_steps import DEVICE, a_step, assert_close, expected, spec_of

# isort: split
from kvcore.spec import KVCacheSpec
from runner import Engine, EngineConfig, SamplingParams
from runner.attention import triton_kernels
from runner.attention.base import AttentionLayer
from runner.attention.triton_backend import INTERPRETER, TritonBackend
from runner.attention.triton_launch import plan_launches
from runner.errors import UnsupportedModelError
from tests.runner.paged_reference import RandomStep, random_step
from tests.runner.small_models import generated_by_transformers, random_prompts, small_model


def forward(
    step: RandomStep, *, backend: TritonBackend | None = None, plan: Any = None, **features: Any
) -> torch.Tensor:
    backend = backend or TritonBackend()
    group = step.batch.groups[0]
    if plan is None:
        plan = backend.plan(group)
    scale = group.spec.head_size**-0.5
    return backend.forward(step.query, step.key, step.value, step.kv_cache, plan, scale=scale, **features)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("kind", "far"), [("full", 0), ("sliding", 40), ("chunked", 60)])
def test_prefills_and_decodes_in_one_step_equal_the_reference(kind: str, far: int, dtype: str) -> None:
    lengths = [(0, 1), (0, 40), (700, 1), (17, 9), (16, 1), (100, 30), (31, 2)]
    step = a_step(1, spec_of(kind, reach=far), lengths, group_size=4, dtype=dtype)
    sinks = torch.linspace(-2, 2, 8, device=DEVICE)
    assert_close(forward(step, softcap=5.0, sinks=sinks), expected(step, softcap=5.0, sinks=sinks))


def test_a_prefix_computed_in_this_step_is_read_by_others_in_this_step() -> None:
    lengths = [(0, 60), (48, 5), (48, 1)]
    step = random_step(random.Random(2), spec_of(), lengths, num_query_heads=4, num_shared_blocks=3, device=DEVICE)
    assert_close(forward(step), expected(step))


def as_captured(step: RandomStep, bound: int, padded: list[int]) -> RandomStep:
    """The step as a captured one is laid out: upper bounds on the host, and rows that are padding."""
    group = step.batch.groups[0]
    seq_lens, slots = group.seq_lens.clone(), group.slot_mapping.clone()
    seq_lens[padded], slots[padded] = 0, -1
    group = replace(group, context_lens=[bound] * len(group.query_lens), seq_lens=seq_lens, slot_mapping=slots)
    return replace(step, batch=replace(step.batch, groups=(group,)))


@pytest.mark.parametrize("bound", [600, 100_000])
@pytest.mark.parametrize(("kind", "far"), [("full", 0), ("sliding", 300), ("chunked", 400)])
def test_a_captured_step_is_right_for_all_lengths_up_to_its_bound(kind: str, far: int, bound: int) -> None:
    whole = a_step(3, spec_of(kind, reach=far), [(n - 1, 1) for n in (1, 16, 17, 257, 512, 600)])
    reference = expected(whole)
    step = as_captured(whole, bound, padded=[1, 5])
    backend = TritonBackend()
    output = forward(step, backend=backend)
    (launch,) = plan_launches(
        whole.batch.groups[0].spec, [1] * 6, [bound] * 6, group_size=2, element_size=4, card=INTERPRETER
    )
    assert launch.num_tiles == 6
    kept = [0, 2, 3, 4]
    assert_close(output[kept], reference[kept])
    assert not output[[1, 5]].any()
    assert whole.kv_cache[0].isnan().all(), "padding was written somewhere"


@pytest.mark.gpu
def test_a_captured_step_replays_with_other_contents() -> None:
    backend = TritonBackend()
    one, other = (
        a_step(seed, spec_of(), [(n - 1, 1) for n in lengths], dtype="bfloat16")
        for seed, lengths in ((4, (700, 20, 300, 64)), (5, (33, 512, 1, 640)))
    )
    step = as_captured(one, 800, padded=[])
    group = step.batch.groups[0]
    step.kv_cache = torch.zeros(200, *one.kv_cache.shape[1:], dtype=torch.bfloat16, device=DEVICE)
    table = torch.zeros(4, 50, dtype=torch.int32, device=DEVICE)
    plan = replace(backend.plan(group), block_table=table)
    forward(step, backend=backend, plan=plan)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward(step, backend=backend, plan=plan)
    fresh = other.batch.groups[0]
    used = fresh.block_table
    table[:, : used.shape[1]] = used
    step.kv_cache[: other.kv_cache.shape[0]] = other.kv_cache
    for mine, theirs in (
        (group.seq_lens, fresh.seq_lens),
        (group.slot_mapping, fresh.slot_mapping),
        (step.query, other.query),
        (step.key, other.key),
        (step.value, other.value),
    ):
        mine.copy_(theirs)
    output.fill_(float("nan"))
    graph.replay()
    assert_close(output, expected(other))


def layer(spec: KVCacheSpec) -> AttentionLayer:
    return AttentionLayer("model.layers.3", spec, spec.num_kv_heads * 2)


@pytest.mark.parametrize(
    ("spec", "dtype", "words"),
    [
        (
            spec_of(block_size=48),
            torch.float16,
            "this layer's have 48, 3 times the block_size=16 of layers that store more bytes per token, and would with "
            "any block_size. Use attention_backend='torch'",
        ),
        (
            spec_of(block_size=8),
            torch.float16,
            "got block_size=8. Choose 16, 32, 64..., or use attention_backend='torch'",
        ),
        (
            spec_of(head_size=512),
            torch.float16,
            "heads of up to 256 elements; this one has 512. Use attention_backend=",
        ),
        (
            spec_of(),
            torch.float64,
            "computes in float32, float16, bfloat16; the model is in float64. Load it in one of",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_layer_and_the_remedy(
    spec: KVCacheSpec, dtype: torch.dtype, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^layer model\.layers\.3: the triton backend ") as caught:
        TritonBackend().check([layer(spec_of()), layer(spec)], device=torch.device(DEVICE), dtype=dtype)
    assert words in str(caught.value)


def test_pages_that_were_chosen_badly_are_refused_with_other_sizes() -> None:
    """All layers alike: it is the choice that is wrong, and not that their sizes differ."""
    layers = [layer(spec_of(block_size=48)), layer(spec_of(block_size=96))]
    with pytest.raises(UnsupportedModelError, match=r"got block_size=48\. Choose 16, 32, 64\.\.\., or use attention_b"):
        TritonBackend().check(layers, device=torch.device(DEVICE), dtype=torch.float16)


@pytest.mark.parametrize("head_size", [8, 16, 72, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_works_is_taken(head_size: int, dtype: torch.dtype) -> None:
    for kind in ("full", "sliding", "chunked"):
        spec = spec_of(kind, block_size=64, head_size=head_size, reach=100)
        TritonBackend().check([layer(spec)], device=torch.device(DEVICE), dtype=dtype)


def test_a_cpu_without_the_interpreter_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "INTERPRETED", False)
    with pytest.raises(
        UnsupportedModelError, match=r"needs a CUDA device; the model is on cpu\. Move it there, or use"
    ):
        TritonBackend().check([layer(spec_of())], device=torch.device("cpu"), dtype=torch.float16)


ARCHITECTURES = [
    "llama",
    pytest.param("gemma2-softcap", marks=pytest.mark.slow),
    pytest.param("gpt-oss-sinks", marks=pytest.mark.slow),
    pytest.param("llama4-chunks", marks=pytest.mark.slow),
    pytest.param("gemma3-hybrid", marks=pytest.mark.slow),
    pytest.param("gemma4-two-head-sizes", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whole_models_say_what_transformers_says(architecture: str) -> None:
    model = small_model(architecture)
    prompts = random_prompts([3, 40, 29], shared=17)
    told = generated_by_transformers(model, prompts, 4)
    config = EngineConfig(
        attention_backend="triton", num_blocks=60, max_num_batched_tokens=30, max_num_seqs=4, max_model_len=96
    )
    engine = Engine(copy.deepcopy(model).to(DEVICE), config=config)
    for kv_cache in engine.model_runner.kv_caches.values():
        kv_cache.fill_(float("nan"))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=4))
    assert [output.token_ids for output in outputs] == told
