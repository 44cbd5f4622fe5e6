"""A cache's metrics for Prometheus, under vLLM's names behind a prefix of one's own.

Needs prometheus-client: ``pip install 'kvcore[metrics]'``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("kvcore.prometheus needs prometheus-client: pip install 'kvcore[metrics]'") from error

from kvcore.histogram import Histogram
from kvcore.metrics import CacheMetrics


class CacheCollector(Collector):
    """Reads the metrics when it is asked, so that the engine does nothing for it in between.

    ::

        metrics = CacheMetrics(manager, watched_blocks=200)
        prometheus_client.REGISTRY.register(CacheCollector(metrics, labels={"model_name": "llama"}))
        prometheus_client.start_http_server(8001)

    It may be asked in another thread than the engine's. It takes plain numbers only, so that it sees them at most a
    step apart.

    Args:
        metrics: What to read.
        prefix: Of every name. With ``"vllm:"``, what draws vLLM's metrics draws these.
        labels: Of every metric.
    """

    def __init__(
        self, metrics: CacheMetrics, *, prefix: str = "kvcore:", labels: Mapping[str, str] | None = None
    ) -> None:
        self._metrics = metrics
        self._prefix = prefix
        self._labels = dict(labels or {})

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        metrics, pool, totals = self._metrics, self._metrics.manager.block_pool, self._metrics.totals
        yield self._gauge("kv_cache_usage_perc", "Share of the blocks that requests hold; 1 is all.", metrics.usage)
        yield self._gauge("kv_cache_blocks", "Blocks that can be used.", len(pool.blocks) - 1)
        yield self._gauge("kv_cache_free_blocks", "Blocks that no request holds.", pool.get_num_free_blocks())
        yield self._gauge("kv_cache_cached_prefixes", "Prefixes that can be hit.", len(pool.prefix_index))
        yield self._counter("kv_cache_evictions", "Cached blocks overwritten, or evicted by id.", metrics.num_evictions)

        yield self._counter("prefix_cache_requests", "Lookups, as many for a request as there were.", totals.requests)
        yield self._counter("prefix_cache_queries", "Tokens looked up.", totals.queries)
        yield self._counter("prefix_cache_hits", "Tokens found.", totals.hits)
        again = "of requests that had been preempted."
        yield self._counter("prefix_cache_preempted_requests", f"Lookups {again}", totals.preempted_requests)
        yield self._counter("prefix_cache_preempted_queries", f"Tokens looked up {again}", totals.preempted_queries)
        yield self._counter("prefix_cache_preempted_hits", f"Tokens found {again}", totals.preempted_hits)
        yield self._counter("prefix_cache_resets", "Steps in which the prefix cache was reset.", metrics.num_resets)
        last = f"of the last {metrics.recent.max_requests} requests."
        yield self._gauge("prefix_cache_hit_rate", f"Share of the tokens found, {last}", metrics.recent.hit_rate)
        yield self._gauge("prefix_cache_hit_tokens", f"Tokens found, mean {last}", metrics.recent.mean_hit_tokens)

        if (lives := metrics.block_lives) is not None:
            for name, text, histogram in (
                ("kv_block_lifetime_seconds", "From handing a block out to its eviction", lives.age_at_eviction),
                (
                    "kv_block_idle_before_evict_seconds",
                    "From the release of a cached block to its eviction",
                    lives.idle_before_eviction,
                ),
                ("kv_block_reuse_gap_seconds", "From the release of a cached block to a hit", lives.reuse_gaps),
            ):
                family = self._histograms(name, f"{text}, of a sample of the blocks.")
                self._add(family, histogram)
                yield family
        if (times := metrics.call_times) is not None:
            family = self._histograms("kv_cache_call_seconds", "Time of a call, in a sample of the steps.", "call")
            for call, histogram in times.histograms.items():
                self._add(family, histogram, call)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family

    def _histograms(self, name: str, text: str, *more_labels: str) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._prefix + name, text, labels=[*self._labels, *more_labels])

    def _add(self, family: HistogramMetricFamily, histogram: Histogram, *more_labels: str) -> None:
        buckets = [
            ("+Inf" if bound == float("inf") else str(float(bound)), count) for bound, count in histogram.cumulative()
        ]
        family.add_metric([*self._labels.values(), *more_labels], buckets, histogram.sum)
