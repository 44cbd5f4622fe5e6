"""Publishes KV events over ZeroMQ, with vLLM's wire protocol: whoever subscribes to its workers can subscribe to ours.

A PUB socket sends three frames a batch: topic, sequence number (8 bytes, big-endian, from 0), payload. Batches can be
lost on the way to a slow subscriber. It sees a gap in the numbers, and asks a ROUTER socket for what it missed: one
request with the first number it wants, answered by every batch from there on that is still kept, then by an end marker.

Needs pyzmq and msgspec: ``pip install 'kvcore[events]'``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from itertools import count
from types import TracebackType

try:
    import zmq
except ImportError as error:
    raise ImportError("kvcore.event_publisher needs pyzmq: pip install 'kvcore[events]'") from error

from kvcore.errors import ConfigError, KVCacheError
from kvcore.event_encoding import encode_batch
from kvcore.events import KVEventBatch
from kvcore.spec import require_positive

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Stands in the place of the sequence number of the message that ends a replay."""

CLOSE_SECONDS = 1.0
"""How long a publisher that is closed waits for what it has sent to leave the machine."""

logger = logging.getLogger(__name__)


class PublisherClosedError(KVCacheError, RuntimeError):
    """A batch was published after the publisher was closed."""


class EventPublisher:
    """Sends batches of KV events to whoever listens, from a thread of its own.

    :meth:`publish` costs the scheduler an append to a queue. Neither a slow subscriber nor none at all holds it up:
    the queue, what waits for each subscriber, and what is kept for replays are all bounded. Use it as a context
    manager, or :meth:`close` it.

    Args:
        endpoint: Address of the PUB socket. One with a ``*`` (``tcp://*:5557``; ``tcp://127.0.0.1:*`` for any free
            port), an IPv6 ``::`` or an ``ipc://`` path is bound; any other is a collector's, which is connected to.
        replay_endpoint: Address to bind the ROUTER socket to; None: no replays.
        topic: What subscribers choose by: they ask for all topics that begin with some text.
        buffer_steps: Batches kept for replays.
        hwm: Batches that may wait for one subscriber; for a slower one, later batches are lost.
        max_queue_size: Batches that may wait for the thread; later ones are dropped and counted.
        data_parallel_rank: Written into batches that name no rank.
        integer_hashes: Send hashes as numbers, see :func:`kvcore.event_encoding.encode_batch`.

    Attributes:
        endpoint: The address of the PUB socket, the port filled in.
        replay_endpoint: The address of the ROUTER socket, likewise, or None.

    Raises:
        ConfigError: A size below 1, or an address that cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        data_parallel_rank: int = 0,
        integer_hashes: bool = False,
    ) -> None:
        require_positive(buffer_steps=buffer_steps, hwm=hwm, max_queue_size=max_queue_size)
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._integer_hashes = integer_hashes
        self._max_queue_size = max_queue_size
        self._numbers = count()
        self._num_dropped = 0
        self._queue: deque[tuple[int, KVEventBatch]] = deque()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)  # sequence number, payload
        self._lock = threading.Lock()
        self._closed = False
        self._woken = False  # a wake-up is under way: one at a time, so that they never fill their pipe

        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(hwm)
            self.endpoint = _open(self._pub, endpoint, bind=_is_bound(endpoint))
            self._replay: zmq.Socket[bytes] | None = None
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # Room for a whole replay with its end marker. Twice that, since ZeroMQ learns of what was read only
                # when half of the room is used up.
                self._replay.set(zmq.SNDHWM, 2 * (buffer_steps + 1))
                self.replay_endpoint = _open(self._replay, replay_endpoint, bind=True)
            self._wake_receiver = self._context.socket(zmq.PAIR)
            self._wake_receiver.bind("inproc://wake")
            self._wake_sender = self._context.socket(zmq.PAIR)
            self._wake_sender.connect("inproc://wake")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        # A daemon, so that a publisher that nobody closed does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="kv-event-publisher", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"EventPublisher({self.endpoint!r}, replay_endpoint={self.replay_endpoint!r}, {state})"

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_dropped(self) -> int:
        """Batches that were dropped because too many waited for the thread. Their numbers are missing in the stream, so
        that subscribers notice."""
        return self._num_dropped

    def publish(self, batch: KVEventBatch) -> None:
        """Gives a batch its number and hands it to the thread. Never waits. O(1).

        The batch and its events must not change afterwards. A batch without events is sent too: now and then one lets
        subscribers notice that they missed the last.

        Raises:
            PublisherClosedError: The publisher is closed.
        """
        with self._lock:
            if self._closed:
                raise PublisherClosedError(f"{self!r} takes no more batches")
            number = next(self._numbers)
            if len(self._queue) >= self._max_queue_size:
                self._num_dropped += 1
                return
            self._queue.append((number, batch))
            self._wake()

    def close(self) -> None:
        """Sends what is queued, then ends the thread and closes the sockets. Again: does nothing.

        Waits for subscribers to be handed what was sent, but no longer than :data:`CLOSE_SECONDS`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake()
        self._thread.join()
        self._context.destroy(linger=0)

    def _wake(self) -> None:
        """Lets the thread look at the queue. The lock is held."""
        if not self._woken:
            self._woken = True
            self._wake_sender.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_receiver, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        closed = False
        while not closed:
            ready = dict(poller.poll())
            if self._wake_receiver in ready:
                self._wake_receiver.recv()
                with self._lock:
                    self._woken = False
                    closed = self._closed
                self._send_queued()
            if self._replay is not None and self._replay in ready:
                self._send_queued()  # so that a replay has all that was published before it was asked for
                self._answer(self._replay)
        self._pub.close(linger=int(CLOSE_SECONDS * 1000))
        if self._replay is not None:
            self._replay.close(linger=int(CLOSE_SECONDS * 1000))
        self._wake_receiver.close(linger=0)

    def _send_queued(self) -> None:
        while self._queue:
            number, batch = self._queue.popleft()
            try:
                payload = self._encode(batch)
            except Exception:
                # It leaves a gap like any batch that is lost; the thread must live.
                logger.exception("batch %d of KV events cannot be encoded and is not sent", number)
                continue
            frames = (number.to_bytes(8, "big"), payload)
            # A PUB socket never waits: what a subscriber has no room for is not sent to it.
            self._pub.send_multipart((self._topic, *frames), zmq.NOBLOCK)
            self._sent.append(frames)

    def _encode(self, batch: KVEventBatch) -> bytes:
        rank = self._rank if batch.data_parallel_rank is None else batch.data_parallel_rank
        return encode_batch(KVEventBatch(batch.ts, batch.events, rank), integer_hashes=self._integer_hashes)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Sends what one subscriber asks for. A client that does not read loses what it has no room for, no more."""
        request = replay.recv_multipart()
        if len(request) != 3 or not 0 < len(request[2]) <= 8:
            logger.warning("a request for a replay has frames of %s bytes; wanted: b'', 8 bytes", [*map(len, request)])
            return
        client, _, first = request
        first = first.rjust(8, b"\0")
        for number, payload in self._sent:
            if number >= first:  # big-endian numbers of one length are in the order of their bytes
                replay.send_multipart((client, b"", self._topic, number, payload), zmq.NOBLOCK)
        replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""), zmq.NOBLOCK)


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def _open(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """Binds or connects a socket; the address it has then.

    Raises:
        ConfigError: It cannot.
    """
    try:
        if "::" in endpoint or "[" in endpoint:
            socket.set(zmq.IPV6, 1)
        if not bind:
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        raise ConfigError(f"cannot {verb} {endpoint!r} for KV events: {error}") from error
    return socket.get_string(zmq.LAST_ENDPOINT)
