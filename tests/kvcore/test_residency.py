"""Pinned prefixes stay; expected ones stay longer."""

from __future__ import annotations

from array import array
from itertools import count

import pytest

from kvcore import BlockHasher, ConfigError, KVCacheManager, PinError, Request, RequestProtocolError
from kvcore.testing import admit, assert_eviction_order, cache_prompt, make_manager, make_request, make_spec, table

PREFIX = range(100, 108)


def cache(manager: KVCacheManager, tokens: range | list[int]) -> Request:
    return cache_prompt(manager, "cached", tokens)


NEW_TOKENS = count(1000)


def fill(manager: KVCacheManager) -> None:
    """Overwrites everything that can be."""
    others = []
    while num_free := manager.block_pool.get_num_free_blocks():
        others.append(make_request(f"other {num_free}", [next(NEW_TOKENS)] * 4, manager))
        if manager.allocate_slots(others[-1], 4) is None:
            others.pop()
            break
    for other in others:
        manager.free(other)


def hit(manager: KVCacheManager, tokens: range | list[int]) -> int:
    return manager.get_computed_blocks(make_request("lookup", [*tokens, 1], manager))[1]


@pytest.mark.parametrize("groups", [["full"], ["full", "sliding:6"], ["sliding:6"], ["full", "chunked:8"]])
def test_a_pinned_prefix_outlasts_whatever_runs_until_it_is_unpinned(groups: list[str]) -> None:
    manager = make_manager(20, groups=groups)
    pin = manager.residency.pin(cache(manager, PREFIX))
    assert pin.num_tokens == 8
    for _ in range(3):
        fill(manager)
        assert hit(manager, PREFIX) == 8
        manager.check_invariants()
    manager.residency.unpin(pin)
    manager.check_invariants()
    assert hit(manager, PREFIX) == 8
    fill(manager)
    assert hit(manager, PREFIX) == 0
    assert manager.usage == 0
    assert not manager.residency.counts


def test_token_ids_are_pinned_by_their_hashes() -> None:
    manager = make_manager(20)
    cached = cache(manager, [*PREFIX, 1, 2, 3, 4])
    pin = manager.residency.pin(list(PREFIX), block_hasher=cached.block_hasher)
    assert (pin.num_tokens, pin.blocks.get_block_ids()) == (8, ([1, 2],))
    with pytest.raises(PinError, match="pass the block_hasher that the requests are made with"):
        manager.residency.pin(list(PREFIX))


def test_what_is_not_in_the_cache_is_not_kept() -> None:
    manager = make_manager(20)
    pin = manager.residency.pin(make_request("new", PREFIX, manager))
    assert pin.num_tokens == 0
    cache(manager, PREFIX)
    fill(manager)
    assert hit(manager, PREFIX) == 0
    manager.residency.unpin(pin)


def test_prefixes_that_share_blocks_are_kept_for_as_long_as_one_of_them_is_pinned() -> None:
    manager = make_manager(20)
    long = manager.residency.pin(cache(manager, range(16)))
    short = manager.residency.pin(make_request("short", range(8), manager))
    assert len(manager.residency.counts) == 4
    manager.residency.unpin(long)
    manager.check_invariants()
    fill(manager)
    assert hit(manager, range(16)) == 8
    manager.residency.unpin(short)


def test_no_more_than_the_limit_is_pinned() -> None:
    manager = make_manager(20, pin_limit=0.25)
    manager.residency.pin(cache(manager, range(12)))
    second = cache(manager, range(100, 112))
    with pytest.raises(PinError, match="6 blocks would be pinned, and 5 may be"):
        manager.residency.pin(second)
    manager.check_invariants()
    assert len(manager.residency.counts) == 3
    manager.residency.pin(make_request("again", range(12), manager))  # the same blocks: nothing more


@pytest.mark.parametrize("pin_limit", [-0.1, 1, "half"])
def test_a_limit_that_is_no_share_of_the_pool_is_refused(pin_limit: object) -> None:
    with pytest.raises(ConfigError, match="pin_limit is a share of the pool"):
        make_manager(20, pin_limit=pin_limit)


def test_a_pin_is_undone_once_and_where_it_was_made() -> None:
    manager, other = make_manager(20), make_manager(20)
    pin = manager.residency.pin(cache(manager, PREFIX))
    with pytest.raises(PinError, match="not pinned here"):
        other.residency.unpin(pin)
    manager.residency.unpin(pin)
    with pytest.raises(PinError, match="not pinned here"):
        manager.residency.unpin(pin)
    manager.check_invariants()


def test_the_cache_is_not_reset_while_a_prefix_is_pinned() -> None:
    manager = make_manager(20)
    pin = manager.residency.pin(cache(manager, PREFIX))
    assert manager.reset_prefix_cache() is False
    assert hit(manager, PREFIX) == 8
    manager.residency.unpin(pin)
    assert manager.reset_prefix_cache() is True


def test_pins_do_not_hide_what_all_running_requests_share() -> None:
    manager = make_manager(30)
    manager.residency.pin(cache(manager, PREFIX))
    manager.residency.pin(cache(manager, range(200, 208)))
    for name in ("a", "b"):
        admit(manager, make_request(name, [*PREFIX, 1, 2, 3, 4 + len(name)], manager))
    assert manager.get_num_common_prefix_blocks("a") == [2]


def test_a_request_that_is_expected_finds_what_would_have_been_evicted() -> None:
    manager = make_manager(9)
    waiting = cache(manager, range(16))
    cache(manager, range(100, 108))
    assert_eviction_order(manager, [7, 8, 4, 3, 2, 1, 6, 5])
    assert manager.residency.expect(make_request("waiting", [*range(16), 1], manager)) == 16
    assert_eviction_order(manager, [7, 8, 6, 5, 4, 3, 2, 1])
    admit(manager, make_request("running", range(200, 216), manager))
    assert hit(manager, range(16)) == 16
    assert waiting.num_tokens == 16


def test_what_waits_can_be_expected_as_often_as_one_likes() -> None:
    manager = make_manager(12, groups=["full", "sliding:6"], log_stats=True)
    cache(manager, range(16))
    waiting = make_request("waiting", range(16), manager)
    for _ in range(3):
        assert manager.residency.expect(waiting) == 12
        manager.check_invariants()
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert stats.requests == 1  # the first lookup of all; to expect is not to ask
    assert manager.usage == 0


def test_a_prefix_hashed_at_another_block_size_is_refused() -> None:
    manager = make_manager(20, groups=[make_spec("full", 8)])
    request = Request("a", range(64), block_hasher=BlockHasher(4))
    with pytest.raises(ConfigError, match="hashed at another block size"):
        manager.residency.pin(request)
    with pytest.raises(ConfigError, match="hashed at another block size"):
        manager.residency.expect(request)


def test_a_request_that_runs_on_a_pinned_prefix_gives_back_only_its_own() -> None:
    manager = make_manager(20)
    pin = manager.residency.pin(cache(manager, PREFIX))
    request = make_request("a", [*PREFIX, 1, 2], manager)
    admit(manager, request)
    assert table(manager, request)[:2] == list(pin.blocks.get_block_ids()[0])
    manager.free(request)
    manager.check_invariants()
    fill(manager)
    assert hit(manager, PREFIX) == 8


def test_any_kind_of_token_ids_can_be_pinned_and_what_is_no_request_is_refused() -> None:
    manager = make_manager(20)
    cached = cache(manager, PREFIX)
    for tokens in (tuple(PREFIX), iter(PREFIX), array("I", PREFIX)):
        assert manager.residency.pin(tokens, block_hasher=cached.block_hasher).num_tokens == 8

    class Halfway:
        request_id = "halfway"
        num_tokens = num_computed_tokens = 8
        block_hashes = cached.block_hashes

    with pytest.raises(RequestProtocolError, match="block_contents"):
        manager.residency.pin(Halfway())  # type: ignore[arg-type]
    manager.check_invariants()
