"""flash-attn for a CPU: functions that take what each version takes, refuse what it refuses, and compute in float64.

Arguments have the versions' own names and order, so that an unknown keyword fails here as it would there. The rules are
those that the versions check or state: flash-attn 2.8.3, flash-attn 3 (``hopper/``), flash-attn 4.0.0b36. What they
load and multiply by 0 is multiplied by 0 here too, so that a NaN comes through where it would there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from runner.attention.flash_backend import FlashAttentionBackend

T = TypeVar("T")
HALF = (torch.float16, torch.bfloat16)


class Refused(Exception):
    """What the real functions would refuse, or read out of bounds for."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise Refused(message)


def given(value: T | None, name: str) -> T:
    """A value that is optional to the function and not to a caller with pages."""
    if value is None:
        raise Refused(f"{name} must be given")
    return value


def require_int32(tensor: torch.Tensor, name: str, *shape: int) -> None:
    require(isinstance(tensor, torch.Tensor), f"{name} must be a tensor: a number would be a copy from the host")
    require(tensor.dtype == torch.int32, f"{name} must be int32")
    require(tensor.shape == shape, f"{name} must have shape {shape}, not {tuple(tensor.shape)}")
    require(tensor.is_contiguous(), f"{name} must be contiguous")


def require_heads(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, multiple: int) -> None:
    require(query.dtype in HALF, "only fp16 and bf16")
    require(query.dtype == keys.dtype == values.dtype, "query, keys and values of one dtype")
    require(query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1, "last dimension contiguous")
    require(keys.dim() == 4 and keys.shape == values.shape, "pages [num_pages, page_size, heads, head size]")
    require(query.shape[-1] == keys.shape[-1], "one head size")
    require(query.shape[-2] % keys.shape[-2] == 0, "query heads a multiple of key heads")
    require(query.shape[-1] <= 256 and query.shape[-1] % multiple == 0, f"head size a multiple of {multiple} up to 256")


def require_window(window_size: tuple[Any, Any], none: Any) -> int | None:
    """Tokens to the left, None if unbounded."""
    left, right = window_size
    if (left, right) == (none, none):
        return None
    require(isinstance(left, int) and left >= 0 and right == 0, "a causal window is (tokens to the left, 0)")
    return left


@torch.library.custom_op("flash_stand_ins::attend_pages", mutates_args=())
def attend_pages(
    query: torch.Tensor,  # [T, Hq, D]
    keys: torch.Tensor,  # [num_pages, page_size, Hkv, D]
    values: torch.Tensor,
    table: torch.Tensor,  # [B, W]
    query_starts: torch.Tensor,  # [B + 1]
    lengths: torch.Tensor,  # [B]
    sinks: torch.Tensor | None = None,  # [Hq]
    *,
    max_query_len: int,
    max_context_len: int,
    scale: float,
    left: int | None,
    softcap: float,
    tile: int,
    loads_whole_pages: bool = False,
) -> torch.Tensor:
    """``[T, Hq, D]``: causal, aligned bottom right. One operation to torch, as the real ones are.

    Whole tiles of values take part, with weight 0 where they are not read: from the tile in which the first query's
    window begins to the sequence's end, or, with ``loads_whole_pages``, to the end of its last page.
    """
    output = torch.full_like(query, float("nan"), memory_format=torch.contiguous_format)
    page_size, group_size = keys.shape[1], query.shape[1] // keys.shape[2]
    starts = query_starts.tolist()
    for i, length in enumerate(lengths.tolist()):
        begin, end = starts[i], starts[i + 1]
        num_queries = end - begin
        require(num_queries <= max_query_len and length <= max_context_len, "longest lengths are no bounds")
        if length == 0:
            output[begin:end] = 0
            continue
        positions = torch.arange(length - num_queries, length)[:, None]  # [Q, 1]
        oldest = 0 if left is None else max(0, length - num_queries - left)
        first = oldest // tile * tile
        stop = -(-length // page_size) * page_size if loads_whole_pages else length
        seen = torch.arange(first, stop)  # [S]
        pages = table[i, seen // page_size].long()  # fails if the table is too short
        require(bool(((pages >= 0) & (pages < keys.shape[0])).all()), "a page beyond the cache")
        k, v = (t[pages, seen % page_size].double().repeat_interleave(group_size, 1) for t in (keys, values))
        scores = torch.einsum("qhd,shd->hqs", query[begin:end].double(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = seen > positions
        if left is not None:
            hidden |= seen < positions - left
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            column = sinks.double()[:, None, None].expand(-1, num_queries, 1)
            weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        output[begin:end] = torch.einsum("hqs,shd->qhd", weights, v).to(query.dtype)
    return output


def _flash2_tile(head_size: int) -> int:
    return 256 if head_size <= 64 else 128 if head_size <= 128 else 64


def _flash2_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    require(q.dim() == 3, "q is [total, heads, head size]")
    require_heads(q, k, v, 8)
    block_table = given(block_table, "block_table")
    batch = cu_seqlens_q.shape[0] - 1
    require_int32(cu_seqlens_q, "cu_seqlens_q", batch + 1)
    require_int32(cu_seqlens_k, "cu_seqlens_k", batch + 1)
    require_int32(block_table, "block_table", batch, block_table.shape[1])
    require(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    require(type(max_seqlen_q) is int and type(max_seqlen_k) is int, "numbers of the host")
    require(dropout_p == 0 and causal and not return_attn_probs, "causal, without dropout, output only")
    left = require_window(window_size, -1)
    return attend_pages(
        q, k, v, block_table, cu_seqlens_q, cu_seqlens_k.diff(),
        max_query_len=max_seqlen_q, max_context_len=max_seqlen_k,
        scale=given(softmax_scale, "softmax_scale"), left=left, softcap=softcap, tile=_flash2_tile(q.shape[-1]),
    )  # fmt: skip


def _flash2_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    require(q.dim() == 4, "q is [batch, queries, heads, head size]")
    # Head sizes that are no multiple of 8 it would pad by copying the whole cache.
    require_heads(q, k_cache, v_cache, 8)
    require(k is None and v is None, "keys are in the cache already")
    block_table, cache_seqlens = given(block_table, "block_table"), given(cache_seqlens, "cache_seqlens")
    batch, num_queries = q.shape[:2]
    require_int32(cache_seqlens, "cache_seqlens", batch)
    require_int32(block_table, "block_table", batch, block_table.shape[1])
    require(k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    require(causal and 0 <= num_splits <= 128 and not return_softmax_lse, "causal, at most 128 splits, output only")
    left = require_window(window_size, -1)
    starts = torch.arange(0, batch * num_queries + 1, num_queries)
    output = attend_pages(
        q.flatten(0, 1), k_cache, v_cache, block_table, starts, cache_seqlens,
        max_query_len=num_queries, max_context_len=block_table.shape[1] * k_cache.shape[1],
        scale=given(softmax_scale, "softmax_scale"), left=left, softcap=softcap, tile=_flash2_tile(q.shape[-1]),
    )  # fmt: skip
    return output.unflatten(0, (batch, num_queries))


def _flash3_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    require(q.dim() == 3, "q is [total, heads, head size]")
    require_heads(q, k_cache, v_cache, 8)
    require(k is None and v is None, "keys are in the cache already")
    page_table, cache_seqlens = given(page_table, "page_table"), given(cache_seqlens, "cache_seqlens")
    cu_seqlens_q = given(cu_seqlens_q, "cu_seqlens_q")
    batch = cu_seqlens_q.shape[0] - 1
    require_int32(cu_seqlens_q, "cu_seqlens_q", batch + 1)
    require_int32(cache_seqlens, "cache_seqlens", batch)
    require_int32(page_table, "page_table", batch, page_table.shape[1])
    require(type(max_seqlen_q) is int, "max_seqlen_q must be provided if cu_seqlens_q is provided")
    require(causal and attention_chunk == 0 and not return_softmax_lse, "causal, without chunks, output only")
    require(0 <= num_splits <= 256, "num_splits > 256 not supported")
    left = require_window(window_size, -1)
    return attend_pages(
        q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens,
        max_query_len=given(max_seqlen_q, "max_seqlen_q"), max_context_len=page_table.shape[1] * k_cache.shape[1],
        scale=given(softmax_scale, "softmax_scale"), left=left, softcap=softcap,
        tile=128, loads_whole_pages=k_cache.shape[1] % 64 == 0,  # the shortest of its tiles
    )  # fmt: skip


def _flash4_varlen(capability: tuple[int, int]) -> Any:
    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qv: None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: None = None,
        seqused_q: None = None,
        seqused_k: torch.Tensor | None = None,
        gather_kv_indices: None = None,
        page_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: torch.Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: None = None,
        score_mod_bwd: None = None,
        mask_mod: None = None,
        block_sparse_tensors: None = None,
        aux_tensors: None = None,
        aux_scalars: None = None,
        return_lse: bool = False,
        scheduler_metadata: None = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> tuple[torch.Tensor, None]:
        require(q.dim() == 3, "q is [total, heads, head size]")
        require_heads(q, k, v, 8)
        require(cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k")
        page_table, seqused_k = given(page_table, "page_table"), given(seqused_k, "seqused_k")
        cu_seqlens_q, max_seqlen_q = given(cu_seqlens_q, "cu_seqlens_q"), given(max_seqlen_q, "max_seqlen_q")
        max_seqlen_k = given(max_seqlen_k, "max_seqlen_k")
        head_size, page_size = q.shape[-1], k.shape[1]
        tile = 128 if head_size <= 128 else 96 if head_size <= 192 else 64
        require(page_size == tile or head_size % 16 == 0, "Paged KV does not support irregular head dim")
        if capability[0] == 9:
            require(num_splits == 1, "SplitKV not supported on SM 9.0")
        else:
            require(head_size <= 128 or head_size == 256, "no kernels for this head size")
        batch = cu_seqlens_q.shape[0] - 1
        require_int32(cu_seqlens_q, "cu_seqlens_q", batch + 1)
        require_int32(seqused_k, "seqused_k", batch)
        require_int32(page_table, "page_table", batch, page_table.shape[1])
        require(type(max_seqlen_q) is int and type(max_seqlen_k) is int, "numbers of the host")
        for tensor in (q, k, v):
            # Others it would copy, and that is the whole cache.
            require(all(stride % 8 == 0 for stride in tensor.stride()[:-1]), "strides of 16 bytes")
        if learnable_sink is not None:
            require(learnable_sink.shape == (q.shape[1],), "learnable_sink is [heads]")
            require(learnable_sink.dtype in (*HALF, torch.float32), "learnable_sink in half or single precision")
        require(causal, "causal")
        left = require_window(window_size, None)
        output = attend_pages(
            q, k, v, page_table, cu_seqlens_q, seqused_k, max_query_len=max_seqlen_q, max_context_len=max_seqlen_k,
            scale=given(softmax_scale, "softmax_scale"), left=left, softcap=softcap, sinks=learnable_sink,
            tile=tile, loads_whole_pages=page_size == tile,
        )  # fmt: skip
        return output, None

    return flash_attn_varlen_func


def flash_attn_2() -> Any:
    """Module ``flash_attn``."""
    return SimpleNamespace(
        __name__="flash_attn",
        __file__="flash_attn/__init__.py",
        flash_attn_varlen_func=_flash2_varlen,
        flash_attn_with_kvcache=_flash2_kvcache,
    )


def flash_attn_3() -> Any:
    """Module ``flash_attn_interface``. Its ``flash_attn_varlen_func`` takes no pages, so nothing here calls it."""
    return SimpleNamespace(
        __name__="flash_attn_interface",
        __file__="flash_attn_interface.py",
        flash_attn_varlen_func=lambda q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: None,
        flash_attn_with_kvcache=_flash3_kvcache,
    )


def flash_attn_4(capability: tuple[int, int] = (9, 0)) -> Any:
    """Module ``flash_attn.cute``, on a GPU of that compute capability."""
    return SimpleNamespace(
        __name__="flash_attn.cute",
        __file__="flash_attn/cute/__init__.py",
        flash_attn_varlen_func=_flash4_varlen(capability),
    )


STAND_INS = {2: flash_attn_2, 3: flash_attn_3, 4: flash_attn_4}
"""By major number."""


def backend_of(version: int, capability: tuple[int, int] = (9, 0)) -> FlashAttentionBackend:
    """The backend on the stand-in for a version."""
    module = flash_attn_4(capability) if version == 4 else STAND_INS[version]()
    return FlashAttentionBackend(module, capability=capability, device_type="cpu")
