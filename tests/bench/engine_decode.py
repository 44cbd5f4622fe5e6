"""What one decode step costs as contexts grow, alone and together, with and without a shared prefix.

Steps are run directly, on block tables made for the purpose: what the cache holds does not change what it costs, so
that nothing has to be computed first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from transformers import PreTrainedModel

from kvcore import KVCacheBlocks
from runner import Engine, EngineConfig
from runner.batch import SequenceSlice

BLOCK_SIZE = 16
CONTEXTS = (128, 512, 2048, 4096, 8192)
"""Tokens, the one that is computed included."""

TOGETHER = 16
ALONE = "1 sequence"
MOST_TOKENS = 16 * 4096
"""Tokens in the cache at most, over all sequences: a bound on memory."""

Series = dict[str, dict[str, float]]
"""Milliseconds of a step by series and number of tokens, as JSON has them."""


def step_times(model: PreTrainedModel, *, contexts: Sequence[int] = CONTEXTS, repetitions: int = 5) -> Series:
    """Medians. Every sequence computes one token at the end of its context.

    Args:
        model: The model; an engine takes it over.
        contexts: Tokens of each sequence.
        repetitions: Steps timed for each number, after one that is not.
    """
    longest = min(max(contexts), model.config.max_position_embeddings)
    contexts = [context for context in contexts if context <= longest]
    series: Series = {}
    for name, tables in _tables(contexts):
        num_blocks = 1 + max(max(map(max, table)) for table in tables.values())
        series[name] = _times(model, tables, num_blocks, repetitions)
        if name == ALONE:
            series[f"{ALONE}, cache 8 times as large"] = _times(model, tables, 8 * num_blocks, repetitions)
    return series


def _tables(contexts: Sequence[int]) -> Iterator[tuple[str, dict[int, list[list[int]]]]]:
    """For each series the block tables of its sequences, by number of tokens."""
    alone = {context: [_blocks(1, context)] for context in contexts}
    apart = {
        context: [_blocks(1 + i * (context // BLOCK_SIZE), context) for i in range(TOGETHER)]
        for context in contexts
        if TOGETHER * context <= MOST_TOKENS
    }
    sharing = {
        # All but the last block, which is each sequence's own.
        context: [[*_blocks(1, context)[:-1], context // BLOCK_SIZE + i] for i in range(TOGETHER)]
        for context in contexts
    }
    yield ALONE, alone
    yield f"{TOGETHER} sequences, nothing shared", apart
    yield f"{TOGETHER} sequences, all but a block shared", sharing


def _blocks(first: int, context: int) -> list[int]:
    return list(range(first, first + context // BLOCK_SIZE))


def _times(
    model: PreTrainedModel, tables: dict[int, list[list[int]]], num_blocks: int, repetitions: int
) -> dict[str, float]:
    longest = max(tables)
    engine = Engine(model, None, EngineConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=longest))
    for cache in engine.model_runner.kv_caches.values():
        # Memory that was never written takes no time to read.
        cache.fill_(0.5)
    pool = engine.manager.block_pool.blocks
    times = {}
    for context, blocks in tables.items():
        names = [str(i) for i in range(len(blocks))]
        step = [
            SequenceSlice(name, [1], context - 1, KVCacheBlocks(([pool[i] for i in table],)), samples=True)
            for name, table in zip(names, blocks, strict=True)
        ]
        engine.model_runner.execute(step)
        step = [replace(sequence, new_blocks=None) for sequence in step]
        seconds = []
        for _ in range(repetitions):
            start = time.perf_counter()
            engine.model_runner.execute(step)
            seconds.append(time.perf_counter() - start)
        engine.model_runner.forget(names)
        times[str(context)] = median(seconds) * 1e3
    return times
