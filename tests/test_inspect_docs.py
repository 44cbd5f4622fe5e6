"""``docs/inspect.md`` and ``examples/watch_the_pool.py``: the walk-through tells what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import main
from tests.test_examples import EXAMPLES, load

PAGE = (Path(__file__).parent.parent / "docs" / "inspect.md").read_text("utf-8")


def test_the_example_writes_the_page_and_says_what_happens_in_each_step(tmp_path: Path) -> None:
    script = EXAMPLES / "watch_the_pool.py"
    command = [sys.executable, str(script), str(tmp_path / "pool.html")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "third arrives with 23 tokens and finds 0 of them" in done.stdout
    assert (tmp_path / "pool.html").read_text("utf-8") == load("watch_the_pool").page()


def test_in_the_example_two_share_a_prefix_one_finishes_and_a_third_evicts() -> None:
    steps = load("watch_the_pool").watch()
    (shared,) = steps[2].shared_prefixes()
    assert shared.request_ids == ("first", "second")
    assert (steps[5].blocks[3].state, steps[5].blocks[4].state) == ("cached", "empty")
    evicted = steps[5].blocks[3].prefix_hash
    assert evicted not in {block.prefix_hash for block in steps[6].blocks}
    assert steps[6].requests[1].tables == ((4, 7, 8, 9, 10, 3),)
    # The last one finds the eight tokens that were shared, in the same blocks, and nothing else.
    assert steps[8].requests[-1].tables[0][:2] == (1, 2)
    assert "finds 8 of them" in steps[8].label


def test_the_walk_through_has_an_item_for_each_step_with_its_blocks() -> None:
    steps = load("watch_the_pool").watch()
    items = re.findall(r"^\d+\. \*\*.*?(?=^\d+\. |^The page is)", PAGE, re.DOTALL | re.MULTILINE)
    assert len(items) == len(steps)
    for item, before, step in zip(items[1:], steps[:-1], steps[1:], strict=True):
        names = {request.request_id for request in before.requests} ^ {request.request_id for request in step.requests}
        assert all(f"`{name}`" in item for name in names), item


def test_the_program_of_the_page_runs_and_the_terminal_shows_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(programs[0], names)
    assert names["page"].startswith("<!doctype html>")
    capsys.readouterr()
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert main(["inspect", "pool.jsonl", "--rows", "3"]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed == shown.rstrip()
