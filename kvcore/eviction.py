"""Which free block to overwrite next.

A policy owns the free blocks. The pool tells it what was released and what was reused, and asks it for victims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvcore.blocks import FreeKVCacheBlockQueue, KVCacheBlock
from kvcore.errors import ConfigError


class EvictionPolicy(Protocol):
    """Keeps the blocks that nobody holds, and says in which order they are overwritten."""

    queue: FreeKVCacheBlockQueue
    """Every free block; its head is the next victim."""

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Takes blocks in that their last holder let go of, each list with the one to overwrite first in front.

        ``unhashed`` blocks are in no index and cannot be hit again, so that they go before every hashed one (rule 4).
        With them come registered blocks that are not worth keeping (:mod:`kvcore.single_type.ends`).
        """

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Lets blocks go that were hit while free."""

    def take(self, n: int) -> list[KVCacheBlock]:
        """Gives away ``n`` blocks to be overwritten; at least that many are free."""

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """The free blocks in the order they would be taken."""

    def __len__(self) -> int:
        """How many are free."""


class LRU:
    """Least recently released first; what cannot be hit goes before all. O(1) a block in every call."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.queue = FreeKVCacheBlockQueue(blocks)
        # Bound once: the pool calls these on its hot path, and nothing is to be added on the way.
        self.reuse = self.queue.remove_n
        self.take = self.queue.popleft_n

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Unhashed blocks to the head, hashed ones to the tail."""
        if unhashed:
            self.queue.prepend_n(unhashed)
        if hashed:
            self.queue.append_n(hashed)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self.queue)

    def __len__(self) -> int:
        return len(self.queue)


POLICIES: dict[str, type[LRU]] = {"lru": LRU}
"""Policies by the name that ``KVCacheManager(eviction_policy=...)`` takes."""


def make_policy(name: str, blocks: Sequence[KVCacheBlock]) -> EvictionPolicy:
    """The policy of that name, holding ``blocks`` in the given order.

    Raises:
        ConfigError: There is no such policy.
    """
    try:
        return POLICIES[name](blocks)
    except (KeyError, TypeError):
        raise ConfigError(f"eviction_policy must be one of {', '.join(sorted(POLICIES))}; got {name!r}") from None
