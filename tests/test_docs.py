"""Every ``>>>`` example of the concepts pages runs, page by page, and answers what the page says."""

from __future__ import annotations

import doctest
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

CONCEPTS = Path(__file__).parent.parent / "docs" / "concepts"
PAGES = sorted(CONCEPTS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_examples_of_a_concepts_page_give_what_the_page_shows(page: Path) -> None:
    # A fence would end up inside the expected output of the last example of a block.
    lines = page.read_text("utf-8").splitlines(keepends=True)
    text = "".join("\n" if line.startswith("```") else line for line in lines)
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
    assert result.attempted > 0, "a concepts page teaches with examples that run; this one has none"
    assert result.failed == 0, "\n" + "".join(report)


def test_the_smallest_program_of_getting_started_runs_and_leaves_nothing_in_use() -> None:
    page = (CONCEPTS.parent / "getting-started.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    assert names["hit"] == 0
    assert names["block_tables"] == ([1],)
    assert names["manager"].usage == 0


def test_the_pictures_of_the_eviction_order_are_what_the_code_draws() -> None:
    drawing = runpy.run_path(str(CONCEPTS.parent / "eviction_picture.py"))
    assert drawing["PICTURE"].read_text("utf-8") == drawing["svg"](drawing["rows"]()), "run docs/eviction_picture.py"
    drawn = drawing["svg"](drawing["policy_rows"](), drawing["POLICIES_TITLE"])
    assert drawing["POLICIES_PICTURE"].read_text("utf-8") == drawn, "run docs/eviction_picture.py"
