"""How the Triton attention kernel is launched: for which tiles, and into how many splits the keys of a tile are cut.

Everything here is computed from host numbers, never from what tensors hold: numbers of queries, which are exact, and
lengths of contexts, which may be upper bounds, so that a launch that was captured in a CUDA graph is right for every
later content of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvcore.spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec, cdiv
from runner.attention.triton_shapes import (
    PROGRAMS_PER_PROCESSOR,
    Card,
    TileShape,
    decode_block_m,
    decode_shape,
    fitted,
    prefill_shape,
)

MIN_SPLIT_KEYS = 256
"""Fewest keys of a split: below, joining the parts costs more than walking on."""

MAX_SPLITS = 128

MAX_SCRATCH = 64 << 20
"""Bytes for the parts that the splits of a launch leave, at most."""


@dataclass(frozen=True)
class Launch:
    """One launch of the attention kernel. It serves the sequences whose number of queries is in a range.

    Args:
        shape: Tile shape.
        num_tiles: Tiles of queries, an upper bound.
        first_tile: Number of the first one.
        num_splits: Programs that share the keys of a tile; 1: no second kernel.
        tile_is_sequence: Tile i is sequence i, if its queries fit in one tile; otherwise tiles are packed by
            ``query_start_loc``.
        least_queries: Sequences with fewer are left to another launch. Only if tiles are not sequences.
        most_queries: Most queries of a sequence that is served.
    """

    shape: TileShape
    num_tiles: int
    first_tile: int = 0
    num_splits: int = 1
    tile_is_sequence: bool = False
    least_queries: int = 1
    most_queries: int = 1


def most_visible_keys(spec: KVCacheSpec, context_len: int, num_queries: int) -> int:
    """Most keys that the last ``num_queries`` of a sequence of ``context_len`` tokens read, in tokens."""
    if isinstance(spec, SlidingWindowSpec):
        return min(context_len, spec.sliding_window - 1 + num_queries)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return min(context_len, spec.attention_chunk_size - 1 + num_queries)
    return context_len


def num_splits(num_programs: int, keys: int, num_processors: int) -> int:
    """Programs that share the keys of a tile, so that the device has enough of them.

    Args:
        num_programs: Programs without splits.
        keys: Most keys that a tile reads, in tokens.
        num_processors: Multiprocessors of the device.
    """
    wanted = num_processors * PROGRAMS_PER_PROCESSOR // num_programs
    return max(1, min(wanted, cdiv(keys, MIN_SPLIT_KEYS), MAX_SPLITS))


def scratch_bytes(num_programs: int, block_m: int, head_size: int) -> int:
    """What one split of each program leaves for the second kernel: outputs and sums in float32.

    Args:
        num_programs: Tiles times KV heads.
        block_m: Rows of a tile.
        head_size: D.
    """
    return num_programs * block_m * (head_size + 1) * 4


def plan_launches(
    spec: KVCacheSpec,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    group_size: int,
    element_size: int,
    card: Card,
) -> list[Launch]:
    """One launch for the sequences with few queries and one for those with many, each only if there are any.

    Args:
        spec: What the group's layers cache.
        query_lens: Queries of each sequence.
        context_lens: Tokens of each sequence after the step, or upper bounds.
        group_size: G, query heads per KV head.
        element_size: Bytes of an element of the cache.
        card: The device.
    """
    few = decode_block_m(group_size) // group_size  # queries that fit in one small tile
    of: dict[str, Any] = {"group_size": group_size, "element_size": element_size, "card": card}
    launches = []
    if min(query_lens) <= few:
        launches.append(_decode_launch(spec, query_lens, context_lens, few=few, **of))
    if max(query_lens) > few:
        launches.append(_prefill_launch(spec, query_lens, context_lens, few=few, **of))
    return launches


def _decode_launch(
    spec: KVCacheSpec,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    few: int,
    group_size: int,
    element_size: int,
    card: Card,
) -> Launch:
    """For sequences with up to ``few`` queries; each sequence has a tile, served or not."""
    most = max(n for n in query_lens if n <= few)
    context = max(context for n, context in zip(query_lens, context_lens, strict=True) if n <= few)
    tiles = len(query_lens)
    programs = tiles * spec.num_kv_heads
    splits = num_splits(programs, most_visible_keys(spec, context, most), card.num_processors)
    shape = decode_shape(group_size, spec.head_size, element_size, programs * splits / card.num_processors)
    return Launch(
        fitted(shape, spec.head_size, element_size, card),
        num_tiles=tiles,
        num_splits=splits,
        tile_is_sequence=True,
        most_queries=most,
    )


def _prefill_launch(
    spec: KVCacheSpec,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    few: int,
    group_size: int,
    element_size: int,
    card: Card,
) -> Launch:
    """For sequences with more than ``few`` queries: the tiles from the first of them to the last.

    Sequences with few queries between them have tiles too, and a part of the scratch. Mostly they come before.
    """
    shape = prefill_shape(group_size, spec.head_size, element_size, max(query_lens))
    queries = shape.block_m // group_size
    starts = list(accumulate(query_lens, initial=0))
    served = [i for i, n in enumerate(query_lens) if n > few]
    # Tiles have numbers: see _find_sequence in triton_kernels.
    first_tile = starts[served[0]] // queries + served[0]
    last = served[-1]
    tiles = starts[last] // queries + last + cdiv(query_lens[last], queries) - first_tile
    busy = sum(cdiv(query_lens[i], queries) for i in served)
    keys = most_visible_keys(spec, max(context_lens[i] for i in served), queries)
    splits = num_splits(busy * spec.num_kv_heads * PROGRAMS_PER_PROCESSOR, keys, card.num_processors)
    affordable = MAX_SCRATCH // scratch_bytes(tiles * spec.num_kv_heads, shape.block_m, spec.head_size)
    return Launch(
        fitted(shape, spec.head_size, element_size, card),
        num_tiles=tiles,
        first_tile=first_tile,
        num_splits=max(1, min(splits, affordable)),
        least_queries=few + 1,
        most_queries=max(query_lens),
    )
