"""What lookups are counted as."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import ConfigError, PrefixCacheStats
from kvcore.stats import RecentHits
from kvcore.testing import admit, make_manager, make_request


def test_lookups_queries_and_hits_are_counted_until_they_are_taken() -> None:
    manager = make_manager(20, log_stats=True)
    admit(manager, make_request("a", range(10), manager))
    admit(manager, make_request("b", range(12), manager))
    stats = manager.make_prefix_cache_stats()
    assert stats == PrefixCacheStats(requests=2, queries=22, hits=8)
    assert stats.hit_rate == pytest.approx(8 / 22)
    assert manager.make_prefix_cache_stats() == PrefixCacheStats()


def test_requests_that_come_back_after_a_preemption_are_counted_apart() -> None:
    manager = make_manager(20, log_stats=True)
    request = make_request("a", range(10), manager)
    admit(manager, request)
    manager.free(request)
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    admit(manager, request)
    stats = manager.make_prefix_cache_stats()
    assert stats == PrefixCacheStats(
        requests=1, queries=10, hits=0, preempted_requests=1, preempted_queries=10, preempted_hits=8
    )


def test_a_prompt_shorter_than_a_block_was_asked_for_and_not_found() -> None:
    # Else the hit rate would leave out the prompts that can never be hit.
    manager = make_manager(20, log_stats=True)
    manager.get_computed_blocks(make_request("short", range(3), manager))
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(requests=1, queries=3)


def test_a_reset_is_noted_once() -> None:
    manager = make_manager(20, log_stats=True)
    manager.reset_prefix_cache()
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(reset=True)
    assert manager.make_prefix_cache_stats() == PrefixCacheStats()


def test_nothing_is_counted_unless_asked_for() -> None:
    manager = make_manager(20)
    admit(manager, make_request("a", range(10), manager))
    assert manager.make_prefix_cache_stats() is None


def test_nothing_is_counted_where_caching_is_off() -> None:
    manager = make_manager(20, log_stats=True, enable_caching=False)
    admit(manager, make_request("a", range(10), manager))
    assert manager.make_prefix_cache_stats() == PrefixCacheStats()


def test_the_hit_rate_of_no_lookup_is_zero() -> None:
    assert PrefixCacheStats().hit_rate == 0.0


def test_the_mean_hit_is_over_the_requests_that_had_not_been_preempted() -> None:
    stats = PrefixCacheStats()
    assert stats.mean_hit_tokens == 0.0
    for num_hits in (8, 0, 4):
        stats.record(10, num_hits, preempted=False)
    stats.record(10, 9, preempted=True)
    assert stats.mean_hit_tokens == 4.0


def test_counts_of_several_steps_add_up() -> None:
    total = PrefixCacheStats(requests=1, queries=10, hits=4)
    total.add(PrefixCacheStats(True, 2, 20, 6, 3, 30, 21))
    total.add(PrefixCacheStats())
    assert total == PrefixCacheStats(True, 3, 30, 10, 3, 30, 21)


def step(requests: int, queries: int, hits: int, *, reset: bool = False) -> PrefixCacheStats:
    return PrefixCacheStats(reset, requests, queries, hits)


def test_the_recent_hit_rate_forgets_what_was_long_ago() -> None:
    recent = RecentHits(max_requests=3)
    assert (recent.hit_rate, recent.mean_hit_tokens, recent.num_requests) == (0.0, 0.0, 0)
    recent.observe(step(1, 100, 0))
    recent.observe(step(2, 100, 50))
    assert (recent.hit_rate, recent.num_requests) == (0.25, 3)
    recent.observe(step(1, 100, 100))  # the first step goes
    assert (recent.hit_rate, recent.mean_hit_tokens, recent.num_requests) == (0.75, 50.0, 3)


def test_steps_without_lookups_push_nothing_out_of_the_recent_ones() -> None:
    recent = RecentHits(max_requests=2)
    recent.observe(step(2, 10, 5))
    for _ in range(10):
        recent.observe(step(0, 0, 0))
    assert (recent.hit_rate, recent.num_requests) == (0.5, 2)


def test_a_step_with_more_requests_than_are_looked_back_counts_alone() -> None:
    recent = RecentHits(max_requests=2)
    recent.observe(step(1, 10, 10))
    recent.observe(step(5, 50, 0))
    assert (recent.hit_rate, recent.num_requests) == (0.0, 5)


def test_after_a_reset_the_recent_requests_are_those_since() -> None:
    recent = RecentHits()
    recent.observe(step(4, 40, 40))
    recent.observe(step(1, 10, 0, reset=True))
    assert (recent.hit_rate, recent.num_requests) == (0.0, 1)


def test_looking_back_no_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_requests"):
        RecentHits(0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.booleans()), max_size=40), st.integers(1, 10))
def test_the_recent_requests_are_the_latest_steps_that_fit(steps: list[tuple[int, int, bool]], most: int) -> None:
    recent = RecentHits(most)
    kept: list[tuple[int, int]] = []
    for requests, hits, reset in steps:
        recent.observe(PrefixCacheStats(reset, requests, 10 * requests, hits * requests))
        kept = ([] if reset else kept) + ([(requests, hits * requests)] if requests else [])
        while sum(n for n, _ in kept) > most and len(kept) > 1:
            kept.pop(0)
        assert recent.num_requests == sum(n for n, _ in kept)
        assert recent.mean_hit_tokens * recent.num_requests == pytest.approx(sum(h for _, h in kept))
