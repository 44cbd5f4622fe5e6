"""Where results go: JSON, figures, and the sections of the documentation's page that are generated."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from tests.bench.peer import ROOT

PAGE = ROOT / "docs" / "performance.md"
ASSETS = ROOT / "docs" / "assets" / "bench"
OUT = Path("artifacts", "bench")
"""Where results go by default, relative to :data:`ROOT`."""


def machine() -> dict[str, Any]:
    """The machine, as far as it matters to a reader of the figures."""
    return {"processor": _processor(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def number(value: float) -> str:
    """Three digits that count, and no exponent."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}"


def short(number: float) -> str:
    """1024 as 1K, 1048576 as 1M."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


def write_json(path: Path, value: Any) -> None:
    """Numbers in a row share a line: the tokens of a run are thousands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=1)
    text = re.sub(r"\[\n[-+\d\s.,e]+\]", lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]", text)
    path.write_text(text + "\n", "utf-8")


def update_section(name: str, content: str, page: Path = PAGE) -> None:
    """Replaces what stands between the markers of a section, ``<!-- name: begin -->`` and ``<!-- name: end -->``.

    Raises:
        ValueError: The page has no such section.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text("utf-8")
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{page.name} needs the markers {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}", "utf-8")
