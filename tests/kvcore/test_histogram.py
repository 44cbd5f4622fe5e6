"""Values are counted in the bucket they belong to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import ConfigError
from kvcore.histogram import Histogram


def test_a_value_is_counted_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram([1.0, 2.0, 5.0])
    for value in (0.5, 1.0, 1.5, 5.0, 5.1, 100.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 2]
    assert (histogram.count, histogram.sum) == (6, pytest.approx(113.1))
    assert histogram.mean == pytest.approx(113.1 / 6)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 3), (5.0, 4), (float("inf"), 6)]


def test_of_no_values_the_mean_is_zero() -> None:
    assert Histogram([1.0]).mean == 0.0
    assert repr(Histogram([1.0])) == "Histogram(count=0, mean=0)"


@given(st.lists(st.floats(-10, 10)), st.lists(st.floats(-9, 9), min_size=1, unique=True))
def test_for_each_bound_the_values_up_to_it_are_counted(values: list[float], bounds: list[float]) -> None:
    histogram = Histogram(sorted(bounds))
    for value in values:
        histogram.observe(value)
    for bound, count in histogram.cumulative():
        assert count == sum(value <= bound for value in values)


@pytest.mark.parametrize("bounds", [[], [1.0, 1.0], [2.0, 1.0]])
def test_bounds_that_do_not_ascend_are_refused(bounds: list[float]) -> None:
    with pytest.raises(ConfigError, match="must ascend"):
        Histogram(bounds)
