"""Puts the page that ``examples/watch_the_pool.py`` writes into the site, made anew at every build."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

EXAMPLE = Path(__file__).parent.parent / "examples" / "watch_the_pool.py"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs.yml's ``hooks`` when the files of the site are known."""
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    files.append(File.generated(config, "assets/watch-the-pool.html", content=example.page()))
    return files
