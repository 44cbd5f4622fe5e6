"""Block ids written short: ``1-3 9-7 4`` for 1, 2, 3, 9, 8, 7, 4. Pools hand blocks out, and get them back, in runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def to_runs(ids: Sequence[int]) -> str:
    """The ids in their order, neighbours that count up or down by one joined. O(ids)."""
    parts = []
    start = 0
    while start < len(ids):
        stop = start + 1
        step = ids[stop] - ids[start] if stop < len(ids) else 0
        if step in (1, -1):
            while stop < len(ids) and ids[stop] - ids[stop - 1] == step:
                stop += 1
        else:
            stop = start + 1
        first, last = ids[start], ids[stop - 1]
        if stop - start > 2:
            parts.append(f"{first}-{last}")
        else:
            parts += map(str, ids[start:stop])
        start = stop
    return " ".join(parts)


def from_runs(text: str, num_blocks: int) -> Iterable[int]:
    """The ids that :func:`to_runs` wrote, of a pool with ``num_blocks`` blocks.

    Raises:
        ValueError: The text is none of its, or an id is not of such a pool.
    """
    for part in text.split():
        first, dash, last = part.partition("-")
        start, end = int(first), int(last if dash else first)
        if max(start, end) >= num_blocks:
            raise ValueError(f"block {max(start, end)} is not in a pool of {num_blocks} blocks")
        yield from range(start, end + 1) if end >= start else range(start, end - 1, -1)
