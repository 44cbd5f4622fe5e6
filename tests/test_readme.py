"""The README's example runs as printed, prints what it says, and stays short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL)


def test_the_embedding_example_prints_what_the_readme_says() -> None:
    assert EXAMPLE is not None, "README.md has no ```python block followed by its output in a ```text block"
    code, output = EXAMPLE.groups()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == output


def test_the_embedding_example_takes_at_most_25_lines() -> None:
    assert EXAMPLE is not None
    assert len(EXAMPLE.group(1).strip().splitlines()) <= 25


def test_the_readme_opens_with_the_two_commands() -> None:
    first_block = re.search(r"```(?:bash|sh|console)\n(.*?)```", README, re.DOTALL)
    assert first_block is not None
    assert README.index("make demo") < README.index("make test") < README.index("\n## ")


def test_every_local_link_of_the_readme_leads_to_a_file() -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README) + re.findall(r'(?:src|srcset)="([^":]+)"', README)
    assert targets
    missing = [target for target in targets if not (Path(__file__).parent.parent / target).exists()]
    assert missing == []
