"""Paged attention on a CPU by a kernel in C that reads pages where they lie: the default there.

Sequences with many new tokens, for which matrix products are what counts, are left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from runner.attention.base import AttentionBackend, AttentionLayer
from runner.attention.pieces import Piece, attend_pieces, plan_pieces
from runner.attention.spans import plan_spans
from runner.attention.torch_softmax import GatherBuffer
from runner.batch import GroupBatch
from runner.errors import RunnerError, UnsupportedModelError
from runner.native.build import MOST_HEAD_SIZE
from runner.native.kernels import SUFFIXES, native_kernels
from runner.native.structs import AttentionWork


@dataclass(frozen=True)
class NativePlan:
    """A step for one group.

    Args:
        slots: ``[T]``, of the step.
        pieces: Sequences with many queries.
        work: Those with few, for the kernel, call by call.
    """

    slots: torch.Tensor
    pieces: list[Piece]
    work: list[AttentionWork]


class NativeBackend(AttentionBackend):
    """Any page size; float32 and bfloat16, computed in float32; heads of up to 256 elements. Compiled at first use."""

    name: ClassVar[str] = "native"

    def __init__(self) -> None:
        self._buffer = GatherBuffer()

    @property
    def default_block_size(self) -> int:
        """A quarter of what is usual: as fast here, and what a prefix hit leaves over takes long on a CPU."""
        return 4

    def check(self, layers: Sequence[AttentionLayer], *, device: torch.device, dtype: torch.dtype) -> None:
        """As the contract says; what it refuses the torch backend takes."""
        for layer in layers:
            refusal = None
            if device.type != "cpu":
                refusal = f"computes on a CPU; the model is on {device}"
            elif dtype not in SUFFIXES:
                taken, given = ", ".join(SUFFIXES.values()), str(dtype).removeprefix("torch.")
                refusal = f"computes in {taken}; the model is in {given}"
            elif layer.spec.head_size > MOST_HEAD_SIZE:
                refusal = f"takes heads of up to {MOST_HEAD_SIZE} elements; this one has {layer.spec.head_size}"
            if refusal is not None:
                raise UnsupportedModelError(
                    f"layer {layer.name}: the native backend {refusal}. Use attention_backend='torch'"
                )

    def plan(self, batch: GroupBatch) -> NativePlan:
        """Cuts the step into pieces of long sequences and spans that the others read. O(tokens they read)."""
        few, pieces = plan_pieces(batch)
        return NativePlan(batch.slot_mapping, pieces, plan_spans(batch, few))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: NativePlan,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the contract says.

        Raises:
            RunnerError: Queries, keys or values are of another type than the cache, as under autocast, or of another
                class than tensors are.
        """
        kinds = {type(query), type(key), type(value)}
        if kinds != {torch.Tensor}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise RunnerError(
                f"queries, keys and values are of class {names}, which may have no memory to read: use "
                "attention_backend='torch'"
            )
        if not query.dtype == key.dtype == value.dtype == kv_cache.dtype:
            raise RunnerError(
                f"queries, keys and values are {query.dtype}, {key.dtype} and {value.dtype}, and the cache is "
                f"{kv_cache.dtype}: run the engine outside of torch.autocast, on a model loaded in the type it shall "
                "compute in"
            )
        kernels = native_kernels()
        kernels.store(key, value, kv_cache, plan.slots)
        output = query.new_empty(query.shape)  # [T, Hq, D]
        for work in plan.work:
            kernels.attend(work, query, kv_cache, output, scale=scale, softcap=softcap, sinks=sinks)
        if plan.pieces:
            by_key_head = (key.shape[1], query.shape[1] // key.shape[1])  # [Hkv, G] for Hq
            attend_pieces(
                plan.pieces,
                query.unflatten(1, by_key_head),
                key,
                value,
                kv_cache,
                output.unflatten(1, by_key_head),
                self._buffer,
                scale=scale,
                softcap=softcap,
                sinks=None if sinks is None else sinks.view(*by_key_head, 1),
            )
        return output
