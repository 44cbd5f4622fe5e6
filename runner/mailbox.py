"""From the worker thread to one consumer: what it has not taken yet."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from runner.outputs import RequestOutput


class Mailbox:
    """Belongs to an event loop: every method is called there.

    A consumer that is slower than the engine piles nothing up: of each request, what was not taken is merged into one
    output.

    Args:
        loop: The event loop.

    Attributes:
        request_ids: Requests that are not finished; the worker's own.
        is_closed: Nothing comes any more, but what is there may still be taken.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.request_ids: set[str] = set()
        self.is_closed = False
        self._latest: dict[str, RequestOutput] = {}  # by request, those that wait longest first
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, item: RequestOutput | Exception | None) -> None:
        """Add an output; an error, or None, is the last that comes."""
        if isinstance(item, RequestOutput):
            before = self._latest.get(item.request_id)
            self._latest[item.request_id] = replace(item, delta=before.delta + item.delta) if before else item
        else:
            self._error = item
            self.is_closed = True
        self._news.set()

    async def take(self) -> RequestOutput | None:
        """The output that waits longest; None at the end. The error, if that is how it ends."""
        while not self._latest and not self.is_closed:
            self._news.clear()
            await self._news.wait()
        if self._latest:
            return self._latest.pop(next(iter(self._latest)))
        if self._error is not None:
            raise self._error
        return None
