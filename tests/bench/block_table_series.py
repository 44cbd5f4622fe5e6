"""What keeping block tables as arrays costs a step of decoding, by length of the context; numpy is needed here only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import numpy as np

from kvcore import FullAttentionSpec, KVCacheBlock, KVCacheBlocks, KVCacheConfig, KVCacheGroupSpec
from kvcore.block_table import BlockTables
from tests.bench.scaling_series import STEPS, K, Point
from tests.bench.workloads import BLOCK_SIZE, timed

REQUESTS = 256
LENGTHS = (K, 4 * K, 16 * K, 64 * K, 128 * K)


class DecodingTables:
    """Block tables of requests that decode, each a token further inside its last block than the one before it.

    Args:
        context_tokens: Length of the shortest, a multiple of the block size.
    """

    def __init__(self, context_tokens: int) -> None:
        num_blocks = context_tokens // BLOCK_SIZE + 1
        config = KVCacheConfig(
            REQUESTS * num_blocks, [KVCacheGroupSpec(["layer"], FullAttentionSpec(BLOCK_SIZE, 1, 1, "float32"))]
        )
        self.tables = BlockTables(config, REQUESTS, context_tokens + K)
        self.blocks = [[KVCacheBlock(i * num_blocks + j) for j in range(num_blocks)] for i in range(REQUESTS)]
        self.lengths = np.array([context_tokens + i % BLOCK_SIZE for i in range(REQUESTS)])
        self.names = [f"decoding-{i}" for i in range(REQUESTS)]
        for name, blocks, length in zip(self.names, self.blocks, self.lengths, strict=True):
            self.tables.add(name, KVCacheBlocks((blocks[: -(-length // BLOCK_SIZE)],)))
        self.rows = np.array([self.tables.row(name) for name in self.names])
        self.new_blocks = KVCacheBlocks(([KVCacheBlock(1)],))
        self.next_token = 0

    def append_and_map(self, steps: int) -> None:
        """Steps: a sixteenth of the requests gets a block, changed rows are listed, all new tokens get their slots."""
        table = self.tables.tables[0]
        for _ in range(steps):
            first = -self.next_token % BLOCK_SIZE
            for name in self.names[first::BLOCK_SIZE]:
                self.tables.append(name, self.new_blocks)
            table.take_changed_rows()
            table.slot_mapping(self.rows, self.lengths + self.next_token)
            self.next_token += 1

    def rebuild(self) -> None:
        """One step of who makes the array anew from lists of blocks."""
        array = np.zeros(self.tables.tables[0].array.shape, dtype=np.int32)
        for row, blocks in enumerate(self.blocks):
            array[row, : len(blocks)] = [block.block_id for block in blocks]


def measure(
    lengths: Sequence[int] = LENGTHS, *, repetitions: int, clock: Callable[[], float], quick: bool = False
) -> Iterator[Point]:
    """Seconds for a step of all requests: ``append_and_map``, and ``rebuild`` to set it against."""
    for length in lengths[:2] if quick else lengths:
        print(f"  block tables at {length:,}", file=sys.stderr, flush=True)
        decoding = DecodingTables(length)
        kept = [timed(lambda d=decoding: d.append_and_map(STEPS), clock)[0] / STEPS for _ in range(repetitions)]
        rebuilt = [timed(decoding.rebuild, clock)[0] for _ in range(repetitions)]
        yield {"at": length, "append_and_map": median(kept), "rebuild": median(rebuilt)}
