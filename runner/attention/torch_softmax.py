"""Attention over keys and values that lie together, in torch operations, and the buffer that they are gathered into."""

from __future__ import annotations

import torch


class GatherBuffer:
    """Memory for what is gathered from pages, kept from call to call.

    On a CPU that is most of the speed: memory fresh from the allocator costs a page fault every 4 KiB, several times
    what the gather itself does.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def gather(self, cache: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in rows ``[2 * S]`` of a cache, as ``[S, Hkv, D]`` each, valid until the next call."""
        size = rows.numel() * cache[0].numel()
        memory = self._memory
        if memory.numel() < size or memory.dtype != cache.dtype or memory.device != cache.device:
            # A decode step reads a few tokens more than the one before: leave room.
            memory = self._memory = cache.new_empty(size + size // 4)
        gathered = memory[:size].view(-1, *cache.shape[1:])  # [2 * S, Hkv, D]
        torch.index_select(cache, 0, rows, out=gathered)
        keys, values = gathered.view(2, -1, *cache.shape[1:])
        return keys, values


def attend(
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


def with_sinks(
    output: torch.Tensor,  # [..., Hkv, G, Q, D]
    logsumexp: torch.Tensor,  # [..., Hkv, G, Q]
    sinks: torch.Tensor | None,  # [Hkv, G, 1]
) -> torch.Tensor:
    """What is left of the output when one more score per head takes its share of the softmax."""
    if sinks is None:
        return output
    return output * torch.sigmoid(logsumexp - sinks)[..., None].to(output.dtype)
