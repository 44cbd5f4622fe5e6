"""The engine behind an event loop: any number of tasks stream from it, and one thread runs its steps.

An :class:`~runner.engine.Engine` belongs to one thread. Here that is a worker: what tasks want of the engine is put
into a queue, the worker takes what is there between two steps, and what a step yields goes back to the tasks in one
call into their event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from runner.engine import Engine
from runner.errors import EngineConfigError, RequestRefusedError, RunnerError
from runner.outputs import RequestOutput
from runner.prompts import Prompt
from runner.sampling import SamplingParams


class EngineFullError(RunnerError):
    """As many requests wait as may; the message says how many. Later there may be room: HTTP's 429."""


class EngineStepError(RunnerError):
    """The step a request was in failed, and ended all requests under way; ``__cause__`` is what happened."""


class EngineClosedError(RunnerError):
    """The engine takes no more requests: it was closed, or is broken."""


@dataclass(frozen=True)
class AsyncEngineStats:
    """An engine after its latest step. Counts of tokens and requests are since the start.

    Attributes:
        running: Requests that hold blocks.
        waiting: Requests that do not, yet or any more.
        usage: Share of the cache's blocks that running requests hold, 0 to 1.
        num_prompt_tokens: Tokens of the prompts of all requests that were started.
        num_cached_tokens: Of those, the ones that were found in the cache.
        num_generated_tokens: Tokens of outputs.
        num_finished_requests: Requests that came to their end; aborted and failed ones did not.
    """

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished_requests: int = 0


class AsyncEngine:
    """Serves one engine to the tasks of an event loop, or of several.

    From here on the engine belongs to the worker thread, which ends with :meth:`aclose`; ``async with`` calls that.

    Args:
        engine: The engine; nobody else may call it.
        max_queued_requests: Requests that may wait for a place among those that run. Those that the next step can
            start right away do not count.

    Attributes:
        engine: As given. Its configuration may be read; nothing of it may be called.

    Raises:
        EngineConfigError: ``max_queued_requests`` is negative.
    """

    def __init__(self, engine: Engine, *, max_queued_requests: int = 256) -> None:
        if max_queued_requests < 0:
            raise EngineConfigError(f"max_queued_requests must be at least 0, got {max_queued_requests}")
        self.engine = engine
        self._worker = _Worker(engine, max_queued_requests)
        self._ids = itertools.count()

    def __repr__(self) -> str:
        return f"AsyncEngine({self.engine!r}, {self.stats})"

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> OutputStream:
        """Answer one prompt, an output at a time: ``async for output in engine.stream(prompt)``.

        Args:
            prompt: One prompt.
            sampling_params: What it wants.
            request_id: A name no other unfinished request has; None: a new one.
            cache_salt: Only requests with the same salt share cached blocks.
            priority: As in :meth:`~runner.engine.Engine.add_request`.

        Returns:
            The outputs. Nothing is asked of the engine before the first one is awaited, or
            :meth:`OutputStream.start` is.
        """
        name = f"stream-{next(self._ids)}" if request_id is None else request_id
        params = sampling_params or SamplingParams()
        return OutputStream(self._worker, name, prompt, params, cache_salt=cache_salt, priority=priority)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """The finished output of :meth:`stream`. Its ``delta`` is what came last, its ``text`` is all of it."""
        stream = self.stream(prompt, sampling_params, request_id=request_id, cache_salt=cache_salt, priority=priority)
        output = await anext(stream)
        while not output.finished:
            output = await anext(stream)
        return output

    async def abort(self, request_id: str) -> RequestOutput:
        """End a request; its stream ends with the same output, ``finish_reason`` "abort".

        Raises:
            RunnerError: No unfinished request has that id.
        """
        return await asyncio.wrap_future(self._worker.submit(lambda: self._worker.abort(request_id)))

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


class OutputStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, the last one finished.

    A consumer that is slower than the engine does not hold it up, and does not pile anything up either: outputs it has
    not taken are merged into one, whose ``delta`` is the text since the one before.

    Closing the stream, dropping it, and cancelling the task that waits for an output abort the request.
    """

    def __init__(
        self, worker: _Worker, request_id: str, prompt: Prompt, sampling_params: SamplingParams, **details: Any
    ) -> None:
        self._ended = False
        self.request_id = request_id
        self._worker = worker
        self._request = (prompt, sampling_params, details)
        self._mailbox: _Mailbox | None = None

    async def start(self) -> None:
        """Queue the request, so that a refusal comes before the first output is awaited. A second call does nothing.

        Raises:
            EngineFullError: Too many wait.
            RequestRefusedError: It can never fit, is empty, has a token the model does not, wants several answers (open
                a stream for each), or its id is taken.
            EngineClosedError: Nothing is accepted any more.
        """
        if self._mailbox is not None or self._ended:
            return
        mailbox = self._mailbox = _Mailbox(self.request_id, asyncio.get_running_loop())
        worker, request = self._worker, self._request
        try:
            await asyncio.wrap_future(worker.submit(lambda: worker.add(mailbox, *request)))
        except BaseException:
            self.close()
            raise

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        await self.start()
        assert self._mailbox is not None
        try:
            output = await self._mailbox.take()
        except BaseException:
            self.close()
            raise
        self._ended = output.finished
        return output

    def close(self) -> None:
        """Abort the request unless it is finished; its blocks are free after the step the engine is in."""
        if not self._ended:
            self._ended = True
            if (mailbox := self._mailbox) is not None:
                worker = self._worker
                worker.submit(lambda: worker.withdraw(mailbox))

    async def aclose(self) -> None:
        """As :meth:`close`; for ``contextlib.aclosing``."""
        self.close()

    def __del__(self) -> None:
        # A loop left early drops its iterator. SimpleQueue.put may be called from here.
        self.close()


class _Mailbox:
    """From the worker to one consumer: what it has not taken yet. ``put`` and ``take`` belong to the event loop."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self.num_tokens = 0  # generated so far; the worker's own
        self._latest: RequestOutput | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, item: RequestOutput | Exception) -> None:
        if isinstance(item, Exception):
            self._error = item
        else:
            self._latest = replace(item, delta=self._latest.delta + item.delta) if self._latest else item
        self._news.set()

    async def take(self) -> RequestOutput:
        while self._latest is None:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        output, self._latest = self._latest, None
        return output


class _Worker:
    """The thread that the engine belongs to. ``submit`` is for any thread, all other methods run in this one."""

    def __init__(self, engine: Engine, max_queued_requests: int) -> None:
        self.engine = engine
        self.max_queued_requests = max_queued_requests
        self.stats = AsyncEngineStats()
        self.closed_because: str | None = None
        self._vocabulary = engine.model_runner.model.get_input_embeddings().num_embeddings
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._some_were_left_waiting = False
        # Between what is submitted and the thread's end. It may be entered twice: collecting garbage inside can close a
        # stream, which submits.
        self._gate = threading.RLock()
        self._stopped = False
        # A daemon: whoever forgets to close the engine can still leave the interpreter.
        self.thread = threading.Thread(target=self._run, name="runner.AsyncEngine", daemon=True)
        self.thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Have the thread call a function between two steps, after those submitted before."""
        future: Future[Any] = Future()
        with self._gate:
            if not self._stopped:
                self._commands.put((future, function))
                return future
        self._refuse(future)
        return future

    # -- what is submitted ----------------------------------------------------------------------------------------

    def add(self, mailbox: _Mailbox, prompt: Prompt, params: SamplingParams, details: dict[str, Any]) -> None:
        if self.closed_because is not None:
            raise self._closed()
        self._check_room()
        token_ids = self._encode(prompt)
        # In a step it would fail for everyone.
        strange = next((token for token in token_ids if not 0 <= token < self._vocabulary), None)
        if strange is not None:
            raise RequestRefusedError(f"the prompt has token {strange}; the model knows 0 to {self._vocabulary - 1}")
        self.engine.add_request(token_ids, params, request_id=mailbox.request_id, **details)
        self._mailboxes[mailbox.request_id] = mailbox

    def withdraw(self, mailbox: _Mailbox) -> None:
        # Not by id alone: a refused stream may have had the id of one that runs.
        if self._mailboxes.get(mailbox.request_id) is mailbox:
            del self._mailboxes[mailbox.request_id]
            self.engine.abort(mailbox.request_id)

    def abort(self, request_id: str) -> RequestOutput:
        output = self.engine.abort(request_id)
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is not None:
            self._deliver([(mailbox, output)])
        return output

    def stop(self) -> None:
        self.closed_because = self.closed_because or "it was closed"
        with self._gate:
            self._stopped = True
        for request_id in list(self._mailboxes):
            self.abort(request_id)

    # -- the loop -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            self._execute_commands()
            if self._has_work:
                self._step()
        while not self._commands.empty():  # what was submitted after the stop
            self._refuse(self._commands.get()[0])

    @property
    def _has_work(self) -> bool:
        return self.engine.has_unfinished_requests and self.closed_because is None

    def _execute_commands(self) -> None:
        """All that are there; where there is nothing to compute, wait for one."""
        wait = not self._has_work
        while not self._stopped:
            try:
                future, function = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                self._note()
                future.set_result(result)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except BaseException as error:
            self._fail(error)
            return
        self._some_were_left_waiting = bool(self.engine.scheduler.waiting)
        items = []
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            items.append((mailbox, output))
            self._count(mailbox, output)
            if output.finished:
                del self._mailboxes[output.request_id]
        self._deliver(items)

    def _fail(self, cause: BaseException) -> None:
        mailboxes, self._mailboxes = list(self._mailboxes.values()), {}
        message = f"a step failed and ended all {len(mailboxes)} requests under way: {type(cause).__name__}: {cause}"
        try:
            for mailbox in mailboxes:
                # The engine has let go of them itself, unless it failed before it came to computing.
                with suppress(RunnerError):
                    self.engine.abort(mailbox.request_id)
        except Exception as error:
            self.closed_because = f"{message}; letting go of them failed too: {type(error).__name__}: {error}"
        errors = [EngineStepError(message) for _ in mailboxes]
        for error in errors:
            error.__cause__ = cause
        self._deliver(zip(mailboxes, errors, strict=True))

    def _encode(self, prompt: Prompt) -> list[int]:
        try:
            return self.engine.encode(prompt)
        except RunnerError:
            raise
        except Exception as error:
            # A chat template may refuse a conversation with any error, a tokenizer text that is not Unicode.
            raise RequestRefusedError(f"the prompt cannot be encoded: {error}") from error

    def _check_room(self) -> None:
        scheduler = self.engine.scheduler
        waiting, running = len(scheduler.waiting), len(scheduler.running)
        # Those that came since the latest step do not queue: the next one may start them all. But where it left some
        # waiting, there was no room in the cache, however many seats are free.
        seats = 0 if waiting and self._some_were_left_waiting else self.engine.config.max_num_seqs - running
        if waiting >= self.max_queued_requests + seats:
            raise EngineFullError(
                f"the engine is full: {running} requests run and {waiting} wait, of which "
                f"max_queued_requests={self.max_queued_requests} may queue; try again later"
            )

    def _count(self, mailbox: _Mailbox, output: RequestOutput) -> None:
        is_first = mailbox.num_tokens == 0
        new_tokens = len(output.token_ids) - mailbox.num_tokens
        mailbox.num_tokens = len(output.token_ids)
        stats = self.stats
        self.stats = replace(
            stats,
            num_prompt_tokens=stats.num_prompt_tokens + (len(output.prompt_token_ids) if is_first else 0),
            num_cached_tokens=stats.num_cached_tokens + (output.num_cached_tokens if is_first else 0),
            num_generated_tokens=stats.num_generated_tokens + new_tokens,
            num_finished_requests=stats.num_finished_requests + output.finished,
        )

    def _note(self) -> None:
        scheduler = self.engine.scheduler
        self.stats = replace(
            self.stats,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            usage=self.engine.manager.usage,
        )

    def _deliver(self, items: Iterable[tuple[_Mailbox, RequestOutput | Exception]]) -> None:
        """To the consumers' event loops, in one call to each: a call wakes the loop through a socket."""
        self._note()  # first, so that who has an output sees what it left behind
        by_loop = defaultdict(list)
        for mailbox, item in items:
            by_loop[mailbox.loop].append((mailbox, item))
        for loop, theirs in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed: nobody waits there
                loop.call_soon_threadsafe(_put_all, theirs)

    def _closed(self) -> EngineClosedError:
        return EngineClosedError(f"the engine takes no more requests: {self.closed_because}")

    def _refuse(self, future: Future[Any]) -> None:
        if future.set_running_or_notify_cancel():
            future.set_exception(self._closed())


def _put_all(items: list[tuple[_Mailbox, RequestOutput | Exception]]) -> None:
    for mailbox, item in items:
        mailbox.put(item)
