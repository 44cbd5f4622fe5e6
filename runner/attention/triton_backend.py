"""Paged attention in Triton: one kernel for prefill and decode, any page of a power of two from 16, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import torch

from kvcore.spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec
from runner.attention import triton_kernels, triton_ops
from runner.attention.base import AttentionBackend, AttentionLayer
from runner.attention.triton_launch import Launch, plan_launches
from runner.attention.triton_shapes import LARGEST_HEAD, SMALLEST_PAGE, Card, takes_pages_of
from runner.batch import GroupBatch
from runner.errors import UnsupportedModelError

TYPES = (torch.float32, torch.float16, torch.bfloat16)

INTERPRETER = Card(num_processors=1, shared_bytes=1 << 20, major=9)
"""Stands for a card: one program at a time, and memory enough."""


@dataclass(frozen=True)
class TritonPlan:
    """A step for one group.

    Args:
        batch: The step.
        block_table: ``[B, width]`` int32, of the step.
        launches: Those of the attention kernel, by query heads per KV head: worked out with the first layer that has
            so many, since a group is known by what it caches.
    """

    batch: GroupBatch
    block_table: torch.Tensor
    launches: dict[int, list[Launch]] = field(default_factory=dict)


class TritonBackend(AttentionBackend):
    """CUDA, or a CPU in Triton's interpreter (``TRITON_INTERPRET=1``), which is slow and for tests.

    Sequences with few queries and those with many are served by a launch of the same kernel each. Into how many splits
    keys are cut is decided by the number of sequences and by how long they may get, so that a captured launch is right
    for all lengths.
    """

    name: ClassVar[str] = "triton"
    supports_graphs: ClassVar[bool] = True

    def describe(self) -> str:
        """As the contract says."""
        return "triton (interpreted: slow)" if triton_kernels.INTERPRETED else "triton"

    def check(self, layers: Sequence[AttentionLayer], *, device: torch.device, dtype: torch.dtype) -> None:
        """As the contract says; what it refuses the torch backend takes."""
        shortest_page = min((layer.spec.block_size for layer in layers), default=SMALLEST_PAGE)
        for layer in layers:
            refusal = self._refusal(layer, device, dtype, shortest_page)
            if refusal is not None:
                raise UnsupportedModelError(f"layer {layer.name}: the triton backend {refusal}")

    def _refusal(
        self, layer: AttentionLayer, device: torch.device, dtype: torch.dtype, shortest_page: int
    ) -> str | None:
        """Why a layer cannot be served, and what to do."""
        torch_backend = "attention_backend='torch'"
        if device.type != "cuda" and not triton_kernels.INTERPRETED:
            return (
                f"needs a CUDA device; the model is on {device}. Move it there, or use {torch_backend} (for tests on a "
                "CPU: set TRITON_INTERPRET=1 before Python starts)"
            )
        if dtype not in TYPES:
            names = ", ".join(str(known).removeprefix("torch.") for known in TYPES)
            return (
                f"computes in {names}; the model is in {str(dtype).removeprefix('torch.')}. Load it in one of them, or "
                f"use {torch_backend}"
            )
        page = layer.spec.block_size
        if not takes_pages_of(page):
            need = f"needs pages of a power of two from {SMALLEST_PAGE} tokens"
            times = page // shortest_page
            if times & (times - 1):
                return (
                    f"{need}; this layer's have {page}, {times} times the block_size={shortest_page} of layers that "
                    f"store more bytes per token, and would with any block_size. Use {torch_backend}"
                )
            return f"{need}; got block_size={page}. Choose 16, 32, 64..., or use {torch_backend}"
        if layer.spec.head_size > LARGEST_HEAD:
            return (
                f"takes heads of up to {LARGEST_HEAD} elements; this one has {layer.spec.head_size}. Use "
                f"{torch_backend}"
            )
        return None

    def plan(self, batch: GroupBatch) -> TritonPlan:
        """O(1) on the host, and a gather on the device."""
        return TritonPlan(batch, batch.block_table)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: TritonPlan,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the contract says."""
        batch = plan.batch
        triton_ops.store_kv(key, value, kv_cache, batch.slot_mapping)
        out = query.new_empty(query.shape)  # [T, Hq, D]
        for launch in self._launches(plan, query.shape[1] // key.shape[1], kv_cache):
            triton_ops.paged_attention(
                query,
                kv_cache,
                out,
                block_table=plan.block_table,
                query_start_loc=batch.query_start_loc,
                seq_lens=batch.seq_lens,
                launch=launch,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                **reach(batch.spec),
            )
        return out

    def _launches(self, plan: TritonPlan, group_size: int, kv_cache: torch.Tensor) -> list[Launch]:
        if group_size not in plan.launches:
            plan.launches[group_size] = plan_launches(
                plan.batch.spec,
                plan.batch.query_lens,
                plan.batch.context_lens,
                group_size=group_size,
                element_size=kv_cache.element_size(),
                card=card_of(kv_cache.device),
            )
        return plan.launches[group_size]


@cache
def card_of(device: torch.device) -> Card:
    """What a launch has to know of a device; of a CPU, :data:`INTERPRETER`."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    # Without the larger figure, what every block may have is safe.
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Card(properties.multi_processor_count, shared_bytes, properties.major)


def reach(spec: KVCacheSpec) -> dict[str, int]:
    """How far back a query reads, as :func:`~runner.attention.triton_ops.paged_attention` takes it."""
    if isinstance(spec, SlidingWindowSpec):
        return {"window": spec.sliding_window}
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return {"chunk": spec.attention_chunk_size}
    return {}
