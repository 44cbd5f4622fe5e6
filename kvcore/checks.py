"""What a caller of the facade can get wrong, found before anything is changed. Errors say what to do."""

from __future__ import annotations

from typing import Any, NoReturn

from kvcore.contents import PrefixContents
from kvcore.coordinator import KVCacheCoordinator
from kvcore.errors import (
    ComputedTokensError,
    ConfigError,
    CountError,
    DuplicateRequestError,
    HitHandoverError,
    RequestProtocolError,
    UnknownRequestError,
    shown,
)
from kvcore.extra_keys import ExtraKeys
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.request import RequestLike


def check_counts(names: str, *counts: int) -> None:
    """Counts of tokens and blocks are whole numbers and not negative; ``names`` are theirs, with spaces between."""
    for position, count in enumerate(counts):
        if not isinstance(count, int) or count < 0:
            name = names.split()[position]
            raise CountError(f"{name} must be a whole number and not negative, got {shown(count)}")


def check_blocks(hits: object) -> None:
    """Hits come as the lookup returned them."""
    if not isinstance(hits, KVCacheBlocks):
        raise HitHandoverError(
            f"new_computed_blocks must be a KVCacheBlocks, the first of the two that get_computed_blocks returned; got "
            f"{type(hits).__name__}"
        )


def check_same_request(request: RequestLike, holder: RequestLike) -> None:
    """``request`` is the one that holds blocks under its id."""
    if holder is not request:
        raise DuplicateRequestError(
            f"request id {request.request_id!r} is in use by another request object: "
            "use unique ids, pass the same object in every call, and free it before using its id again"
        )


def check_num_tokens(request: Any) -> None:
    """A request of the caller's own class counts its tokens as code that is compiled takes a count."""
    if not isinstance(request.num_tokens, int):
        _refuse_type(request, "num_tokens", "an int", request.num_tokens)


def check_computed(request: RequestLike, num_new_computed_tokens: int) -> None:
    """A request cannot have more computed tokens than tokens."""
    check_num_tokens(request)
    computed = request.num_computed_tokens
    if not isinstance(computed, int):
        raise ComputedTokensError(
            f"num_computed_tokens of request {request.request_id!r} must be a whole number, got {shown(computed)}"
        )
    if computed < 0 or computed + num_new_computed_tokens > request.num_tokens:
        raise ComputedTokensError(
            f"request {request.request_id!r} has {request.num_tokens} tokens: it cannot have {computed} computed ones "
            f"and {num_new_computed_tokens} that are computed now; check num_computed_tokens"
        )


def check_hashes(request: RequestLike, hash_block_size: int) -> None:
    """A request is hashed at the manager's block size. Its own hasher tells, if it has one; the count may tell."""
    hasher = getattr(request, "block_hasher", None)
    too_many = len(request.block_hashes) * hash_block_size > request.num_tokens
    if too_many or (hasher is not None and hasher.block_size != hash_block_size):
        raise ConfigError(
            f"request {request.request_id!r} is hashed at another block size than the manager's {hash_block_size}: "
            f"make it with BlockHasher({hash_block_size}, ...)"
        )


ATTRIBUTES = ("block_hashes", "block_contents")
EVENT_ATTRIBUTES = (*ATTRIBUTES, "token_ids", "extra_keys")


def check_protocol(request: Any, *, events: bool) -> None:
    """A request of the caller's own class has what will be read later, half way through a change, and in the type that
    code which is compiled takes."""
    for attribute in EVENT_ATTRIBUTES if events else ATTRIBUTES:
        if not hasattr(request, attribute):
            raise RequestProtocolError(
                f"request {request.request_id!r} has no attribute {attribute}: {type(request).__name__} must have what "
                "kvcore.request.RequestLike lists, and EventRequest where KV events are on"
            )
    check_num_tokens(request)
    hashes = request.block_hashes
    for block_hash in (hashes[0], hashes[-1]) if len(hashes) else ():  # not each: that would cost as much as a lookup
        if not isinstance(block_hash, bytes):
            _refuse_type(request, "block_hashes", "bytes", block_hash)
    if not isinstance(request.block_contents, PrefixContents | None):
        _refuse_type(request, "block_contents", "a PrefixContents or None", request.block_contents)
    if events and not isinstance(request.extra_keys, ExtraKeys):
        _refuse_type(request, "extra_keys", "an ExtraKeys", request.extra_keys)


def _refuse_type(request: RequestLike, attribute: str, wanted: str, value: object) -> NoReturn:
    kind = type(value).__name__
    raise RequestProtocolError(f"{attribute} of request {request.request_id!r} must be {wanted}, got a {kind}")


def check_admission(
    coordinator: KVCacheCoordinator, request: RequestLike, hits: KVCacheBlocks, num_new_computed_tokens: int
) -> None:
    """A request that holds nothing starts from nothing, and its hits cover in every group what it says they cover."""
    request_id = request.request_id
    check_protocol(request, events=coordinator.block_pool.enable_kv_cache_events)
    if request.num_computed_tokens:
        raise UnknownRequestError(
            f"request {request_id!r} has {request.num_computed_tokens} computed tokens but holds no blocks: "
            "it was never admitted or is freed already; set num_computed_tokens to 0 to admit it"
        )
    if coordinator.block_pool.enable_caching:
        check_hashes(request, coordinator.hash_block_size)
    elif num_new_computed_tokens:
        raise HitHandoverError(f"caching is off: {request_id!r} cannot bring computed blocks")
    if num_new_computed_tokens > len(request.block_hashes) * coordinator.hash_block_size:
        raise HitHandoverError(
            f"{num_new_computed_tokens} tokens of {request_id!r} cannot be hits: it has {len(request.block_hashes)} "
            "block hashes; make it with a block_hasher, and pass what get_computed_blocks returned for it"
        )
    managers = coordinator.single_type_managers
    if len(hits.blocks) != len(managers):
        raise HitHandoverError(f"new_computed_blocks has {len(hits.blocks)} groups, the cache has {len(managers)}")
    for manager, blocks in zip(managers, hits.blocks, strict=True):
        if len(blocks) * manager.block_size != num_new_computed_tokens:
            raise ComputedTokensError(
                f"num_new_computed_tokens of {request_id!r} is {num_new_computed_tokens}, but it brings {len(blocks)} "
                f"blocks of {manager.block_size} tokens in group {manager.kv_cache_group_id}: "
                "pass both as get_computed_blocks returned them"
            )


def check_slots(request: RequestLike, num_slots: int) -> None:
    """A request that holds blocks has slots for all that it says it has computed."""
    if request.num_computed_tokens > num_slots:
        raise ComputedTokensError(
            f"request {request.request_id!r} has {request.num_computed_tokens} computed tokens and slots for "
            f"{num_slots}: count tokens as computed only if allocate_slots was asked for them and did not answer None; "
            "beyond max_model_len it gives no slots"
        )


def check_no_hits(request: RequestLike, hits: KVCacheBlocks, num_new_computed_tokens: int) -> None:
    """A request that holds blocks takes no hits any more."""
    if num_new_computed_tokens or any(hits.blocks):
        raise HitHandoverError(
            f"request {request.request_id!r} is running and cannot take computed blocks again: "
            "hand hits over once, when it is admitted"
        )
