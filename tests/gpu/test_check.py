"""The GPU script at the size of a toy on a CPU: it runs, says what it found, and notices what is wrong."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvcore.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from tests.bench.report import ROOT, update_section
from tests.gpu import check, report
from tests.gpu.exact import BOUNDS, Error, exact_attention
from tests.gpu.processes import Worker, run_part
from tests.gpu.work import Settings
from tests.runner.paged_reference import random_step, reference_attention

BACKENDS = ["torch", "triton"] if importlib.util.find_spec("triton") else ["torch"]
LENGTHS = [(0, 1), (0, 17), (30, 1), (17, 9), (1500, 3)]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.check", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a run left: results, report, and what it printed."""
    folder = tmp_path_factory.mktemp("gpu")
    done = run(
        "--device=cpu", "--tiny", f"--backend={','.join(BACKENDS)},nonesuch",
        f"--json={folder / 'check.json'}", f"--markdown={folder / 'check.md'}",
    )  # fmt: skip
    (folder / "stdout").write_text(done.stdout, "utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "check.json").read_text("utf-8"))


def test_the_page_shows_the_results_that_are_kept_with_it() -> None:
    results = json.loads(check.KEPT.read_text("utf-8"))
    assert report.section(results).strip() in check.PAGE.read_text("utf-8")
    assert not report.wrong(results)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from-json=/nowhere/check.json"], "there is no file '/nowhere/check.json'"),
        (["--minutes=0"], "expected a number above 0, got '0'"),
        (["--minutes=nan"], "expected a number above 0, got 'nan'"),
        (["--backend=,"], "expected names with commas between them"),
        (["--device=cpu"], "on a CPU only --tiny"),
    ],
)
def test_options_that_cannot_work_are_refused_in_a_line(options: list[str], message: str) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_every_part_runs_every_backend_and_none_is_wrong(results: dict[str, Any]) -> None:
    assert list(results["parts"]) == [part.name for part in check.PARTS]
    for part, records in results["parts"].items():
        statuses = {record["status"] for record in records}
        assert statuses <= {"ok", "refused"}, part
        assert {record.get("backend") for record in records if record["status"] == "ok"} >= set(BACKENDS), part
    assert report.wrong(results) == []


@pytest.mark.slow
def test_a_backend_that_cannot_be_used_is_named_with_the_reason(out: Path, results: dict[str, Any]) -> None:
    (refused,) = (record for record in results["parts"]["availability"] if record["status"] == "refused")
    assert refused["name"] == "nonesuch"
    assert "must be one of" in refused["note"]
    assert refused["note"] in (out / "check.md").read_text("utf-8")


@pytest.mark.slow
def test_every_measurement_is_told_in_a_line_and_none_has_a_time_of_a_cpu(out: Path, results: dict[str, Any]) -> None:
    lines = (out / "stdout").read_text("utf-8").splitlines()
    for part, records in results["parts"].items():
        for record in records:
            assert check.line(part, record) in lines
            assert not {"seconds", "share", "bandwidth", "tokens_per_second"} & record.keys()


@pytest.mark.slow
def test_a_report_made_again_from_the_results_is_the_same_and_has_a_place_in_the_page(
    out: Path, tmp_path: Path
) -> None:
    text = (out / "check.md").read_text("utf-8")
    done = run("--from-json", str(out / "check.json"))
    assert done.returncode == 0
    assert done.stdout.strip() == text.strip()
    page = tmp_path / "gpu.md"
    page.write_text(check.PAGE.read_text("utf-8"), "utf-8")
    update_section("gpu", text, page)
    assert text.strip() in page.read_text("utf-8")


@pytest.mark.slow
def test_a_wrong_result_is_named_and_is_the_exit_status(results: dict[str, Any], tmp_path: Path) -> None:
    other = copy.deepcopy(results)
    (record,) = (r for r in other["parts"]["correctness"] if r["name"] == "torch, float32: windows")
    record |= {"status": "failed", "failures": ["a case"], "note": "1 of 9 cases is wrong"}
    (tmp_path / "other.json").write_text(json.dumps(other), "utf-8")
    done = run("--from-json", str(tmp_path / "other.json"))
    assert done.returncode == 1
    assert "**Wrong: 1.** correctness: torch, float32: windows" in done.stdout


def test_that_nothing_was_compared_is_wrong() -> None:
    unrun = {"name": "torch, float32: windows", "status": "not run", "note": "out of time"}
    assert report.wrong({"parts": {"correctness": [unrun]}}) == ["correctness: nothing was compared"]


def test_without_a_gpu_the_command_that_needs_none_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("--tiny")
    assert done.returncode == 1
    assert "--device cpu" in done.stderr


@pytest.mark.slow
def test_what_crashes_or_hangs_costs_one_measurement() -> None:
    worker = Worker("misbehaving")
    records = {record["name"]: record for record in run_part([worker], Settings("cpu", ()), seconds=40)}
    assert list(records) == ["fine", "raises", "ends its process", "fine after all", "never ends", "never begins"]
    assert records["fine"]["status"] == records["fine after all"]["status"] == "ok"
    assert records["raises"]["status"] == "error"
    assert "ValueError: as it should" in records["raises"]["traceback"]
    assert records["ends its process"]["status"] == "error"
    assert "exit code 7" in records["ends its process"]["note"]
    assert records["never ends"]["status"] == records["never begins"]["status"] == "not run"


@pytest.mark.parametrize("has_all", [False, True], ids=["", "softcap and sinks"])
@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(16, 2, 8, "float32"),
        SlidingWindowSpec(16, 2, 8, "float32", 11),
        ChunkedLocalAttentionSpec(16, 2, 8, "float32", 24),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_the_quick_reference_is_the_slow_one(spec: KVCacheSpec, has_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.exact.MOST_SCORES", 200)  # so that it takes the queries piece by piece
    step = random_step(random.Random(1), spec, LENGTHS, num_query_heads=6)
    extras = {"softcap": 3.0, "sinks": torch.linspace(-1, 1, 6)} if has_all else {}
    expected = reference_attention(step, spec, scale=0.3, **extras)
    error = Error.of(exact_attention(step, spec, scale=0.3, **extras), expected)
    assert error.vector < 1e-12


def test_a_window_that_is_a_token_too_short_is_more_than_rounding() -> None:
    right, wrong = (SlidingWindowSpec(16, 2, 64, "float32", window) for window in (1024, 1023))
    step = random_step(random.Random(2), right, [(1400, 1), (2000, 2)], num_query_heads=4)
    error = Error.of(exact_attention(step, wrong, scale=0.125), exact_attention(step, right, scale=0.125))
    assert not error.is_within(BOUNDS["bfloat16"])


def test_one_nan_is_not_within_any_bound() -> None:
    reference = torch.ones(3, 2, 4, dtype=torch.float64)
    output = reference.clone()
    assert Error.of(output, reference).is_within(BOUNDS["float32"])
    output[1, 1, 1] = float("nan")
    assert not Error.of(output, reference).is_within(BOUNDS["bfloat16"])


def test_the_report_compares_windows_with_full_attention_and_speeds_with_transformers() -> None:
    def decode(window: int | None, size: int, microseconds: float) -> dict[str, Any]:
        seconds = {"eager": 2e-6 * microseconds, "graph": 1e-6 * microseconds}
        return {
            "name": f"window {window}", "status": "ok", "backend": "triton", "page": 16, "batch": 64, "context": 8192,
            "window": window, "bytes": size, "seconds": seconds, "bandwidth": size / seconds["graph"],
            "copy_bandwidth": 4e12, "share": size / seconds["graph"] / 4e12,
        }  # fmt: skip

    def served(way: str, speed: float) -> dict[str, Any]:
        return {
            "name": way, "status": "ok", "way": way, "graphs": True, "tokens_per_second": {"64": speed},
            "prompt_tokens": 128, "new_tokens": 128,
        }  # fmt: skip

    text = report.section(
        {
            "settings": {"device": "cuda"},
            "machine": {
                "processor": "P", "system": "S", "card": "C", "memory": 80 << 30, "multiprocessors": 1, "driver": "1"
            },
            "versions": {"torch": "2"},
            "date": "2026-01-01",
            "total_seconds": 60.0,
            "parts": {
                "decode": [decode(None, 2 << 30, 800.0), decode(1024, 256 << 20, 200.0)],
                "engines": [served("engine, triton", 3000.0), served("transformers, generate", 1000.0)],
            },
        }
    )  # fmt: skip
    assert "The best at 64 x 8,192 reads at **67%** of a copy (aimed at: 70%)." in text
    assert "4.00 times as fast, with 8.00 times fewer bytes: 86% of the time that could be saved" in text
    assert "| triton | 16 | 64 x 8,192 |  | 2,048 | 1,600 | 800 | 2,684 | 67% |" in text
    assert "| engine, triton | yes | 3,000 | 3.00 |" in text


@pytest.mark.gpu
def test_on_a_gpu_the_script_runs_through(tmp_path: Path) -> None:
    done = run("--tiny", "--minutes=5", f"--json={tmp_path / 'check.json'}")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "check.json").read_text("utf-8"))
    assert any("share" in record for record in results["parts"]["decode"])
