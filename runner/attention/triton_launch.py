"""How the Triton attention kernel is launched: tile shapes, and into how many splits the keys of a tile are cut.

Everything here is computed from host numbers that are upper bounds, never from what tensors hold, so that a launch that
was captured in a CUDA graph is right for every later content of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec, cdiv

PROGRAMS_PER_PROCESSOR = 2
"""Decode programs per multiprocessor to aim for: two are enough, as ``tests/gpu/tune.py`` measured on an H200."""

MIN_SPLIT_KEYS = 256
"""Fewest keys of a split: below, joining the parts costs more than walking on."""

MAX_SPLITS = 128


@dataclass(frozen=True)
class TileShape:
    """What a program of the attention kernel works on at a time, and how it is compiled.

    Args:
        block_m: Rows of a tile, queries times query heads of a KV head; a power of two from 16.
        block_n: Keys a step; a power of two from 16.
        num_warps: Warps a program.
        num_stages: Steps whose loads are in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Launch:
    """One launch of the attention kernel. It serves the sequences whose number of queries is in a range.

    Args:
        shape: Tile shape.
        num_tiles: Tiles of queries, an upper bound.
        num_splits: Programs that share the keys of a tile; 1: no second kernel.
        tile_is_sequence: Tile i is sequence i, if its queries fit in one tile; otherwise tiles are packed by
            ``query_start_loc``.
        least_queries: Sequences with fewer are left to another launch. Only if tiles are not sequences.
        most_queries: Most queries of a sequence that is served.
    """

    shape: TileShape
    num_tiles: int
    num_splits: int = 1
    tile_is_sequence: bool = False
    least_queries: int = 1
    most_queries: int = 1


def padded_head_size(head_size: int) -> int:
    """Elements that a head takes in a tile: a power of two from 16."""
    return max(16, power_of_two_from(head_size))


def power_of_two_from(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def decode_block_m(group_size: int) -> int:
    """Rows of a tile for sequences with few queries: what the tensor cores take at least."""
    return max(16, power_of_two_from(group_size))


def decode_shape(group_size: int, head_size: int, element_size: int, programs_per_processor: float) -> TileShape:
    """Tile shape for sequences with few queries: the loads are all that counts.

    Args:
        group_size: G, query heads per KV head.
        head_size: D.
        element_size: Bytes of an element of the cache.
        programs_per_processor: Programs of the launch for each multiprocessor.
    """
    if element_size > 2:  # no tensor cores: more would not fit in registers
        return TileShape(decode_block_m(group_size), 16, num_warps=4, num_stages=3)
    # 16 KiB of keys and as much of values a step. Few programs have more steps in flight; of many, more have to be on a
    # multiprocessor at a time.
    block_n = min(max(16384 // (padded_head_size(head_size) * element_size), 16), 128)
    num_stages = 4 if programs_per_processor <= PROGRAMS_PER_PROCESSOR else 2
    return TileShape(decode_block_m(group_size), block_n, num_warps=4, num_stages=num_stages)


def prefill_shape(group_size: int, head_size: int, element_size: int, most_queries: int) -> TileShape:
    """Tile shape for sequences with many queries: the tensor cores are all that counts.

    Args:
        group_size: G, query heads per KV head.
        head_size: D.
        element_size: Bytes of an element of the cache.
        most_queries: Queries of the longest sequence.
    """
    if element_size > 2:
        return TileShape(decode_block_m(group_size), 16, num_warps=4, num_stages=2)
    block_m = 64 if most_queries * group_size <= 64 else 128
    block_m = max(block_m, power_of_two_from(group_size))
    return TileShape(
        block_m, 64 if padded_head_size(head_size) <= 128 else 32, num_warps=4 if block_m == 64 else 8, num_stages=3
    )


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


def plan_launches(
    spec: KVCacheSpec,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    group_size: int,
    element_size: int,
    num_processors: int,
) -> list[Launch]:
    """One launch for the sequences with few queries and one for those with many, each only if there are any.

    Args:
        spec: What the group's layers cache.
        query_lens: Queries of each sequence.
        context_lens: Tokens of each sequence after the step, or upper bounds.
        group_size: G, query heads per KV head.
        element_size: Bytes of an element of the cache.
        num_processors: Multiprocessors of the device.
    """
    few = decode_block_m(group_size) // group_size  # queries that fit in one small tile
    most, launches = max(query_lens), []
    if min(query_lens) <= few:
        fewest_most = max(n for n in query_lens if n <= few)
        keys = most_visible_keys(spec, max(context_lens), fewest_most)
        tiles = len(query_lens)
        programs = tiles * spec.num_kv_heads
        splits = num_splits(programs, keys, num_processors)
        launches.append(
            Launch(
                decode_shape(group_size, spec.head_size, element_size, programs * splits / num_processors),
                num_tiles=tiles,
                num_splits=splits,
                tile_is_sequence=True,
                most_queries=fewest_most,
            )
        )
    if most > few:
        shape = prefill_shape(group_size, spec.head_size, element_size, most)
        queries = shape.block_m // group_size
        tiles = sum(query_lens) // queries + len(query_lens)
        busy = sum(cdiv(n, queries) for n in query_lens if n > few)
        keys = most_visible_keys(spec, max(context_lens), queries)
        launches.append(
            Launch(
                shape,
                num_tiles=tiles,
                num_splits=num_splits(busy * spec.num_kv_heads * PROGRAMS_PER_PROCESSOR, keys, num_processors),
                least_queries=few + 1,
                most_queries=most,
            )
        )
    return launches
