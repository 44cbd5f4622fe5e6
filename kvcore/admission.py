"""How a request comes in: with hits that are still what the lookup found, and only if all it asks for fits."""

from __future__ import annotations

from typing import NamedTuple

from kvcore.checks import check_admission
from kvcore.coordinator import KVCacheCoordinator
from kvcore.growth import Holder
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.request import RequestLike


class _Found(NamedTuple):
    """What a lookup answered, and which generation of the index did."""

    request: RequestLike
    blocks: KVCacheBlocks
    num_tokens: int
    generation: int


class Admission:
    """Lets requests in.

    Args:
        coordinator: Where their block tables come to be.
        max_model_len: Tokens beyond which a request gets no slots.
        watermark_blocks: Blocks that are to stay free.
        no_blocks: What :meth:`admit` answers where it needed none.
    """

    def __init__(
        self, coordinator: KVCacheCoordinator, max_model_len: int, watermark_blocks: int, no_blocks: KVCacheBlocks
    ) -> None:
        self._coordinator = coordinator
        self._max_model_len = max_model_len
        self._watermark_blocks = watermark_blocks
        self._no_blocks = no_blocks
        self._found: _Found | None = None  # the last lookup's answer, until a request is admitted

    def note_lookup(self, request: RequestLike, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Remembers what a lookup found: admitted with that next, a request's hits need no second look. O(1)."""
        self._found = _Found(request, blocks, num_tokens, self._coordinator.block_pool.prefix_index.generation)

    def check(self, request: RequestLike, hits: KVCacheBlocks, num_tokens: int) -> None:
        """Makes sure that a new request may come in with these hits, which cover ``num_tokens`` tokens.

        O(1) right after the lookup that found them, else O(hit blocks).

        Raises:
            ComputedTokensError: The hit blocks hold another number of tokens.
            UnknownRequestError: The request has computed tokens.
            HitHandoverError: Hits from a cache that is off, or of another number of groups.
            StaleHitError: Hits that were evicted since the lookup.
            ForeignBlockError: Hits of another pool.
        """
        if self._just_found(request, hits, num_tokens):
            return
        check_admission(self._coordinator, request, hits, num_tokens)
        for manager, blocks in zip(self._coordinator.single_type_managers, hits.blocks, strict=True):
            manager.check_hits(request, blocks)

    def admit(
        self,
        request: RequestLike,
        hits: KVCacheBlocks,
        num_new_tokens: int,
        num_computed_tokens: int,
        *,
        num_external_computed_tokens: int,
        num_lookahead_tokens: int,
        delay_cache_blocks: bool,
        full_sequence_must_fit: bool,
        reserved_blocks: int,
    ) -> tuple[Holder, KVCacheBlocks] | None:
        """What :meth:`kvcore.KVCacheManager.allocate_slots` does for a new request, its arguments checked.

        O(hit blocks + new blocks).

        Args:
            request: One that holds nothing.
            hits: Its hits, as :meth:`check` has let them pass.
            num_computed_tokens: Tokens of the hits and external ones together. All others are what ``allocate_slots``
                was given.

        Returns:
            The request as one that holds blocks, and the new ones of these; None if they do not fit.
        """
        coordinator = self._coordinator
        request_id = request.request_id
        known = request.num_tokens
        computed = min(num_computed_tokens, self._max_model_len)
        num_tokens = min(computed + num_new_tokens + num_lookahead_tokens, self._max_model_len)
        num_free_blocks = coordinator.block_pool.get_num_free_blocks() - self._watermark_blocks
        if full_sequence_must_fit:
            length = min(known, self._max_model_len)
            if not coordinator.has_room(length, hits.blocks, computed, num_free_blocks, cap=True):
                return None
        if not coordinator.has_room(num_tokens, hits.blocks, computed, num_free_blocks - reserved_blocks):
            return None
        len(request.block_hashes)  # as Holder.read_hashes
        coordinator.admit(request, hits.blocks, computed, num_external_computed_tokens)
        groups = coordinator.append_new_blocks(request_id, coordinator.num_new_blocks(request_id, num_tokens))
        if not delay_cache_blocks:
            coordinator.cache_blocks(request, min(computed + num_new_tokens, num_tokens, known))
        holder = Holder(request, coordinator, self._max_model_len, self._no_blocks)
        return holder, KVCacheBlocks(groups) if any(groups) else self._no_blocks

    def _just_found(self, request: RequestLike, hits: KVCacheBlocks, num_tokens: int) -> bool:
        """Whether this is the answer to the last lookup, for a request that is still new, and nothing can have become
        of the blocks since: nothing has left the index."""
        found, self._found = self._found, None
        return (
            found is not None
            and found.request is request
            and found.blocks is hits
            and found.num_tokens == num_tokens
            and found.generation == self._coordinator.block_pool.prefix_index.generation
            and not request.num_computed_tokens
        )
