"""One step as tensors: the tokens of all its sequences in a row, and for each KV cache group where they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvcore.spec import KVCacheGroupSpec, KVCacheSpec, cdiv


@dataclass(frozen=True)
class SequenceSlice:
    """The part of one request that a step computes.

    Args:
        token_ids: The tokens to compute, one at least.
        num_computed_tokens: Tokens of the request already in the cache.
        block_ids: Its block table in each group, long enough for the tokens after this step.
        samples: The last of these tokens is the last one known, so that its logits give the next.
    """

    token_ids: Sequence[int]
    num_computed_tokens: int
    block_ids: tuple[Sequence[int], ...]
    samples: bool


@dataclass(frozen=True)
class GroupBatch:
    """A step as one KV cache group sees it. B sequences, T tokens.

    Args:
        spec: What the group's layers cache.
        query_lens: Tokens of each sequence in this step; they add up to T.
        context_lens: Tokens of each sequence in the cache after this step, its own included.
        block_ids: Block table of each sequence. Entries before what its first query reads may be 0, the null block.
        slot_mapping: ``[T]``, where each token's key and value go: block id times block size plus offset in the block.
        device: Where the model runs.
    """

    spec: KVCacheSpec
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_ids: Sequence[Sequence[int]]
    slot_mapping: torch.Tensor
    device: torch.device

    @cached_property
    def query_starts(self) -> list[int]:
        """Index of each sequence's first token among the T, and T: B + 1 numbers."""
        starts = [0]
        for length in self.query_lens:
            starts.append(starts[-1] + length)
        return starts

    @cached_property
    def block_table(self) -> torch.Tensor:
        """``[B, longest table]``, int32, on the device; shorter tables are filled up with 0, the null block."""
        longest = max(len(ids) for ids in self.block_ids)
        rows = [[*ids, *[0] * (longest - len(ids))] for ids in self.block_ids]
        return torch.tensor(rows, dtype=torch.int32).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """A packed step: no padding, no batch dimension; each sequence's tokens follow the ones before.

    Args:
        input_ids: ``[1, T]``.
        position_ids: ``[1, T]``, positions in each token's own sequence.
        logits_indices: ``[S]``, the tokens among the T whose logits are wanted: the last one of each sequence that
            samples.
        groups: One entry per KV cache group.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_indices: torch.Tensor
    groups: tuple[GroupBatch, ...]


def make_batch(
    sequences: Sequence[SequenceSlice], groups: Sequence[KVCacheGroupSpec], device: torch.device | str = "cpu"
) -> Batch:
    """Lay out a step. O(tokens and table entries).

    Args:
        sequences: What to compute, one sequence at least.
        groups: The cache's groups, in the order of the block tables.
        device: Where the tensors go.

    Raises:
        ValueError: No sequences, no tokens in one of them, or a block table too short for its tokens.
    """
    if not sequences:
        raise ValueError("a step needs at least one sequence")
    device = torch.device(device)
    query_lens = [len(sequence.token_ids) for sequence in sequences]
    if not all(query_lens):
        raise ValueError("every sequence of a step needs at least one token to compute")
    context_lens = [s.num_computed_tokens + n for s, n in zip(sequences, query_lens, strict=True)]
    positions = torch.cat([torch.arange(c - n, c) for c, n in zip(context_lens, query_lens, strict=True)])  # [T]
    ends = torch.tensor(query_lens).cumsum(0)  # [B]
    samples = torch.tensor([sequence.samples for sequence in sequences])  # [B]
    return Batch(
        input_ids=torch.tensor([[token for s in sequences for token in s.token_ids]]).to(device, non_blocking=True),
        position_ids=positions[None].to(device, non_blocking=True),
        logits_indices=(ends[samples] - 1).to(device, non_blocking=True),
        groups=tuple(
            GroupBatch(
                spec=group.kv_cache_spec,
                query_lens=query_lens,
                context_lens=context_lens,
                block_ids=(block_ids := [sequence.block_ids[i] for sequence in sequences]),
                slot_mapping=_slots(positions, query_lens, context_lens, block_ids, group.kv_cache_spec.block_size).to(
                    device, non_blocking=True
                ),
                device=device,
            )
            for i, group in enumerate(groups)
        ),
    )


def _slots(
    positions: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_ids: Sequence[Sequence[int]],
    block_size: int,
) -> torch.Tensor:
    """``[T]``: the slot of each token of the step."""
    touched: list[int] = []  # ids of the blocks that the step writes, sequence by sequence
    shifts = []  # from a token's block in its sequence to its place in ``touched``
    for query_len, context_len, ids in zip(query_lens, context_lens, block_ids, strict=True):
        first, stop = (context_len - query_len) // block_size, cdiv(context_len, block_size)
        if len(ids) < stop:
            raise ValueError(
                f"a block table of {len(ids)} blocks is too short for {context_len} tokens: it needs {stop}"
            )
        shifts.append(len(touched) - first)
        touched += ids[first:stop]
    shift = torch.tensor(shifts).repeat_interleave(torch.tensor(query_lens))  # [T]
    return torch.tensor(touched)[positions // block_size + shift] * block_size + positions % block_size
