"""Block tables as arrays, through steps of decoding: ``pytest tests/bench --benchmark-only``."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

pytest.importorskip("numpy")

from tests.bench.block_table_series import REQUESTS, DecodingTables
from tests.bench.workloads import BLOCK_SIZE


@pytest.mark.benchmark(group="block table, 16 steps")
@pytest.mark.parametrize("context_tokens", [1024, 16384])
def test_in_a_block_of_steps_each_request_gets_one_block(benchmark: BenchmarkFixture, context_tokens: int) -> None:
    made = []

    def make() -> tuple[tuple[DecodingTables, int], dict[str, object]]:
        made.append(DecodingTables(context_tokens))
        return (made[-1], BLOCK_SIZE), {}

    benchmark.pedantic(DecodingTables.append_and_map, setup=make, rounds=5)
    num_blocks = made[-1].tables.tables[0].num_blocks
    lengths = made[-1].lengths + BLOCK_SIZE
    assert num_blocks.tolist() == [-(-length // BLOCK_SIZE) for length in lengths]
    assert len(num_blocks) == REQUESTS
