"""A snapshot in the terminal: usage, the ends of the queue, the longest shared prefixes, who holds what. Needs rich."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcore.errors import ConfigError
from kvcore.id_runs import to_runs
from kvcore.snapshot import BlockSnapshot, Snapshot

if TYPE_CHECKING:
    from rich.table import Table

    Part = tuple[str, Table | None]
    """A heading, and what stands below it."""

_WORDS = {
    "shared": "held by several requests",
    "used": "held by one request",
    "cached": "free, cached: can be hit until it is overwritten",
    "empty": "free, nothing to hit",
}
_STYLES = {"shared": "bold blue", "used": "green", "cached": "yellow", "empty": "dim", "null": "dim"}


def render(snapshot: Snapshot, *, width: int | None = None, colour: bool = False, num_rows: int = 10) -> str:
    """The snapshot as text.

    Args:
        snapshot: What to show.
        width: Columns; None: those of the terminal.
        colour: Write the escape codes of a terminal.
        num_rows: Most rows of each table.

    Raises:
        ConfigError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError:
        raise ConfigError("this view needs rich: pip install 'kvcore[inspect]'") from None
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, highlight=False, markup=False, emoji=False
    )
    parts = [_title(snapshot), _states(snapshot), *_queue(snapshot, num_rows), _shared(snapshot, num_rows)]
    for title, table in [*parts, _holders(snapshot, num_rows)]:
        console.print(title, style="bold", soft_wrap=True)
        if table is not None:
            console.print(table)
        else:
            console.print()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def printable(text: str) -> str:
    """Text of others with what could move a cursor or change a colour spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _title(snapshot: Snapshot) -> Part:
    usable = len(snapshot.blocks) - 1
    lines = [f"{usable - len(snapshot.queue):,} of {usable:,} blocks in use ({snapshot.usage:.1%})"]
    if snapshot.label:
        lines.insert(0, printable(snapshot.label))
    lines += [f"group {number}: {group}" for number, group in enumerate(snapshot.groups)]
    if not snapshot.enable_caching:
        lines.append("prefix caching is off")
    return "\n".join(lines), None


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table


def _states(snapshot: Snapshot) -> Part:
    from rich.text import Text

    table = _table(">number", "share", "state")
    for state, words in _WORDS.items():
        share = snapshot.counts[state] / (len(snapshot.blocks) - 1)
        bar = Text(f"{'█' * round(20 * share):<20} {share:6.1%}", _STYLES[state])
        table.add_row(f"{snapshot.counts[state]:,}", bar, words)
    return "Blocks", table


def _describe(block: BlockSnapshot, snapshot: Snapshot) -> tuple[str, str]:
    """What a free block holds, and the hash of it."""
    if block.prefix_hash is None or block.group_id is None:
        return "-", ""
    size = snapshot.groups[block.group_id].block_size
    tokens = (
        "unknown tokens"
        if block.position is None
        else f"tokens {block.position * size:,} to {(block.position + 1) * size - 1:,}"
    )
    group = f", group {block.group_id}" if len(snapshot.groups) > 1 else ""
    return f"{tokens}{group}", block.prefix_hash[:12]


def _queue(snapshot: Snapshot, num_rows: int) -> list[Part]:
    """The queue, or its head and its tail."""
    ends: list[tuple[str, Sequence[int]]] = [("Free queue, overwritten next", snapshot.queue[:num_rows])]
    if len(snapshot.queue) > num_rows:
        tail = snapshot.queue[max(num_rows, len(snapshot.queue) - num_rows) :]
        ends.append((f"Free queue, overwritten last ({len(snapshot.queue):,} blocks in all)", tail))
    if not snapshot.queue:
        return [("No block is free.", None)]
    parts: list[Part] = []
    for title, ids in ends:
        table = _table(">place", ">block", "holds", "hash")
        for block_id in ids:
            row = _describe(snapshot.blocks[block_id], snapshot)
            table.add_row(f"{snapshot.queue_places[block_id] + 1:,}", str(block_id), *row)
        parts.append((title, table))
    return parts


def _shared(snapshot: Snapshot, num_rows: int) -> Part:
    prefixes = snapshot.shared_prefixes()
    if not prefixes:
        return "No two requests share a block.", None
    more = f" ({num_rows} of {len(prefixes):,})" if len(prefixes) > num_rows else ""
    table = _table(">tokens", ">requests", ">group", "blocks", "held by")
    for prefix in prefixes[:num_rows]:
        names = _shorten([printable(name) for name in prefix.request_ids], 6, ", ")
        runs = _shorten(to_runs(prefix.block_ids).split(), 12, " ")
        row: list[Any] = [f"{prefix.num_tokens:,}", f"{len(prefix.request_ids):,}", str(prefix.group_id), runs, names]
        table.add_row(*row)
    return f"Longest shared prefixes{more}", table


def _holders(snapshot: Snapshot, num_rows: int) -> Part:
    if not snapshot.requests:
        return "No request holds blocks.", None
    more = f" ({num_rows} of {len(snapshot.requests):,})" if len(snapshot.requests) > num_rows else ""
    table = _table("request", ">computed", ">tokens", ">group", ">blocks", ">shared", "table")
    largest = sorted(snapshot.requests, key=lambda request: -sum(len(set(table) - {0}) for table in request.tables))
    for request in largest[:num_rows]:
        name, counts = printable(request.request_id), (f"{request.num_computed_tokens:,}", f"{request.num_tokens:,}")
        for group_id, ids in enumerate(request.tables):
            held = [block_id for block_id in ids if block_id]
            shared = sum(len(snapshot.holders[block_id]) > 1 for block_id in held)
            runs = _shorten(to_runs(ids).split(), 12, " ")
            first = (name, *counts) if group_id == 0 else ("", "", "")
            table.add_row(*first, str(group_id), f"{len(held):,}", f"{shared:,}", runs)
    return f"Who holds most{more}", table


def _shorten(parts: Sequence[str], most: int, between: str) -> str:
    rest = f"{between}... {len(parts) - most:,} more" if len(parts) > most else ""
    return between.join(parts[:most]) + rest
