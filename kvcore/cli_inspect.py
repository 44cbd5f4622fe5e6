"""``kvcore inspect``: a snapshot in the terminal, or as a web page."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from kvcore.arguments import count
from kvcore.errors import ConfigError
from kvcore.inspect_terminal import render
from kvcore.snapshot import load_snapshots
from kvcore.snapshot_html import snapshots_to_html


def add_parser(commands: Any) -> None:
    """Adds the command to those of ``kvcore``."""
    parser = commands.add_parser(
        "inspect",
        help="look into a pool",
        description="Show a snapshot of a pool: how full it is, what is overwritten next, which prefixes are shared,\n"
        "who holds what. A file holds one snapshot a line (kvcore.snapshot.save_snapshots).",
        epilog="examples:\n"
        "  kvcore inspect pool.jsonl\n"
        "  kvcore inspect pool.jsonl --step 3 --rows 30\n"
        "  kvcore inspect pool.jsonl --html pool.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("snapshot", metavar="SNAPSHOT", help="file of snapshots")
    parser.add_argument("--step", type=count, metavar="N", help="which of them, counted from 1 (default: the last)")
    parser.add_argument("--rows", type=count, default=10, metavar="N", help="most rows of each table (default: 10)")
    parser.add_argument("--html", metavar="PAGE", help="write all of them as a web page with a slider instead")
    parser.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> str:
    snapshots = load_snapshots(args.snapshot)
    if args.html:
        page = snapshots_to_html(snapshots, title=f"KV cache: {Path(args.snapshot).name}")
        return write_page(args.html, page, len(snapshots))
    if args.step is not None and args.step > len(snapshots):
        raise ConfigError(f"--step {args.step} is beyond the last of the file's {len(snapshots)} snapshots")
    snapshot = snapshots[(args.step or len(snapshots)) - 1]
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else 120
    return render(snapshot, width=width, colour=terminal, num_rows=args.rows)


def write_page(path: str, page: str, num_steps: int) -> str:
    """Writes a page; what to print about it.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        Path(path).write_text(page, "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path!r}: {error}") from error
    return f"wrote {path}: {num_steps} {'step' if num_steps == 1 else 'steps'}, {len(page):,} characters"
