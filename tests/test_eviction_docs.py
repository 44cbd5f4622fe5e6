"""``docs/eviction-policies.md``, ``docs/replay.md`` and ``examples/test_eviction_order.py`` do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import main
from kvcore.eviction import POLICIES

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "test_eviction_order.py"


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL)


def test_the_example_passes_when_a_user_runs_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout)


def test_the_programs_of_the_page_on_policies_run_and_show_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for program in programs("eviction-policies.md"):
        exec(program, names)
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "eviction-policies.md").read_text("utf-8"), re.DOTALL)
    assert capsys.readouterr().out == shown
    arguments = ["trace.jsonl", "--blocks", "20", "--policy", "lru", "slru", "lfu", "tlru", "adaptive"]
    assert main(["replay", *arguments, "--outputs", "cache", "--block-size", "2", "--jobs", "1"]) == 0


def test_the_policy_of_the_page_is_the_one_of_the_example() -> None:
    (shown,) = [program for program in programs("eviction-policies.md") if "class OnceFirst" in program]
    assert shown[shown.index("class OnceFirst") :].rstrip() in EXAMPLE.read_text("utf-8")


def test_the_page_on_policies_names_every_one() -> None:
    page = (ROOT / "docs" / "eviction-policies.md").read_text("utf-8")
    assert all(f"| `{name}` |" in page for name in POLICIES)


def test_the_program_of_the_page_on_replays_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = programs("replay.md")
    exec(program, {})
    lru, bound = map(float, capsys.readouterr().out.split())
    assert 0 < lru <= bound < 1


def test_the_page_on_replays_tells_of_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = (ROOT / "docs" / "replay.md").read_text("utf-8")
    assert {option for option in options if option not in page} <= {"--dtype"}
