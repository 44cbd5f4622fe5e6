"""Runs the parts of the check, each in processes of its own that are ended when their time is over."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from tests.gpu.work import Order, Record, Settings, work

MOST_REPLACED = 4
"""Processes of a part that may die and be replaced."""

_context = multiprocessing.get_context("spawn")


class Worker:
    """A process for one part. It starts at once, imports what it needs, and waits.

    Attributes:
        has_begun: It has said what it measures.
        waiting: Names of measurements that have not begun.
        current: The one under way.
        done: Those that are over.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self.has_begun = False
        self.waiting: list[str] = []
        self.current: str | None = None
        self.done: frozenset[str] = frozenset()
        self.connection, theirs = _context.Pipe()
        self._process = _context.Process(target=work, args=(part, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the connection
        self.order = Order(Settings("cpu", ()))

    @property
    def whole(self) -> str:
        """A name for all that it was to measure."""
        return f"share {self.order.share + 1} of {self.order.num_shares} of the measurements"

    def begin(self, order: Order) -> None:
        """Give it its order."""
        self.order, self.done = order, order.done
        with suppress(OSError):  # if it died while importing, whoever listens will notice
            self.connection.send(order)

    def listen(self) -> tuple[str, Record | None]:
        """What it sends next: "record" with one, "end", "dead", or anything else that matters to nobody."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):
            return "dead", None
        if kind == "names":
            self.has_begun, self.waiting = True, content
        elif kind == "begin":
            self.current = content
            self.waiting.remove(content)
        elif kind == "record":
            self.current = None
            self.done |= {content["name"]}
            return kind, content
        return kind, None

    def stop(self) -> str:
        """End it; says how it ended if it did so by itself."""
        self._process.join(0.2)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        self.connection.close()
        return f"exit code {code}" if code is not None else "still running"


def run_part(workers: Sequence[Worker], settings: Settings, seconds: float) -> Iterator[Record]:
    """The records of a part, as they come.

    Args:
        workers: Processes that wait; they share the measurements among them, and are ended here.
        settings: What to check.
        seconds: Time for all; what has not begun by then is reported as not run.
    """
    deadline = time.monotonic() + seconds
    num_replaced = 0
    running: dict[Connection, Worker] = {}

    def start(worker: Worker, share: int, done: frozenset[str] = frozenset()) -> None:
        worker.begin(Order(settings, share, len(workers), done, deadline - time.monotonic()))
        running[worker.connection] = worker

    for share, worker in enumerate(workers):
        start(worker, share)
    while running:
        ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            worker = running[connection]
            kind, record = worker.listen()
            if kind == "record" and record is not None:
                yield record
            elif kind == "end":
                yield from _not_run(worker.waiting, "out of time")
                worker.stop()
                del running[connection]
            elif kind == "dead":
                del running[connection]
                how = worker.stop()
                lost = worker.current if worker.has_begun else worker.whole
                if lost is not None:
                    yield {"name": lost, "status": "error", "note": f"the process died: {how}"}
                if worker.current is None and not worker.waiting:
                    continue
                num_replaced += 1
                if num_replaced > MOST_REPLACED:
                    yield from _not_run(worker.waiting, "too many processes died")
                    continue
                done = worker.done | ({worker.current} if worker.current else set())
                start(Worker(worker.part), worker.order.share, done)
    for worker in running.values():
        if worker.current is not None:
            yield from _not_run([worker.current], "cut off: out of time")
        if not worker.has_begun:
            yield from _not_run([worker.whole], "out of time before it began")
        yield from _not_run(worker.waiting, "out of time")
        worker.stop()


def _not_run(names: Sequence[str], note: str) -> Iterator[Record]:
    for name in names:
        yield {"name": name, "status": "not run", "note": note}
