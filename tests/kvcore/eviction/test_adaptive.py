"""The adaptive policy does not lose to LRU, and gains where there is something to gain."""

from __future__ import annotations

from functools import cache

import pytest

from kvcore.replay import replay
from kvcore.replay_trace import TraceRequest
from tests.kvcore.traces import KINDS, make_trace

POOLS = (130, 700)
MARGIN = 0.005  # the least that counts, as a share of the blocks: 0.5 points


@cache
def trace(kind: str, seed: int = 5) -> list[TraceRequest]:
    return make_trace(kind, seed, 2000)


def hit_rate(kind: str, policy: str, num_blocks: int, seed: int = 5) -> float:
    return replay(trace(kind, seed), num_blocks, policy).block_hit_rate


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_never_stays_behind_lru_by_half_a_point(kind: str) -> None:
    for num_blocks in POOLS:
        lru = hit_rate(kind, "lru", num_blocks)
        assert hit_rate(kind, "adaptive", num_blocks) >= lru - MARGIN, f"{num_blocks} blocks, where LRU finds {lru:.1%}"


def test_it_is_ready_for_a_setting_before_it_changes_to_it() -> None:
    # A batch of more blocks than the pool has, each night. What LRU leaves in the pool is no good start for others.
    assert hit_rate("nightly_batch", "adaptive", 8000) >= hit_rate("nightly_batch", "lru", 8000) - MARGIN


@pytest.mark.parametrize(
    ("kind", "num_blocks"),
    [
        ("popular_prompts", 400),
        ("scans", 400),
        ("few_shot_tree", 400),
        ("conversations", 800),
        ("loop", 800),
        ("documents", 1000),
    ],
)
def test_it_finds_far_more_than_lru_where(kind: str, num_blocks: int) -> None:
    assert hit_rate(kind, "adaptive", num_blocks) >= hit_rate(kind, "lru", num_blocks) + 0.03


def test_a_scan_does_not_flush_a_hot_prompt() -> None:
    hot = TraceRequest([*range(10)])
    scan = [TraceRequest([*range(1000 + 20 * i, 1020 + 20 * i)]) for i in range(400)]
    requests = [request for i, one_off in enumerate(scan) for request in ([hot, one_off] if i % 8 == 0 else [one_off])]
    assert replay(requests, 100, "lru").num_blocks_hit == 0
    assert replay(requests, 100, "adaptive").num_requests_hit > 40  # of the 49 that could
