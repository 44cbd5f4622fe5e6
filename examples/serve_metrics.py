"""What serve.py tells Prometheus. Needs prometheus-client."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runner import AsyncEngine


class StatsCollector(Collector):
    """Reads the engine's own counters, when it is asked."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    def collect(self) -> Iterable[Metric]:
        now = self.engine.stats
        yield GaugeMetricFamily("runner_requests_running", "Requests that hold blocks", now.running)
        yield GaugeMetricFamily("runner_requests_waiting", "Requests that wait for blocks", now.waiting)
        yield GaugeMetricFamily("runner_kv_cache_usage_ratio", "Share of the blocks in use", now.usage)
        yield CounterMetricFamily("runner_prompt_tokens", "Tokens of prompts", now.num_prompt_tokens)
        yield CounterMetricFamily("runner_cached_tokens", "Of those, found in the cache", now.num_cached_tokens)
        yield CounterMetricFamily("runner_generated_tokens", "Tokens of outputs", now.num_generated_tokens)
        yield CounterMetricFamily("runner_requests_finished", "Requests that ended", now.num_finished_requests)


def add_metrics(app: FastAPI, engine: AsyncEngine) -> None:
    """The engine's counters at /metrics."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(engine))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
