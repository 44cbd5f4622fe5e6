"""Paged attention in plain torch operations: on any device, and what the other backends are compared with.

Two kinds of work in a step. A sequence with many new tokens (a prefill, or a chunk of one) is attended on its own.
Sequences with few (decodes, and what is left of a prompt whose beginning was cached) are attended together, in as few
operations as their tables allow; a run of blocks that they share is read once for all of them. What they read for
themselves is attended beside it, and the two results are joined by the sums that their softmaxes divide by: exactly
what one softmax over everything gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from runner.attention.base import AttentionBackend, AttentionLayer
from runner.attention.cohorts import Cohort, cache_rows, plan_cohorts
from runner.attention.pieces import Piece, attend_pieces, plan_pieces
from runner.attention.torch_softmax import GatherBuffer, attend, with_sinks
from runner.batch import GroupBatch


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

    Args:
        because: Why it was chosen, where it is not what would have been; for :meth:`describe`.
    """

    name: ClassVar[str] = "torch"

    def __init__(self, *, because: str = "") -> None:
        self._because = because
        self._buffer = GatherBuffer()

    @property
    def default_block_size(self) -> int:
        """A quarter of what is usual: hardly slower, and what a prefix hit leaves over takes long on a CPU."""
        return 4

    def describe(self) -> str:
        """As the contract says."""
        return f"torch ({self._because})" if self._because else "torch"

    def check(self, layers: Sequence[AttentionLayer], *, device: torch.device, dtype: torch.dtype) -> None:
        """Takes every layer."""

    def plan(self, batch: GroupBatch) -> TorchPlan:
        """Splits the step into cohorts of sequences and pieces of long ones. O(tokens they read)."""
        few, pieces = plan_pieces(batch)
        return TorchPlan(
            written=cache_rows(batch.slot_mapping, batch.spec.block_size).view(2, -1),
            pieces=pieces,
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
        attend_pieces(
            plan.pieces, query, key, value, kv_cache, output, self._buffer, scale=scale, softcap=softcap, sinks=sinks
        )
        for cohort in plan.cohorts:
            keys, values = self._buffer.gather(rows, cohort.rows)  # [S + B * P, Hkv, D] each
            output[cohort.tokens] = _attend_cohort(
                query[cohort.tokens], keys, values, cohort, scale=scale, softcap=softcap, sinks=sinks
            )
        return output.flatten(1, 2)  # [T, Hq, D]


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
    output, logsumexp = attend(query.flatten(2, 3), own_keys, own_values, mask, scale=scale, softcap=softcap)
    output = output.unflatten(2, (group_size, num_queries))  # [B, Hkv, G, Q, D]
    logsumexp = logsumexp.unflatten(2, (group_size, num_queries))  # [B, Hkv, G, Q]
    if cohort.num_shared:
        # The shared keys meet the queries of all sequences in one product per head.
        shared_keys, shared_values = (
            tensor[: cohort.num_shared].transpose(0, 1)[None] for tensor in (keys, values)
        )  # [1, Hkv, S, D] each
        by_head = query.permute(1, 2, 0, 3, 4)  # [Hkv, G, B, Q, D]
        shared, shared_logsumexp = attend(
            by_head.flatten(1, 3)[None], shared_keys, shared_values, None, scale=scale, softcap=softcap
        )
        shared = shared[0].unflatten(1, by_head.shape[1:4]).permute(2, 0, 1, 3, 4)  # [B, Hkv, G, Q, D]
        shared_logsumexp = shared_logsumexp[0].unflatten(1, by_head.shape[1:4]).permute(2, 0, 1, 3)  # [B, Hkv, G, Q]
        # The two are halves of one softmax: each counts by its share of the sum.
        share = torch.sigmoid(logsumexp - shared_logsumexp)
        output = torch.lerp(shared.float(), output.float(), share[..., None]).to(output.dtype)
        if sinks is not None:
            logsumexp = torch.logaddexp(logsumexp, shared_logsumexp)
    return with_sinks(output, logsumexp, sinks).permute(0, 3, 1, 2, 4)
