"""Paged attention in plain torch operations: the default on a CPU, and what the other backends are compared with.

Two kinds of work in a step. A sequence with many new tokens (a prefill, or a chunk of one) is attended on its own.
Sequences with few (decodes, and what is left of a prompt whose beginning was cached) are attended together, in as few
operations as their tables allow; a run of blocks that they share is read once for all of them. What they read for
themselves is attended beside it, and the two results are joined by the sums that their softmaxes divide by: exactly
what one softmax over everything gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from kvcore.spec import FullAttentionSpec, KVCacheSpec
from runner.attention.base import AttentionBackend, AttentionLayer, visible_from, visible_from_each
from runner.attention.cohorts import Cohort, cache_rows, plan_cohorts
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


@dataclass(frozen=True)
class TorchPlan:
    """A step for one group.

    Args:
        written: ``[2, T]``, rows of the cache that the step's keys and values go to.
        pieces: Sequences with many queries.
        cohorts: Those with few.
    """

    written: torch.Tensor
    pieces: list[Piece]
    cohorts: list[Cohort]


class TorchBackend(AttentionBackend):
    """Any page size, any device, any element type.

    What is gathered from the pages goes through a buffer that lives as long as the backend. On a CPU that is most of
    the speed: memory fresh from the allocator costs a page fault every 4 KiB, several times what the gather itself
    does.

    Args:
        because: Why it was chosen, where it is not what would have been; for :meth:`describe`.
    """

    name: ClassVar[str] = "torch"

    def __init__(self, *, because: str = "") -> None:
        self._because = because
        self._buffer = torch.empty(0)

    def describe(self) -> str:
        """As the contract says."""
        return f"torch ({self._because})" if self._because else "torch"

    def check(self, layers: Sequence[AttentionLayer], *, device: torch.device, dtype: torch.dtype) -> None:
        """Takes every layer."""

    def plan(self, batch: GroupBatch) -> TorchPlan:
        """Splits the step into cohorts of sequences and pieces of long ones. O(tokens they read)."""
        few = [i for i, n in enumerate(batch.query_lens) if n <= FEW_QUERIES]
        return TorchPlan(
            written=cache_rows(batch.slot_mapping, batch.spec.block_size).view(2, -1),
            pieces=[piece for i, n in enumerate(batch.query_lens) if n > FEW_QUERIES for piece in _pieces(batch, i)],
            cohorts=plan_cohorts(batch, few),
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: TorchPlan,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the contract says."""
        num_kv_heads = key.shape[1]
        group_size = query.shape[1] // num_kv_heads  # G, query heads per key head
        rows = kv_cache.flatten(0, 2)  # [num_blocks * 2 * block_size, Hkv, D]
        rows.index_copy_(0, plan.written[0], key)
        rows.index_copy_(0, plan.written[1], value)

        query = query.unflatten(1, (num_kv_heads, group_size))  # [T, Hkv, G, D]
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, group_size, 1)  # [Hkv, G, 1], for all queries
        output = torch.empty_like(query, memory_format=torch.contiguous_format)  # [T, Hkv, G, D]
        for piece in plan.pieces:
            if piece.rows is None:
                keys, values = key[piece.queries], value[piece.queries]  # [S, Hkv, D] each
            else:
                keys, values = self._gather(rows, piece.rows)
            output[piece.queries] = _attend_piece(
                query[piece.queries], keys, values, piece.mask, scale=scale, softcap=softcap, sinks=sinks
            )
        for cohort in plan.cohorts:
            keys, values = self._gather(rows, cohort.rows)  # [S + B * P, Hkv, D] each
            output[cohort.tokens] = _attend_cohort(
                query[cohort.tokens], keys, values, cohort, scale=scale, softcap=softcap, sinks=sinks
            )
        return output.flatten(1, 2)  # [T, Hq, D]

    def _gather(self, cache: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in rows ``[2 * S]`` of a cache, as ``[S, Hkv, D]`` each, valid until the next call."""
        size = rows.numel() * cache[0].numel()
        buffer = self._buffer
        if buffer.numel() < size or buffer.dtype != cache.dtype or buffer.device != cache.device:
            # A decode step reads a few tokens more than the one before: leave room.
            buffer = self._buffer = cache.new_empty(size + size // 4)
        gathered = buffer[:size].view(-1, *cache.shape[1:])  # [2 * S, Hkv, D]
        torch.index_select(cache, 0, rows, out=gathered)
        keys, values = gathered.view(2, -1, *cache.shape[1:])
        return keys, values


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
        output, logsumexp = _attend(part, keys[:, :, :seen], values[:, :, :seen], hidden, scale=scale, softcap=softcap)
        parts.append(_with_sinks(output, logsumexp, sinks))
    return torch.cat(parts, 2).permute(2, 0, 1, 3)


def _attend_cohort(
    query: torch.Tensor,  # [B, Q, Hkv, G, D]
    keys: torch.Tensor,  # [S + B * P, Hkv, D]
    values: torch.Tensor,  # [S + B * P, Hkv, D]
    cohort: Cohort,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [Hkv, G, 1]
) -> torch.Tensor:
    """``[B, Q, Hkv, G, D]``."""
    batch, num_queries, _, group_size, _ = query.shape
    query = query.permute(0, 2, 3, 1, 4)  # [B, Hkv, G, Q, D]
    mask = cohort.mask
    if mask is not None:
        mask = mask[:, None, None].expand(-1, -1, group_size, -1, -1).flatten(2, 3)  # [B, 1, G * Q, P]
    own_keys, own_values = (
        tensor[cohort.num_shared :].unflatten(0, (batch, -1)).transpose(1, 2) for tensor in (keys, values)
    )  # [B, Hkv, P, D] each
    output, logsumexp = _attend(query.flatten(2, 3), own_keys, own_values, mask, scale=scale, softcap=softcap)
    output = output.unflatten(2, (group_size, num_queries))  # [B, Hkv, G, Q, D]
    logsumexp = logsumexp.unflatten(2, (group_size, num_queries))  # [B, Hkv, G, Q]
    if cohort.num_shared:
        # The shared keys meet the queries of all sequences in one product per head.
        shared_keys, shared_values = (
            tensor[: cohort.num_shared].transpose(0, 1)[None] for tensor in (keys, values)
        )  # [1, Hkv, S, D] each
        by_head = query.permute(1, 2, 0, 3, 4)  # [Hkv, G, B, Q, D]
        shared, shared_logsumexp = _attend(
            by_head.flatten(1, 3)[None], shared_keys, shared_values, None, scale=scale, softcap=softcap
        )
        shared = shared[0].unflatten(1, by_head.shape[1:4]).permute(2, 0, 1, 3, 4)  # [B, Hkv, G, Q, D]
        shared_logsumexp = shared_logsumexp[0].unflatten(1, by_head.shape[1:4]).permute(2, 0, 1, 3)  # [B, Hkv, G, Q]
        # The two are halves of one softmax: each counts by its share of the sum.
        share = torch.sigmoid(logsumexp - shared_logsumexp)
        output = torch.lerp(shared.float(), output.float(), share[..., None]).to(output.dtype)
        if sinks is not None:
            logsumexp = torch.logaddexp(logsumexp, shared_logsumexp)
    return _with_sinks(output, logsumexp, sinks).permute(0, 3, 1, 2, 4)


def _attend(
    query: torch.Tensor,  # [X, Y, Q, D]
    keys: torch.Tensor,  # [X, Y, S, D]
    values: torch.Tensor,  # [X, Y, S, D]
    mask: torch.Tensor | None,  # broadcasts against [X, Y, Q, S]; float32, added to the scores
    *,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[X, Y, Q, D]``, and ``[X, Y, Q]`` in float32: the logarithm of the sum that the softmax divides by."""
    if softcap is None and query.device.type == "cpu":
        # What scaled_dot_product_attention runs on a CPU. It never holds all scores, and only under this name does it
        # give the sums as well.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=mask, scale=scale
        )
    # In float32 at least: rounded to bfloat16, scores would be off by as much as a softmax tells apart.
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(exact) @ keys.to(exact).mT * scale
    if softcap is not None:
        # Before anything is masked: what is -inf must stay so.
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp[..., None]).exp_()
    return weights.to(values.dtype) @ values, logsumexp


def _with_sinks(
    output: torch.Tensor,  # [..., Hkv, G, Q, D]
    logsumexp: torch.Tensor,  # [..., Hkv, G, Q]
    sinks: torch.Tensor | None,  # [Hkv, G, 1]
) -> torch.Tensor:
    """What is left of the output when one more score per head takes its share of the softmax."""
    if sinks is None:
        return output
    return output * torch.sigmoid(logsumexp - sinks)[..., None].to(output.dtype)
