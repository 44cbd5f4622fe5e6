"""Ways to serve a batch of prompts with one model: what transformers has, and the engine.

Each takes token ids and generates the same number of tokens for every prompt, greedily, whatever the tokens are. All
prompts are there when the clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from runner import Engine, SamplingParams

Prompts = Sequence[list[int]]


@dataclass(frozen=True)
class Served:
    """What became of the prompts. Times are seconds since they all arrived.

    Args:
        seconds: Until the last token.
        first_tokens: Until each prompt's first token.
        tokens: The generated tokens of each prompt.
        num_cached_tokens: Prompt tokens found in the cache; None if that is not told.
    """

    seconds: float
    first_tokens: list[float]
    tokens: list[list[int]]
    num_cached_tokens: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of the outputs; the time for the prompts counts."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of a step after the first tokens are there; only where all prompts are served together."""
        return (self.seconds - max(self.first_tokens)) / (len(self.tokens[0]) - 1)


def by_engine(engine: Engine, prompts: Prompts, max_tokens: int) -> Served:
    """All prompts at once, through the engine as it is, with what is in its cache."""
    start = time.perf_counter()
    outputs = engine.generate(list(prompts), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    seconds = time.perf_counter() - start
    return Served(
        seconds,
        [output.metrics.first_token - start for output in outputs if output.metrics.first_token is not None],
        [output.token_ids for output in outputs],
        sum(output.num_cached_tokens for output in outputs),
    )


def by_generate(model: PreTrainedModel, prompts: Prompts, max_tokens: int) -> Served:
    """One prompt after the other, through ``model.generate``."""
    config = _greedy(model, max_tokens)
    first_tokens, tokens = [], []
    start = time.perf_counter()
    for prompt in prompts:
        streamer = _FirstToken()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer
            )
        tokens.append(output[0, len(prompt) :].tolist())
        first_tokens.append(streamer.time - start)
    return Served(time.perf_counter() - start, first_tokens, tokens)


def by_generate_batch(
    model: PreTrainedModel, prompts: Prompts, max_tokens: int, *, by_defaults: bool
) -> tuple[Served, Served]:
    """All prompts at once, through ``model.generate_batch``, transformers' continuous batching.

    Args:
        model: The model.
        prompts: Token ids.
        max_tokens: For each prompt.
        by_defaults: The size of its cache too, nine tenths of the machine's memory. Otherwise, it has room for all
            prompts twice over.

    Returns:
        Two views of one call. By its own clock, which starts when it has taken the prompts: what it sets up before does
        not count. And by the caller's, for whom the call begins when it is made and ends when it returns.
    """
    config = _greedy(model, max_tokens)
    batching = ContinuousBatchingConfig()
    if not by_defaults:
        # The name changed between versions of transformers.
        page = batching.page_size if hasattr(batching, "page_size") else batching.block_size
        batching.num_blocks = 2 * sum(-(-(len(prompt) + max_tokens) // page) for prompt in prompts)
    called = time.perf_counter()
    results = model.generate_batch(
        list(prompts),
        generation_config=config,
        continuous_batching_config=batching,
        record_timestamps=True,
    )
    outputs = list(results.values())  # in the order of the prompts
    if len(outputs) < len(prompts):
        raise RuntimeError(f"generate_batch answered {len(outputs)} of {len(prompts)} prompts")
    if failures := [output.error for output in outputs if output.error]:
        raise RuntimeError(f"generate_batch failed: {failures[0]}")
    returned = time.perf_counter()
    start = min(output.created_time for output in outputs)  # by the same clock
    first_tokens = [output.timestamps[0] for output in outputs]
    tokens = [list(output.generated_tokens) for output in outputs]
    own = Served(max(output.timestamps[-1] for output in outputs) - start, [t - start for t in first_tokens], tokens)
    return own, Served(returned - called, [t - called for t in first_tokens], tokens)


def _greedy(model: PreTrainedModel, max_tokens: int) -> GenerationConfig:
    """Makes the model ready for transformers' own generation, of so many tokens whatever they are."""
    model.set_attn_implementation("sdpa")
    # What a config leaves open is taken from the model's own.
    model.generation_config.eos_token_id = None
    return GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)


class _FirstToken(BaseStreamer):
    """Notes when the first token comes. What ``generate`` puts first is the prompt."""

    def __init__(self) -> None:
        self.time = 0.0
        self._puts = 0

    def put(self, value: Any) -> None:
        self._puts += 1
        if self._puts == 2:
            self.time = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to do."""
