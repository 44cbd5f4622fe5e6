"""The sweep over launches at the size of a toy: every launch it tries is right, and it says which is the default."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.report import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.slow
def test_a_sweep_measures_every_launch_and_the_default_and_finds_none_wrong(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.tune", "--tiny", "--json", str(path)],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text("utf-8"))
    assert results["not_reached"] == []
    rows = results["rows"]
    assert not [row for row in rows if "failed" in row]
    assert max(row["error"] for row in rows) < 1e-2
    cases = {(row["page"], row["batch"], row["context"], row["window"], row["queries"]) for row in rows}
    defaults = [row for row in rows if row.get("default")]
    assert len(defaults) == len(cases) == 10, "three decodes and two prefills with pages of two sizes"
