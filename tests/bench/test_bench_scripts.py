"""The scripts start, say what they take, and stop with a message when something is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.peer import ROOT
from tests.bench.report import write_json

SCRIPTS = ["bench_native", "compare", "gc_pause", "metrics_cost", "on_kvcore", "on_vllm", "profile_tables", "scaling"]


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"tests.bench.{script}", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_what_it_takes(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0
    assert "usage:" in done.stdout


@pytest.mark.parametrize("script", ["compare", "scaling", "profile_tables", "gc_pause"])
def test_without_the_peer_the_command_that_sets_it_up_is_named(script: str, tmp_path: Path) -> None:
    done = run(script, "--peer-dir", str(tmp_path))
    assert done.returncode == 1
    assert f"tests/bench/setup_peer.sh {tmp_path}" in done.stderr
    assert "Traceback" not in done.stderr


def test_results_are_kept_as_they_are_with_the_numbers_of_a_list_in_a_line(tmp_path: Path) -> None:
    value = {"name": "a [\n1\n] b", "none": [], "tokens": [[1, -2, 3], [4.5, 1e-9]], "mixed": [1, "2", None]}
    path = tmp_path / "results" / "one.json"
    write_json(path, value)
    assert json.loads(path.read_text("utf-8")) == value
    assert "[1, -2, 3]" in path.read_text("utf-8")


def test_the_script_of_kvcore_prints_one_object() -> None:
    done = run("on_kvcore", "--only", "warm_lookup32k", "--reps", "1", "--hash", "sha256_raw")
    result = json.loads(done.stdout)
    assert result["manager"]["hash"] == "sha256_raw"
    assert set(result["medians"]) == {"full.warm_lookup32k", "hybrid.warm_lookup32k"}
    assert result["hit_tokens"] == {"full.warm_lookup32k": 32752, "hybrid.warm_lookup32k": 32752}


def test_a_workload_that_does_not_exist_is_named() -> None:
    done = run("on_kvcore", "--only", "hash33k")
    assert done.returncode == 1
    assert "no hash33k here; there are: hash32k" in done.stderr


def test_a_profile_is_a_table_for_each_workload(tmp_path: Path) -> None:
    out = tmp_path / "tables.txt"
    done = run("profile_tables", "--no-peer", "--only", "cold_admit32k", "--lines", "100", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "==== hybrid.cold_admit32k, kvcore" in out.read_text("utf-8")
    assert "allocate_slots" in out.read_text("utf-8")


@pytest.mark.slow
def test_the_native_kernels_are_measured_beside_what_they_stand_for() -> None:
    done = run("bench_native", "--layers", "1", "--reps", "1", "--threads", "1")
    if "there are no native kernels to measure" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    times = [float(cell) for row in rows for cell in row[1:] if cell.replace(".", "").isdigit()]
    assert "16 of 8,192, 8,144 shared" in [row[0] for row in rows]
    assert min(times) > 0


def test_collections_are_counted_by_phase() -> None:
    done = run("gc_pause", "--no-peer", "--blocks", "20000", "--remedy", "frozen")
    assert done.returncode == 0, done.stderr
    assert "collect everything" in done.stdout


@pytest.mark.slow
def test_scaling_is_measured_drawn_and_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("numpy")
    done = run("scaling", "--no-peer", "--quick", "--reps", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "scaling.json").read_text("utf-8"))
    assert [point["at"] for point in results["kvcore"]["series"]["pool_size"]] == [1024, 4096]
    assert (tmp_path / "scaling_pool_size.svg").exists()
