"""Follows a worker's KV events over ZeroMQ, and keeps a mirror of its prefix index true.

Batches come numbered. A gap is closed by a replay; what no replay can bring back empties the mirror, so that it knows
less than the worker holds for a while, and never more.

Needs pyzmq and msgspec: ``pip install 'kvcore[events]'``.
"""

from __future__ import annotations

import logging
from types import TracebackType

try:
    import zmq
except ImportError as error:
    raise ImportError("kvcore.event_subscriber needs pyzmq: pip install 'kvcore[events]'") from error

from kvcore.errors import ConfigError
from kvcore.event_encoding import EventFormatError, decode_batch
from kvcore.event_mirror import IndexMirror
from kvcore.event_publisher import END_OF_REPLAY
from kvcore.spec import require_positive

logger = logging.getLogger(__name__)


class EventSubscriber:
    """Keeps the mirror of one worker up to date, whenever :meth:`update` is called. Not thread-safe.

    Use it as a context manager, or :meth:`close` it.

    Args:
        mirror: What the events are applied to.
        endpoint: Address of the worker's PUB socket.
        replay_endpoint: Address of its ROUTER socket; None: what is missed is lost.
        topic: Only batches whose topic begins so.
        hwm: Batches that may wait here; later ones are missed.
        replay_timeout: Seconds to wait for each message of a replay.

    Attributes:
        num_batches: Batches applied.
        num_replayed: Those of them that a replay brought.
        num_lost: Batches that were sent and never came.
        num_restarts: How often the worker was taken to have begun anew.

    Raises:
        ConfigError: An address that cannot be used, or a size below 1.
    """

    def __init__(
        self,
        mirror: IndexMirror,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        hwm: int = 100_000,
        replay_timeout: float = 1.0,
    ) -> None:
        require_positive(hwm=hwm)
        self.mirror = mirror
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.num_batches = self.num_replayed = self.num_lost = self.num_restarts = 0
        self._hwm = hwm
        self._timeout_ms = int(replay_timeout * 1000)
        self._next = 0  # number of the batch to apply next
        self._last_live = -1  # number of the last batch that came without being asked for
        self._context = zmq.Context()
        try:
            self._sub = self._context.socket(zmq.SUB)
            self._sub.set_hwm(hwm)
            self._sub.set(zmq.IPV6, 1)
            self._sub.set(zmq.SUBSCRIBE, topic.encode())
            self._monitor = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._sub.connect(endpoint)
        except BaseException as error:
            self._context.destroy(linger=0)
            if isinstance(error, zmq.ZMQError):
                raise ConfigError(f"cannot subscribe to KV events at {endpoint!r}: {error}") from error
            raise

    def __repr__(self) -> str:
        return f"EventSubscriber({self.endpoint!r}, next={self._next}, lost={self.num_lost}, {self.mirror!r})"

    def __enter__(self) -> EventSubscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the sockets; the mirror stays as it is. Again: does nothing."""
        self._context.destroy(linger=0)

    def update(self, timeout: float = 0.0) -> int:
        """Applies what has come, and asks for what is missing.

        Args:
            timeout: Seconds to wait if nothing has come yet. A replay takes its own time.

        Returns:
            Batches that were applied.
        """
        before = self.num_batches
        if self._was_disconnected():
            self._start_over()
        if self._sub.poll(int(timeout * 1000)):
            for _ in range(self._hwm):  # not forever, however fast the worker is
                try:
                    frames = self._sub.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                # Asked after the message is here: a worker that came back was disconnected before it sent it.
                if self._was_disconnected():
                    self._start_over()
                else:
                    self._take(frames)
        return self.num_batches - before

    def catch_up(self) -> None:
        """Asks for what came after the last batch applied. At the start: for all that the worker still keeps, without
        waiting for the next event; later: in case the last batches were missed, and none came since."""
        if self.replay_endpoint is None:
            return
        # A socket for each replay: what comes late for the one before cannot be taken for an answer to this one.
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.IPV6, 1)
            dealer.connect(self.replay_endpoint)
            dealer.send_multipart((b"", self._next.to_bytes(8, "big")))
            while dealer.poll(self._timeout_ms):
                _, _, number, payload = dealer.recv_multipart()
                if number == END_OF_REPLAY:
                    return
                before = self._next
                self._apply(int.from_bytes(number, "big"), payload)
                self.num_replayed += self._next > before
        logger.warning("the replay of KV events at %s did not come to its end", self.replay_endpoint)

    def _take(self, frames: list[bytes]) -> None:
        """Deals with a batch that came without being asked for."""
        if len(frames) != 3 or len(frames[1]) != 8:
            logger.warning(
                "a message at %s has frames of %s bytes, and is no KV event", self.endpoint, [*map(len, frames)]
            )
            return
        number, payload = int.from_bytes(frames[1], "big"), frames[2]
        if number <= self._last_live:
            self._begin_anew()
        self._last_live = number
        if number > self._next:
            self.catch_up()
        self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        """Applies a batch, unless it was applied before."""
        if number < self._next:
            return
        if number > self._next:
            self._lose(number - self._next)
        self._next = number + 1
        try:
            batch = decode_batch(payload)
        except EventFormatError as error:
            logger.warning("batch %d of %s is lost: %s", number, self.endpoint, error)
            self._lose(1)
            return
        self.mirror.apply(batch)
        self.num_batches += 1

    def _lose(self, num_batches: int) -> None:
        # A block that was removed in a lost batch must not be promised.
        self.num_lost += num_batches
        self.mirror.clear()

    def _was_disconnected(self) -> bool:
        """Whether the connection was lost since this was asked last."""
        lost = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            lost = True
        return lost

    def _start_over(self) -> None:
        """After a lost connection: the worker may have been replaced by another, whose numbers begin at 0 again. What
        waits here may be of either, and a replay has all of it that is worth having."""
        while self._sub.poll(0):
            self._sub.recv_multipart()
        self._begin_anew()
        self.catch_up()

    def _begin_anew(self) -> None:
        self.num_restarts += 1
        self.mirror.clear()
        self._next = 0
        self._last_live = -1
