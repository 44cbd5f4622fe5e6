"""``docs/backends.md`` says what the code does."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys

import pytest
import torch

from runner.attention import BACKENDS, make_backend
from runner.attention.flash_backend import PREFERENCE
from runner.attention.flash_versions import VERSIONS
from tests.runner.backend_features import BEGIN, END, PAGE, described, feature_table

TEXT = PAGE.read_text("utf-8")


def table_below(heading: str) -> list[list[str]]:
    """Cells of the rows of the first table that begins with this heading."""
    _, _, below = TEXT.partition(f"| {heading} |")
    rows = below.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_table_of_features_is_what_the_backends_answer() -> None:
    between = TEXT[TEXT.index(BEGIN) + len(BEGIN) : TEXT.index(END)].strip()
    assert between == feature_table(), "run `python -m tests.runner.backend_features`"


def test_a_set_of_sizes_without_a_name_is_not_passed_over() -> None:
    with pytest.raises(LookupError, match=r"no words .* \[3, 5\]"):
        described([3, 5])


def test_the_page_names_every_backend_and_the_default() -> None:
    assert [row[0].strip("`") for row in table_below("backend | is | install")] == list(BACKENDS)
    assert make_backend(None, torch.device("cpu")).name in ("native", "torch")


def test_the_versions_of_flash_attn_stand_in_the_order_in_which_they_are_taken() -> None:
    rows = table_below("compute capability | GPUs, for example | takes")
    taken = {
        int(major): tuple(int(n) for n in re.findall(r"\b[234]\b", row[2]))
        for row in rows
        for major in re.findall(r"(\d+)\.x", row[0])
    }
    assert taken == PREFERENCE
    assert all(major in VERSIONS[n].capabilities for major, numbers in taken.items() for n in numbers)


def test_modules_and_commands_to_install_flash_attn_are_those_of_the_errors() -> None:
    rows = {int(row[0]): row for row in table_below("version | module | install")}
    assert rows.keys() == VERSIONS.keys()
    for number, version in VERSIONS.items():
        assert rows[number][1] == f"`{version.modules[0]}`"
        assert f"`{version.install}`" in rows[number][2]


def test_the_figures_about_prefix_hits_are_what_the_manager_finds() -> None:
    # A fence would end up inside the expected output of the last example of a block.
    text = "\n".join("" if line.startswith("```") else line for line in TEXT.splitlines())
    test = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    report: list[str] = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.attempted > 0
    assert result.failed == 0, "\n" + "".join(report)


def test_the_command_that_the_page_names_finds_the_table_as_it_stands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runner.backend_features"],
        cwd=PAGE.parents[1], capture_output=True, text=True, check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "docs/backends.md stands as it was\n"
