"""Ages, idle times and reuse gaps, as a clock in the test's hand says they are."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvcore import BlockRemoved, ConfigError, KVCacheManager
from kvcore.block_lives import BlockLives
from kvcore.histogram import Histogram
from kvcore.testing import admit, make_manager, make_request
from tests.kvcore.random_worker import RandomWorker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A small cache, every block of it watched; ``at`` makes calls at a time and lets them be seen."""

    def __init__(self, num_blocks: int = 4, **options: Any) -> None:
        self.clock = Clock()
        self.manager: KVCacheManager = make_manager(num_blocks)
        self.lives = BlockLives(self.manager.block_pool.blocks, interval=0.0, clock=self.clock, **options)

    def at(self, now: float, *, reset: bool = False) -> None:
        self.clock.now = now
        self.lives.step(reset=reset)


def values(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, pytest.approx(histogram.sum)  # type: ignore[return-value]


def test_a_block_that_is_overwritten_tells_its_age_and_how_long_it_lay_idle() -> None:
    watched = Watched(num_blocks=4)
    first = make_request("first", range(12), watched.manager)
    admit(watched.manager, first)
    watched.at(10.0)
    watched.manager.free(first)
    watched.at(25.0)
    admit(watched.manager, make_request("second", range(100, 108), watched.manager))
    watched.at(40.0)
    # Two blocks of the three are overwritten: handed out at 10, released at 25.
    assert values(watched.lives.age_at_eviction) == (2, 60.0)
    assert values(watched.lives.idle_before_eviction) == (2, 30.0)
    assert watched.lives.reuse_gaps.count == 0


def test_a_hit_ends_a_gap_and_the_time_after_it_is_not_idle() -> None:
    watched = Watched(num_blocks=4)
    for start, name in ((0.0, "first"), (100.0, "second")):
        request = make_request(name, range(9), watched.manager)
        admit(watched.manager, request)
        watched.at(start + 1.0)
        watched.manager.free(request)
        watched.at(start + 5.0)
    # The second one hit two blocks, free since 5, at 101; the half-filled third is in no index.
    assert values(watched.lives.reuse_gaps) == (2, 2 * 96.0)
    admit(watched.manager, make_request("third", range(100, 112), watched.manager))
    watched.at(112.0)
    assert values(watched.lives.idle_before_eviction) == (2, 2 * 7.0)
    assert values(watched.lives.age_at_eviction) == (2, 2 * 111.0)


def test_the_age_of_a_block_begins_when_it_is_handed_out_and_not_when_it_is_full() -> None:
    watched = Watched(num_blocks=2)
    request = make_request("first", [1, 2, 3], watched.manager)
    admit(watched.manager, request)
    watched.at(10.0)
    request.append_output_token_ids(4)
    watched.manager.allocate_slots(request, 1)
    watched.at(20.0)
    watched.manager.free(request)
    watched.at(25.0)
    admit(watched.manager, make_request("second", [5], watched.manager))
    watched.at(40.0)
    assert values(watched.lives.age_at_eviction) == (1, 30.0)


def test_a_block_released_and_overwritten_between_two_looks_was_not_idle() -> None:
    watched = Watched(num_blocks=4)
    for now, name in ((1.0, "first"), (5.0, "second"), (9.0, "third")):
        request = make_request(name, range(int(100 * now), int(100 * now) + 12), watched.manager)
        admit(watched.manager, request)
        watched.at(now)
        if name == "first":
            watched.manager.free(request)
            watched.at(2.0)
        else:
            watched.manager.free(request)
    # The first one's blocks lay idle from 2 to 5; the second's were let go just before the third one took them.
    assert values(watched.lives.idle_before_eviction) == (6, 3 * 3.0)
    assert values(watched.lives.age_at_eviction) == (6, 3 * 4.0 + 3 * 4.0)


def test_a_hit_of_a_block_in_use_is_no_gap() -> None:
    watched = Watched(num_blocks=8)
    for name in ("first", "second"):
        admit(watched.manager, make_request(name, range(9), watched.manager))
        watched.at(1.0)
    assert watched.lives.reuse_gaps.count == 0


@pytest.mark.parametrize("in_use", [True, False])
def test_what_is_evicted_by_id_or_reset_was_not_overwritten(in_use: bool) -> None:
    watched = Watched(num_blocks=4)
    request = make_request("first", range(12), watched.manager)
    admit(watched.manager, request)
    watched.at(1.0)
    if not in_use:
        watched.manager.free(request)
        watched.at(2.0)
    watched.manager.evict_blocks([1])
    watched.at(3.0)
    if in_use:
        watched.manager.free(request)
        watched.at(4.0)
    assert watched.manager.reset_prefix_cache()
    admit(watched.manager, make_request("second", range(100, 112), watched.manager))
    watched.at(5.0, reset=True)
    assert watched.lives.age_at_eviction.count == 0
    assert watched.lives.idle_before_eviction.count == 0


def test_what_was_cached_before_the_watch_began_has_no_age_but_the_next_content_has() -> None:
    watched = Watched(num_blocks=4)
    request = make_request("first", range(12), watched.manager)
    admit(watched.manager, request)
    watched.manager.free(request)
    lives = BlockLives(watched.manager.block_pool.blocks, interval=0.0, clock=watched.clock)
    for now, name in ((1.0, "second"), (5.0, "third")):
        watched.clock.now = now
        request = make_request(name, range(int(100 * now), int(100 * now) + 12), watched.manager)
        admit(watched.manager, request)
        lives.step()
        assert lives.age_at_eviction.count == (0 if name == "second" else 3)
        watched.manager.free(request)
        lives.step()
    assert values(lives.age_at_eviction) == (3, 12.0)


def test_blocks_are_looked_at_no_more_often_than_asked_for() -> None:
    clock = Clock()
    manager = make_manager(4)
    lives = BlockLives(manager.block_pool.blocks, interval=10.0, clock=clock)
    lives.step()
    request = make_request("first", range(9), manager)
    admit(manager, request)
    clock.now = 9.0
    lives.step()  # not yet: the blocks are taken to have been handed out when they are looked at
    clock.now = 10.0
    lives.step()
    manager.free(request)
    clock.now = 20.0
    lives.step()
    admit(manager, make_request("second", range(100, 112), manager))
    clock.now = 30.0
    lives.step()
    assert values(lives.age_at_eviction) == (2, 40.0)


@pytest.mark.parametrize(("num_watched", "watched"), [(1, 1), (7, 7), (19, 19), (1000, 19)])
def test_as_many_blocks_are_watched_as_asked_for_and_there_are(num_watched: int, watched: int) -> None:
    manager = make_manager(20)
    lives = BlockLives(manager.block_pool.blocks, num_watched=num_watched)
    assert f"blocks={watched}," in repr(lives)


@pytest.mark.parametrize("options", [{"num_watched": 0}, {"interval": -1.0}])
def test_settings_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BlockLives(make_manager(4).block_pool.blocks, **options)


def test_every_overwritten_block_is_seen_when_all_are_looked_at_after_each_of_many_random_operations() -> None:
    worker = RandomWorker(seed=3)
    clock = Clock()
    lives = BlockLives(worker.manager.block_pool.blocks, num_watched=1000, interval=0.0, clock=clock)
    overwritten = 0
    for _ in range(5_000):
        clock.now += 1.0
        operation = worker.operation()
        removed = sum(isinstance(event, BlockRemoved) for event in worker.manager.take_events())
        overwritten += removed if operation != "evict" else 0
        stats = worker.manager.make_prefix_cache_stats()
        assert stats is not None
        lives.step(reset=stats.reset)
    assert lives.age_at_eviction.count == overwritten > 500
    assert lives.idle_before_eviction.count == overwritten
    assert lives.idle_before_eviction.sum < lives.age_at_eviction.sum
    assert lives.reuse_gaps.count > 100


def test_its_own_clock_goes_forward() -> None:
    manager = make_manager(4)
    lives = BlockLives(manager.block_pool.blocks, interval=0.0)
    for first_token in (0, 100):
        request = make_request(str(first_token), range(first_token, first_token + 12), manager)
        admit(manager, request)
        lives.step()
        time.sleep(0.002)
        manager.free(request)
        lives.step()
    assert lives.age_at_eviction.mean >= 0.002
