"""Traces of requests: what a replay reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

from kvcore.errors import FileFormatError

MOONCAKE_BLOCK_SIZE = 512
"""Tokens of a hash id in Mooncake's traces."""


class TraceRequest(NamedTuple):
    """One request of a trace.

    Attributes:
        hash_ids: One number for each full block of its prompt, the same for the same prefix.
        timestamp: When it arrived, in milliseconds.
        input_length: Tokens of its prompt, as recorded.
        output_length: Tokens of its answer, as recorded.
        priority: For the policy; lower is more urgent.
        tail: Tokens of its prompt after the last full block.
        output_ids: As ``hash_ids``, for the blocks that the answer fills; empty where the answer is not known.
    """

    hash_ids: Sequence[int]
    timestamp: float = 0.0
    input_length: int = 0
    output_length: int = 0
    priority: int = 0
    tail: int = 1
    output_ids: Sequence[int] = ()

    @property
    def num_askable(self) -> int:
        """How many of the prompt's blocks can be hit: the last token is always computed (rule 6)."""
        return len(self.hash_ids) if self.tail else max(0, len(self.hash_ids) - 1)

    def num_prompt_tokens(self, block_size: int) -> int:
        """Tokens of the prompt, given those of a block."""
        return len(self.hash_ids) * block_size + self.tail

    def num_cached_tokens(self, block_size: int, *, with_output: bool) -> int:
        """Tokens in the cache at the end; of an answer all but the last, which nothing was computed after."""
        num_tokens = self.num_prompt_tokens(block_size)
        return num_tokens + max(0, self.output_length - 1) if with_output else num_tokens


def read_trace(
    path: str | PathLike[str],
    parse: Callable[[bytes], TraceRequest] | None = None,
    *,
    on_bad_line: Callable[[FileFormatError], None] | None = None,
) -> Iterator[TraceRequest]:
    """The requests of a trace, one a line, one at a time: the file is read as they are asked for.

    Empty lines are passed over.

    Args:
        path: The file.
        parse: Makes a request of a line; None: :func:`parse_mooncake`. :class:`kvcore.replay_formats.LineParser` has
            one for other formats.
        on_bad_line: Called with what is wrong with a line, which is then passed over; None: raise it.

    Raises:
        FileFormatError: The file cannot be read, or a line is no request; the message has its number.
    """
    parse = parse or parse_mooncake
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    request = parse(line)
                except FileFormatError as error:
                    located = FileFormatError(f"{path}, line {number}: {error}")
                    if on_bad_line is None:
                        raise located from None
                    on_bad_line(located)
                else:
                    yield request
    except OSError as error:
        raise FileFormatError(f"cannot read the trace {path}: {error.strerror}") from error


def parse_mooncake(line: bytes | str) -> TraceRequest:
    """One line of a trace in Mooncake's format.

    It is a JSON object with ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens) and
    ``hash_ids`` (one for every 512 tokens of the prompt); it may have a ``priority``.

    Raises:
        FileFormatError: It is no request.
    """
    return mooncake_request(parse_object(line))


def parse_object(line: bytes | str) -> Mapping[str, Any]:
    """The JSON object of a line.

    Raises:
        FileFormatError: It holds none.
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise FileFormatError(f"expected a JSON object, got {type(values).__name__}")
    return values


def mooncake_request(values: Mapping[str, Any]) -> TraceRequest:
    """As :func:`parse_mooncake`, of the line's object."""
    hash_ids = values.get("hash_ids")
    if not isinstance(hash_ids, list) or any(type(x) is not int or not 0 <= x < 1 << 64 for x in hash_ids):
        raise FileFormatError(f"hash_ids must be a list of whole numbers from 0 to 2**64 - 1, got {shown(hash_ids)}")
    return TraceRequest(hash_ids, timestamp_of(values), *counts_of(values))


def timestamp_of(values: Mapping[str, Any]) -> float:
    """When the request of a line arrived, in milliseconds; 0 if it does not say.

    Raises:
        FileFormatError: It says something else.
    """
    timestamp: Any = values.get("timestamp", 0)
    if type(timestamp) not in (int, float) or not 0 <= timestamp < float("inf"):
        raise FileFormatError(f"timestamp must be a number of milliseconds, got {shown(timestamp)}")
    return float(timestamp)


def counts_of(values: Mapping[str, Any]) -> tuple[int, int, int]:
    """``input_length``, ``output_length`` and ``priority`` of a line; 0 where it has none.

    Raises:
        FileFormatError: One is not a whole number, or a length is negative.
    """
    counts = []
    for name in ("input_length", "output_length", "priority"):
        count: Any = values.get(name, 0)
        if type(count) is not int or (count < 0 and name != "priority"):
            raise FileFormatError(f"{name} must be a whole number, and a length not negative; got {shown(count)}")
        counts.append(count)
    return counts[0], counts[1], counts[2]


def shown(value: object) -> str:
    """A value for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
