"""Batches of events leave for whoever listens, and nobody who does not listen holds anything up."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcore import ConfigError, KVCacheEvent, KVEventBatch
from kvcore.event_encoding import decode_batch, encode_batch
from kvcore.event_publisher import EventPublisher, PublisherClosedError
from tests.kvcore.event_wire import ANY_PORT, batch, replay, socket, until


def make_publisher(**options: Any) -> EventPublisher:
    return EventPublisher(ANY_PORT, **{"replay_endpoint": ANY_PORT, **options})


def numbers(messages: list[tuple[bytes, int, bytes]]) -> list[int]:
    return [number for _, number, _ in messages]


def subscribed(publisher: EventPublisher, sub: zmq.Socket[bytes], topic: bytes = b"") -> list[bytes]:
    """Subscribes, and publishes until something comes: that is the first message."""
    sub.subscribe(topic)

    def arrived() -> bool:
        publisher.publish(KVEventBatch(0.0, []))
        return bool(sub.poll(10))

    until(arrived)
    return sub.recv_multipart()


@pytest.mark.parametrize("address", [ANY_PORT, "ipc://{}/events"])
def test_a_subscriber_gets_topic_number_and_payload_of_each_batch_in_order(address: str, tmp_path: Path) -> None:
    with (
        EventPublisher(address.format(tmp_path), topic="kv@worker-1", data_parallel_rank=3) as publisher,
        socket(zmq.SUB, publisher.endpoint) as sub,
    ):
        _, first, _ = subscribed(publisher, sub, b"kv@")
        for number in range(100):
            publisher.publish(batch(number))
        until_now = int.from_bytes(first, "big")
        received = []
        while len(received) < 100:
            topic, number_bytes, payload = sub.recv_multipart()
            until_now += 1
            assert (topic, number_bytes) == (b"kv@worker-1", until_now.to_bytes(8, "big"))
            if decode_batch(payload).events:
                received.append(payload)
        assert received == [
            encode_batch(KVEventBatch(float(n), batch(n).events, data_parallel_rank=3)) for n in range(100)
        ]


def test_a_publisher_can_connect_to_a_collector_that_is_bound() -> None:
    with socket(zmq.SUB, ANY_PORT, bind=True) as sub:
        address = sub.get_string(zmq.LAST_ENDPOINT)
        with EventPublisher(address) as publisher:
            assert publisher.endpoint == address
            _, _, payload = subscribed(publisher, sub)
            assert decode_batch(payload) == KVEventBatch(0.0, [], data_parallel_rank=0)


def test_a_rank_that_a_batch_names_stays_and_hashes_can_go_as_numbers() -> None:
    with make_publisher(data_parallel_rank=3, integer_hashes=True) as publisher:
        publisher.publish(KVEventBatch(1.0, batch(7).events, data_parallel_rank=5))
        ((_, _, payload),) = replay(publisher, 0)
        assert payload == encode_batch(KVEventBatch(1.0, batch(7).events, 5), integer_hashes=True)


def test_a_replay_begins_where_it_is_asked_to_and_has_all_that_was_published_before() -> None:
    with make_publisher(topic="t") as publisher:
        assert replay(publisher, 0) == []
        for number in range(300):
            publisher.publish(batch(number))
        assert numbers(replay(publisher, 0)) == [*range(300)]
        assert numbers(replay(publisher, 290)) == [*range(290, 300)]
        assert replay(publisher, 300) == []
        assert replay(publisher, 299) == [(b"t", 299, encode_batch(KVEventBatch(299.0, batch(299).events, 0)))]


def test_only_the_last_batches_are_kept_for_replays() -> None:
    with make_publisher(buffer_steps=3) as publisher:
        for number in range(10):
            publisher.publish(batch(number))
        assert numbers(replay(publisher, 0)) == [7, 8, 9]


def test_requests_that_make_no_sense_are_passed_over() -> None:
    with make_publisher() as publisher:
        publisher.publish(batch(0))
        assert publisher.replay_endpoint is not None
        with socket(zmq.DEALER, publisher.replay_endpoint) as dealer:
            for request in ((b"",), (b"", b""), (b"", bytes(9)), (b"", bytes(8), b"more"), (bytes(8),)):
                dealer.send_multipart(request)
            dealer.send_multipart((b"", bytes(8)))
            assert [dealer.recv_multipart()[2] for _ in range(2)] == [bytes(8), b"\xff" * 8]
            assert not dealer.poll(20)


class SlowToEncode(list[KVCacheEvent]):
    """Events that hold the publisher's thread up until they are let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def __iter__(self) -> Iterator[KVCacheEvent]:
        self.begun.set()
        assert self.let_go.wait(10)
        return iter([])


def test_when_the_thread_falls_behind_later_batches_are_dropped_counted_and_missing_in_the_numbers() -> None:
    with make_publisher(max_queue_size=5) as publisher:
        slow = SlowToEncode()
        publisher.publish(KVEventBatch(0.0, slow))
        assert slow.begun.wait(10)
        for number in range(1, 21):
            publisher.publish(batch(number))  # does not wait, though the thread does
        assert publisher.num_dropped == 15
        slow.let_go.set()
        assert numbers(replay(publisher, 0)) == [0, 1, 2, 3, 4, 5]
        publisher.publish(batch(21))
        assert numbers(replay(publisher, 5)) == [5, 21]


def test_a_batch_that_cannot_be_encoded_is_a_gap_and_the_next_one_is_sent() -> None:
    with make_publisher() as publisher:
        publisher.publish(KVEventBatch(0.0, ["no event"]))  # type: ignore[list-item]
        publisher.publish(batch(1))
        assert numbers(replay(publisher, 0)) == [1]


def test_a_subscriber_that_does_not_read_gets_no_more_than_was_let_wait_for_it() -> None:
    with make_publisher(hwm=2, buffer_steps=1) as publisher, socket(zmq.SUB, publisher.endpoint, hwm=2) as sub:
        subscribed(publisher, sub)
        for number in range(120):
            publisher.publish(batch(number, num_tokens=50_000))  # a quarter of a megabyte: more than sockets hold
        assert numbers(replay(publisher, 0))[-1] >= 119  # all are sent
        received = 0
        while sub.poll(100):
            sub.recv_multipart()
            received += 1
        assert received < 100
        assert publisher.num_dropped == 0


def test_what_was_published_before_closing_arrives_at_a_subscriber_that_takes_a_while_to_read_it() -> None:
    received: list[KVEventBatch] = []

    def read_slowly(sub: zmq.Socket[bytes]) -> None:
        while sub.poll(500):
            received.append(decode_batch(sub.recv_multipart()[2]))
            time.sleep(0.002)

    with socket(zmq.SUB, ANY_PORT, bind=True, hwm=1) as sub:
        with EventPublisher(sub.get_string(zmq.LAST_ENDPOINT)) as publisher:
            subscribed(publisher, sub)
            for number in range(60):
                publisher.publish(batch(number, num_tokens=50_000))  # 15 MB: more than the sockets hold
            reader = threading.Thread(target=read_slowly, args=[sub])
            reader.start()
        reader.join()
    assert [found.ts for found in received if found.events] == [*range(60)]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kv-event-publisher"]


def test_closing_ends_the_thread_gives_the_addresses_back_and_may_be_done_twice() -> None:
    first = make_publisher()
    assert len(threads()) == 1
    first.close()
    first.close()
    assert threads() == []
    with pytest.raises(PublisherClosedError, match=r"closed\) takes no more batches"):
        first.publish(batch(0))
    assert first.replay_endpoint is not None
    with EventPublisher(ANY_PORT, replay_endpoint=first.replay_endpoint) as second:
        second.publish(batch(1))
        assert numbers(replay(second, 0)) == [0]


def test_a_publisher_that_nobody_closed_does_not_keep_the_process_alive() -> None:
    program = f"from kvcore.event_publisher import EventPublisher; p = EventPublisher({ANY_PORT!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("endpoint", "options"),
    [
        ("nonsense://*", {}),
        ("no address", {}),
        (ANY_PORT, {"replay_endpoint": "tcp://no.such.host.invalid:1"}),
        (ANY_PORT, {"hwm": 0}),
        (ANY_PORT, {"buffer_steps": 0}),
        (ANY_PORT, {"max_queue_size": 0}),
    ],
)
def test_settings_that_cannot_work_are_refused_and_leave_no_thread(endpoint: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EventPublisher(endpoint, **options)
    assert threads() == []


def test_an_address_in_use_is_named() -> None:
    with make_publisher() as publisher, pytest.raises(ConfigError, match=r"cannot bind .* in use"):
        EventPublisher(ANY_PORT, replay_endpoint=publisher.replay_endpoint)
