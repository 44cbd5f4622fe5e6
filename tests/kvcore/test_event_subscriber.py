"""Whatever is lost on the way, a mirror is either as the worker's index or promises less."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
import zmq

from kvcore import ConfigError, KVEventBatch, Request
from kvcore.event_encoding import encode_batch
from kvcore.event_mirror import IndexMirror
from kvcore.event_publisher import EventPublisher
from kvcore.event_subscriber import EventSubscriber
from tests.kvcore.event_wire import ANY_PORT, LossyRelay, batch, replay, socket, until
from tests.kvcore.random_worker import RandomWorker

EMPTY_BATCH = encode_batch(KVEventBatch(0.0, []))


class Link:
    """A random worker, the publisher of its events, and a subscriber, with a lossy relay between if that is asked for.

    Args:
        groups: Of the worker.
        loses: Which messages the relay loses, by number; None: there is no relay.
        replays: Whether the subscriber may ask for replays.
        **options: Of the publisher.
    """

    def __init__(
        self,
        groups: str = "full/4",
        *,
        loses: Callable[[int], bool] | None = None,
        replays: bool = True,
        **options: Any,
    ) -> None:
        self.stack = ExitStack()
        self.worker = RandomWorker(groups.split())
        options = {"replay_endpoint": ANY_PORT, **options}
        self.publisher = self.stack.enter_context(EventPublisher(ANY_PORT, **options))
        address = self.publisher.endpoint
        if loses is not None:
            self.relay = self.stack.enter_context(LossyRelay(address, loses))
            address = self.relay.endpoint
        replay_endpoint = self.publisher.replay_endpoint if replays else None
        self.subscriber = self.stack.enter_context(
            EventSubscriber(IndexMirror(), address, replay_endpoint=replay_endpoint)
        )
        self.num_published = 0

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def connect(self) -> None:
        """Publishes until something arrives."""

        def arrived() -> bool:
            self.publish(KVEventBatch(0.0, []))
            return self.subscriber.update(0.01) > 0

        until(arrived)

    def publish(self, batch: KVEventBatch) -> None:
        self.publisher.publish(batch)
        self.num_published += 1

    def run(self, num_operations: int) -> None:
        """Lets the worker work, and publishes what it tells."""
        for _ in range(num_operations):
            self.worker.operation()
            if events := self.worker.manager.take_events():
                self.publish(KVEventBatch(time.time(), events))

    def answers(self, num_prompts: int = 5) -> Iterator[tuple[int, int]]:
        """The mirror's answers beside the manager's own, in tokens."""
        for _ in range(num_prompts):
            prompt: Request = self.worker.prompt()
            yield self.subscriber.mirror.longest_prefix(prompt), self.worker.longest_prefix(prompt)


def randomly(share: float) -> Callable[[int], bool]:
    return lambda number: random.Random(number).random() < share


@pytest.mark.parametrize("groups", ["full/4", "full/4 sliding:6/4"])
def test_with_messages_lost_and_replayed_the_answers_are_the_managers_own_after_ten_thousand_operations(
    groups: str,
) -> None:
    # One message in twenty is lost, and now and then a hundred in a row.
    with Link(groups, loses=lambda number: randomly(0.05)(number) or number % 1000 < 100) as link:
        link.connect()
        hits = []
        for _ in range(100):
            link.run(100)
            link.subscriber.update()
            link.subscriber.catch_up()  # what is still on its way
            pairs = [*link.answers()]
            assert all(told == own for told, own in pairs), pairs
            hits += [own for _, own in pairs]
        until(lambda: link.relay.num_passed + link.relay.num_lost >= link.num_published - 200)
        assert link.relay.num_lost > 100
        assert link.subscriber.num_batches == link.num_published
        assert link.subscriber.num_replayed > link.relay.num_lost // 2
        assert link.subscriber.num_lost == 0
        assert sum(map(bool, hits)) > 50  # else nothing was compared


def test_a_gap_is_closed_as_soon_as_a_later_message_shows_it() -> None:
    with Link(loses=lambda number: number % 10 == 5) as link:
        link.connect()
        for _ in range(300):
            link.run(1)
        while link.num_published % 10 != 8:
            link.publish(KVEventBatch(0.0, []))
        until(lambda: link.subscriber.update(0.01) * 0 or link.subscriber.num_batches == link.num_published)
        assert link.subscriber.num_lost == 0
        assert link.subscriber.num_replayed > 0
        assert all(told == own for told, own in link.answers(50))


def test_what_no_replay_brings_back_is_not_promised() -> None:
    with Link(loses=randomly(0.1), buffer_steps=5) as link:
        link.connect()
        for _ in range(100):
            link.run(20)
            link.subscriber.update()
            link.subscriber.catch_up()
            assert all(told <= own for told, own in link.answers())
        assert link.subscriber.num_lost > 0
        assert link.subscriber.num_batches + link.subscriber.num_lost == link.num_published


def test_without_replays_a_gap_empties_the_mirror() -> None:
    with Link(loses=randomly(0.3), replays=False) as link:
        link.connect()
        for _ in range(50):
            link.run(5)
            last = link.num_published
            until(lambda last=last: link.relay.num_passed + link.relay.num_lost >= last - 1)  # type: ignore[misc]
            link.subscriber.catch_up()  # asks nobody
            link.subscriber.update(0.01)
        # The last messages may be among the lost: one that comes tells of them.
        before = link.subscriber.num_batches
        until(lambda: link.publish(KVEventBatch(0.0, [])) or link.subscriber.update(0.01))  # type: ignore[func-returns-value]
        assert link.subscriber.num_batches > before
        assert link.subscriber.num_lost > 0
        assert link.subscriber.num_replayed == 0
        assert all(told <= own for told, own in link.answers())


def test_a_subscriber_that_comes_late_catches_up_without_waiting_for_an_event() -> None:
    with Link() as link:
        link.run(300)
        link.subscriber.catch_up()
        assert link.subscriber.num_replayed == link.num_published
        assert all(told == own for told, own in link.answers(50))


def test_a_subscriber_that_did_not_read_for_long_catches_up() -> None:
    with EventPublisher(ANY_PORT, replay_endpoint=ANY_PORT, hwm=2) as publisher:
        subscriber = EventSubscriber(
            IndexMirror(), publisher.endpoint, replay_endpoint=publisher.replay_endpoint, hwm=2
        )
        with subscriber:
            until(lambda: publisher.publish(batch(0)) or subscriber.update(0.01))  # type: ignore[func-returns-value]
            for number in range(100):
                publisher.publish(batch(number, num_tokens=50_000))
            num_sent = 1 + replay(publisher, 0)[-1][1]
            until(lambda: subscriber.update(0.1) == 0)
            subscriber.catch_up()
            assert (subscriber.num_batches, subscriber.num_lost) == (num_sent, 0)
            assert subscriber.num_replayed > 0


@pytest.mark.parametrize("first_life", [3, 100])
def test_a_worker_that_came_back_empty_is_not_taken_for_the_one_before(first_life: int) -> None:
    with Link() as link:
        link.connect()
        link.run(first_life)
        link.subscriber.update(1.0)
        addresses = (link.publisher.endpoint, link.publisher.replay_endpoint)
        link.publisher.close()
        link.worker = RandomWorker(seed=1)
        with EventPublisher(_bound(addresses[0]), replay_endpoint=addresses[1]) as link.publisher:
            # More or fewer batches than in the first life: the numbers alone do not tell.
            link.run(30)
            until(lambda: link.subscriber.update(0.01) or link.subscriber.num_restarts)
            link.subscriber.catch_up()
            link.subscriber.update()
            assert link.subscriber.num_restarts == 1
            assert all(told == own for told, own in link.answers(50))


def _bound(address: str) -> str:
    """The same port, in the form that is bound."""
    return f"tcp://*:{address.rpartition(':')[2]}"


def test_numbers_that_begin_again_behind_a_relay_are_a_worker_that_began_again() -> None:
    with socket(zmq.PUB, ANY_PORT, bind=True) as relay:
        address = relay.get_string(zmq.LAST_ENDPOINT)
        with EventSubscriber(IndexMirror(), address) as subscriber:
            numbers = count()

            def send(number: int, payload: bytes = EMPTY_BATCH) -> None:
                relay.send_multipart((b"", number.to_bytes(8, "big"), payload))

            until(lambda: send(next(numbers)) or subscriber.update(0.01))  # type: ignore[func-returns-value]
            assert subscriber.num_restarts == 0
            send(0)
            assert subscriber.update(5.0) == 1
            send(1)
            assert subscriber.update(5.0) == 1
            assert subscriber.num_restarts == 1


@pytest.mark.parametrize(
    "frames",
    [(b"",), (b"", b"\0" * 7, b""), (b"", b"\0" * 8), (b"", b"\0" * 8, b"", b"more")],
    ids=["one frame", "short number", "two frames", "four frames"],
)
def test_messages_that_are_no_batches_are_passed_over(frames: tuple[bytes, ...]) -> None:
    with ExitStack() as stack:
        pub = stack.enter_context(socket(zmq.PUB, ANY_PORT, bind=True))
        subscriber = stack.enter_context(EventSubscriber(IndexMirror(), pub.get_string(zmq.LAST_ENDPOINT)))

        numbers = count()

        def a_batch_arrived() -> bool:
            pub.send_multipart((b"", next(numbers).to_bytes(8, "big"), EMPTY_BATCH))
            return subscriber.update(0.01) > 0

        until(a_batch_arrived)
        until(lambda: subscriber.update(0.05) == 0)
        before = (subscriber.num_batches, subscriber.num_lost, subscriber.num_restarts)
        pub.send_multipart(frames)
        pub.send_multipart((b"", next(numbers).to_bytes(8, "big"), EMPTY_BATCH))
        assert subscriber.update(5.0) + subscriber.update(0.1) == 1
        assert (subscriber.num_batches - 1, subscriber.num_lost, subscriber.num_restarts) == before


def test_a_payload_that_cannot_be_read_is_lost_and_empties_the_mirror() -> None:
    with Link() as link:
        link.connect()
        link.run(50)
        until(lambda: link.subscriber.update(0.01) == 0)
        assert len(link.subscriber.mirror) > 0
        pub = link.stack.enter_context(socket(zmq.PUB, ANY_PORT, bind=True))
        other = link.stack.enter_context(EventSubscriber(link.subscriber.mirror, pub.get_string(zmq.LAST_ENDPOINT)))

        def lost() -> bool:
            pub.send_multipart((b"", b"\0" * 8, b"no msgpack"))
            other.update(0.01)
            return other.num_lost > 0

        until(lost)
        assert len(link.subscriber.mirror) == 0


def test_a_replay_that_nobody_answers_is_given_up() -> None:
    with socket(zmq.PUB, ANY_PORT, bind=True) as pub, socket(zmq.ROUTER, ANY_PORT, bind=True) as silent:
        subscriber = EventSubscriber(
            IndexMirror(),
            pub.get_string(zmq.LAST_ENDPOINT),
            replay_endpoint=silent.get_string(zmq.LAST_ENDPOINT),
            replay_timeout=0.05,
        )
        with subscriber:
            numbers = count(5)

            def send() -> int:
                pub.send_multipart((b"", next(numbers).to_bytes(8, "big"), EMPTY_BATCH))
                return subscriber.update(0.01)

            until(send)
            assert subscriber.num_lost >= 5
            assert subscriber.num_replayed == 0
            assert silent.poll(1000)  # it was asked


def test_a_subscriber_may_be_closed_twice_and_keeps_its_mirror() -> None:
    with Link() as link:
        link.run(50)
        link.subscriber.catch_up()
        known = len(link.subscriber.mirror)
        link.subscriber.close()
        link.subscriber.close()
        assert len(link.subscriber.mirror) == known > 0
        assert f"prefixes={known}" in repr(link.subscriber)


@pytest.mark.parametrize(("address", "options"), [("no address", {}), (ANY_PORT, {"hwm": 0})])
def test_settings_that_cannot_work_are_refused(address: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EventSubscriber(IndexMirror(), address, **options)
