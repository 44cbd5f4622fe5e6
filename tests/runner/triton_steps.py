"""Random steps for the Triton kernels and backend, on a GPU where there is one, in Triton's interpreter elsewhere.

Import this before anything that imports Triton: where there is no CUDA device it asks for the interpreter.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Whoever imports this is about Triton.
pytest.importorskip("triton", reason="Triton is not installed; it has wheels for Linux only")

from kvcore.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from runner.attention.triton_backend import reach
from runner.attention.triton_kernels import INTERPRETED
from runner.attention.triton_launch import Launch
from runner.attention.triton_ops import paged_attention, store_kv
from runner.attention.triton_shapes import TileShape, decode_block_m
from tests.runner.paged_reference import RandomStep, random_step, reference_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not INTERPRETED:
    raise RuntimeError("Triton was imported, perhaps by transformers, before TRITON_INTERPRET=1 was set")

TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
"""Largest difference from float64 for values of the normal distribution: rounding of weights and of the output."""


def spec_of(
    kind: str = "full", *, block_size: int = 16, num_kv_heads: int = 2, head_size: int = 32, reach: int = 0
) -> KVCacheSpec:
    if kind == "sliding":
        return SlidingWindowSpec(block_size, num_kv_heads, head_size, "float32", reach)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(block_size, num_kv_heads, head_size, "float32", reach)
    return FullAttentionSpec(block_size, num_kv_heads, head_size, "float32")


def a_step(
    seed: int, spec: KVCacheSpec, lengths: list[tuple[int, int]], *, group_size: int = 2, dtype: str = "float32"
) -> RandomStep:
    """A step of sequences of (past, new) tokens whose unused cache is NaN."""
    return random_step(
        random.Random(seed),
        spec,
        lengths,
        num_query_heads=spec.num_kv_heads * group_size,
        dtype=TYPES[dtype],
        device=DEVICE,
    )


def decode_launch(step: RandomStep, *, block_n: int = 32, num_splits: int = 1) -> Launch:
    """Serves the sequences whose queries fit in one small tile."""
    group = step.batch.groups[0]
    group_size = step.query.shape[1] // group.spec.num_kv_heads
    block_m = decode_block_m(group_size)
    few = [n for n in group.query_lens if n <= block_m // group_size]
    return Launch(
        TileShape(block_m, block_n, num_warps=4, num_stages=2),
        num_tiles=len(group.query_lens),
        num_splits=num_splits,
        tile_is_sequence=True,
        most_queries=max(few, default=1),
    )


def prefill_launch(
    step: RandomStep, *, block_m: int = 16, block_n: int = 32, num_splits: int = 1, least_queries: int = 1
) -> Launch:
    """Serves the sequences with so many queries and more, in as many tiles as it takes."""
    group = step.batch.groups[0]
    queries = block_m // (step.query.shape[1] // group.spec.num_kv_heads)
    return Launch(
        TileShape(block_m, block_n, num_warps=4, num_stages=2),
        num_tiles=sum(group.query_lens) // queries + len(group.query_lens),
        num_splits=num_splits,
        least_queries=least_queries,
        most_queries=max(group.query_lens),
    )


def attended(
    step: RandomStep,
    launch: Launch,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the kernels make of a step: ``[T, Hq, D]``, NaN where nothing was written."""
    group = step.batch.groups[0]
    store_kv(step.key, step.value, step.kv_cache, group.slot_mapping)
    out = torch.full(step.query.shape, float("nan"), dtype=step.query.dtype, device=DEVICE)
    paged_attention(
        step.query,
        step.kv_cache,
        out,
        block_table=group.block_table if block_table is None else block_table,
        query_start_loc=group.query_start_loc,
        seq_lens=group.seq_lens if seq_lens is None else seq_lens,
        launch=launch,
        scale=group.spec.head_size**-0.5,
        softcap=softcap,
        sinks=sinks,
        **reach(group.spec),
    )
    return out


def expected(step: RandomStep, *, softcap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """The reference, ``[T, Hq, D]`` in float64."""
    spec = step.batch.groups[0].spec
    return reference_attention(step, spec, scale=spec.head_size**-0.5, softcap=softcap, sinks=sinks)


def assert_close(output: torch.Tensor, reference: torch.Tensor) -> None:
    """Equal up to rounding of the output's type; NaN is not equal to anything."""
    assert output.shape == reference.shape
    difference = float((output.double() - reference).abs().max())
    assert difference <= TOLERANCE[output.dtype], f"off by {difference} in {output.dtype}"
