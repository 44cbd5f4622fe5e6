"""What Prometheus reads is what the cache did, under the names that the dashboard asks for."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from kvcore.metrics import CacheMetrics
from kvcore.prometheus import CacheCollector
from kvcore.testing import admit, make_manager, make_request
from tests.kvcore.random_worker import RandomWorker

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana_dashboard.json"


def registry(metrics: CacheMetrics, **options: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(CacheCollector(metrics, **options))
    return registry


def all_metrics(worker: RandomWorker) -> CacheMetrics:
    return CacheMetrics(worker.manager, watched_blocks=1000, step_sample_rate=1.0)


def test_counts_and_gauges_are_the_metrics_own() -> None:
    manager = make_manager(20, log_stats=True)
    metrics = CacheMetrics(manager)
    values = registry(metrics).get_sample_value
    for name in ("a", "b"):
        admit(manager, make_request(name, range(10), manager))
    metrics.step()
    assert values("kvcore:prefix_cache_queries_total") == 20
    assert values("kvcore:prefix_cache_hits_total") == 8
    assert values("kvcore:prefix_cache_requests_total") == 2
    assert values("kvcore:prefix_cache_hit_rate") == pytest.approx(0.4)
    assert values("kvcore:prefix_cache_hit_tokens") == pytest.approx(4.0)
    # Two shared blocks, and one of its own for each.
    assert values("kvcore:kv_cache_usage_perc") == pytest.approx(4 / 19)
    assert values("kvcore:kv_cache_free_blocks") == 15
    assert values("kvcore:kv_cache_blocks") == 19
    assert values("kvcore:kv_cache_cached_prefixes") == 2
    assert values("kvcore:kv_cache_evictions_total") == 0


def test_requests_that_had_been_preempted_and_resets_are_counted_apart() -> None:
    manager = make_manager(20, log_stats=True)
    metrics = CacheMetrics(manager)
    values = registry(metrics).get_sample_value
    request = make_request("a", range(10), manager)
    for _ in range(2):
        admit(manager, request)
        manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
    manager.reset_prefix_cache()
    metrics.step()
    assert values("kvcore:prefix_cache_requests_total") == 1
    assert values("kvcore:prefix_cache_preempted_requests_total") == 1
    assert values("kvcore:prefix_cache_preempted_queries_total") == 10
    assert values("kvcore:prefix_cache_preempted_hits_total") == 8
    assert values("kvcore:prefix_cache_resets_total") == 1


def test_histograms_have_the_buckets_of_the_metrics_with_labels_on_each() -> None:
    worker = RandomWorker()
    metrics = all_metrics(worker)
    for _ in range(500):
        metrics.step()
        worker.operation()
    values = registry(metrics, labels={"model_name": "m"}).get_sample_value
    assert metrics.call_times is not None
    for call, histogram in metrics.call_times.histograms.items():
        labels = {"model_name": "m", "call": call}
        for bound, count in histogram.cumulative():
            le = "+Inf" if bound == float("inf") else str(bound)
            assert values("kvcore:kv_cache_call_seconds_bucket", {**labels, "le": le}) == count
        assert values("kvcore:kv_cache_call_seconds_count", labels) == histogram.count
        assert values("kvcore:kv_cache_call_seconds_sum", labels) == pytest.approx(histogram.sum)
    assert metrics.block_lives is not None
    age = metrics.block_lives.age_at_eviction
    assert values("kvcore:kv_block_lifetime_seconds_count", {"model_name": "m"}) == age.count
    assert values("kvcore:kv_block_lifetime_seconds_bucket", {"model_name": "m", "le": "0.05"}) == age.counts[0]


def test_the_prefix_can_be_vllms_and_the_names_are_then_those_that_vllm_has() -> None:
    text = generate_latest(registry(all_metrics(RandomWorker()), prefix="vllm:")).decode()
    of_vllm = {
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:kv_block_lifetime_seconds",
        "vllm:kv_block_idle_before_evict_seconds",
        "vllm:kv_block_reuse_gap_seconds",
    }
    assert of_vllm <= {family.name for family in text_string_to_metric_families(text)}


def test_what_is_not_measured_is_not_exported() -> None:
    names = {family.name for family in registry(CacheMetrics(make_manager(9, log_stats=True))).collect()}
    assert not any("seconds" in name for name in names)


def test_it_can_be_scraped_while_the_worker_works() -> None:
    worker = RandomWorker()
    metrics = all_metrics(worker)
    server, thread = start_http_server(0, "127.0.0.1", registry(metrics))
    try:
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        queries = []
        for _ in range(5):
            for _ in range(50):
                metrics.step()
                worker.operation()
            with urllib.request.urlopen(address, timeout=10) as answer:
                text = answer.read().decode()
            (value,) = re.findall(r"^kvcore:prefix_cache_queries_total (\S+)$", text, re.MULTILINE)
            queries.append(float(value))
        assert queries == sorted(queries)
        assert queries[-1] == metrics.totals.queries
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_every_metric_of_the_example_dashboard_is_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"kvcore:\w+", " ".join(expressions)))
    text = generate_latest(registry(all_metrics(RandomWorker()))).decode()
    exported = set(re.findall(r"^kvcore:\w+", text, re.MULTILINE))
    assert asked - exported == set()
    # And the other way round, but for what a histogram has of itself: the dashboard leaves nothing out.
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked}
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported} - families == set()


def test_the_panels_of_the_example_dashboard_do_not_overlap_and_have_titles() -> None:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
