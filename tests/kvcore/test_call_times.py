"""Calls are measured in the steps that were chosen, and in no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore import ConfigError, CountError, KVCacheManager, Request
from kvcore.call_times import CallTimes
from kvcore.testing import make_manager, make_request


def life(manager: KVCacheManager, name: str = "r") -> None:
    """One lookup, one admission, two more slots, one free."""
    request: Request = make_request(name, range(9), manager)
    hits, num_hit = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 9 - num_hit, num_hit, hits)
    request.num_computed_tokens = 9
    request.append_output_token_ids([9, 10])
    manager.allocate_slots(request, 1)
    manager.grow([request], 2)
    manager.free(request)


def counts(times: CallTimes) -> dict[str, int]:
    return {name: histogram.count for name, histogram in times.histograms.items()}


def test_each_call_of_a_measured_step_is_counted_under_its_name() -> None:
    manager = make_manager(20)
    times = CallTimes(manager, step_sample_rate=1.0)
    life(manager)
    assert counts(times) == {"lookup": 0, "allocate": 0, "grow": 0, "free": 0}  # no step has begun
    times.next_step()
    for _ in range(3):
        life(manager)
        times.next_step()
    assert counts(times) == {"lookup": 3, "allocate": 6, "grow": 3, "free": 3}
    assert all(0 < histogram.sum < 10 for histogram in times.histograms.values())
    manager.check_invariants()


def test_a_share_of_the_steps_is_measured_and_the_others_not() -> None:
    manager = make_manager(20)
    times = CallTimes(manager, step_sample_rate=0.3, seed=0)
    seen = []
    for _ in range(1000):
        before = times.histograms["free"].count
        times.next_step()
        life(manager)
        life(manager)
        seen.append(times.histograms["free"].count - before)
    assert set(seen) == {0, 2}  # a step is measured as a whole
    assert 200 < seen.count(2) < 400


def test_a_call_that_raises_is_counted_and_raises() -> None:
    manager = make_manager(20)
    times = CallTimes(manager, step_sample_rate=1.0)
    times.next_step()
    request = make_request("r", range(9), manager)
    with pytest.raises(CountError):
        manager.allocate_slots(request, -1)
    assert counts(times)["allocate"] == 1


def test_when_closed_the_manager_is_as_it_was() -> None:
    manager = make_manager(20)
    before = dict(vars(manager))
    times = CallTimes(manager, step_sample_rate=1.0)
    times.next_step()
    life(manager)
    assert vars(manager) != before
    times.close()
    times.close()
    assert vars(manager).keys() == before.keys()
    times.next_step()  # chooses none any more
    life(manager)
    assert counts(times)["free"] == 1


def test_other_managers_are_not_measured() -> None:
    manager, other = make_manager(20), make_manager(20)
    times = CallTimes(manager, step_sample_rate=1.0)
    times.next_step()
    life(other)
    assert counts(times)["allocate"] == 0


def test_a_recording_goes_on_while_its_calls_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    manager = make_manager(20, record=path)
    times = CallTimes(manager, step_sample_rate=0.5, seed=0)
    lines = []
    for number in range(20):
        times.next_step()
        before = len(path.read_text().splitlines())
        life(manager, str(number))
        lines.append(len(path.read_text().splitlines()) - before)
    assert set(lines) == {lines[0]} != {0}
    assert 0 < counts(times)["free"] < 20
    times.close()
    life(manager, "after")
    assert len(path.read_text().splitlines()) == 1 + 21 * lines[0]


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="step_sample_rate is a share"):
        CallTimes(make_manager(4), step_sample_rate=rate)
