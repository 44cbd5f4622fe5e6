"""Which sequences of a step are attended together: those with few queries, by equal beginnings or by length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from kvcore.spec import FullAttentionSpec
from runner.attention.base import visible_from, visible_from_each
from runner.batch import GroupBatch

MIN_SHARED_TOKENS = 64
"""Shared tokens from which reading them once pays for the extra operations."""

MOST_OWN_SLOTS = 1 << 15
MOST_SCORES = 1 << 20
"""Per cohort: slots gathered, and scores per head. They bound the memory of a step, whatever it holds."""


@dataclass(frozen=True)
class Cohort:
    """B sequences with up to Q queries each, attended together.

    A sequence reads S keys that all others read too, then P keys of its own; short rows of those repeat their last.

    Args:
        tokens: ``[B, Q]``, which of the step's T tokens the queries are; short rows repeat their last.
        rows: ``[2 * (S + B * P)]``, rows of the cache (see :func:`cache_rows`): keys, then values, the shared ones
            first.
        num_shared: S; 0 where the sequences share too few.
        mask: ``[B, Q, P]``, float32, to be added to scores: -inf where a query does not read an own key, else 0. None
            where each reads all. No query reads none.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    num_shared: int
    mask: torch.Tensor | None


def cache_rows(slots: torch.Tensor, block_size: int) -> torch.Tensor:
    """``[2 * S]``, where a cache ``[num_blocks, 2, block_size, ...]`` has the keys of slots ``[S]``, then the values.

    Counted in rows of ``cache.flatten(0, 2)``.
    """
    keys = slots + slots // block_size * block_size
    return torch.cat((keys, keys + block_size))


def plan_cohorts(batch: GroupBatch, sequences: Sequence[int]) -> list[Cohort]:
    """Sort sequences (indices into the batch) into cohorts. O(tokens they read).

    Within a cohort, numbers of queries differ by less than a factor of 2, and about half of what is read is padding at
    most.
    """

    def magnitude_of_queries(i: int) -> int:
        return batch.query_lens[i].bit_length()

    cohorts = []
    for some in _grouped(sequences, magnitude_of_queries):
        alone = []
        for members, shared in shared_beginnings(batch, some):
            if shared < MIN_SHARED_TOKENS:
                alone += members
            else:
                cohorts += [_cohort(batch, alike, shared) for alike in _of_like_length(batch, members, shared)]
        cohorts += [_cohort(batch, alike, 0) for alike in _of_like_length(batch, alone, 0)]
    return cohorts


def _grouped(sequences: Iterable[int], key: Callable[[int], int]) -> list[list[int]]:
    return [list(members) for _, members in groupby(sorted(sequences, key=key), key=key)]


def shared_beginnings(batch: GroupBatch, sequences: Iterable[int]) -> list[tuple[list[int], int]]:
    """Sequences (indices into the batch) by their first block, each time with the tokens that all of them share there.

    O(blocks they read).
    """
    groups = _grouped(sequences, lambda i: batch.block_ids[i][0])
    return [(members, _num_shared_tokens(batch, members)) for members in groups]


def _num_shared_tokens(batch: GroupBatch, members: Sequence[int]) -> int:
    """Tokens at the start that lie in the same blocks for all members; 0 for one member alone."""
    if len(members) < 2 or not isinstance(batch.spec, FullAttentionSpec):
        # What a window reads of a shared prefix differs from query to query, and is bounded by the window anyway.
        return 0
    tables = [list(batch.block_ids[i]) for i in members]
    low, high = min(tables), max(tables)  # what the first and the last in order share, all between them share
    shared = next((i for i, (a, b) in enumerate(zip(low, high)) if a != b), min(len(low), len(high)))  # noqa: B905
    # Every query reads all of it, and itself besides, so that each has something of its own to read.
    readable = min(batch.context_lens[i] - batch.query_lens[i] for i in members)
    return min(shared, readable // batch.spec.block_size) * batch.spec.block_size


def _own_start(batch: GroupBatch, i: int, shared: int) -> int:
    """First position that sequence ``i`` reads for itself."""
    return max(shared, visible_from(batch.spec, batch.context_lens[i] - batch.query_lens[i]))


def _of_like_length(batch: GroupBatch, members: Sequence[int], shared: int) -> list[list[int]]:
    """All together if at most half of what is gathered is padding, else split where lengths double; none too large."""
    if not members:
        return []
    lengths = {i: batch.context_lens[i] - _own_start(batch, i, shared) for i in members}
    alike = [list(members)]
    if max(lengths.values()) * len(members) > 2 * sum(lengths.values()):
        alike = _grouped(members, lambda i: lengths[i].bit_length())
    parts = []
    for some in alike:
        longest = max(1, *(lengths[i] for i in some))
        scores = max(batch.query_lens[i] for i in some) * (shared + longest)
        most = max(1, min(MOST_OWN_SLOTS // longest, MOST_SCORES // scores))
        parts += [some[begin : begin + most] for begin in range(0, len(some), most)]
    return parts


def _cohort(batch: GroupBatch, members: Sequence[int], shared: int) -> Cohort:
    block_size = batch.spec.block_size
    starts = [_own_start(batch, i, shared) for i in members]
    contexts = torch.tensor([batch.context_lens[i] for i in members])[:, None]  # [B, 1]
    own_start = torch.tensor(starts)[:, None]  # [B, 1]
    num_queries = torch.tensor([batch.query_lens[i] for i in members])[:, None]  # [B, 1]
    # Padding repeats what is the sequence's own: other slots may hold NaN, and 0 * NaN is NaN.
    offsets = torch.arange(int((contexts - own_start).max()))  # [P]
    positions = torch.minimum(own_start + offsets, contexts - 1)  # [B, P]
    queries = torch.minimum(torch.arange(int(num_queries.max())), num_queries - 1)  # [B, Q], counted in the sequence
    query_positions = contexts - num_queries + queries  # [B, Q]
    hidden = (own_start + offsets)[:, None] > query_positions[:, :, None]  # [B, Q, P]
    if not isinstance(batch.spec, FullAttentionSpec):
        hidden |= positions[:, None] < visible_from_each(batch.spec, query_positions)[:, :, None]

    tables = [batch.block_ids[i] for i in members]
    width = max(len(ids) for ids in tables)
    table = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in tables])  # [B, width]
    slots = (table.gather(1, positions // block_size) * block_size + positions % block_size).flatten()
    if shared:
        shared_slots = table[0, : shared // block_size, None] * block_size + torch.arange(block_size)
        slots = torch.cat((shared_slots.flatten(), slots))
    query_starts = torch.tensor([batch.query_starts[i] for i in members])[:, None]  # [B, 1]
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")) if hidden.any() else None
    device = batch.device
    return Cohort(
        tokens=(query_starts + queries).to(device, non_blocking=True),
        rows=cache_rows(slots, block_size).to(device, non_blocking=True),
        num_shared=shared,
        mask=None if mask is None else mask.to(device, non_blocking=True),
    )
