"""Sizes and tables as plain text, for reports that a person reads in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1 before the point: ``1536`` as ``1.50 KiB``."""
    amount, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{num_bytes:,} B" if unit == "B" else f"{amount:,.2f} {unit}"


def share(part: int, whole: int) -> str:
    """Bytes and the part they are of ``whole`` bytes: ``64.00 KiB (20.0%)``; ``-`` for none."""
    return "-" if part == 0 else f"{size(part)} ({part / whole:.1%})"


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Iterable[int] = ()) -> str:
    """Columns as wide as their widest cell, numbers to the right, the columns in ``left`` to the left."""
    left = set(left)
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = (
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)
