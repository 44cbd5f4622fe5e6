"""Types of arguments that the command lines of this project share: for argparse, which shows their messages."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError
from fractions import Fraction

UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
"""Bytes in a unit of memory, by its name in small letters."""


def number_of_bytes(text: str) -> int:
    """``8GiB``, ``1.5 GB`` or a plain number, as bytes. Capitals do not matter.

    Raises:
        ArgumentTypeError: It is neither, its unit is unknown, or it is less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in UNITS:
        raise ArgumentTypeError(f"expected a number of bytes, or one with a unit (8GiB, 1.5GiB, 500MB), got {text!r}")
    value = int(Fraction(match[1]) * UNITS[match[2]])
    if value < 1:
        raise ArgumentTypeError(f"expected at least one byte, got {text!r}")
    return value


def find_modules_here() -> None:
    """Modules of one's own are found where the command is run, as they are with ``python -m``."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def count(text: str) -> int:
    """A whole number of at least 1, with ``,`` or ``_`` between its digits if that reads better.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        value = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value
