"""Paged attention in plain torch operations: the default on a CPU, and what the other backends are compared with.

Two kinds of work in a step. A sequence with many new tokens (a prefill, or a chunk of one) is attended on its own.
Sequences with few (decodes, and what is left of a prompt whose beginning was cached) are attended together, in as few
operations as their tables allow; a run of blocks that they share is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from kvcore.spec import FullAttentionSpec, KVCacheSpec
from runner.attention.base import AttentionBackend, AttentionLayer, visible_from, visible_from_each
from runner.attention.cohorts import Cohort, plan_cohorts
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
        slots: ``[S]``, slots of the keys they read; None: the keys of the very same tokens, straight from the
            projection.
        mask: ``[queries, S]``, True where a key may be read; None: each query reads the keys up to its own.
    """

    queries: slice
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class TorchPlan:
    """A step for one group."""

    block_size: int
    slot_mapping: torch.Tensor
    pieces: list[Piece]
    cohorts: list[Cohort]


class TorchBackend(AttentionBackend):
    """Any page size, any device, any element type.

    What is gathered from the pages goes through two buffers that live as long as the backend. On a CPU that is most of
    the speed: memory fresh from the allocator costs a page fault every 4 KiB, several times what the gather itself
    does.
    """

    name: ClassVar[str] = "torch"

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def check(self, layers: Sequence[AttentionLayer], *, device: torch.device, dtype: torch.dtype) -> None:
        """Takes every layer."""

    def plan(self, batch: GroupBatch) -> TorchPlan:
        """Splits the step into cohorts of sequences and pieces of long ones. O(tokens they read)."""
        few = [i for i, n in enumerate(batch.query_lens) if n <= FEW_QUERIES]
        return TorchPlan(
            block_size=batch.spec.block_size,
            slot_mapping=batch.slot_mapping,
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
        num_kv_heads, head_size = key.shape[1:]
        group_size = query.shape[1] // num_kv_heads  # G, query heads per key head
        rows = kv_cache.view(-1, num_kv_heads, head_size)  # [num_blocks * 2 * block_size, Hkv, D]
        key_rows = _key_rows(plan.slot_mapping, plan.block_size)  # [T]
        rows.index_copy_(0, key_rows, key)
        rows.index_copy_(0, key_rows + plan.block_size, value)

        query = query.reshape(-1, num_kv_heads, group_size, head_size)  # [T, Hkv, G, D]
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, group_size)  # [Hkv, G]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)  # [T, Hkv, G, D]
        for piece in plan.pieces:
            if piece.slots is None:
                keys, values = key[piece.queries], value[piece.queries]  # [S, Hkv, D] each
            else:
                keys, values = self._gather(rows, piece.slots, plan.block_size)
            queries = query[piece.queries]
            if softcap is None and sinks is None:
                output[piece.queries] = _attend_fused(queries, keys, values, piece.mask, scale=scale)
            else:
                output[piece.queries] = _attend_explicitly(
                    queries, keys, values, piece.mask, scale=scale, softcap=softcap, sinks=sinks
                )
        for cohort in plan.cohorts:
            output[cohort.tokens] = self._attend_cohort(
                query[cohort.tokens], rows, cohort, plan.block_size, scale=scale, softcap=softcap, sinks=sinks
            )
        return output.flatten(1, 2)  # [T, Hq, D]

    def _attend_cohort(
        self,
        query: torch.Tensor,  # [B, Q, Hkv, G, D]
        rows: torch.Tensor,  # [num_blocks * 2 * block_size, Hkv, D]
        cohort: Cohort,
        block_size: int,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,  # [Hkv, G]
    ) -> torch.Tensor:
        """``[B, Q, Hkv, G, D]``: scores against the shared keys and the own ones, one softmax over both."""
        batch, num_queries, num_kv_heads, group_size, head_size = query.shape
        query = query.permute(0, 2, 3, 1, 4)  # [B, Hkv, G, Q, D]
        by_sequence = query.reshape(batch, num_kv_heads, -1, head_size)  # [B, Hkv, G * Q, D]
        own_keys, own_values = self._gather_by_head(rows, cohort.own_slots, block_size)  # [B, Hkv, P, D] each
        scores = _capped(by_sequence @ own_keys.mT * scale, softcap)
        scores = scores.view(*query.shape[:4], -1)  # [B, Hkv, G, Q, P]
        if cohort.hidden is not None:
            scores = scores.masked_fill_(cohort.hidden[:, None, None], float("-inf"))
        if sinks is not None:
            sinks = sinks[:, :, None]  # [Hkv, G, 1], for all queries
        if cohort.shared_slots is None:
            output = _softmax(scores, sinks).flatten(2, 3) @ own_values  # [B, Hkv, G * Q, D]
        else:
            # The shared keys meet the queries of all sequences in one product per head.
            shared_keys, shared_values = self._gather(rows, cohort.shared_slots, block_size)  # [S, Hkv, D] each
            by_head = by_sequence.transpose(0, 1).reshape(num_kv_heads, -1, head_size)  # [Hkv, B * G * Q, D]
            shared_scores = _capped(by_head @ shared_keys.permute(1, 2, 0) * scale, softcap)  # [Hkv, B * G * Q, S]
            shared_scores = shared_scores.view(num_kv_heads, batch, group_size, num_queries, -1).transpose(0, 1)
            weights = _softmax(torch.cat((shared_scores, scores), -1), sinks)  # [B, Hkv, G, Q, S + P]
            num_shared = shared_scores.shape[-1]
            by_head = weights[..., :num_shared].transpose(0, 1).reshape(num_kv_heads, -1, num_shared)
            output = by_head @ shared_values.transpose(0, 1)  # [Hkv, B * G * Q, D]
            output = output.view(num_kv_heads, batch, -1, head_size).transpose(0, 1)  # [B, Hkv, G * Q, D]
            output = output + weights[..., num_shared:].flatten(2, 3) @ own_values
        return output.view(query.shape).permute(0, 3, 1, 2, 4)

    def _gather(self, rows: torch.Tensor, slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots ``[S]``, as ``[S, Hkv, D]`` each, valid until the next call."""
        num_kv_heads, head_size = rows.shape[1:]
        key_rows = _key_rows(slots, block_size)
        index = torch.cat((key_rows, key_rows + block_size))
        gathered = self._buffer("rows", rows, (index.numel(), num_kv_heads * head_size))
        torch.index_select(rows.flatten(1), 0, index, out=gathered)
        keys, values = gathered.view(2, slots.numel(), num_kv_heads, head_size)
        return keys, values

    def _gather_by_head(
        self, rows: torch.Tensor, slots: torch.Tensor, block_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots ``[B, P]``, as ``[B, Hkv, P, D]`` each, valid until the next call.

        Heads come before tokens, so that the batched products run on what was gathered as it is; they would otherwise
        make another copy of it.
        """
        num_kv_heads, head_size = rows.shape[1:]
        heads = torch.arange(num_kv_heads, device=slots.device)[:, None]
        key_rows = _key_rows(slots, block_size)[:, None] * num_kv_heads + heads  # [B, Hkv, P]
        index = torch.stack((key_rows, key_rows + block_size * num_kv_heads))  # [2, B, Hkv, P]
        gathered = self._buffer("heads", rows, (index.numel(), head_size))
        torch.index_select(rows.flatten(0, 1), 0, index.flatten(), out=gathered)
        keys, values = gathered.view(*index.shape, head_size)
        return keys, values

    def _buffer(self, name: str, like: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """Uninitialized memory of that shape, the same as last time if it is large enough."""
        size = shape[0] * shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype or buffer.device != like.device:
            # A decode step reads a few tokens more than the one before: leave room.
            buffer = self._buffers[name] = like.new_empty(size + size // 4)
        return buffer[:size].view(shape)


def _key_rows(slots: torch.Tensor, block_size: int) -> torch.Tensor:
    """Rows of keys, where each page has ``block_size`` rows of keys, then as many of values."""
    return slots + slots // block_size * block_size


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
            slots=slots.to(batch.device, non_blocking=True),
            mask=_causal_mask(spec, torch.arange(begin, stop), seen).to(batch.device, non_blocking=True),
        )


def _causal_mask(spec: KVCacheSpec, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """``[queries, keys]``, True where the query reads the key."""
    mask = key_positions <= query_positions[:, None]
    if not isinstance(spec, FullAttentionSpec):
        mask &= key_positions >= visible_from_each(spec, query_positions)[:, None]
    return mask


def _attend_fused(
    query: torch.Tensor,  # [Q, Hkv, G, D]
    keys: torch.Tensor,  # [S, Hkv, D]
    values: torch.Tensor,  # [S, Hkv, D]
    mask: torch.Tensor | None,  # [Q, S]
    *,
    scale: float,
) -> torch.Tensor:
    """``[Q, Hkv, G, D]`` by torch's fused attention, which never holds all scores at once."""
    group_size = query.shape[2]
    # Key heads play the batch, so that the query heads of a group read one key head by a stride of 0 instead of a copy.
    output = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),  # [Hkv, G, Q, D]
        keys.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1),  # [Hkv, G, S, D]
        values.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return output.permute(2, 0, 1, 3)


def _attend_explicitly(
    query: torch.Tensor,  # [Q, Hkv, G, D]
    keys: torch.Tensor,  # [S, Hkv, D]
    values: torch.Tensor,  # [S, Hkv, D]
    mask: torch.Tensor | None,  # [Q, S]
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [Hkv, G]
) -> torch.Tensor:
    """``[Q, Hkv, G, D]`` with scores that can be changed before the softmax."""
    parts = []
    for begin in range(0, query.shape[0], QUERIES_PER_PIECE):
        part = query[begin : begin + QUERIES_PER_PIECE].permute(1, 2, 0, 3)  # [Hkv, G, Q, D], Q of this part from here
        num_queries = part.shape[2]
        if mask is None:
            visible = torch.ones(num_queries, begin + num_queries, dtype=torch.bool, device=query.device).tril(begin)
        else:
            visible = mask[begin : begin + num_queries]
        seen = visible.shape[1]
        scores = _capped(part.flatten(1, 2) @ keys[:seen].permute(1, 2, 0) * scale, softcap)  # [Hkv, G * Q, S]
        scores = scores.view(*part.shape[:3], seen).masked_fill_(~visible, float("-inf"))  # [Hkv, G, Q, S]
        weights = _softmax(scores, None if sinks is None else sinks[:, :, None])
        output = weights.flatten(1, 2) @ values[:seen].transpose(0, 1)  # [Hkv, G * Q, D]
        parts.append(output.view(part.shape).permute(2, 0, 1, 3))  # [Q, Hkv, G, D]
    return torch.cat(parts)


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Before anything is masked: what is -inf must stay so."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _softmax(
    scores: torch.Tensor,  # [..., S]
    sinks: torch.Tensor | None,  # broadcasts against [...]
) -> torch.Tensor:
    """Weights of the keys, ``[..., S]``; with sinks they add up to less than 1."""
    if sinks is not None:
        scores = torch.cat((scores, sinks[..., None].expand(*scores.shape[:-1], 1).to(scores.dtype)), -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
    return weights if sinks is None else weights[..., :-1]
