"""Tile shapes of the Triton attention kernel, and what it takes at all. Imports no Triton.

The shapes were chosen from a sweep on an H200, ``tests/gpu/tune.py``; a card with less shared memory gets smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PROGRAMS_PER_PROCESSOR = 2
"""Decode programs per multiprocessor to aim for: two are enough, as ``tests/gpu/tune.py`` measured on an H200."""

EXCHANGED = 2048
"""Bytes of shared memory for the maxima and sums that warps tell each other, at most."""

SMALLEST_PAGE = 16
"""Tokens; the least that a step through the keys takes."""

LARGEST_HEAD = 256
"""Elements; smaller heads are padded to a power of two."""


@dataclass(frozen=True)
class Card:
    """What a launch has to know of a device.

    Args:
        num_processors: Multiprocessors.
        shared_bytes: Shared memory that a block can have, in bytes.
        major: Major number of the compute capability.
    """

    num_processors: int
    shared_bytes: int
    major: int

    @property
    def multiplies_aside(self) -> bool:
        """The tensor cores read shared memory while the warps go on: Hopper and Blackwell for data centers."""
        return self.major in (9, 10)


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


def takes_pages_of(block_size: int) -> bool:
    """Whether the kernels take pages of so many tokens."""
    return block_size >= SMALLEST_PAGE and block_size & (block_size - 1) == 0


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


def shared_bytes(shape: TileShape, head_size: int, element_size: int, card: Card) -> int:
    """Shared memory that the compiler gives a program, in bytes: an upper bound, and mostly what it is.

    Args:
        shape: Tile shape.
        head_size: D.
        element_size: Bytes of an element of the cache.
        card: What it is compiled for.
    """
    padded = padded_head_size(head_size)
    # The loads of a step are over when it begins. Tensor cores that work aside still read those of the step before.
    steps = shape.num_stages if card.multiplies_aside else max(shape.num_stages - 1, 1)
    queries = shape.block_m * padded * element_size
    keys_and_values = 2 * steps * shape.block_n * padded * element_size
    # For the tensor cores, warps lie below each other, unless the output is wider than high. A warp that has whole rows
    # keeps their weights in registers; their output is laid out anew before it is written.
    whole_rows = element_size <= 2 and shape.block_m >= max(16 * shape.num_warps, padded)
    weights = 0 if whole_rows and not card.multiplies_aside else shape.block_m * shape.block_n * element_size
    output = shape.block_m * padded * 4 if whole_rows or card.multiplies_aside else 0
    return max(queries + weights + keys_and_values, output) + EXCHANGED


def fitted(shape: TileShape, head_size: int, element_size: int, card: Card) -> TileShape:
    """The shape with as few stages, then as few keys a step, as it takes to fit into the card's shared memory."""
    while shared_bytes(shape, head_size, element_size, card) > card.shared_bytes:
        if shape.num_stages > 2:
            shape = replace(shape, num_stages=shape.num_stages - 1)
        elif shape.block_n > 16:
            shape = replace(shape, block_n=shape.block_n // 2)
        else:
            break  # no smaller kernel: Triton says what it lacks
    return shape
