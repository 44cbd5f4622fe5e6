"""What a manager logs: its layout, what does not fit, resets. And that it is quiet about all else."""

from __future__ import annotations

import logging

import pytest

from kvcore import manager_log
from kvcore.testing import admit, make_manager, make_request


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvcore")


def test_the_layout_is_told_at_start(caplog: pytest.LogCaptureFixture) -> None:
    make_manager(1000, groups=["full", "sliding:64"], max_model_len=8192)
    (line,) = caplog.messages
    assert line.startswith("pool of 1,000 blocks, the null block included; up to 8,192 tokens a request")
    assert "prefix caching on, 4 tokens a hash" in line
    assert "group 1: 1 layers of SlidingWindowSpec(block_size=4" in line


def test_a_refusal_is_told_with_what_was_free_and_the_next_ones_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(10)
    admit(manager, make_request("a", range(20), manager))
    large = make_request("large\n", range(100, 130), manager)
    caplog.clear()
    for _ in range(5):
        assert manager.allocate_slots(large, 30) is None
    assert caplog.messages == [
        r"request 'large\n' with 30 tokens, 0 of them computed, does not fit: 4 of 9 blocks are free"
    ]
    monkeypatch.setattr(manager_log, "SECONDS_BETWEEN_REFUSALS", 0.0)
    manager._log._say_again_at = 0.0
    assert manager.allocate_slots(large, 30) is None
    assert caplog.messages[1].endswith("4 of 9 blocks are free (and 4 more times since the last such line)")


def test_every_way_of_not_fitting_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_log, "SECONDS_BETWEEN_REFUSALS", 0.0)
    manager = make_manager(6)
    running = make_request("running", range(100), manager)
    manager.allocate_slots(running, 20)
    running.num_computed_tokens = 20
    waiting = make_request("waiting", range(200, 210), manager)
    caplog.clear()
    assert manager.allocate_slots(running, 1) is None
    assert manager.allocate_slots(running, 1, reserved_blocks=1) is None
    assert manager.grow([running]).num_grown == 0
    assert manager.allocate_slots(waiting, 4) is None
    assert manager.allocate_slots(waiting, 4, full_sequence_must_fit=True) is None
    assert [message.split()[1] for message in caplog.messages] == ["'running'"] * 3 + ["'waiting'"] * 2


def test_a_reset_is_told_and_so_is_one_that_could_not_be(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(10)
    request = make_request("a", range(9), manager)
    admit(manager, request)
    caplog.clear()
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert caplog.messages == [
        "the prefix cache was not reset: requests and pins hold 3 blocks",
        "the prefix cache was reset: nothing can be hit until requests have filled blocks again",
    ]


def test_what_goes_well_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(10)
    caplog.clear()
    request = make_request("a", range(9), manager)
    admit(manager, request)
    manager.grow([request])
    manager.free(request)
    assert caplog.messages == []


def test_at_warning_nothing_is_told_or_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvcore")
    manager = make_manager(4)
    large = make_request("large", range(30), manager)
    assert manager.allocate_slots(large, 30) is None
    assert manager.reset_prefix_cache()
    assert caplog.messages == []
