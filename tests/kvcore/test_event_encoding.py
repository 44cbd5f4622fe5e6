"""The bytes of KV events are those of vLLM's."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvcore import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch, LoRAAdapter, MultiModalItem
from kvcore.event_encoding import EventFormatError, decode_batch, encode_batch
from kvcore.events import integer_hash
from kvcore.testing import admit, make_manager, make_request
from tests.kvcore.recordings import GOLDEN

RECORDED = json.loads((GOLDEN / "event_batches.json").read_text())
KINDS = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved, "AllBlocksCleared": AllBlocksCleared}


def recorded_hash(value: Any) -> Any:
    return bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value


def recorded_event(event: dict[str, Any]) -> KVCacheEvent:
    kind = KINDS[event.pop("type")]
    if "block_hashes" in event:
        event["block_hashes"] = [recorded_hash(value) for value in event["block_hashes"]]
    if "parent_block_hash" in event:
        event["parent_block_hash"] = recorded_hash(event["parent_block_hash"])
    if "extra_keys" in event:
        event["extra_keys"] = [keys and tuple(keys) for keys in event["extra_keys"]]
    return kind(**event)  # type: ignore[no-any-return]


@pytest.mark.parametrize("recording", RECORDED, ids=range(len(RECORDED)))
def test_a_recorded_batch_is_encoded_byte_for_byte_and_decoded_field_for_field(recording: dict[str, Any]) -> None:
    payload = bytes.fromhex(recording["payload_hex"])
    ts, events, rank = json.loads(json.dumps(recording["decoded"]))
    batch = KVEventBatch(ts, [recorded_event(event) for event in events], rank)
    assert encode_batch(batch) == payload
    assert decode_batch(payload) == batch


def test_what_a_manager_tells_comes_back_as_it_was() -> None:
    manager = make_manager(20, groups=["full", "sliding:6", "chunked:8"], enable_kv_cache_events=True)
    request = make_request(
        "a",
        range(12),
        manager,
        cache_salt="tenant",
        lora=LoRAAdapter("french", "/adapters/french"),
        mm_items=[MultiModalItem("image", 2, 4)],
    )
    admit(manager, request)
    manager.evict_blocks(range(20))
    events = manager.take_events()
    assert {type(event) for event in events} == {BlockStored, BlockRemoved}
    decoded = decode_batch(encode_batch(KVEventBatch(1.5, events, 7)))
    for event in events:
        if isinstance(event, BlockStored):
            # msgpack has arrays, and no tuples inside of them.
            event.extra_keys = [
                tuple(list(key) if isinstance(key, tuple) else key for key in keys or ()) or None
                for keys in event.extra_keys or []
            ]
    assert decoded == KVEventBatch(1.5, events, 7)


def test_hashes_can_be_sent_as_the_numbers_that_their_last_eight_bytes_are() -> None:
    first, second = bytes(range(32)), bytes(range(32, 64))
    events = [BlockStored([second], first, [1], 1), BlockStored([first], None, [1], 1), BlockRemoved([second, 5])]
    decoded = decode_batch(encode_batch(KVEventBatch(0.0, events), integer_hashes=True)).events
    numbers = 0x18191A1B1C1D1E1F, 0x38393A3B3C3D3E3F
    assert decoded == [
        BlockStored([numbers[1]], numbers[0], [1], 1),
        BlockStored([numbers[0]], None, [1], 1),
        BlockRemoved([numbers[1], 5]),
    ]
    assert events[0] == BlockStored([second], first, [1], 1)  # what was sent is as it was
    assert integer_hash(first) == numbers[0]


def test_what_a_later_version_adds_to_an_event_is_passed_over() -> None:
    payload = msgspec.msgpack.encode(
        [2.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "colour": 3}]]
    )
    assert decode_batch(payload) == KVEventBatch(2.0, [BlockRemoved([1], medium="CPU")])


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        [1.0, [{"type": "BlockMoved"}], None],
        [1.0, [{"type": "BlockRemoved"}], None],
        [1.0, [{"type": "BlockRemoved", "block_hashes": ["text"], "medium": None}], None],
        [1.0, {}, None],
    ],
)
def test_what_is_no_batch_is_refused(content: Any) -> None:
    with pytest.raises(EventFormatError, match="is no batch of KV events"):
        decode_batch(msgspec.msgpack.encode(content))


@pytest.mark.parametrize("payload", [b"", b"\xc1", bytes.fromhex(RECORDED[0]["payload_hex"])[:-1]])
def test_bytes_that_are_cut_off_or_no_msgpack_are_refused(payload: bytes) -> None:
    with pytest.raises(EventFormatError):
        decode_batch(payload)
