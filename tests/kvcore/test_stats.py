"""What lookups are counted as."""

from __future__ import annotations

import pytest

from kvcore import PrefixCacheStats
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
