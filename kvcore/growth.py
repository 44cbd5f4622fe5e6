"""What a request that holds blocks needs for its next tokens, and how far it gets before it needs anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcore.coordinator import KVCacheCoordinator
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.request import RequestLike


class Holder:
    """A request that holds blocks.

    While its tokens stay below ``quiet_tokens`` and its computed tokens below ``skip_at``, it needs no block, has none
    to register and none to give back. Most decode steps end with that comparison.

    Args:
        request: The request.
        coordinator: Where its block tables are.
        max_model_len: Tokens beyond which it gets no slots.
        no_blocks: What :meth:`grow` answers where it needed none.

    Attributes:
        num_slots: Tokens that its blocks hold, in every group.
        register_at: Tokens from which on a block is to be registered.
        skip_at: Computed tokens from which on a block is to be given back.
        quiet_tokens: The first number of tokens that needs a block or has one registered.
    """

    __slots__ = (
        "_coordinator",
        "_max_model_len",
        "_no_blocks",
        "num_slots",
        "quiet_tokens",
        "register_at",
        "request",
        "skip_at",
    )

    def __init__(
        self, request: RequestLike, coordinator: KVCacheCoordinator, max_model_len: int, no_blocks: KVCacheBlocks
    ) -> None:
        self.request = request
        self._coordinator = coordinator
        self._max_model_len = max_model_len
        self._no_blocks = no_blocks
        self.num_slots = coordinator.num_slots(request.request_id)
        self.skip_at = coordinator.next_skip_at(request.request_id)
        self.note_registered()

    def note_registered(self) -> None:
        """Finds out anew when the next block is to be registered. O(groups)."""
        self.register_at = self._coordinator.next_register_at(self.request.request_id)
        self.quiet_tokens = min(self.num_slots + 1, self.register_at)

    def grow(
        self,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        *,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> KVCacheBlocks | None:
        """What :meth:`kvcore.KVCacheManager.allocate_slots` does for a running request, its arguments checked.

        Only the limits that a change touches are found anew: of the three, a step of decoding touches one.
        """
        request, coordinator = self.request, self._coordinator
        request_id = request.request_id
        known = request.num_tokens  # read before anything changes, as all that is the caller's
        computed = min(request.num_computed_tokens, self._max_model_len)
        num_tokens = min(computed + num_new_tokens + num_lookahead_tokens, self._max_model_len)
        if computed >= self.skip_at:
            coordinator.tell_policy(request)
            coordinator.remove_skipped_blocks(request_id, computed)
            self.skip_at = coordinator.next_skip_at(request_id)
        num_free_blocks = coordinator.block_pool.free_block_queue.num_free_blocks
        if full_sequence_must_fit:
            length = min(known, self._max_model_len)
            if coordinator.get_num_blocks_to_grow(request_id, length, cap=True) > num_free_blocks:
                return None
        num_new_blocks = coordinator.num_new_blocks(request_id, num_tokens) if num_tokens > self.num_slots else ()
        if sum(num_new_blocks) > num_free_blocks - reserved_blocks:
            return None
        new_blocks = self._no_blocks
        if num_new_blocks:
            new_blocks = KVCacheBlocks(coordinator.append_new_blocks(request_id, num_new_blocks))
            self.num_slots = coordinator.num_slots(request_id)
            self.quiet_tokens = min(self.num_slots + 1, self.register_at)
        num_finished_tokens = min(computed + num_new_tokens, num_tokens, known)
        if num_finished_tokens >= self.register_at and not delay_cache_blocks:
            coordinator.cache_blocks(request, num_finished_tokens)
            self.note_registered()
        return new_blocks


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
