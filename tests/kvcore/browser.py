"""A headless Chromium for the tests of pages: the one of the system, driven by playwright.

Run as a program, it takes the screenshot of the docs::

    python -m tests.kvcore.browser docs/assets/watch-the-pool.png
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.test_examples import load

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
WALK_THROUGH_STEP = 6
"""The step of the example that the screenshot shows: the first request is gone, and one of its blocks is cached."""


def find_chromium() -> str | None:
    """The browser on this machine, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launch() -> Iterator[Browser]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    # Chromium has no sandbox for root, as whom containers run.
    options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=options)
        try:
            yield browser
        finally:
            browser.close()


def walk_through() -> str:
    """The page that ``examples/watch_the_pool.py`` writes."""
    return str(load("watch_the_pool").page())


def go_to_step(page: Page, number: int) -> None:
    """By keyboard, as a user would."""
    page.focus("#step")
    page.keyboard.press("Home")
    for _ in range(number - 1):
        page.keyboard.press("ArrowRight")


def screenshot(browser: Browser, folder: Path, target: Path) -> None:
    """The top of the walk-through as a picture."""
    file = folder / "walk-through.html"
    file.write_text(walk_through(), "utf-8")
    page = browser.new_page(viewport={"width": 820, "height": 740}, color_scheme="light")
    page.goto(file.as_uri())
    go_to_step(page, WALK_THROUGH_STEP)
    target.parent.mkdir(exist_ok=True)
    page.screenshot(path=target)
    page.close()


if __name__ == "__main__":
    import tempfile

    from PIL import Image

    with launch() as chromium, tempfile.TemporaryDirectory() as temporary:
        screenshot(chromium, Path(temporary), Path(sys.argv[1]))
    # A palette of 128 colours: a third of the size, and nobody sees the difference.
    Image.open(sys.argv[1]).convert("RGB").quantize(128).save(sys.argv[1], optimize=True)
