"""Decode steps that are replayed give what steps that are launched anew give."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import runner.attention
import runner.model_runner
from runner import Engine, EngineConfig, SamplingParams
from runner.batch import SequenceSlice
from runner.decode_graphs import DecodeGraphs, capture_sizes
from runner.errors import EngineConfigError
from runner.step_inputs import StepInputs
from tests.runner.paged_reference import blocks_of
from tests.runner.recorded_ops import RecordedOps
from tests.runner.small_models import random_prompts, small_model
from tests.runner.table_backend import TableBackend

PROMPTS = random_prompts([40, 3, 61, 17, 30], shared=20)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def _table_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """With inputs and block tables in memory of their own, as on a device: what is not sent is not there."""
    monkeypatch.setitem(runner.attention.BACKENDS, "table", lambda device: TableBackend())
    monkeypatch.setattr(runner.model_runner, "StepInputs", partial(StepInputs, separate=True))


@pytest.fixture(scope="module", params=["llama", "gemma3-hybrid"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return small_model(request.param)


def engine_for(model: PreTrainedModel, **settings: Any) -> Engine:
    sizes: dict[str, Any] = {"num_blocks": 300, "block_size": 4, "max_model_len": 128, "max_num_seqs": 6}
    # What is recorded are torch's operations; the native product of packed weights is none.
    sizes |= {"attention_backend": "table", "packed_weights": False}
    return Engine(copy.deepcopy(model), config=EngineConfig(**(sizes | settings)))


def capturing_engine(model: PreTrainedModel, **settings: Any) -> tuple[Engine, RecordedOps]:
    engine, capture = engine_for(model, **settings), RecordedOps()
    engine.model_runner.capture_graphs(required=True, capture=capture)
    return engine, capture


def answers(engine: Engine) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def test_replayed_steps_give_the_same_tokens_as_launched_ones(model: PreTrainedModel) -> None:
    expected = answers(engine_for(model))
    engine, capture = capturing_engine(model)
    assert answers(engine) == expected
    assert capture.num_replays >= PARAMS.max_tokens - 1
    assert answers(engine) == expected, "now that the cache is warm"


def test_replays_follow_requests_that_come_go_and_are_preempted(model: PreTrainedModel) -> None:
    tight = {"num_blocks": 60, "growth_tokens": 0, "watermark": 0.0, "max_num_batched_tokens": 16}
    expected = answers(engine_for(model))
    engine, capture = capturing_engine(model, **tight)
    outputs: dict[str, list[int]] = {}
    names = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS[:3]]
    late = list(PROMPTS[3:])
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs[output.request_id] = output.token_ids
        if late:
            names.append(engine.add_request(late.pop(0), PARAMS))
    assert [outputs[name] for name in names] == expected
    assert capture.num_replays


def test_padding_writes_nowhere(model: PreTrainedModel) -> None:
    engine, _ = capturing_engine(model)
    for cache in engine.model_runner.kv_caches.values():
        assert not cache.any(), "capturing, all of it padding, wrote something"
    engine.generate(PROMPTS[:3], PARAMS)  # three of the four rows that are replayed
    for cache in engine.model_runner.kv_caches.values():
        assert not cache[0].any(), "the null block holds something"


def test_a_step_that_no_captured_one_can_stand_for_is_launched(model: PreTrainedModel) -> None:
    engine, capture = capturing_engine(model)
    engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    assert capture.num_replays == 0, "a prefill"
    engine.step()
    assert capture.num_replays == 1, "a decode"
    engine.add_request(PROMPTS[2], PARAMS)
    engine.step()
    assert capture.num_replays == 1, "a decode beside a prefill"
    graphs = engine.model_runner.graphs
    assert graphs is not None
    decode = SequenceSlice("a", [1], 5, None, samples=True)
    assert graphs.size_for([decode]) == 1
    assert graphs.size_for([decode] * 3) == 4
    assert graphs.size_for([decode] * 7) is None, "more than were captured"
    assert graphs.size_for([decode, replace(decode, samples=False)]) is None, "a piece of a prompt, of one token"


def test_steps_of_all_sizes_leave_their_logits_in_one_place(model: PreTrainedModel) -> None:
    engine, _ = capturing_engine(model)
    graphs = engine.model_runner.graphs
    assert graphs is not None
    tables = blocks_of(*([1] for _ in engine.kv_cache_config.kv_cache_groups))
    step = [SequenceSlice("a", [1], 0, tables, samples=True)]
    places = set()
    for size in graphs.sizes:
        places.add(graphs.run(step, size).data_ptr())
        step = [replace(step[0], new_blocks=None)]
    assert len(places) == 1


def test_the_start_report_says_what_was_captured(model: PreTrainedModel) -> None:
    engine, _ = capturing_engine(model)
    assert "CUDA graphs    decode steps of up to 6 requests, in 4 sizes" in engine.describe()


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("torch", "what the torch backend does depends on the step"),
        ("table", "the model is on cpu, not on a CUDA device"),
    ],
)
def test_what_cannot_be_captured_is_run_as_it_is_or_refused_if_it_was_demanded(backend: str, reason: str) -> None:
    model = small_model("llama")
    config: dict[str, Any] = {"attention_backend": backend, "num_blocks": 50}
    assert Engine(model, config=EngineConfig(**config)).model_runner.no_graphs_because == reason
    with pytest.raises(EngineConfigError, match=f"cuda_graphs=True, but {reason}: leave it out"):
        Engine(model, config=EngineConfig(cuda_graphs=True, **config))
    assert (
        Engine(model, config=EngineConfig(cuda_graphs=False, **config)).model_runner.no_graphs_because
        == "not asked for"
    )


def test_a_model_that_looks_at_values_is_run_as_it_is_and_says_so() -> None:
    model = small_model("llama")

    def look(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        assert not args[0].isnan().any()

    model.model.layers[1].register_forward_pre_hook(look)
    expected = answers(engine_for(model))
    engine = engine_for(model)
    engine.model_runner.capture_graphs(capture=RecordedOps())
    assert engine.model_runner.graphs is None
    assert "could not be captured (RuntimeError: a value was read" in engine.model_runner.no_graphs_because
    assert answers(engine) == expected


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 64, 100, 256, 300, 1024])
def test_captured_sizes_reach_to_the_largest_batch_and_waste_little(max_num_seqs: int) -> None:
    sizes = capture_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_num_seqs
    for batch in range(1, max_num_seqs + 1):
        padded = next(size for size in sizes if size >= batch)
        assert padded < 2 * batch + 1, "more than half of it is padding"


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid"])
def test_graphs_on_the_device_give_the_same_tokens(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = []
    run = DecodeGraphs.run
    monkeypatch.setattr(DecodeGraphs, "run", lambda self, *step: (replayed.append(step), run(self, *step))[1])
    model = small_model(architecture).to("cuda")
    settings: dict[str, Any] = {"attention_backend": "triton", "num_blocks": 300, "max_model_len": 128}
    eager = Engine(model, config=EngineConfig(cuda_graphs=False, **settings))
    expected = answers(eager)
    assert not replayed
    engine = Engine(model, config=EngineConfig(cuda_graphs=True, **settings))
    assert answers(engine) == expected
    assert len(replayed) >= PARAMS.max_tokens - 1
