"""Tokens a second of the engine on a random model of a billion parameters, beside transformers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
)

from kvcore.spec import cdiv
from runner import Engine, EngineConfig, SamplingParams
from runner.attention import make_backend
from tests.gpu.refusing import refusing
from tests.gpu.work import Measurement, Record, Settings

Prompts = list[list[int]]


@dataclass(frozen=True)
class Load:
    """A model and what it is asked for.

    Args:
        config: Of the model, in the shape of Llama.
        requests: Numbers of requests that come at once.
        prompt_tokens: Of each.
        new_tokens: Of each.
        repetitions: Most, of which the median counts.
    """

    config: dict[str, Any]
    requests: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    repetitions: int


_ENDLESS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LOAD = Load(
    {
        "vocab_size": 32_768,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        **_ENDLESS,
    },
    requests=(64, 1),
    prompt_tokens=128,
    new_tokens=128,
    repetitions=3,
)
SMALL_LOAD = Load(
    {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        **_ENDLESS,
    },
    requests=(3, 1),
    prompt_tokens=8,
    new_tokens=3,
    repetitions=1,
)

CACHE_BYTES = 4 << 30
SMALL_CACHE_BYTES = 4 << 20

ENOUGH_SECONDS = 2.0
"""Of repetitions, after which there are no more."""


def load_of(settings: Settings) -> Load:
    """What is asked for."""
    return SMALL_LOAD if settings.tiny else LOAD


def measurements(settings: Settings) -> list[Measurement]:
    """The engine with each backend, with and without CUDA graphs; then transformers, which may fail or hang."""
    found: list[Measurement] = []
    for name in sorted(settings.backends, key=lambda name: name == "torch"):  # the slowest last
        for with_graphs in (True, False) if make_backend(name, settings.device).supports_graphs else (False,):
            title = f"engine, {name}{', CUDA graphs' if with_graphs else ''}"
            found.append(Measurement(title, partial(_measure_engine, settings, name, with_graphs)))
    transformers = [
        Measurement("transformers, generate_batch", partial(_measure_generate_batch, settings)),
        Measurement("transformers, generate", partial(_measure_generate, settings)),
    ]
    return [*found[:1], *transformers, *found[1:]]  # in case time runs out


@refusing
def _measure_engine(settings: Settings, name: str, with_graphs: bool) -> Record:
    load = load_of(settings)
    engine = Engine(
        _model(settings),
        None,
        EngineConfig(
            attention_backend=name,
            cuda_graphs=None if with_graphs else False,
            kv_cache_memory=SMALL_CACHE_BYTES if settings.tiny else CACHE_BYTES,
            max_model_len=load.prompt_tokens + load.new_tokens,
            max_num_seqs=max(load.requests),
        ),
    )
    record: Record = {"way": f"engine, {name}", "backend": name, "graphs": engine.model_runner.graphs is not None}
    params = SamplingParams(max_tokens=load.new_tokens, ignore_eos=True)

    def serve(prompts: Prompts) -> float:
        start = time.perf_counter()
        engine.generate(prompts, params)
        return time.perf_counter() - start

    record |= _speeds(settings, serve)
    if with_graphs and engine.model_runner.graphs is None:
        record["note"] += f"; without graphs: {engine.model_runner.no_graphs_because}"
    return record


def _measure_generate(settings: Settings) -> Record:
    """``generate`` of all prompts as one tensor: they are of one length, so nothing is padded."""
    model, load = _model(settings), load_of(settings)
    model.set_attn_implementation("sdpa")

    def generate(prompts: Prompts) -> float:
        ids = torch.tensor(prompts, device=settings.device)
        _wait(settings)
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=load.new_tokens,
                min_new_tokens=load.new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        _wait(settings)
        assert output.shape[1] == load.prompt_tokens + load.new_tokens
        return time.perf_counter() - start

    return {"way": "transformers, generate", "graphs": False} | _speeds(settings, generate)


def _measure_generate_batch(settings: Settings) -> Record:
    """``generate_batch``, transformers' continuous batching.

    With its defaults, but a cache twice as large as needed, and as many tokens a step as the engine takes: left to
    itself it makes buffers for as many as there is memory for. By its own clock: what it sets up before it takes the
    prompts does not count.
    """
    model, load = _model(settings), load_of(settings)
    model.set_attn_implementation("sdpa")
    generation = GenerationConfig(max_new_tokens=load.new_tokens, do_sample=False, pad_token_id=0)

    def serve(prompts: Prompts) -> float:
        batching = ContinuousBatchingConfig()
        # The name changed between versions of transformers.
        page = batching.page_size if hasattr(batching, "page_size") else batching.block_size
        batching.max_batch_tokens = 64 if settings.tiny else EngineConfig().max_num_batched_tokens
        batching.num_blocks = 2 * len(prompts) * cdiv(load.prompt_tokens + load.new_tokens, page)
        results = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching, record_timestamps=True
        )
        outputs = list(results.values())
        if failures := [output.error for output in outputs if output.error]:
            raise RuntimeError(f"generate_batch failed: {failures[0]}")
        if found := [
            len(output.generated_tokens) for output in outputs if len(output.generated_tokens) != load.new_tokens
        ]:
            raise RuntimeError(f"generate_batch gave {found[0]} tokens instead of {load.new_tokens}")
        return max(output.timestamps[-1] for output in outputs) - min(output.created_time for output in outputs)

    return {"way": "transformers, generate_batch", "graphs": None} | _speeds(settings, serve)


def _speeds(settings: Settings, serve: Callable[[Prompts], float]) -> Record:
    """Tokens a second for each number of requests, the median; the time for the prompts counts.

    Args:
        settings: For the load.
        serve: Seconds for prompts that all come at once.
    """
    load, seconds = load_of(settings), {}
    seed = 0
    for requests in load.requests:
        times = []
        for repetition in range(1 + load.repetitions):
            # New prompts each time: nothing is found in a cache.
            generator = torch.Generator().manual_seed(seed := seed + 1)
            shape = (requests, load.prompt_tokens)
            prompts = torch.randint(load.config["vocab_size"], shape, generator=generator).tolist()
            took = serve(prompts)
            if repetition or not settings.is_timed:  # the first warms up
                times.append(took)
            if not settings.is_timed or sum(times) > ENOUGH_SECONDS:
                break
        seconds[str(requests)] = median(times)
    record: Record = {"prompt_tokens": load.prompt_tokens, "new_tokens": load.new_tokens}
    if not settings.is_timed:
        return record | {"note": "it runs; times on a CPU mean nothing"}
    speeds = {requests: int(requests) * load.new_tokens / took for requests, took in seconds.items()}
    told = ", ".join(f"{speed:,.0f} tokens/s with {requests}" for requests, speed in speeds.items())
    return record | {"seconds": seconds, "tokens_per_second": speeds, "note": told}


@cache
def _model(settings: Settings) -> PreTrainedModel:
    """Random weights, made on the device."""
    torch.manual_seed(0)
    config = LlamaConfig(**load_of(settings).config)
    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if settings.is_timed else torch.float32)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model.eval()


def _wait(settings: Settings) -> None:
    if settings.is_timed:
        torch.cuda.synchronize()
