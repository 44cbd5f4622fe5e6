"""The workloads of the comparison on kvcore alone, for everyday use: ``pytest tests/bench --benchmark-only``."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kvcore import BlockHasher
from tests.bench.on_kvcore import BATCHED, KvcoreAdapter
from tests.bench.workloads import (
    ALL_GROUPS,
    CHURN_FAMILIES,
    CHURN_REQUESTS,
    CHURN_SHARED_TOKENS,
    PROMPT_TOKENS,
    VOCABULARY,
    WARM_PROMPT,
    WORKLOADS,
    Groups,
    Workload,
)

ROUNDS = 7

# All but the last block of the prompt, whose last token is always computed; and what the later members of a family
# share with its first.
HIT_TOKENS = {
    "cold_admit32k": 0,
    "warm_lookup32k": PROMPT_TOKENS - 16,
    "warm_prompt32k": PROMPT_TOKENS - 16,
    "churn": (CHURN_REQUESTS - CHURN_FAMILIES) * CHURN_SHARED_TOKENS,
}


@pytest.mark.benchmark(disable_gc=True)
@pytest.mark.parametrize("groups", ALL_GROUPS, ids=lambda groups: groups.name)
@pytest.mark.parametrize("workload", [*WORKLOADS, WARM_PROMPT, *BATCHED], ids=lambda workload: workload.name)
def test_a_workload_finds_in_the_cache_what_is_there(
    benchmark: BenchmarkFixture, workload: Workload, groups: Groups
) -> None:
    adapter = KvcoreAdapter()
    benchmark.group = groups.name
    found = benchmark.pedantic(
        lambda call: call(), setup=lambda: ((workload.prepare(adapter, groups),), {}), rounds=ROUNDS
    )
    assert found == HIT_TOKENS.get(workload.name)


@pytest.mark.benchmark(disable_gc=True, group="hash")
@pytest.mark.parametrize("algorithm", ["xxh3", "sha256_raw", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_a_prompt_gets_a_hash_for_each_full_block(benchmark: BenchmarkFixture, algorithm: str) -> None:
    hasher = BlockHasher(16, algorithm, seed="0")
    tokens = [i * 7919 % VOCABULARY for i in range(PROMPT_TOKENS)]
    hashes = benchmark.pedantic(hasher.hash_tokens, args=(tokens,), rounds=ROUNDS)
    assert len(set(hashes)) == PROMPT_TOKENS // 16
