"""The plainest backend that reads nothing but tensors, so that its steps can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from runner.attention.base import AttentionBackend, AttentionLayer, visible_from_each
from runner.batch import GroupBatch


class TableBackend(AttentionBackend):
    """Gathers whole table rows and masks what a query does not read. For caches without NaN."""

    name: ClassVar[str] = "table"
    supports_graphs: ClassVar[bool] = True

    def check(self, layers: Sequence[AttentionLayer], *, device: torch.device, dtype: torch.dtype) -> None:
        assert all(layer.softcap is None and not layer.has_sinks for layer in layers)

    def plan(self, batch: GroupBatch) -> tuple[GroupBatch, torch.Tensor]:
        return batch, batch.block_table.long()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: tuple[GroupBatch, torch.Tensor],
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        block_size = kv_cache.shape[2]
        batch, table = plan
        slots = batch.slot_mapping
        # What goes nowhere goes back to where it came from: a write to the null block of what is there.
        page, offset = slots.clamp(min=0) // block_size, slots.clamp(min=0) % block_size
        written = (slots >= 0)[:, None, None]
        kv_cache[page, 0, offset] = torch.where(written, key, kv_cache[page, 0, offset])
        kv_cache[page, 1, offset] = torch.where(written, value, kv_cache[page, 1, offset])
        tokens = torch.arange(len(query))
        sequence = torch.searchsorted(batch.query_start_loc, tokens, right=True) - 1  # [T]
        positions = batch.seq_lens[sequence] - batch.query_start_loc[sequence + 1] + tokens  # [T]
        keys, values = (
            kv_cache[:, side][table].flatten(1, 2)[sequence].repeat_interleave(query.shape[1] // key.shape[1], 2)
            for side in (0, 1)
        )  # [T, width * block_size, Hq, D]
        seen = torch.arange(keys.shape[1])[None]
        visible = (seen <= positions[:, None]) & (seen >= visible_from_each(batch.spec, positions)[:, None])
        scores = torch.einsum("thd,tshd->ths", query, keys) * scale
        weights = scores.masked_fill(~visible[:, None], -1e30).softmax(-1)
        return torch.einsum("ths,tshd->thd", weights, values)
