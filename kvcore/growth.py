"""How far a running request can go before anything has to be done for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.request import RequestLike
from kvcore.single_type import SingleTypeKVCacheManager
from kvcore.single_type.base import NEVER


class Holder:
    """A request that holds blocks.

    While its tokens stay below ``quiet_tokens`` and its computed tokens below ``skip_at``, it needs no block, has none
    to register and none to give back. Most decode steps end with that comparison.

    Args:
        request: The request.
        managers: Where its block tables are.

    Attributes:
        num_slots: Tokens that its blocks hold, in every group.
        register_at: Tokens from which on a block is to be registered.
        skip_at: Computed tokens from which on a block is to be given back.
        quiet_tokens: The first number of tokens that needs a block or has one registered.
    """

    __slots__ = ("_managers", "num_slots", "quiet_tokens", "register_at", "request", "skip_at")

    def __init__(self, request: RequestLike, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        self.request = request
        self.num_slots = self.register_at = self.skip_at = self.quiet_tokens = 0
        self._managers = managers

    def update(self) -> None:
        """Finds the limits anew, after its block tables have changed. O(groups)."""
        request_id = self.request.request_id
        num_slots = register_at = skip_at = NEVER
        for manager in self._managers:
            limits = manager.limits(request_id)
            num_slots = min(num_slots, limits.num_slots)
            register_at = min(register_at, limits.register_at)
            skip_at = min(skip_at, limits.skip_at)
        self.num_slots, self.register_at, self.skip_at = num_slots, register_at, skip_at
        self.quiet_tokens = min(num_slots + 1, register_at)


@dataclass(frozen=True)
class Growth:
    """What :meth:`kvcore.KVCacheManager.grow` did.

    Args:
        num_grown: Requests that have their slots, counted from the first; the one at this index, if there is one, is
            the first that did not fit.
        new_blocks: New blocks by index, for those of them that got any.
    """

    num_grown: int
    new_blocks: Mapping[int, KVCacheBlocks]
