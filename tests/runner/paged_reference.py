"""Attention as the contract describes it, one query at a time in float64, and random steps to try it on."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kvcore.blocks import KVCacheBlock
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    cdiv,
)
from runner.attention.base import AttentionBackend, visible_from
from runner.batch import Batch, SequenceSlice
from runner.step_inputs import make_batch


def blocks_of(*tables: list[int]) -> KVCacheBlocks:
    """Blocks of these ids, a list for each group, as a manager returns them."""
    return KVCacheBlocks(tuple([KVCacheBlock(block_id) for block_id in table] for table in tables))


@dataclass
class RandomStep:
    """Sequences with a past, and what they compute now.

    ``kv_cache`` holds the past and NaN everywhere else. ``keys`` and ``values`` are each sequence's whole history, the
    step's tokens included.
    """

    batch: Batch
    kv_cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def random_step(
    rng: random.Random,
    spec: KVCacheSpec,
    lengths: list[tuple[int, int]],
    *,
    num_query_heads: int,
    num_shared_blocks: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> RandomStep:
    """A step of sequences of (past, new) tokens in blocks anywhere; the first ``num_shared_blocks`` are common to all.

    Blocks that no query of a sequence reads are replaced by the null block, as the books do for windows. The first
    sequence may compute shared tokens in this step, which the others read as their past.
    """
    generator = torch.Generator().manual_seed(rng.getrandbits(32))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    block_size, shape = spec.block_size, (spec.num_kv_heads, spec.head_size)
    num_blocks = 2 + num_shared_blocks + sum(cdiv(past + new, block_size) for past, new in lengths)
    free = list(range(1, num_blocks))
    rng.shuffle(free)
    shared = [free.pop() for _ in range(num_shared_blocks)]
    kv_cache = torch.full((num_blocks, 2, block_size, *shape), float("nan"), dtype=dtype, device=device)
    shared_history = noise(2, num_shared_blocks * block_size, *shape)
    not_yet = range(lengths[0][0], num_shared_blocks * block_size)
    sequences, keys, values = [], [], []
    for past, new in lengths:
        total = past + new
        assert min(past if sequences else total, total) >= num_shared_blocks * block_size
        own = noise(2, total - shared_history.shape[1], *shape)
        history = torch.cat((shared_history, own), 1)  # [2, total, Hkv, D]
        table = shared + [free.pop() for _ in range(cdiv(total, block_size) - num_shared_blocks)]
        unread = visible_from(spec, past) // block_size
        table[:unread] = [0] * unread
        for position in range(unread * block_size, past):
            if position in not_yet:
                continue
            kv_cache[table[position // block_size], :, position % block_size] = history[:, position]
        name = f"sequence-{len(sequences)}"
        sequences.append(SequenceSlice(name, [7] * new, past, blocks_of(table), samples=True))
        keys.append(history[0])
        values.append(history[1])
    batch = make_batch(sequences, KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], spec)]), device)
    num_tokens = sum(new for _, new in lengths)
    return RandomStep(
        batch=batch,
        kv_cache=kv_cache,
        query=noise(num_tokens, num_query_heads, spec.head_size),
        key=torch.cat([k[past:] for k, (past, _) in zip(keys, lengths, strict=True)]),
        value=torch.cat([v[past:] for v, (past, _) in zip(values, lengths, strict=True)]),
        keys=keys,
        values=values,
    )


def reference_attention(
    step: RandomStep,
    spec: KVCacheSpec,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[T, Hq, D]`` in float64."""
    group = step.batch.groups[0]
    outputs = []
    token = 0
    for query_len, context_len, keys, values in zip(
        group.query_lens, group.context_lens, step.keys, step.values, strict=True
    ):
        repeats = step.query.shape[1] // keys.shape[1]
        for position in range(context_len - query_len, context_len):
            seen = slice(visible_from(spec, position), position + 1)
            k = keys[seen].double().repeat_interleave(repeats, 1)  # [S, Hq, D]
            v = values[seen].double().repeat_interleave(repeats, 1)
            scores = torch.einsum("hd,shd->hs", step.query[token].double(), k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), 1)
            weights = scores.softmax(-1)[:, : k.shape[0]]
            outputs.append(torch.einsum("hs,shd->hd", weights, v))
            token += 1
    return torch.stack(outputs)


def spec_of(
    kind: str, block_size: int, num_kv_heads: int, head_size: int, reach: int, dtype: str = "float32"
) -> KVCacheSpec:
    """Full attention, windows or chunks of ``reach`` tokens."""
    if kind == "sliding":
        return SlidingWindowSpec(block_size, num_kv_heads, head_size, dtype, reach)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(block_size, num_kv_heads, head_size, dtype, reach)
    return FullAttentionSpec(block_size, num_kv_heads, head_size, dtype)


def difference(
    backend: AttentionBackend,
    seed: int,
    spec: KVCacheSpec,
    lengths: list[tuple[int, int]],
    *,
    group_size: int = 1,
    num_shared_blocks: int = 0,
    softcap: float | None = None,
    with_sinks: bool = False,
) -> float:
    """Largest difference from the reference on one random step; NaN if anything unused came through."""
    step = random_step(
        random.Random(seed),
        spec,
        lengths,
        num_query_heads=spec.num_kv_heads * group_size,
        num_shared_blocks=num_shared_blocks,
        dtype=getattr(torch, spec.dtype),
    )
    sinks = torch.linspace(-2, 2, spec.num_kv_heads * group_size) if with_sinks else None
    scale = spec.head_size**-0.5
    output = backend.forward(
        step.query, step.key, step.value, step.kv_cache, backend.plan(step.batch.groups[0]),
        scale=scale, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    expected = reference_attention(step, spec, scale=scale, softcap=softcap, sinks=sinks)
    assert output.shape == expected.shape
    assert output.dtype == step.query.dtype
    return float((output.double() - expected).abs().max())
