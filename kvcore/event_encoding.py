"""KV events as bytes: the msgpack of vLLM's events, so that what reads those reads these.

A batch is an array of its time, its events and its rank. An event is a map that begins with its type; what every
event of the type has is always there, what only some have is left out where it is None.

Needs msgspec: ``pip install 'kvcore[events]'``.
"""

from __future__ import annotations

from dataclasses import fields
from functools import reduce
from operator import or_
from types import GenericAlias
from typing import Any, get_type_hints

try:
    import msgspec
except ImportError as error:
    raise ImportError("kvcore.event_encoding needs msgspec: pip install 'kvcore[events]'") from error

from kvcore.errors import KVCacheError
from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch, integer_hash


class EventFormatError(KVCacheError, ValueError):
    """A payload that is no batch of KV events."""


def _struct(kind: type[KVCacheEvent], num_required: int) -> Any:
    """The msgspec twin of an event. Its bytes are those of vLLM's own struct; a dict's are not, since msgspec chooses
    the width of a map's header by the fields that a struct could have."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    required = [(name, hints[name]) for name in names[:num_required]]
    optional = [(name, hints[name], None) for name in names[num_required:]]
    return msgspec.defstruct(kind.__name__, [*required, *optional], tag=True, omit_defaults=True, gc=False)


_STRUCTS: dict[type[KVCacheEvent], Any] = {
    BlockStored: _struct(BlockStored, 7),  # up to lora_name
    BlockRemoved: _struct(BlockRemoved, 2),  # up to medium
    AllBlocksCleared: _struct(AllBlocksCleared, 0),
}
_KINDS = {struct: kind for kind, struct in _STRUCTS.items()}
_NAMES = {kind: [field.name for field in fields(kind)] for kind in _STRUCTS}

_Batch: Any = msgspec.defstruct(
    "KVEventBatch",
    [
        ("ts", float),
        ("events", GenericAlias(list, (reduce(or_, _STRUCTS.values()),))),
        ("data_parallel_rank", int | None, None),
    ],
    array_like=True,
    omit_defaults=True,
    gc=False,
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Batch)


def encode_batch(batch: KVEventBatch, *, integer_hashes: bool = False) -> bytes:
    """The payload of a batch. O(tokens and hashes).

    Args:
        batch: What to send.
        integer_hashes: Send the last 64 bits of each hash as a number, as vLLM does unless told otherwise, for readers
            that expect no bytes. Numbers are shorter, and two prefixes may come to share one.
    """
    events = [_to_struct(event, integer_hashes) for event in batch.events]
    return _encoder.encode(_Batch(float(batch.ts), events, batch.data_parallel_rank))


def decode_batch(payload: bytes) -> KVEventBatch:
    """The batch in a payload; fields that are not known are passed over. O(tokens and hashes).

    Raises:
        EventFormatError: It is no msgpack of a batch, or it has an event of another type.
    """
    try:
        batch = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise EventFormatError(f"a payload of {len(payload)} bytes is no batch of KV events: {error}") from error
    return KVEventBatch(batch.ts, [_from_struct(event) for event in batch.events], batch.data_parallel_rank)


def _to_struct(event: KVCacheEvent, integer_hashes: bool) -> Any:
    kind = type(event)
    struct = _STRUCTS[kind](*[getattr(event, name) for name in _NAMES[kind]])
    if integer_hashes and not isinstance(event, AllBlocksCleared):
        struct.block_hashes = [*map(integer_hash, event.block_hashes)]
        if isinstance(event, BlockStored) and event.parent_block_hash is not None:
            struct.parent_block_hash = integer_hash(event.parent_block_hash)
    return struct


def _from_struct(struct: Any) -> KVCacheEvent:
    kind = _KINDS[type(struct)]
    return kind(*[getattr(struct, name) for name in _NAMES[kind]])
