"""How far a running request can go before anything has to be done for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.request import RequestLike
from kvcore.single_type import SingleTypeKVCacheManager


class Holder:
    """A request that holds blocks.

    While its tokens stay below ``quiet_tokens`` and its computed tokens below ``quiet_computed``, it needs no block,
    has none to register and none to give back. Most decode steps end with that comparison.

    Args:
        request: The request.
        managers: Where its block tables are.
    """

    __slots__ = ("_managers", "quiet_computed", "quiet_tokens", "request")

    def __init__(self, request: RequestLike, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        self.request = request
        self.quiet_tokens = 0
        self.quiet_computed = 0
        self._managers = managers

    def update(self) -> None:
        """Finds the limits anew, after its block tables have changed. O(groups)."""
        request_id = self.request.request_id
        self.quiet_tokens = min([manager.quiet_until(request_id) for manager in self._managers])
        self.quiet_computed = min([manager.next_skip_at(request_id) for manager in self._managers])


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
