"""One step, as the model and its attention see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.spec import KVCacheSpec
from runner.device_tables import DeviceBlockTable


@dataclass(frozen=True)
class SequenceSlice:
    """The part of one request that a step computes.

    Args:
        request_id: Whose.
        token_ids: The tokens to compute, one at least.
        num_computed_tokens: Tokens of the request already in the cache.
        new_blocks: Blocks that its tables have got since its last step: all of them in its first; None: none.
        samples: The last of these tokens is the last one known, so that its logits give the next.
    """

    request_id: str
    token_ids: Sequence[int]
    num_computed_tokens: int
    new_blocks: KVCacheBlocks | None
    samples: bool


@dataclass(frozen=True)
class GroupBatch:
    """A step as one KV cache group sees it. B sequences, T tokens.

    Holds until the next step is laid out.

    A step that is captured in a CUDA graph is laid out with padding: rows of one token each, whose slot is -1 and whose
    length 0. Its tensors have other contents at each replay; of ``context_lens``, only that they are upper bounds holds
    for all of them.

    Args:
        spec: What the group's layers cache.
        query_lens: Tokens of each sequence in this step; they add up to T.
        context_lens: Tokens of each sequence in the cache after this step, its own included.
        slot_mapping: ``[T]``, int64, where each token's key and value go: block id times block size plus offset in the
            block; -1: nowhere.
        query_start_loc: ``[B + 1]``, int32: :attr:`query_starts`.
        seq_lens: ``[B]``, int32: ``context_lens``.
        table: The block tables of all requests.
        rows: ``[B]``, which of its rows are the sequences'; on the host.
        row_index: ``[B]``, int64: ``rows``.
        width: Blocks of the longest of these rows; in a captured step, what a row holds at most.
        device: Where the model runs, and all tensors here are.
    """

    spec: KVCacheSpec
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    table: DeviceBlockTable
    rows: Sequence[int]
    row_index: torch.Tensor
    width: int
    device: torch.device

    @cached_property
    def query_starts(self) -> list[int]:
        """Index of each sequence's first token among the T, and T: B + 1 numbers."""
        starts = [0]
        for length in self.query_lens:
            starts.append(starts[-1] + length)
        return starts

    @cached_property
    def block_ids(self) -> list[list[int]]:
        """Block table of each sequence, as lists. O(their length).

        Entries before what its first query reads mean nothing: 0, the null block, or the block that was there.
        """
        return self.table.lists(self.rows)

    @property
    def block_table(self) -> torch.Tensor:
        """``[B, width]``, int32, contiguous, on the device. What lies behind a row's end means nothing either.

        Gathered each time it is asked for: once in a plan. Kept from a run before, it would not be part of a capture.
        """
        return self.table.gather(self.row_index, self.width)


@dataclass(frozen=True)
class Batch:
    """A packed step: no batch dimension; each sequence's tokens follow the ones before.

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
