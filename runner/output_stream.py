"""The outputs of a call to an :class:`~runner.async_engine.AsyncEngine`, as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from runner.async_worker import Worker
from runner.mailbox import Mailbox
from runner.outputs import RequestOutput
from runner.prompts import Prompt
from runner.sampling import SamplingParams


class OutputStream(AsyncIterator[RequestOutput]):
    """Outputs as they come, those of all prompts and answers; the last one of each is finished.

    A consumer that is slower than the engine does not hold it up, and does not pile anything up either: outputs of a
    request that it has not taken are merged into one, whose ``delta`` is the text since the one before.

    Closing the stream, dropping it, and cancelling the task that waits for an output abort what is not finished.
    """

    def __init__(
        self,
        worker: Worker,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None,
        **details: Any,
    ) -> None:
        self._is_closed = False
        self._mailbox: Mailbox | None = None
        self._worker = worker
        self._request = (prompts, sampling_params, details)

    async def start(self) -> None:
        """Queue the requests, so that a refusal comes before the first output is awaited. A second call does nothing.

        Raises:
            EngineFullError: Too many wait. None was queued; the same is true of the others.
            RequestRefusedError: One of them can never fit, is empty, has a token the model does not, or its id is
                taken; or they are more at once than run and queue.
            EngineClosedError: Nothing is accepted any more.
        """
        if self._mailbox is not None or self._is_closed:
            return
        mailbox = self._mailbox = Mailbox(asyncio.get_running_loop())
        worker, (prompts, params, details) = self._worker, self._request
        try:
            await asyncio.wrap_future(worker.submit(lambda: worker.add(mailbox, prompts, params, **details)))
        except BaseException:
            self.close()
            raise

    async def __anext__(self) -> RequestOutput:
        await self.start()
        try:
            output = None if self._is_closed or self._mailbox is None else await self._mailbox.take()
        except BaseException:
            self.close()
            raise
        if output is None:
            raise StopAsyncIteration
        return output

    def close(self) -> None:
        """Abort what is not finished; its blocks are free after the step the engine is in."""
        mailbox = self._mailbox
        if not self._is_closed and mailbox is not None and not mailbox.is_closed:
            worker = self._worker
            worker.submit(lambda: worker.withdraw(mailbox))
        self._is_closed = True

    async def aclose(self) -> None:
        """As :meth:`close`; for ``contextlib.aclosing``."""
        self.close()

    def __del__(self) -> None:
        # A loop left early drops its iterator. SimpleQueue.put may be called from here.
        self.close()
