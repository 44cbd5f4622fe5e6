"""Which free block to overwrite next.

A policy owns the free blocks. The pool tells it what was released and what was reused, and asks it for victims.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from kvcore.errors import ConfigError
from kvcore.eviction.adaptive import Adaptive
from kvcore.eviction.base import EvictionPolicy, FreeBlocks, Segments
from kvcore.eviction.fifo import FIFO
from kvcore.eviction.lfu import LFU
from kvcore.eviction.lru import LRU
from kvcore.eviction.priority import Priority
from kvcore.eviction.slru import SLRU
from kvcore.eviction.tail_aware import TailAwareLRU
from kvcore.free_block_queue import FreeKVCacheBlockQueue

__all__ = [
    "FIFO",
    "LFU",
    "LRU",
    "POLICIES",
    "SLRU",
    "Adaptive",
    "EvictionPolicy",
    "FreeBlocks",
    "PolicyChoice",
    "Priority",
    "Segments",
    "TailAwareLRU",
    "free_block_queue",
    "make_policy",
    "policy_name",
]

PolicyChoice: TypeAlias = "str | EvictionPolicy | Callable[[], EvictionPolicy]"
"""A policy's name, the policy itself, or what makes one: a class."""

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "adaptive": Adaptive,
    "fifo": FIFO,
    "lfu": LFU,
    "lru": LRU,
    "priority": Priority,
    "slru": SLRU,
    "tlru": TailAwareLRU,
}
"""Policies by the name that ``KVCacheManager(eviction_policy=...)`` takes."""


def make_policy(choice: PolicyChoice) -> EvictionPolicy:
    """A policy that holds no blocks yet.

    Raises:
        ConfigError: There is no such policy, or it serves another pool already.
    """
    if isinstance(choice, str):
        if choice not in POLICIES:
            raise _no_policy(choice)
        choice = POLICIES[choice]
    policy = choice
    if isinstance(choice, type) or not isinstance(choice, EvictionPolicy):
        if not callable(choice):
            raise _no_policy(choice)
        policy = choice()
    if not isinstance(policy, EvictionPolicy):
        raise ConfigError(
            f"{policy!r} is no eviction policy: it needs release, reuse, take, __iter__ and __len__, "
            "see kvcore.eviction.EvictionPolicy"
        )
    if len(policy) or getattr(policy, "serves_a_pool", False):
        raise ConfigError(f"{policy!r} serves a pool already: make one for each")
    with suppress(AttributeError):  # of a class with slots, the count has to tell
        policy.serves_a_pool = True  # type: ignore[attr-defined]
    return policy


def policy_name(choice: PolicyChoice) -> str:
    """What to call a policy: its name in :data:`POLICIES` if it was chosen by that, else its class."""
    if isinstance(choice, str):
        return choice
    kind = choice if isinstance(choice, type) else type(choice)
    return next((name for name, policy in POLICIES.items() if policy is kind), kind.__name__)


def free_block_queue(policy: EvictionPolicy) -> FreeKVCacheBlockQueue | FreeBlocks:
    """What a pool shows of its free blocks: the policy's queue if it keeps one, else a view of the policy."""
    queue = getattr(policy, "queue", None)
    return queue if isinstance(queue, FreeKVCacheBlockQueue) else FreeBlocks(policy)


def _no_policy(choice: object) -> ConfigError:
    return ConfigError(
        f"eviction_policy must be one of {', '.join(sorted(POLICIES))}, a policy, or a class of policies; "
        f"got {choice!r}"
    )
