"""Benchmarks are timed when asked for, with ``--benchmark-only``; else each runs once, so that it keeps working."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.fixture
def benchmark(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> BenchmarkFixture:
    if not request.config.getoption("benchmark_only"):
        benchmark.disabled = True
    return benchmark
