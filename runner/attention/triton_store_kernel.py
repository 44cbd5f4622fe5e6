"""The store before attention as a Triton kernel: a step's keys and values go to their slots."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    ROW: tl.constexpr,  # Hkv * D
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two from ROW
):
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        row = slot // PAGE * (2 * PAGE) + slot % PAGE  # of the keys; the values are PAGE rows on
        offsets = tl.arange(0, BLOCK)
        inside = offsets < ROW
        head, element = offsets // HEAD_SIZE, offsets % HEAD_SIZE
        keys = tl.load(key + token * key_token_stride + head * key_head_stride + element, mask=inside)
        values = tl.load(value + token * value_token_stride + head * value_head_stride + element, mask=inside)
        target = kv_cache + row * ROW + offsets
        tl.store(target, keys, mask=inside)
        tl.store(target + PAGE * ROW, values, mask=inside)
