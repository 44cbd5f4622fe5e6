"""Counters of an engine that serves, as its worker thread leaves them behind after each step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from runner.engine import Engine
from runner.outputs import RequestOutput


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

    def now(self, engine: Engine) -> AsyncEngineStats:
        """The same counts, and what the engine holds now."""
        scheduler = engine.scheduler
        return replace(self, running=len(scheduler.running), waiting=len(scheduler.waiting), usage=engine.manager.usage)

    def counting(self, outputs: Iterable[RequestOutput]) -> AsyncEngineStats:
        """With the outputs of a step, each of which has one token more than the one before."""
        outputs = list(outputs)
        started = [output for output in outputs if len(output.token_ids) == 1]
        return replace(
            self,
            num_prompt_tokens=self.num_prompt_tokens + sum(len(output.prompt_token_ids) for output in started),
            num_cached_tokens=self.num_cached_tokens + sum(output.num_cached_tokens for output in started),
            num_generated_tokens=self.num_generated_tokens + len(outputs),
            num_finished_requests=self.num_finished_requests + sum(output.finished for output in outputs),
        )
