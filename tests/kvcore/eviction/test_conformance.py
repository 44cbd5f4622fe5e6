"""Every policy keeps to the contract, and the suite that says so finds policies that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvcore import ConfigError, KVCacheBlock
from kvcore.eviction import LRU, POLICIES, SLRU, Adaptive, EvictionPolicy, Priority
from kvcore.testing import admit, cache_prompt, make_manager, make_request
from kvcore.testing_eviction import check_eviction_policy
from tests.kvcore.oracle import AnythingGoes, Cache, run_machine


@pytest.mark.parametrize("make_policy", POLICIES.values(), ids=POLICIES)
def test_every_policy_of_the_package_passes(make_policy: Callable[[], EvictionPolicy]) -> None:
    check_eviction_policy(make_policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"lru"}))
@pytest.mark.parametrize("groups", ["full", "full sliding:6", "chunked:6"])
def test_no_call_corrupts_the_books_under_any_policy(policy: str, groups: str) -> None:
    options = {"eviction_policy": policy, "window_retention": "ends" if "full " in groups else "all"}
    run_machine(Cache(groups, options=options), thorough=False, machine=AnythingGoes)


class Mine:
    """A policy of a user's own, on nothing of the package's: newest prompts first, in a plain list."""

    def __init__(self) -> None:
        self.order: list[KVCacheBlock] = []
        self.num_unhashed = 0

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        self.order[:0] = unhashed
        self.num_unhashed += len(unhashed)
        self.order += hashed

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_unhashed -= sum(block in self.order[: self.num_unhashed] for block in blocks)
        self.order = [block for block in self.order if block not in blocks]

    def take(self, n: int) -> list[KVCacheBlock]:
        taken, self.order = self.order[:n], self.order[n:]
        self.num_unhashed = max(0, self.num_unhashed - n)
        return taken

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def test_a_policy_of_a_users_own_passes() -> None:
    check_eviction_policy(Mine, num_blocks=(7, 20))


class GivesAwayBlocksInUse(Mine):
    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        pass


class LosesABlock(Mine):
    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        super().release(unhashed, hashed[:3])


class CountsWrongly(LRU):
    def __len__(self) -> int:
        return super().__len__() // 2 * 2


class KeepsWhatCannotBeHit(Mine):
    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        self.order += [*hashed, *unhashed]


class KeepsTails(LRU):
    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        super().release(unhashed, hashed[::-1])


class TakesOtherThanItSays(Mine):
    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self.order[: self.num_unhashed] + self.order[self.num_unhashed :][::-1])


class Remembers(Mine):
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        Remembers.runs += 1

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        super().release(unhashed, hashed if Remembers.runs % 2 else hashed[::-1])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (GivesAwayBlocksInUse, r"in its order after reuse, which are in use"),
        (LosesABlock, r"lost \[<block"),
        (CountsWrongly, r"counts \d+ of \d+ blocks"),
        (KeepsWhatCannotBeHit, r"hashed block before one that cannot be hit"),
        (KeepsTails, r"before it in its prefix is number \d+; without it, it cannot be hit"),
        (TakesOtherThanItSays, r"took .* after its order said"),
        (Remembers, r"two different orders"),
    ],
)
def test_the_suite_finds_a_policy_that(policy: Callable[[], EvictionPolicy], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_eviction_policy(policy, prefixes=policy is not Remembers)


def test_the_suite_can_leave_the_order_within_a_prefix_to_the_policy() -> None:
    check_eviction_policy(KeepsTails, prefixes=False)


def test_an_adaptive_policy_passes_with_more_blocks_than_its_shadows_hold() -> None:
    check_eviction_policy(Adaptive, num_blocks=(2100,), num_steps=50)


def test_a_policy_serves_one_pool_even_if_that_holds_none_of_its_blocks_at_the_moment() -> None:
    policy = SLRU()
    manager = make_manager(4, eviction_policy=policy)
    admit(manager, make_request("all of it", range(12), manager))
    with pytest.raises(ConfigError, match="serves a pool already: make one for each"):
        make_manager(4, eviction_policy=policy)


def test_priorities_that_never_come_again_leave_nothing_behind() -> None:
    policy = Priority()
    manager = make_manager(6, eviction_policy=policy)
    for deadline in range(200):
        request = make_request("a", [deadline] * 8, manager, priority=deadline)
        admit(manager, request)
        manager.free(request)
    assert len(policy._by_priority) == len(policy._order) <= 5


def test_a_policy_that_fails_to_serve_leaves_the_books_as_they_were() -> None:
    manager = make_manager(6, eviction_policy="priority")
    request = make_request("a", range(8), manager)
    admit(manager, request)
    request.priority = "urgent"  # type: ignore[assignment]
    with pytest.raises(TypeError):
        manager.free(request)
    manager.check_invariants()
    request.priority = 0
    manager.free(request)
    assert manager.usage == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_reset_what_was_worth_most_keeps_nothing_new_out(policy: str) -> None:
    manager = make_manager(21, eviction_policy=policy)
    for _ in range(3):
        for number in range(4):
            cache_prompt(manager, "old", [number] * 17)
    assert manager.reset_prefix_cache()
    new = [[100 + number] * 17 for number in range(3)]
    for tokens in new:
        cache_prompt(manager, "new", tokens)
    for tokens in new:
        assert manager.get_computed_blocks(make_request("again", tokens, manager))[1] == 16
    manager.check_invariants()


@pytest.mark.parametrize("policy", ["lru", LRU()])
def test_what_makes_no_policies_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match="takes a class of policies, which it calls; got"):
        check_eviction_policy(policy)
