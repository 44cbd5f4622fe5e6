"""What the tests of publisher and subscriber share: raw sockets, and a relay that loses messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from kvcore import BlockStored, KVEventBatch
from kvcore.event_publisher import END_OF_REPLAY, EventPublisher

ANY_PORT = "tcp://127.0.0.1:*"
PATIENCE = 10.0  # seconds until a test gives up; none of them waits so long unless something is broken


def batch(number: int, num_tokens: int = 1) -> KVEventBatch:
    """A batch that can be told from others."""
    return KVEventBatch(float(number), [BlockStored([bytes([number % 256])], None, [70_000] * num_tokens, 1)])


def until(done: Callable[[], object]) -> None:
    """Waits for something that other threads bring about.

    Raises:
        AssertionError: It does not happen.
    """
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


@contextmanager
def socket(kind: int, endpoint: str, *, bind: bool = False, hwm: int = 1000) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.set(zmq.LINGER, 0)
        sock.set_hwm(hwm)
        sock.set(zmq.RCVTIMEO, int(PATIENCE * 1000))
        sock.bind(endpoint) if bind else sock.connect(endpoint)
        yield sock


def replay(publisher: EventPublisher, first: int) -> list[tuple[bytes, int, bytes]]:
    """What the publisher has from a number on: topic, number and payload of each. All that was published before is
    sent by then."""
    assert publisher.replay_endpoint is not None
    with socket(zmq.DEALER, publisher.replay_endpoint) as dealer:
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        messages = []
        while True:
            empty, topic, number, payload = dealer.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert (topic, payload) == (b"", b"")
                return messages
            messages.append((topic, int.from_bytes(number, "big"), payload))


class LossyRelay:
    """Passes a publisher's messages on, but for those that ``loses`` chooses by their numbers.

    Args:
        source: Address of the publisher.
        loses: Whether to lose the message of that number.

    Attributes:
        endpoint: Where to subscribe.
        num_passed: Messages passed on.
        num_lost: Messages lost.
    """

    def __init__(self, source: str, loses: Callable[[int], bool]) -> None:
        self._loses = loses
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(source)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(ANY_PORT)
        self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT)
        self.num_passed = self.num_lost = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> LossyRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stopped:
            if self._sub.poll(10):
                frames = self._sub.recv_multipart()
                if self._loses(int.from_bytes(frames[1], "big")):
                    self.num_lost += 1
                else:
                    self._pub.send_multipart(frames)
                    self.num_passed += 1
