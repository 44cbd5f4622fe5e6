"""Sequences with many new tokens, a prefill or a chunk of one: each is attended on its own, in torch operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvcore.spec import FullAttentionSpec, KVCacheSpec
from runner.attention.base import visible_from, visible_from_each
from runner.attention.cohorts import cache_rows
from runner.attention.torch_softmax import GatherBuffer, attend, with_sinks
from runner.batch import GroupBatch

FEW_QUERIES = 32
"""Most new tokens of a sequence that is attended together with others."""

QUERIES_PER_PIECE = 512
"""Most queries attended at once where a mask is needed: bounds the mask, and with it how far a window piece reads."""


@dataclass(frozen=True)
class Piece:
    """Queries of one sequence that are attended together.

    Args:
        queries: Which of the step's T tokens.
        rows: ``[2 * S]``, rows of the cache with the keys they read, then with the values; None: those of the very same
            tokens, straight from the projection.
        mask: ``[queries, S]``, True where a key may be read; None: each query reads the keys up to its own.
    """

    queries: slice
    rows: torch.Tensor | None
    mask: torch.Tensor | None


def plan_pieces(batch: GroupBatch) -> tuple[list[int], list[Piece]]:
    """The sequences with few new tokens, as indices into the batch, and the pieces of all others."""
    few = [i for i, n in enumerate(batch.query_lens) if n <= FEW_QUERIES]
    return few, [piece for i, n in enumerate(batch.query_lens) if n > FEW_QUERIES for piece in _pieces(batch, i)]


def attend_pieces(
    pieces: Sequence[Piece],
    query: torch.Tensor,  # [T, Hkv, G, D]
    key: torch.Tensor,  # [T, Hkv, D]
    value: torch.Tensor,  # [T, Hkv, D]
    kv_cache: torch.Tensor,  # [num_blocks, 2, block_size, Hkv, D]
    output: torch.Tensor,  # [T, Hkv, G, D]
    buffer: GatherBuffer,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [Hkv, G, 1]
) -> None:
    """Writes the output of the queries of all pieces."""
    for piece in pieces:
        if piece.rows is None:
            keys, values = key[piece.queries], value[piece.queries]  # [S, Hkv, D] each
        else:
            keys, values = buffer.gather(kv_cache.flatten(0, 2), piece.rows)
        output[piece.queries] = _attend_piece(
            query[piece.queries], keys, values, piece.mask, scale=scale, softcap=softcap, sinks=sinks
        )


def _pieces(batch: GroupBatch, index: int) -> Iterator[Piece]:
    """The prefill of one sequence, cut where a mask would get too large."""
    spec, query_len, context_len = batch.spec, batch.query_lens[index], batch.context_lens[index]
    start, first_position = batch.query_starts[index], context_len - query_len
    if first_position == 0 and visible_from(spec, context_len - 1) == 0:
        yield Piece(slice(start, start + query_len), None, None)
        return
    block_ids = torch.tensor(batch.block_ids[index])
    for begin in range(first_position, context_len, QUERIES_PER_PIECE):
        stop = min(begin + QUERIES_PER_PIECE, context_len)
        seen = torch.arange(visible_from(spec, begin), stop)  # [S], positions
        slots = block_ids[seen // spec.block_size] * spec.block_size + seen % spec.block_size
        yield Piece(
            queries=slice(start + begin - first_position, start + stop - first_position),
            rows=cache_rows(slots, spec.block_size).to(batch.device, non_blocking=True),
            mask=_causal_mask(spec, torch.arange(begin, stop), seen).to(batch.device, non_blocking=True),
        )


def _causal_mask(spec: KVCacheSpec, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """``[queries, keys]``, True where the query reads the key."""
    mask = key_positions <= query_positions[:, None]
    if not isinstance(spec, FullAttentionSpec):
        mask &= key_positions >= visible_from_each(spec, query_positions)[:, None]
    return mask


def _attend_piece(
    query: torch.Tensor,  # [Q, Hkv, G, D]
    keys: torch.Tensor,  # [S, Hkv, D]
    values: torch.Tensor,  # [S, Hkv, D]
    mask: torch.Tensor | None,  # [Q, S]
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [Hkv, G, 1]
) -> torch.Tensor:
    """``[Q, Hkv, G, D]``."""
    group_size = query.shape[2]
    query = query.permute(1, 2, 0, 3)  # [Hkv, G, Q, D]
    # Key heads play the batch, so that the query heads of a group read one key head by a stride of 0 instead of a copy.
    keys, values = (t.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1) for t in (keys, values))  # [Hkv, G, S, D]
    if softcap is None and sinks is None:
        output = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        return output.permute(2, 0, 1, 3)
    parts = []
    for begin in range(0, query.shape[2], QUERIES_PER_PIECE):
        part = query[:, :, begin : begin + QUERIES_PER_PIECE]  # [Hkv, G, Q, D], Q of this part from here
        num_queries = part.shape[2]
        if mask is None:
            visible = torch.ones(num_queries, begin + num_queries, dtype=torch.bool, device=query.device).tril(begin)
        else:
            visible = mask[begin : begin + num_queries]
        seen = visible.shape[1]
        hidden = torch.zeros(visible.shape, device=query.device).masked_fill_(~visible, float("-inf"))
        output, logsumexp = attend(part, keys[:, :, :seen], values[:, :, :seen], hidden, scale=scale, softcap=softcap)
        parts.append(with_sinks(output, logsumexp, sinks))
    return torch.cat(parts, 2).permute(2, 0, 1, 3)
