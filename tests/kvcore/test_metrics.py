"""What an operator sees agrees with what the cache did."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import BlockRemoved, ConfigError, PrefixCacheStats
from kvcore.metrics import CacheMetrics
from kvcore.testing import admit, cache_prompt, make_manager, make_request
from tests.kvcore.random_worker import RandomWorker


def test_each_step_says_what_was_looked_up_in_it_and_the_totals_are_their_sum() -> None:
    manager = make_manager(20, log_stats=True)
    metrics = CacheMetrics(manager)
    admit(manager, make_request("a", range(10), manager))
    assert metrics.step() == PrefixCacheStats(requests=1, queries=10)
    admit(manager, make_request("b", range(12), manager))
    assert metrics.step() == PrefixCacheStats(requests=1, queries=12, hits=8)
    assert metrics.step() == PrefixCacheStats()
    assert metrics.totals == PrefixCacheStats(requests=2, queries=22, hits=8)
    assert metrics.recent.hit_rate == pytest.approx(8 / 22)
    assert metrics.num_steps == 3
    assert metrics.usage == manager.usage == pytest.approx(4 / 19)


def test_evictions_are_counted_and_a_reset_is_none() -> None:
    worker = RandomWorker(seed=5)
    metrics = CacheMetrics(worker.manager)
    removed = resets = 0
    for _ in range(3_000):
        worker.operation()
        removed += sum(isinstance(event, BlockRemoved) for event in worker.manager.take_events())
        resets += metrics.step().reset
        assert metrics.num_evictions == removed
    assert metrics.num_resets == resets > 0
    assert removed > 500


def test_resets_between_two_steps_are_no_evictions() -> None:
    manager = make_manager(20, log_stats=True)
    metrics = CacheMetrics(manager)
    cache_prompt(manager, "a", range(10))
    assert manager.reset_prefix_cache()
    assert manager.reset_prefix_cache()
    metrics.step()
    assert (metrics.num_resets, metrics.num_evictions) == (1, 0)


def test_only_what_happens_after_it_was_made_counts() -> None:
    worker = RandomWorker(seed=5)
    worker.run(500)
    worker.manager.take_events()
    worker.manager.make_prefix_cache_stats()
    metrics = CacheMetrics(worker.manager)
    metrics.step()
    assert (metrics.num_evictions, metrics.totals) == (0, PrefixCacheStats())


def test_lives_and_times_are_kept_only_if_asked_for() -> None:
    manager = make_manager(20, log_stats=True)
    metrics = CacheMetrics(manager)
    assert metrics.block_lives is metrics.call_times is None
    metrics.close()
    metrics = CacheMetrics(manager, watched_blocks=5, step_sample_rate=1.0)
    metrics.step()
    admit(manager, make_request("a", range(10), manager))
    assert metrics.call_times is not None
    assert metrics.call_times.histograms["allocate"].count == 1
    metrics.close()
    admit(manager, make_request("b", range(10), manager))
    assert metrics.call_times.histograms["allocate"].count == 1


def test_a_worker_with_all_metrics_on_does_what_it_does_with_them_off() -> None:
    with_metrics, without = RandomWorker(seed=9), RandomWorker(seed=9)
    metrics = CacheMetrics(with_metrics.manager, watched_blocks=10, step_sample_rate=0.5)
    for _ in range(2_000):
        metrics.step()
        with_metrics.operation()
        without.operation()
        assert with_metrics.manager.take_events() == without.manager.take_events()
    with_metrics.manager.check_invariants()
    assert metrics.block_lives is not None
    assert f"requests={metrics.recent.num_requests}" in repr(metrics)


def test_a_manager_that_counts_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="log_stats=True"):
        CacheMetrics(make_manager(20))


@pytest.mark.parametrize("options", [{"recent_requests": 0}, {"watched_blocks": -1}, {"step_sample_rate": 2.0}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CacheMetrics(make_manager(20, log_stats=True), **options)
