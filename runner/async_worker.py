"""The thread that an engine belongs to: it takes what is asked of the engine between two steps, and runs the steps."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from runner.async_stats import AsyncEngineStats
from runner.engine import Engine
from runner.errors import RequestRefusedError, RunnerError
from runner.mailbox import Mailbox
from runner.outputs import RequestOutput
from runner.prompts import Prompt, as_list
from runner.request_loop import checked_params
from runner.sampling import SamplingParams

Delivery = tuple[Mailbox, RequestOutput | Exception | None]
"""Who gets what; None: nothing more comes."""


class EngineFullError(RunnerError):
    """As many requests wait as may; the message says how many. Later there may be room: HTTP's 429."""


class EngineStepError(RunnerError):
    """The step a request was in failed, and ended all requests under way; ``__cause__`` is what happened."""


class EngineClosedError(RunnerError):
    """The engine takes no more requests: it was closed, or is broken."""


class Worker:
    """``submit`` is for any thread, all other methods are for what is submitted.

    Args:
        engine: From here on the thread's own.
        max_queued_requests: Requests that may wait for a place among those that run.

    Attributes:
        stats: The engine after its latest step.
        closed_because: Why no request is accepted any more; None while they are.
        thread: Runs from the start until :meth:`stop`.
    """

    def __init__(self, engine: Engine, max_queued_requests: int) -> None:
        self.engine = engine
        self.max_queued_requests = max_queued_requests
        self.stats = AsyncEngineStats()
        self.closed_because: str | None = None
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}  # by request
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

    def add(
        self, mailbox: Mailbox, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None, **details: Any
    ) -> None:
        """Queue requests, all or none, whose outputs go into a mailbox.

        Raises:
            RunnerError: As :meth:`AsyncEngine.stream` says.
        """
        if self.closed_because is not None:
            raise self._closed()
        prompts = as_list(prompts)
        self._check_room(len(prompts) * checked_params(params).n)
        request_ids = self.engine.add_requests(prompts, params, **details)
        mailbox.request_ids.update(request_ids)
        self._mailboxes.update(dict.fromkeys(request_ids, mailbox))
        if not request_ids:
            self._deliver([(mailbox, None)])

    def withdraw(self, mailbox: Mailbox) -> None:
        """Abort what is not finished of a mailbox's requests, and close it."""
        self._abort_all(mailbox)
        self._deliver([(mailbox, None)])

    def abort(self, request_id: str) -> RequestOutput:
        """End one request, in its stream too."""
        output = self.engine.abort(request_id)
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            self._deliver(self._outcome(mailbox, output))
        return output

    def stop(self) -> None:
        """End everything, the thread too."""
        self.closed_because = self.closed_because or "it was closed"
        with self._gate:
            self._stopped = True
        while self._mailboxes:
            self.abort(next(iter(self._mailboxes)))

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
                self.stats = self.stats.now(self.engine)
                future.set_result(result)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
            self._some_were_left_waiting = bool(self.engine.scheduler.waiting)
            self.stats = self.stats.counting(outputs)
            deliveries = []
            for output in outputs:
                mailbox = self._mailboxes.get(output.request_id)
                if mailbox is not None:  # else it was under way before the engine came here
                    deliveries += self._outcome(mailbox, output)
        except BaseException as error:
            self._fail(error)
        else:
            self._deliver(deliveries)

    def _outcome(self, mailbox: Mailbox, output: RequestOutput) -> list[Delivery]:
        """An output for its mailbox, and the end of that if nothing else is under way there."""
        if not output.finished:
            return [(mailbox, output)]
        del self._mailboxes[output.request_id]
        mailbox.request_ids.remove(output.request_id)
        return [(mailbox, output)] if mailbox.request_ids else [(mailbox, output), (mailbox, None)]

    def _fail(self, cause: BaseException) -> None:
        mailboxes, self._mailboxes = self._mailboxes, {}
        message = f"a step failed and ended all {len(mailboxes)} requests under way: {type(cause).__name__}: {cause}"
        try:
            for request_id in mailboxes:
                # The engine has let go of them itself, unless it failed before it came to computing.
                with suppress(RunnerError):
                    self.engine.abort(request_id)
        except Exception as error:
            self.closed_because = f"{message}; letting go of them failed too: {type(error).__name__}: {error}"
        deliveries: list[Delivery] = []
        for mailbox in dict.fromkeys(mailboxes.values()):
            mailbox.request_ids.clear()
            failure = EngineStepError(message)
            failure.__cause__ = cause
            deliveries.append((mailbox, failure))
        self._deliver(deliveries)

    def _check_room(self, num_requests: int) -> None:
        scheduler = self.engine.scheduler
        waiting, running = len(scheduler.waiting), len(scheduler.running)
        most = self.max_queued_requests + self.engine.config.max_num_seqs
        if num_requests > most:
            raise RequestRefusedError(
                f"{num_requests:,} requests at once are more than ever run (max_num_seqs="
                f"{self.engine.config.max_num_seqs}) and queue (max_queued_requests={self.max_queued_requests}): ask "
                f"for {most:,} at most"
            )
        # Those that came since the latest step do not queue: the next one may start them all. But where it left some
        # waiting, there was no room in the cache, however many seats are free.
        seats = 0 if waiting and self._some_were_left_waiting else self.engine.config.max_num_seqs - running
        if waiting + num_requests > self.max_queued_requests + seats:
            raise EngineFullError(
                f"the engine is full: {running} requests run and {waiting} wait, of which "
                f"max_queued_requests={self.max_queued_requests} may queue: no room for {num_requests} more; try again "
                "later"
            )

    def _abort_all(self, mailbox: Mailbox) -> None:
        for request_id in mailbox.request_ids:
            del self._mailboxes[request_id]
            self.engine.abort(request_id)
        mailbox.request_ids.clear()

    def _deliver(self, items: Iterable[Delivery]) -> None:
        """To the consumers' event loops, in one call to each: a call wakes the loop through a socket."""
        self.stats = self.stats.now(self.engine)  # first, so that who has an output sees what it left behind
        by_loop = defaultdict(list)
        for mailbox, item in items:
            by_loop[mailbox.loop].append((mailbox, item))
        for loop, theirs in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, theirs)
            except RuntimeError:  # the loop is closed: nobody will ever take them
                for mailbox, _ in theirs:
                    self._abort_all(mailbox)
                self.stats = self.stats.now(self.engine)

    def _closed(self) -> EngineClosedError:
        return EngineClosedError(f"the engine takes no more requests: {self.closed_because}")

    def _refuse(self, future: Future[Any]) -> None:
        if future.set_running_or_notify_cancel():
            future.set_exception(self._closed())


def _put_all(items: Iterable[Delivery]) -> None:
    for mailbox, item in items:
        mailbox.put(item)
