"""Paged attention as Triton kernels: what runs on the device.

One attention kernel serves prefill and decode. A program holds a tile: up to ``BLOCK_M`` rows, each a query of one
sequence under one of the G query heads that share a KV head, so that a page is read once for all of them. It walks the
keys its queries may read, ``BLOCK_N`` at a time, through the block table, and keeps a running softmax. With splits,
several programs share a tile's keys; each leaves its part and the logarithm of its sum, and a second kernel joins them.

Scores are kept in powers of two (``exp2``), sums and outputs in float32. A key that no query of a tile reads is not
loaded: the cache there may hold anything.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from runner.attention.triton_interpreter import mend_loop_bounds

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
FAR_BELOW: tl.constexpr = tl.constexpr(-1.0e30)
"""Where a running maximum starts: below every score, and finite, so that differences are no NaN."""


@triton.jit
def _visible_from(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """First position that a query at ``position`` reads; 0 stands for no window and no chunks."""
    if WINDOW:
        return tl.maximum(position - (WINDOW - 1), 0)
    elif CHUNK:
        return position // CHUNK * CHUNK
    else:
        return position * 0


@triton.jit
def _find_sequence(tile, query_start_loc, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence that tile number ``tile`` of a step belongs to, by binary search.

    The tiles of sequence i begin at number ``query_start_loc[i] // BLOCK_Q + i``: at most one more than it has.
    """
    low = tile * 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _find_queries(
    tile, query_start_loc, num_sequences, least_queries, BLOCK_Q: tl.constexpr, TILE_IS_SEQUENCE: tl.constexpr
):
    """Sequence, its first token, its queries, and which of them a tile begins with; queries 0: none for this launch."""
    if TILE_IS_SEQUENCE:
        sequence = tile
        start = tl.load(query_start_loc + sequence)
        first = tile * 0
    else:
        sequence = _find_sequence(tile, query_start_loc, num_sequences, BLOCK_Q)
        start = tl.load(query_start_loc + sequence)
        first = (tile - (start // BLOCK_Q + sequence)) * BLOCK_Q
    num_queries = tl.load(query_start_loc + sequence + 1) - start
    mine = num_queries <= BLOCK_Q if TILE_IS_SEQUENCE else (num_queries >= least_queries) & (first < num_queries)
    return sequence, start, tl.where(mine, num_queries, 0), first


@triton.jit
def _load_pages(table, tile, begin, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the keys of a tile are: their one page, or ``[BLOCK_N]``, each one's page. Entries not in use are not read.

    Loaded one step ahead and carried along: a load of keys that waited for another load could not be started early.
    """
    if PAGE >= BLOCK_N:
        return tl.load(table + tile * BLOCK_N // PAGE, mask=tile * BLOCK_N < end, other=0)
    else:
        keys_at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(table + keys_at // PAGE, mask=(keys_at >= begin) & (keys_at < end), other=0)


@triton.jit
def _attend_keys(
    query,  # [BLOCK_M, BLOCK_D]
    accumulator,  # [BLOCK_M, BLOCK_D] float32
    maximum,  # [BLOCK_M] float32
    total,  # [BLOCK_M] float32
    tile,  # which BLOCK_N keys
    pages,  # of these keys, see _load_pages
    begin,  # positions that this tile of queries reads: from here
    end,  # to before here
    position,  # [BLOCK_M], of the queries
    visible_from,  # [BLOCK_M], what each of them reads first
    head_cache,  # the cache, at this KV head
    scale,
    softcap,
    ROW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,  # some query does not read some of these keys
    DOT_TYPE: tl.constexpr,
):
    """The running softmax after ``BLOCK_N`` more keys."""
    start = tile * BLOCK_N
    offsets = tl.arange(0, BLOCK_N)
    elements = tl.arange(0, BLOCK_D)
    keys_at = start + offsets  # [BLOCK_N], positions
    loaded = (keys_at >= begin) & (keys_at < end)
    if PAGE >= BLOCK_N:
        # One page, and rows that follow each other.
        first_row = pages.to(tl.int64) * (2 * PAGE) + start % PAGE
        pointers = (head_cache + first_row * ROW) + (offsets[:, None] * ROW + elements[None, :])
    else:
        rows = pages.to(tl.int64) * (2 * PAGE * ROW) + keys_at % PAGE * ROW
        pointers = head_cache + rows[:, None] + elements[None, :]  # [BLOCK_N, BLOCK_D]
    inside = elements[None, :] < HEAD_SIZE
    if MASKED:
        # Not only the scores are masked: 0 * NaN would spoil the sum over the values.
        keys = tl.load(pointers, mask=loaded[:, None] & inside, other=0.0)
        values = tl.load(pointers + PAGE * ROW, mask=loaded[:, None] & inside, other=0.0)
    elif BLOCK_D == HEAD_SIZE:
        keys = tl.load(pointers)
        values = tl.load(pointers + PAGE * ROW)
    else:
        keys = tl.load(pointers, mask=inside, other=0.0)
        values = tl.load(pointers + PAGE * ROW, mask=inside, other=0.0)

    scores = tl.dot(query, tl.trans(keys).to(DOT_TYPE), input_precision="ieee")  # [BLOCK_M, BLOCK_N] float32
    scores = scores * scale  # this and softcap as triton_ops makes them: for exp2
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
    if MASKED:
        visible = (keys_at[None, :] <= position[:, None]) & (keys_at[None, :] >= visible_from[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, 1))
    decay = tl.exp2(maximum - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * decay + tl.sum(weights, 1)
    accumulator = accumulator * decay[:, None]
    accumulator = tl.dot(weights.to(DOT_TYPE), values.to(DOT_TYPE), accumulator, input_precision="ieee")
    return accumulator, higher, total


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "last_tile", "num_splits", "least_queries"])
def attention_kernel(
    query,
    kv_cache,
    out,
    partial_out,  # [tiles * Hkv, splits, BLOCK_M, D] float32
    partial_sums,  # [tiles * Hkv, splits, BLOCK_M] float32, logarithms to base 2
    sinks,
    block_table,
    query_start_loc,
    seq_lens,
    query_token_stride,
    query_head_stride,
    table_stride,
    num_sequences,
    last_tile,
    num_splits,
    least_queries,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_SPLIT_TILES: tl.constexpr,
    TILE_IS_SEQUENCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """One program a tile of queries, KV head and split. Neighbours are heads: they read the same pages."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_SIZE
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    # The last tiles of a prefill read the most keys: they start first.
    tile = last_tile - tl.program_id(0) // NUM_KV_HEADS
    split = tl.program_id(1)
    sequence, start, num_queries, first = _find_queries(
        tile, query_start_loc, num_sequences, least_queries, BLOCK_Q, TILE_IS_SEQUENCE
    )
    if num_queries == 0:
        return
    seq_len = tl.load(seq_lens + sequence)
    table = block_table + sequence.to(tl.int64) * table_stride
    head_cache = kv_cache + kv_head * HEAD_SIZE

    rows = tl.arange(0, BLOCK_M)
    elements = tl.arange(0, BLOCK_D)
    index = first + rows // GROUP  # [BLOCK_M], which of the sequence's queries
    head = kv_head * GROUP + rows % GROUP
    live = (rows < BLOCK_Q * GROUP) & (index < num_queries)
    inside = live[:, None] & (elements[None, :] < HEAD_SIZE)
    token = (start + index).to(tl.int64)
    q = tl.load(
        query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + elements[None, :],
        mask=inside,
        other=0.0,
    ).to(DOT_TYPE)

    first_position = seq_len - num_queries + first
    last_position = seq_len - num_queries + tl.minimum(first + BLOCK_Q, num_queries) - 1
    position = seq_len - num_queries + index
    visible_from = _visible_from(position, WINDOW, CHUNK)
    begin = tl.maximum(_visible_from(first_position, WINDOW, CHUNK), 0)
    end = last_position + 1

    first_tile = begin // BLOCK_N
    stop_tile = (end + BLOCK_N - 1) // BLOCK_N
    if SPLIT:
        share = tl.maximum((stop_tile - first_tile + num_splits - 1) // num_splits, MIN_SPLIT_TILES)
        first_tile += split * share
        stop_tile = tl.minimum(first_tile + share, stop_tile)

    accumulator = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    maximum = tl.full((BLOCK_M,), FAR_BELOW, tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    if TILE_IS_SEQUENCE:
        pages = _load_pages(table, first_tile, begin, end, PAGE, BLOCK_N)
        for key_tile in tl.range(first_tile, stop_tile):
            next_pages = _load_pages(table, key_tile + 1, begin, end, PAGE, BLOCK_N)
            accumulator, maximum, total = _attend_keys(
                q, accumulator, maximum, total, key_tile, pages, begin, end, position, visible_from, head_cache,
                scale, softcap, ROW, HEAD_SIZE, PAGE, BLOCK_N, BLOCK_D, HAS_SOFTCAP, True, DOT_TYPE,
            )  # fmt: skip
            pages = next_pages
    else:
        # Between the keys that the last query no longer reads and those that the first does not read yet lie those
        # that all read: no masks there.
        full_from = (_visible_from(last_position, WINDOW, CHUNK) + BLOCK_N - 1) // BLOCK_N
        full_from = tl.minimum(tl.maximum(full_from, first_tile), tl.maximum(stop_tile, first_tile))
        full_to = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N, stop_tile), full_from)
        before = full_from - first_tile
        key_tile = tl.where(before > 0, first_tile, full_to)
        pages = _load_pages(table, key_tile, begin, end, PAGE, BLOCK_N)
        for i in tl.range(0, before + tl.maximum(stop_tile - full_to, 0)):
            next_tile = tl.where(i + 1 < before, first_tile + i + 1, full_to + i + 1 - before)
            next_pages = _load_pages(table, next_tile, begin, end, PAGE, BLOCK_N)
            accumulator, maximum, total = _attend_keys(
                q, accumulator, maximum, total, key_tile, pages, begin, end, position, visible_from, head_cache,
                scale, softcap, ROW, HEAD_SIZE, PAGE, BLOCK_N, BLOCK_D, HAS_SOFTCAP, True, DOT_TYPE,
            )  # fmt: skip
            key_tile = next_tile
            pages = next_pages
        pages = _load_pages(table, full_from, begin, end, PAGE, BLOCK_N)
        for key_tile in tl.range(full_from, full_to):
            next_pages = _load_pages(table, key_tile + 1, begin, end, PAGE, BLOCK_N)
            accumulator, maximum, total = _attend_keys(
                q, accumulator, maximum, total, key_tile, pages, begin, end, position, visible_from, head_cache,
                scale, softcap, ROW, HEAD_SIZE, PAGE, BLOCK_N, BLOCK_D, HAS_SOFTCAP, False, DOT_TYPE,
            )  # fmt: skip
            pages = next_pages

    if SPLIT:
        part = (tl.program_id(0).to(tl.int64) * num_splits + split) * BLOCK_M + rows  # [BLOCK_M]
        empty = total == 0.0
        sums = tl.where(empty, float("-inf"), maximum + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(partial_sums + part, sums, mask=live)
        if first_tile < stop_tile:
            normed = accumulator / tl.where(empty, 1.0, total)[:, None]
            tl.store(partial_out + part[:, None] * HEAD_SIZE + elements[None, :], normed, mask=inside)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
            higher = tl.maximum(maximum, sink)
            decay = tl.exp2(maximum - higher)
            accumulator = accumulator * decay[:, None]
            total = total * decay + tl.exp2(sink - higher)
        normed = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
        row = token * (NUM_KV_HEADS * GROUP) + head  # [BLOCK_M], of the output
        tl.store(out + row[:, None] * HEAD_SIZE + elements[None, :], normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_sequences", "last_tile", "num_splits", "least_queries"])
def join_kernel(
    partial_out,
    partial_sums,
    out,
    sinks,
    query_start_loc,
    num_sequences,
    last_tile,
    num_splits,
    least_queries,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    TILE_IS_SEQUENCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,  # splits at a time
):
    """One program a tile, KV head and row: joins the parts that the splits left."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = last_tile - tl.program_id(0) // NUM_KV_HEADS
    row = tl.program_id(1)
    _, start, num_queries, first = _find_queries(
        tile, query_start_loc, num_sequences, least_queries, BLOCK_Q, TILE_IS_SEQUENCE
    )
    index = first + row // GROUP
    if index >= num_queries:
        return
    head = tl.program_id(0) % NUM_KV_HEADS * GROUP + row % GROUP
    elements = tl.arange(0, BLOCK_D)
    first_part = tl.program_id(0).to(tl.int64) * num_splits
    accumulator = tl.full((BLOCK_D,), 0.0, tl.float32)
    maximum = tl.full((), FAR_BELOW, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = total + 1.0
    for begin in tl.range(0, num_splits, BLOCK_S):
        splits = begin + tl.arange(0, BLOCK_S)
        parts = (first_part + splits) * BLOCK_M + row
        sums = tl.load(partial_sums + parts, mask=splits < num_splits, other=float("-inf"))  # [BLOCK_S]
        # A split without keys left no output, only a sum of nothing.
        inside = (sums > float("-inf"))[:, None] & (elements[None, :] < HEAD_SIZE)
        outputs = tl.load(partial_out + parts[:, None] * HEAD_SIZE + elements[None, :], mask=inside, other=0.0)
        higher = tl.maximum(maximum, tl.max(sums, 0))
        decay = tl.exp2(maximum - higher)
        weights = tl.exp2(sums - higher)
        accumulator = accumulator * decay + tl.sum(outputs * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        maximum = higher
    normed = accumulator / tl.where(total == 0.0, 1.0, total)
    target = out + ((start + index).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_SIZE + elements
    tl.store(target, normed.to(out.dtype.element_ty), mask=elements < HEAD_SIZE)


INTERPRETED = not any(isinstance(function, triton.JITFunction) for function in (attention_kernel, tl.max))
"""The kernels run in Triton's interpreter: ``TRITON_INTERPRET=1`` was set before Triton was imported."""
if INTERPRETED:
    mend_loop_bounds()
