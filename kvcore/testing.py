"""Helpers for tests of eviction order, of hits, and of an engine built on the manager. Needs no test framework.

Build a small cache, walk requests through it, and say what you expect::

    manager = make_manager(8, groups=["full", "sliding:8"])
    first = make_request("first", range(10), manager)
    admit(manager, first)
    manager.free(first)
    assert_eviction_order(manager, [6, 3, 7, 2, 1, 5, 4])

:class:`ShadowMemory` stands in for the cache tensors: it knows what every slot would hold, hence whether a hit is true.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Any
from weakref import WeakKeyDictionary

from kvcore.hashing import BlockHasher
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.manager import KVCacheManager
from kvcore.request import EventRequest, Request
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

__all__ = [
    "ShadowMemory",
    "admit",
    "assert_eviction_order",
    "cache_prompt",
    "first_position_read",
    "free_block_ids",
    "make_manager",
    "make_request",
    "make_spec",
    "prefix_identities",
    "table",
]


def make_spec(kind: str, block_size: int = 4) -> KVCacheSpec:
    """A spec of minimal size from its short name.

    Args:
        kind: ``"full"``, ``"sliding:W"`` or ``"chunked:C"``, W and C in tokens.
        block_size: Tokens per block.

    Raises:
        ValueError: No such kind, or a span of less than one token.
    """
    name, _, span = kind.partition(":")
    if name == "full" and not span:
        return FullAttentionSpec(block_size, 1, 1, "float32")
    if name == "sliding" and span.isdecimal():
        return SlidingWindowSpec(block_size, 1, 1, "float32", int(span))
    if name == "chunked" and span.isdecimal():
        return ChunkedLocalAttentionSpec(block_size, 1, 1, "float32", int(span))
    raise ValueError(f'a kind of attention is "full", "sliding:W" or "chunked:C", with W and C in tokens; got {kind!r}')


def make_manager(
    num_blocks: int,
    block_size: int = 4,
    groups: Sequence[str | KVCacheSpec] = ("full",),
    *,
    max_model_len: int = 4096,
    **options: Any,
) -> KVCacheManager:
    """A manager for a small cache.

    Args:
        num_blocks: Blocks in the pool; block 0 is the null block, so that one fewer can be used.
        block_size: Tokens per block of the groups given by name.
        groups: One entry per KV cache group, a name as for :func:`make_spec` or a spec.
        max_model_len: Longest sequence, in tokens.
        **options: As for :class:`KVCacheManager`.
    """
    specs = [make_spec(group, block_size) if isinstance(group, str) else group for group in groups]
    groups_of_layers = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheManager(KVCacheConfig(num_blocks, groups_of_layers), max_model_len, **options)


def make_request(request_id: str, token_ids: Iterable[int], manager: KVCacheManager, **options: Any) -> Request:
    """A request whose hashes fit the manager.

    Args:
        request_id: Its name.
        token_ids: Its prompt.
        manager: Where it will run.
        **options: As for :class:`Request`. Without a ``block_hasher`` it is hashed with ``sha256_raw``.
    """
    options.setdefault("block_hasher", BlockHasher(manager.coordinator.hash_block_size, "sha256_raw"))
    return Request(request_id, token_ids, **options)


def admit(manager: KVCacheManager, request: Request) -> int:
    """Looks a request up, admits it with all its tokens, and sets them computed, as one big prefill step would.

    Returns:
        How many of its tokens were hits.

    Raises:
        AssertionError: It does not fit.
    """
    hits, num_hit_tokens = manager.get_computed_blocks(request)
    new_blocks = manager.allocate_slots(request, request.num_tokens - num_hit_tokens, num_hit_tokens, hits)
    if new_blocks is None:
        raise AssertionError(f"{request!r} with {num_hit_tokens} hit tokens does not fit into {manager.block_pool!r}")
    request.num_computed_tokens = request.num_tokens
    return num_hit_tokens


def cache_prompt(manager: KVCacheManager, request_id: str, token_ids: Iterable[int]) -> Request:
    """Runs a prompt to its end and frees it, so that its full blocks are in the cache, the ones used last.

    A pool in a given state is made by a few of these, the one to be evicted first in front.

    Returns:
        The finished request.

    Raises:
        AssertionError: It does not fit.
    """
    request = make_request(request_id, token_ids, manager)
    admit(manager, request)
    manager.free(request)
    return request


def table(manager: KVCacheManager, request: Request, group: int = 0) -> list[int]:
    """The block ids of a request in one group, 0 for positions that a window has left."""
    return manager.get_block_ids(request.request_id)[group]


def free_block_ids(manager: KVCacheManager) -> list[int]:
    """The blocks nobody holds, in the order in which they will be overwritten."""
    return [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]


def assert_eviction_order(manager: KVCacheManager, expected: Sequence[int | EllipsisType]) -> None:
    """Makes sure that free blocks will be overwritten in a given order.

    Args:
        manager: Whose.
        expected: Block ids, next victim first. With ``...`` at the end, what follows does not matter.

    Raises:
        AssertionError: They will not; the message shows both orders side by side.
    """
    actual = free_block_ids(manager)
    wanted = [block_id for block_id in expected if not isinstance(block_id, EllipsisType)]
    open_ended = len(wanted) < len(expected)
    if open_ended and (len(wanted) < len(expected) - 1 or expected[-1] is not ...):
        raise ValueError(f"... may only stand once, at the end; got {list(expected)}")
    if (actual[: len(wanted)] if open_ended else actual) == wanted:
        return
    length = max(len(actual), len(wanted))
    lines = ["eviction order differs (next victim first):", "     expected  actual"]
    for position in range(min(length, len(wanted) + 1) if open_ended else length):
        want = str(wanted[position]) if position < len(wanted) else "..." if open_ended else "-"
        have = str(actual[position]) if position < len(actual) else "-"
        mark = " " if want in (have, "...") else ">"
        hashed = position < len(actual) and manager.block_pool.blocks[actual[position]].block_hash is not None
        lines.append(f"{mark} {position:2} {want:>8}  {have:>6}{'  (cached)' if hashed else ''}")
    raise AssertionError("\n".join(lines))


def first_position_read(spec: KVCacheSpec, position: int) -> int:
    """The first position whose keys and values the token at ``position`` reads in a layer of that kind.

    It reads all from there up to its own. Never decreases as ``position`` grows.
    """
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


def prefix_identities(request: EventRequest, draft_token_ids: Sequence[int] = ()) -> list[bytes]:
    """For each position of a request, and of draft tokens after it, a name for all that decides its keys and values.

    That is every token up to and including it, the multi-modal items they stand for, adapter and salt. Two requests
    have the same name at a position exactly if they agree on all of that. Shares no code with the block hashes.
    """
    identities: list[bytes] = []
    _extend_identities(identities, request, request.token_ids)
    _extend_identities(identities, request, draft_token_ids)
    return identities


def _extend_identities(identities: list[bytes], request: EventRequest, token_ids: Sequence[int]) -> None:
    """Appends the names of the positions after ``identities``, which hold ``token_ids``."""
    keys = request.extra_keys
    if identities:
        identity = identities[-1]
    else:
        lora = keys.lora and (keys.lora.name, keys.lora.path)
        identity = repr((keys.cache_salt or None, lora)).encode()
    for position, token in enumerate(map(int, token_ids), len(identities)):
        covering = [
            (item.identifier, position - item.offset)
            for item in keys.mm_items
            if item.offset <= position < item.offset + item.length
        ]
        identity = hashlib.blake2b(identity + repr((token, covering)).encode(), digest_size=16).digest()
        identities.append(identity)


class ShadowMemory:
    """What the cache tensors would hold: for each slot of each block, whose keys and values were last written there.

    Call :meth:`write` whenever an engine would run its model, and the checks to find out whether attention would read
    what it should. A request's tokens are never changed, only appended. A request of a class of your own has to be
    hashable, and to have the ``token_ids`` and ``extra_keys`` of :class:`kvcore.request.EventRequest`.

    Args:
        manager: The manager whose block tables say where things go.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.specs = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
        # A block serves one group at a time: what it held for another one is lost at the first write.
        self._group_of: dict[int, int] = {}
        self._slots: dict[int, dict[int, bytes]] = {}
        self._identities: WeakKeyDictionary[EventRequest, list[bytes]] = WeakKeyDictionary()

    def write(self, request: EventRequest, start: int, stop: int, *, draft_token_ids: Sequence[int] = ()) -> None:
        """Writes positions ``[start, stop)`` of a request into the slots its block tables give.

        Positions past the request's tokens are those of ``draft_token_ids``. A null position takes nothing: its token's
        window has passed before it came, as for tokens whose keys and values come from elsewhere.

        Raises:
            AssertionError: A position has no slot.
        """
        identities = self._identities_of(request, stop, draft_token_ids)
        for group, block_ids in enumerate(self.manager.get_block_ids(request.request_id)):
            block_size = self.specs[group].block_size
            if stop > len(block_ids) * block_size:
                raise AssertionError(
                    f"{request!r} has no slot for position {stop - 1} in group {group}: its table is {block_ids}"
                )
            for position in range(start, stop):
                block_id = block_ids[position // block_size]
                if not block_id:
                    continue
                if self._group_of.get(block_id) != group:
                    self._group_of[block_id] = group
                    self._slots[block_id] = {}
                self._slots[block_id][position % block_size] = identities[position]

    def check_reads(self, request: EventRequest, start: int, stop: int, *, draft_token_ids: Sequence[int] = ()) -> None:
        """Makes sure that the tokens at positions ``[start, stop)`` read this request's own prefix, in every group.

        Raises:
            AssertionError: One would read a null block, a slot never written, or what another prefix left there.
        """
        identities = self._identities_of(request, stop, draft_token_ids)
        for group, block_ids in enumerate(self.manager.get_block_ids(request.request_id)):
            first = first_position_read(self.specs[group], start)
            self._check_slots(request, group, block_ids, first, stop, identities)

    def check_hit(self, request: EventRequest, blocks: KVCacheBlocks, num_hit_tokens: int) -> None:
        """Makes sure that a lookup's answer is true: what later tokens read is there, what none of them reads is null.

        Raises:
            AssertionError: It is not.
        """
        identities = self._identities_of(request, num_hit_tokens, ())
        for group, block_ids in enumerate(blocks.get_block_ids()):
            block_size = self.specs[group].block_size
            if len(block_ids) * block_size != num_hit_tokens:
                raise AssertionError(
                    f"{len(block_ids)} blocks of {block_size} tokens in group {group} are no hit of {num_hit_tokens}"
                )
            first = first_position_read(self.specs[group], num_hit_tokens)
            if any(block_ids[: first // block_size]):
                raise AssertionError(
                    f"nothing before position {first} is read in group {group} after {num_hit_tokens} tokens, "
                    f"so that the blocks there have to be null: {block_ids}"
                )
            self._check_slots(request, group, block_ids, first, num_hit_tokens, identities)

    def _check_slots(
        self,
        request: EventRequest,
        group: int,
        block_ids: Sequence[int],
        first: int,
        stop: int,
        identities: Sequence[bytes],
    ) -> None:
        block_size = self.specs[group].block_size
        for position in range(first, stop):
            block_id = block_ids[position // block_size]
            slot = position % block_size
            if not block_id or self._group_of.get(block_id) != group:
                found = "null" if not block_id else "not written for this group"
            elif (written := self._slots[block_id].get(slot)) == identities[position]:
                continue
            else:
                found = "never written" if written is None else "another prefix"
            raise AssertionError(
                f"position {position} of {request!r} in group {group} is in block {block_id}, slot {slot}: {found}; "
                f"its table is {block_ids}"
            )

    def _identities_of(self, request: EventRequest, stop: int, draft_token_ids: Sequence[int]) -> list[bytes]:
        if stop > request.num_tokens + len(draft_token_ids):
            raise AssertionError(
                f"{request!r} has no position {stop - 1}, with {len(draft_token_ids)} draft tokens after its own"
            )
        known = self._identities.setdefault(request, [])
        if len(known) < request.num_tokens:
            _extend_identities(known, request, request.token_ids[len(known) :])
        if not draft_token_ids:
            return known
        with_drafts = known.copy()
        _extend_identities(with_drafts, request, draft_token_ids)
        return with_drafts
