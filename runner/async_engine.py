"""The engine behind an event loop: any number of tasks stream from it, and one thread runs its steps.

An :class:`~runner.engine.Engine` belongs to one thread. Here that is a :class:`~runner.async_worker.Worker`: what tasks
want of the engine is put into a queue, the worker takes what is there between two steps, and what a step yields goes
back to the tasks in one call into their event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress

from runner.async_stats import AsyncEngineStats
from runner.async_worker import EngineClosedError, EngineFullError, EngineStepError, Worker
from runner.engine import Engine
from runner.errors import EngineConfigError
from runner.output_stream import OutputStream
from runner.outputs import RequestOutput
from runner.prompts import Prompt
from runner.sampling import SamplingParams

__all__ = [
    "AsyncEngine",
    "AsyncEngineStats",
    "EngineClosedError",
    "EngineFullError",
    "EngineStepError",
    "OutputStream",
]


class AsyncEngine:
    """Serves one engine to the tasks of an event loop, or of several.

    From here on the engine belongs to the worker thread, which ends with :meth:`aclose`; ``async with`` calls that.

    Args:
        engine: The engine; nobody else may call it.
        max_queued_requests: Requests that may wait for a place among those that run. Those that the next step can
            start right away do not count.

    Attributes:
        engine: As given. Its configuration and tokenizer may be read; nothing of it may be called.

    Raises:
        EngineConfigError: ``max_queued_requests`` is not a whole number of at least 0.
    """

    def __init__(self, engine: Engine, *, max_queued_requests: int = 256) -> None:
        if not isinstance(max_queued_requests, int) or max_queued_requests < 0:
            raise EngineConfigError(
                f"max_queued_requests must be a whole number of at least 0, got {max_queued_requests!r}"
            )
        self.engine = engine
        self._worker = Worker(engine, max_queued_requests)

    def __repr__(self) -> str:
        return f"AsyncEngine({self.engine!r}, {self.stats})"

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> OutputStream:
        """Answer prompts, an output at a time: ``async for output in engine.stream(prompt)``.

        Args:
            prompts: One prompt or several.
            sampling_params: For all of them; ``output.index`` says to which prompt an output belongs, and
                ``output.choice`` to which of its ``n`` answers.
            request_id: A name no other unfinished request has, for :meth:`abort`; None: a new one. Where there are
                several requests, each adds its number, answers to one prompt in a row: ``name-0``, ``name-1``.
            cache_salt: Only requests with the same salt share cached blocks.
            priority: As in :meth:`~runner.engine.Engine.add_request`.

        Returns:
            The outputs. Nothing is asked of the engine before the first one is awaited, or
            :meth:`OutputStream.start` is.
        """
        return OutputStream(
            self._worker, prompts, sampling_params, request_id=request_id, cache_salt=cache_salt, priority=priority
        )

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """As :meth:`stream`, but gives the finished outputs, in the order of the prompts, answers to one in a row."""
        stream = self.stream(prompts, sampling_params, request_id=request_id, cache_salt=cache_salt, priority=priority)
        async with aclosing(stream):
            outputs = [output async for output in stream if output.finished]
        return sorted(outputs, key=lambda output: (output.index, output.choice))

    async def abort(self, request_id: str) -> RequestOutput:
        """End a request; its stream gets the same output, ``finish_reason`` "abort", as its last.

        Raises:
            RunnerError: No unfinished request has that id.
        """
        return await asyncio.wrap_future(self._worker.submit(lambda: self._worker.abort(request_id)))

    async def update_weights(self, change: Callable[[], object]) -> None:
        """Have the worker call ``change`` between two steps, to write new weights into the model; see
        :meth:`Engine.update_weights <runner.engine.Engine.update_weights>`. Requests that come meanwhile wait.

        Raises:
            RunnerError: Requests are under way; ``change`` was not called.
        """
        await asyncio.wrap_future(self._worker.submit(lambda: self.engine.update_weights(change)))

    async def aclose(self) -> None:
        """End the worker after the step it is in. Requests under way end as if aborted, later ones are refused."""
        if self._worker.thread.is_alive():
            with suppress(EngineClosedError):  # somebody else is closing it
                # Shielded: a task that is cancelled while it waits must not keep the worker from ending.
                await asyncio.shield(asyncio.wrap_future(self._worker.submit(self._worker.stop)))
            self._worker.thread.join()

    @property
    def stats(self) -> AsyncEngineStats:
        """The engine after its latest step. O(1), from any thread."""
        return self._worker.stats

    @property
    def closed_because(self) -> str | None:
        """Why no request is accepted any more; None while they are."""
        return self._worker.closed_because
