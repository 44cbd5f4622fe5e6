"""Tests of eviction order, of the kind that you would write for a stack of your own. Run with: pytest examples

`kvcore.testing` builds a pool in a given state and compares orders; `kvcore.testing_eviction` has the suite that every
policy has to pass. No model, no GPU, no engine. Blocks have four tokens, and block 0 is the null block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvcore import KVCacheBlock, PinError
from kvcore.eviction import Segments
from kvcore.testing import admit, assert_eviction_order, cache_prompt, make_manager, make_request, table
from kvcore.testing_eviction import check_eviction_policy

SYSTEM = [*range(100, 108)]
"""A system prompt: two blocks."""


def test_the_tail_of_a_prompt_is_overwritten_before_its_head() -> None:
    manager = make_manager(num_blocks=6)
    cache_prompt(manager, "a", range(16))
    assert_eviction_order(manager, [5, 4, 3, 2, 1])  # 5 was never used; then a's blocks, the last one first


def test_a_partly_filled_block_goes_first() -> None:
    manager = make_manager(num_blocks=6)
    cache_prompt(manager, "a", range(10))  # 1 and 2 are full; 3 holds two tokens, which nobody can hit
    assert_eviction_order(manager, [3, ...])


def test_a_hit_makes_a_prompt_the_last_to_go() -> None:
    manager = make_manager(num_blocks=7)
    cache_prompt(manager, "a", range(8))
    cache_prompt(manager, "b", range(50, 58))
    assert_eviction_order(manager, [5, 6, 2, 1, 4, 3])
    cache_prompt(manager, "a again", [*range(8), 9])
    assert_eviction_order(manager, [5, 6, 4, 3, 2, 1])


def test_a_system_prompt_that_everybody_uses_survives() -> None:
    manager = make_manager(num_blocks=10)
    for user in range(20):
        question = range(1000 * user, 1000 * user + 12)
        request = make_request(f"user {user}", [*SYSTEM, *question], manager)
        assert admit(manager, request) == (8 if user else 0)
        manager.free(request)


def test_a_scan_flushes_the_system_prompt_unless_it_is_pinned() -> None:
    for pinned in (False, True):
        manager = make_manager(num_blocks=10)
        prompt = cache_prompt(manager, "first", SYSTEM)
        if pinned:
            assert manager.residency.pin(prompt).num_tokens == 8
        for scan in range(10):
            cache_prompt(manager, f"scan {scan}", range(1000 * (scan + 1), 1000 * (scan + 1) + 20))
        _, num_hit_tokens = manager.get_computed_blocks(make_request("next", [*SYSTEM, 1], manager))
        assert num_hit_tokens == (8 if pinned else 0)


def test_pins_have_a_limit_and_end() -> None:
    manager = make_manager(num_blocks=6, pin_limit=0.5)
    pin = manager.residency.pin(cache_prompt(manager, "a", range(8)))
    assert_eviction_order(manager, [3, 4, 5])  # what is pinned is in use
    with pytest.raises(PinError):
        manager.residency.pin(cache_prompt(manager, "b", range(50, 58)))
    manager.residency.unpin(pin)
    assert_eviction_order(manager, [5, 4, 3, 2, 1])


def test_what_a_window_left_behind_goes_before_what_the_next_turn_will_hit() -> None:
    manager = make_manager(30, groups=["full", "sliding:8"], window_retention="ends")
    request = make_request("a", range(17), manager)
    admit(manager, request)
    assert table(manager, request, group=0) == [1, 2, 3, 4, 5]
    assert table(manager, request, group=1) == [6, 7, 8, 9, 10]
    request.append_output_token_ids(17)
    manager.allocate_slots(request, 1)
    request.num_computed_tokens = 18
    assert table(manager, request, group=1) == [0, 0, 8, 9, 10]  # the window has left 6 and 7
    manager.free(request)
    # First what is half full, then what the window left, then what was never used.
    assert_eviction_order(manager, [10, 5, 7, 6, *range(11, 30), 4, 3, 2, 1, 9, 8])


class OnceFirst(Segments):
    """A policy of one's own: what was never hit goes before what was, least recently released first."""

    def __init__(self) -> None:
        super().__init__(3)  # cannot be hit; was not hit; was hit
        self.was_hit: set[KVCacheBlock] = set()

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        self.release_unhashed(unhashed)
        self.was_hit.difference_update(unhashed)
        # The end of the prompt comes in front: whatever stands before a block that was hit has to outlive it.
        first_hit = next((i for i, block in enumerate(hashed) if block in self.was_hit), len(hashed))
        self.was_hit.update(hashed[first_hit:])
        self.append(hashed[:first_hit], 1)
        self.append(hashed[first_hit:], 2)

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().reuse(blocks)
        self.was_hit.update(blocks)

    def take(self, n: int) -> list[KVCacheBlock]:
        taken: list[KVCacheBlock] = []
        for queue in self.queues:
            taken += queue.popleft_n(min(n - len(taken), len(queue)))
        self.was_hit.difference_update(taken)
        return taken

    def __iter__(self) -> Iterator[KVCacheBlock]:
        for queue in self.queues:
            yield from queue


def test_my_policy_is_a_policy() -> None:
    check_eviction_policy(OnceFirst)


def test_under_my_policy_a_scan_passes_by_what_was_hit() -> None:
    manager = make_manager(num_blocks=10, eviction_policy=OnceFirst)
    cache_prompt(manager, "first", [*SYSTEM, 1])
    cache_prompt(manager, "second", [*SYSTEM, 2])
    for scan in range(10):
        cache_prompt(manager, f"scan {scan}", range(1000 * (scan + 1), 1000 * (scan + 1) + 20))
    _, num_hit_tokens = manager.get_computed_blocks(make_request("next", [*SYSTEM, 3], manager))
    assert num_hit_tokens == 8
