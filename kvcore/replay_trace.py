"""Traces of requests: what a replay reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from os import PathLike
from typing import NamedTuple

from kvcore.errors import FileFormatError

MOONCAKE_BLOCK_SIZE = 512
"""Tokens of a hash id in Mooncake's traces."""


class TraceRequest(NamedTuple):
    """One request of a trace.

    Args:
        hash_ids: One number for each full block of its prompt, the same for the same prefix.
        timestamp: When it arrived, in milliseconds.
        input_length: Tokens of its prompt, as recorded.
        output_length: Tokens of its answer, as recorded.
        priority: For the policy; lower is more urgent.
    """

    hash_ids: list[int]
    timestamp: float = 0.0
    input_length: int = 0
    output_length: int = 0
    priority: int = 0


def read_mooncake(
    path: str | PathLike[str], *, on_bad_line: Callable[[FileFormatError], None] | None = None
) -> Iterator[TraceRequest]:
    """The requests of a trace in Mooncake's format, one at a time: the file is read as they are asked for.

    Each line is a JSON object with ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens) and
    ``hash_ids`` (one for every 512 tokens of the prompt); it may have a ``priority``. Empty lines are passed over.

    Args:
        path: The file.
        on_bad_line: Called with what is wrong with a line, which is then passed over; None: raise it.

    Raises:
        FileFormatError: The file cannot be read, or a line is no request; the message has its number.
    """
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield parse_mooncake(line)
                except FileFormatError as error:
                    located = FileFormatError(f"{path}, line {number}: {error}")
                    if on_bad_line is None:
                        raise located from None
                    on_bad_line(located)
    except OSError as error:
        raise FileFormatError(f"cannot read the trace {path}: {error.strerror}") from error


def parse_mooncake(line: bytes | str) -> TraceRequest:
    """One line of a trace in Mooncake's format.

    Raises:
        FileFormatError: It is no request.
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise FileFormatError(f"expected an object with hash_ids, got {type(values).__name__}")
    hash_ids = values.get("hash_ids")
    if not isinstance(hash_ids, list) or any(type(x) is not int or not 0 <= x < 1 << 64 for x in hash_ids):
        raise FileFormatError(f"hash_ids must be a list of whole numbers from 0 to 2**64 - 1, got {_shown(hash_ids)}")
    timestamp = values.get("timestamp", 0)
    if type(timestamp) not in (int, float) or not 0 <= timestamp < float("inf"):
        raise FileFormatError(f"timestamp must be a number of milliseconds, got {_shown(timestamp)}")
    counts = [values.get(name, 0) for name in ("input_length", "output_length", "priority")]
    for name, count in zip(("input_length", "output_length", "priority"), counts, strict=True):
        if type(count) is not int or (count < 0 and name != "priority"):
            raise FileFormatError(f"{name} must be a whole number, and a length not negative; got {_shown(count)}")
    return TraceRequest(hash_ids, timestamp, *counts)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
