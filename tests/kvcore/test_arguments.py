"""Arguments of the command lines, as text and as what is made of it."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from kvcore.arguments import count, number_of_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("1.5 gib", 3 << 29),
        (" 500MB ", 500_000_000),
        ("2kB", 2000),
        ("0.5KiB", 512),
        ("3TB", 3 * 10**12),
        ("1TiB", 1 << 40),
        ("7b", 7),
        ("0.1GiB", (1 << 30) // 10),
        ("9" * 400, int("9" * 400)),
    ],
)
def test_memory_is_given_in_units_or_bytes(text: str, expected: int) -> None:
    assert number_of_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "8 apples", "-1", "1e9", "1.GiB", "nan", "inf", "GiB", "1,5GiB"])
def test_what_is_no_memory_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"8GiB, 1\.5GiB, 500MB") as caught:
        number_of_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.9", "0.0001kB"])
def test_less_than_a_byte_is_no_memory(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="at least one byte"):
        number_of_bytes(text)


def test_counts_may_have_separators() -> None:
    assert [count(text) for text in ("1", "131,072", "131_072", " 16 ")] == [1, 131_072, 131_072, 16]


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", "9" * 5000])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="a whole number of at least 1"):
        count(text)
