"""Sizes and tables as text."""

from __future__ import annotations

import pytest

from kvcore.planning_text import ranges, share, size, table


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**40, "1.00 TiB"),
        (2**52, "4,096.00 TiB"),
    ],
)
def test_bytes_are_told_in_the_largest_unit_that_leaves_one_before_the_point(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_a_share_is_told_in_bytes_and_percent_and_none_as_a_dash() -> None:
    assert share(512, 2048) == "512 B (25.0%)"
    assert share(0, 2048) == "-"


@pytest.mark.parametrize(("numbers", "text"), [([0], "0"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3, 4], "1, 3-4")])
def test_neighbouring_numbers_are_told_as_a_range(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table(("n", "name"), [("1,000", "a"), ("2", "longer")], left={1}) == "    n  name\n1,000  a\n    2  longer"
