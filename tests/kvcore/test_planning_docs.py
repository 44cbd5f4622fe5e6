"""The page on planning shows what the command prints and code that runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvcore.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    """The code blocks of one language, in order."""
    return re.findall(rf"^```{language}\b[^\n]*\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def beside_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory holds the page's config.json."""
    (tmp_path / "config.json").write_text(fenced("json")[0])
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("beside_the_config")
def test_the_command_on_the_page_prints_the_tables_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    prompt, program, *arguments = shlex.split(fenced("console")[0])
    assert (prompt, program) == ("$", "kvcore")
    assert main(arguments) == 0
    assert capsys.readouterr().out == "\n".join(fenced("text"))


@pytest.mark.usefixtures("beside_the_config")
def test_the_python_on_the_page_runs() -> None:
    examples = fenced("python")
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "planning.md", "exec"), {})
