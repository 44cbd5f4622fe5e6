"""The Triton kernels as functions of tensors: the store, and paged attention."""

from __future__ import annotations

import torch
import triton.language as tl

from runner.attention.triton_kernels import INTERPRETED, LOG2_E, attention_kernel, join_kernel
from runner.attention.triton_launch import MIN_SPLIT_KEYS, Launch
from runner.attention.triton_shapes import padded_head_size, power_of_two_from
from runner.attention.triton_store_kernel import store_kernel

TRITON_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def store_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write a step's keys and values to their slots.

    Args:
        key: ``[T, Hkv, D]``, the last dimension contiguous.
        value: As ``key``.
        kv_cache: ``[num_blocks, 2, block_size, Hkv, D]``, contiguous.
        slot_mapping: ``[T]`` int64; -1: nowhere. No slot twice.
    """
    num_tokens, num_kv_heads, head_size = key.shape
    row = num_kv_heads * head_size
    block = power_of_two_from(row)
    store_kernel[(num_tokens,)](
        key,
        value,
        kv_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        ROW=row,
        HEAD_SIZE=head_size,
        PAGE=kv_cache.shape[2],
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 8),
    )


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    launch: Launch,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int = 0,
    chunk: int = 0,
    compile_only: bool = False,
) -> None:
    """Attention of the sequences that ``launch`` serves, over what the cache holds.

    Args:
        query: ``[T, Hq, D]``, the last dimension contiguous.
        kv_cache: ``[num_blocks, 2, block_size, Hkv, D]``, contiguous.
        out: ``[T, Hq, D]``, contiguous; rows of sequences that are not served are left as they are.
        block_table: ``[B, W]`` int32, rows contiguous. Entries for keys that nothing reads may hold anything.
        query_start_loc: ``[B + 1]`` int32.
        seq_lens: ``[B]`` int32, tokens in the cache, those of the step included; 0: reads nothing, gives zeros.
        launch: See :mod:`runner.attention.triton_launch`.
        scale: Factor on the scores.
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        sinks: ``[Hq]``, one more score per head, whose share of the softmax is dropped.
        window: A query reads itself and the ``window - 1`` keys before it; 0: no window.
        chunk: A query reads back to the start of its chunk of so many positions; 0: no chunks.
        compile_only: Compile what the call needs, and do not run it.
    """
    _, num_query_heads, head_size = query.shape
    page, num_kv_heads = kv_cache.shape[2:4]
    shape, splits = launch.shape, launch.num_splits
    programs = launch.num_tiles * num_kv_heads
    last_tile = launch.first_tile + launch.num_tiles - 1
    to_powers_of_two = scale * LOG2_E.value if softcap is None else 2 * scale * LOG2_E.value / softcap
    group = num_query_heads // num_kv_heads
    partial_out = partial_sums = None
    if splits > 1:
        partial_out = query.new_empty((programs, splits, shape.block_m, head_size), dtype=torch.float32)
        partial_sums = query.new_empty((programs, splits, shape.block_m), dtype=torch.float32)
    # The interpreter multiplies with numpy, which has no bfloat16.
    dot_type = tl.float32 if INTERPRETED else TRITON_TYPES[kv_cache.dtype]
    attention_kernel.run(
        query,
        kv_cache,
        out,
        partial_out,
        partial_sums,
        sinks,
        block_table,
        query_start_loc,
        seq_lens,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        seq_lens.shape[0],
        last_tile,
        splits,
        launch.least_queries,
        to_powers_of_two,
        0.0 if softcap is None else softcap * LOG2_E.value,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        PAGE=page,
        WINDOW=window,
        CHUNK=chunk,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None and splits == 1,
        SPLIT=splits > 1,
        MIN_SPLIT_TILES=max(MIN_SPLIT_KEYS // shape.block_n, 1),
        TILE_IS_SEQUENCE=launch.tile_is_sequence,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_D=padded_head_size(head_size),
        DOT_TYPE=dot_type,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        grid=(programs, splits),
        warmup=compile_only,
    )
    if splits > 1:
        rows = min(launch.most_queries, shape.block_m // group) * group
        join_kernel.run(
            partial_out,
            partial_sums,
            out,
            sinks,
            query_start_loc,
            seq_lens.shape[0],
            last_tile,
            splits,
            launch.least_queries,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_SIZE=head_size,
            HAS_SINKS=sinks is not None,
            TILE_IS_SEQUENCE=launch.tile_is_sequence,
            BLOCK_M=shape.block_m,
            BLOCK_D=padded_head_size(head_size),
            BLOCK_S=min(power_of_two_from(splits), 32),
            num_warps=4,
            grid=(programs, rows),
            warmup=compile_only,
        )
