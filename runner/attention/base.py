"""The contract between the model's layers and whatever computes their attention over a paged cache.

Shapes are written with T: tokens in the step, B: sequences in the step, Hq and Hkv: query and key heads, D: head size.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcore.spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec
from runner.batch import GroupBatch


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model, as a call of it was seen at load.

    Args:
        name: Its name in the :class:`~kvcore.spec.KVCacheConfig`.
        spec: What it caches, and with it which tokens it may read.
        num_query_heads: Hq; a multiple of ``spec.num_kv_heads``.
        softcap: Bound on the scores (Gemma 2), None without.
        has_sinks: Each query head has a learned score that takes part in the softmax and adds nothing (GPT-OSS).
    """

    name: str
    spec: KVCacheSpec
    num_query_heads: int
    softcap: float | None = None
    has_sinks: bool = False


class AttentionBackend(ABC):
    """Writes keys and values into pages and attends to what the pages hold.

    A page of a layer's cache is ``[2, block_size, Hkv, D]``, keys before values, so that a whole cache is one
    contiguous tensor ``[num_blocks, 2, block_size, Hkv, D]``: page ``b`` is the same bytes in every layer that shares a
    buffer, whatever that layer's shape. Slot ``s`` is row ``s % block_size`` of page ``s // block_size``.

    For each step the engine calls :meth:`plan` once per KV cache group and then, layer by layer, :meth:`forward`.
    """

    name: ClassVar[str]
    """The name it is chosen by."""

    supports_graphs: ClassVar[bool] = False
    """Whether :meth:`plan` and :meth:`forward` can be captured in a CUDA graph.

    Then they neither wait for the device nor copy from the host, and take from the host's side of a step nothing but
    the number of sequences and the upper bounds that :class:`~runner.batch.GroupBatch` promises for a captured one.
    """

    @property
    def default_block_size(self) -> int:
        """Tokens of a block where the user names none."""
        return 16

    @property
    def page_note(self) -> str | None:
        """Why prefix hits can be no finer than they are, and what helps; None: a smaller ``block_size`` does."""
        return None

    def describe(self) -> str:
        """A few words for the start report: what computes attention, and why that where there was a choice."""
        return self.name

    @abstractmethod
    def check(self, layers: Sequence[AttentionLayer], *, device: torch.device, dtype: torch.dtype) -> None:
        """Refuse, at load, what :meth:`forward` could not compute exactly.

        Args:
            layers: All attention layers of the model.
            device: Where queries, keys, values and caches will be.
            dtype: Their element type.

        Raises:
            UnsupportedModelError: Names the layer, what it needs, and what to use instead.
        """

    @abstractmethod
    def plan(self, batch: GroupBatch) -> Any:
        """What :meth:`forward` needs to know of this step, computed once for all layers of a group.

        Args:
            batch: The step as this group sees it.

        Returns:
            Anything; it is handed back to :meth:`forward` of the same step only.
        """

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: Any,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values, then attend.

        Everything is stored before anything is read: a sequence may read blocks that another one fills in this very
        step (the books register a block when it is scheduled).

        A sequence whose cache holds C tokens at the end of the step has queries at positions C - query_len to C - 1.
        The query at position p reads keys at positions ``visible_from(spec, p)`` to p. Nothing else in the cache has
        any influence on the result, not even if it is NaN: pages hold what their last owner left there. (A backend that
        cannot promise this of NaN says so in its own description.)

        Args:
            query: ``[T, Hq, D]``.
            key: ``[T, Hkv, D]``.
            value: ``[T, Hkv, D]``.
            kv_cache: ``[num_blocks, 2, block_size, Hkv, D]``, contiguous; rows of the step's slots are written.
            plan: What :meth:`plan` returned for this layer's group in this step.
            scale: Factor on the scores.
            softcap: Scores become ``softcap * tanh(score / softcap)``.
            sinks: ``[Hq]``, one more score per head, whose share of the softmax is dropped.

        Returns:
            ``[T, Hq, D]``.
        """


def has_triton() -> bool:
    """Whether Triton is installed."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # where an import of it was made to fail
        return False


def visible_from(spec: KVCacheSpec, position: int) -> int:
    """First position that a query at ``position`` reads (rule 9). O(1)."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


def visible_from_each(spec: KVCacheSpec, positions: torch.Tensor) -> torch.Tensor:
    """:func:`visible_from` of a tensor of positions, as a tensor of the same shape."""
    if isinstance(spec, SlidingWindowSpec):
        return (positions - spec.sliding_window + 1).clamp_(min=0)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return positions // spec.attention_chunk_size * spec.attention_chunk_size
    return torch.zeros_like(positions)
