"""What requests that hold blocks need for their next tokens, and how far they get before they need anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kvcore.checks import check_computed, check_same_request, check_slots
from kvcore.coordinator import KVCacheCoordinator
from kvcore.errors import UnknownRequestError
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.request import RequestId, RequestLike, takes_part_in_caching
from kvcore.single_type.base import NEVER


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
        "no_blocks",
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
        self.no_blocks = no_blocks
        self.num_slots = coordinator.num_slots(request.request_id)
        self.skip_at = coordinator.next_skip_at(request.request_id)
        self.note_registered()

    def note_registered(self) -> None:
        """Finds out anew when the next block is to be registered. O(groups)."""
        self.register_at = NEVER
        if takes_part_in_caching(self.request):
            self.register_at = self._coordinator.next_register_at(self.request.request_id)
        self._find_quiet_tokens()

    def read_hashes(self) -> None:
        """Lets a request that hashes when it is asked refuse its tokens now, and not in the middle of a change."""
        len(self.request.block_hashes)

    def _find_quiet_tokens(self) -> None:
        self.quiet_tokens = self.num_slots + 1 if self.num_slots < self.register_at else self.register_at

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

        Only the limits that a change touches are found anew: of the three, a step of decoding touches one. Comparisons
        take the place of ``min``, which costs as much as three of them.
        """
        request, coordinator, longest = self.request, self._coordinator, self._max_model_len
        request_id = request.request_id
        known = request.num_tokens
        computed = request.num_computed_tokens
        if computed > longest:
            computed = longest
        num_tokens = computed + num_new_tokens + num_lookahead_tokens
        if num_tokens > longest:
            num_tokens = longest
        num_finished_tokens = computed + num_new_tokens
        if num_finished_tokens > num_tokens:
            num_finished_tokens = num_tokens
        if num_finished_tokens > known:
            num_finished_tokens = known
        registers = num_finished_tokens >= self.register_at and not delay_cache_blocks
        if registers:
            self.read_hashes()
        if computed >= self.skip_at:
            coordinator.tell_policy(request)
            coordinator.remove_skipped_blocks(request_id, computed)
            self.skip_at = coordinator.next_skip_at(request_id)
        new_blocks = self.no_blocks
        if num_tokens > self.num_slots or full_sequence_must_fit or reserved_blocks:
            num_free_blocks = coordinator.block_pool.free_block_queue.num_free_blocks
            if full_sequence_must_fit:
                length = min(known, longest)
                if coordinator.get_num_blocks_to_grow(request_id, length, cap=True) > num_free_blocks:
                    return None
            num_new_blocks = coordinator.num_new_blocks(request_id, num_tokens)
            if sum(num_new_blocks) > num_free_blocks - reserved_blocks:
                return None
            if num_tokens > self.num_slots:
                new_blocks = KVCacheBlocks(coordinator.append_new_blocks(request_id, num_new_blocks))
                self.num_slots = coordinator.num_slots(request_id)
                self._find_quiet_tokens()
        if registers:
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


def find_holder(holders: Mapping[RequestId, Holder], request_id: RequestId) -> Holder:
    """The request that holds blocks under an id. O(1).

    Raises:
        UnknownRequestError: None does.
    """
    holder = holders.get(request_id)
    if holder is None:
        raise UnknownRequestError(
            f"request {request_id!r} holds no blocks: it was never admitted (allocate_slots), or is freed already"
        )
    return holder


def grow_each(
    holders: dict[RequestId, Holder],
    requests: list[Any],
    num_new_tokens: int,
    num_lookahead_tokens: int,
) -> Growth:
    """What :meth:`kvcore.KVCacheManager.grow` does, its counts checked.

    Two rounds: the first finds what is wrong with any request, and which of them are due; most cost no more than its
    comparisons. Only the second changes anything. The list is of ``Any``: typed, compiled code would raise a
    ``TypeError`` of its own on a count that is no ``int``, before ``_refuse`` says what is wrong.

    O(requests + new blocks + newly full blocks).
    """
    num_more = num_new_tokens + num_lookahead_tokens
    due: list[tuple[int, Holder]] = []
    for index, request in enumerate(requests):
        holder = holders.get(request.request_id)
        computed = request.num_computed_tokens
        known = request.num_tokens
        if (
            holder is None
            or holder.request is not request
            or not isinstance(computed, int)
            or not isinstance(known, int)
            or not 0 <= computed <= known
            or computed > holder.num_slots
        ):
            _refuse(holders, request)
        if computed + num_more >= holder.quiet_tokens or computed >= holder.skip_at:
            due.append((index, holder))
            if computed + num_new_tokens >= holder.register_at:
                holder.read_hashes()
    new_blocks: dict[int, KVCacheBlocks] = {}
    for index, holder in due:
        blocks = holder.grow(num_new_tokens, num_lookahead_tokens)
        if blocks is None:
            return Growth(index, new_blocks)
        if blocks is not holder.no_blocks:
            new_blocks[index] = blocks
    return Growth(len(requests), new_blocks)


def _refuse(holders: Mapping[RequestId, Holder], request: RequestLike) -> NoReturn:
    """Says what is wrong with a request that cannot grow."""
    holder = find_holder(holders, request.request_id)
    check_same_request(request, holder.request)
    check_computed(request, 0)
    check_slots(request, holder.num_slots)
    raise AssertionError(f"{request!r} can grow")
