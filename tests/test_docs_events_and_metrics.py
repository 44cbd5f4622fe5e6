"""The programs on the pages about events and metrics run, each page from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvcore.metrics import CacheMetrics
from kvcore.prometheus import CacheCollector
from kvcore.testing import make_manager

DOCS = Path(__file__).parent.parent / "docs"


def run(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL):
        exec(program, names)
    return names


def test_the_events_page_publishes_and_follows() -> None:
    names = run("events.md")
    assert names["held"] == 96
    assert names["subscriber"].num_batches == 1


def test_the_metrics_page_prints_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    run("metrics.md")
    printed = capsys.readouterr().out
    assert "0% of the pool in use, 0% of the tokens found" in printed
    assert 'kvcore:kv_cache_usage_perc{model_name="llama"} 0.0' in printed


def test_the_metrics_page_names_every_metric_that_is_exported_and_no_other() -> None:
    page = (DOCS / "metrics.md").read_text("utf-8")
    named = set()
    for cell in re.findall(r"^\| (`k?v?_?(?:kv|prefix)_.*?) \|", page, re.MULTILINE):
        first, *others = re.findall(r"`(\w+)`", cell)
        stem = first.removesuffix("_requests_total")
        named |= {first, *(stem + other if other.startswith("_") else other for other in others)}
    registry = CollectorRegistry()
    registry.register(
        CacheCollector(CacheMetrics(make_manager(9, log_stats=True), watched_blocks=1, step_sample_rate=1.0))
    )
    text = generate_latest(registry).decode()
    kinds = re.findall(r"^# TYPE kvcore:(\w+) (?:gauge|counter|histogram)$", text, re.MULTILINE)
    assert named == set(kinds)
