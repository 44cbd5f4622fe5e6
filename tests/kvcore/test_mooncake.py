"""The figures of the published conversation trace: what LRU, the adaptive policy and the all-knowing one find in it.

The trace is Mooncake's (FAST'25, Apache-2.0). It is not the project's to carry: it is read from
``../shared/data`` beside the repository, or from the path in ``KVCORE_MOONCAKE_TRACE``.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from kvcore.cli import main

TRACE = Path(
    os.environ.get("KVCORE_MOONCAKE_TRACE")
    or Path(__file__).parents[3] / "shared" / "data" / "mooncake_conversation_trace.jsonl"
)
PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
SIZES = (1000, 2000, 4000, 8000, 16000, 32000)


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.is_file(), reason=f"no trace: {TRACE.name} is not there; KVCORE_MOONCAKE_TRACE names it")
def test_the_published_trace_gives_the_figures_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    sizes = [str(size) for size in SIZES]
    file = tmp_path / "found.json"
    assert main(["replay", str(TRACE), "--blocks", *sizes, "--policy", "lru", "adaptive", "--json", str(file)]) == 0
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert shown.rstrip() in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["trace"]["num_requests"] == 12_031
    rates = {(r["policy"], r["num_blocks"]): 100 * r["block_hit_rate"] for r in report["results"]}
    lru, adaptive, bound = ([rates[policy, size] for size in SIZES] for policy in ("lru", "adaptive", "all-knowing"))
    # vLLM's manager finds the same.
    assert lru == pytest.approx([4.5, 5.4, 8.7, 17.8, 26.3, 33.2], abs=0.1)
    assert bound == pytest.approx([19, 25.5, 32, 36.6, 36.6, 36.6], abs=0.5)
    assert all(found >= wanted for found, wanted in zip(adaptive, (7.6, 10.3, 14.4, 19.9), strict=False))
    assert all(found >= least - 0.5 for found, least in zip(adaptive, lru, strict=True))
