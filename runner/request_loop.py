"""Requests in, steps, outputs out: what an engine does while it runs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from kvcore.hashing import BlockHasher
from kvcore.request import Request
from runner.batch import SequenceSlice
from runner.errors import RequestRefusedError, RunnerError, SamplingParamsError
from runner.live_request import LiveRequest
from runner.logits import Sampled, sample
from runner.model_runner import ModelRunner
from runner.outputs import RequestOutput
from runner.prompts import Prompt, as_list, encode
from runner.sampling import SamplingParams
from runner.scheduler import Scheduled, Scheduler


class RequestLoop:
    """For a loop of one's own: add requests at any time, call :meth:`step` while there are any. One thread.

    Args:
        model_runner: What computes.
        scheduler: Who runs; its manager has the books.
        tokenizer: Of the model; None: prompts are token ids, and outputs have no text.
        eos_token_ids: What ends an output.
        hasher: For requests that may share blocks; None: none do.

    Attributes:
        manager: The books.
        num_computed_tokens: Tokens computed so far, of prompts and outputs; cache hits are not among them.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        scheduler: Scheduler,
        *,
        tokenizer: Any,
        eos_token_ids: Collection[int],
        hasher: BlockHasher | None,
    ) -> None:
        self.model_runner = model_runner
        self.scheduler = scheduler
        self.manager = scheduler.manager
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.hasher = hasher
        self.num_computed_tokens = 0
        self._live: dict[str, LiveRequest] = {}
        self._ids = itertools.count()
        self._is_reserved = False  # for the requests of one call of generate or stream

    @property
    def vocabulary_size(self) -> int:
        """Token ids of prompts go from 0 to below this."""
        return int(self.model_runner.model.get_input_embeddings().num_embeddings)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._live)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; see :func:`runner.prompts.encode`."""
        return encode(self.tokenizer, prompt)

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        index: int = 0,
        choice: int = 0,
    ) -> str:
        """Queue a request.

        Args:
            prompt: One prompt.
            sampling_params: What it wants, with ``n`` 1.
            request_id: A name no other unfinished request has; None: a new one.
            cache_salt: Only requests with the same salt share cached blocks.
            priority: Lower is more urgent; see :class:`~runner.scheduler.Scheduler`.
            index: A number of the caller's own, handed back in the outputs.
            choice: Another one.

        Returns:
            The request's id.

        Raises:
            RequestRefusedError: It can never fit, is empty, or its id is taken; or stop strings and no tokenizer, or
                ``n`` above 1, or an id or a priority of the wrong type.
            RunnerError: ``generate`` or ``stream`` has the engine to itself.
        """
        if self._is_reserved:
            raise RunnerError("generate or stream has the engine: to add requests, wait for its end or leave its loop")
        params = checked_params(sampling_params)
        if params.n > 1:
            raise RequestRefusedError(
                f"a request has one answer, and n is {params.n}: use add_requests, or generate or stream"
            )
        if not isinstance(priority, int):
            raise RequestRefusedError(f"priority must be a whole number, got {priority!r}")
        token_ids = self.encode(prompt)
        self.check(token_ids, params)
        if request_id is None:
            request_id = next(name for i in self._ids if (name := f"request-{i}") not in self._live)
        elif not isinstance(request_id, str):
            raise RequestRefusedError(f"request_id must be text, got {request_id!r}")
        elif request_id in self._live:
            raise RequestRefusedError(f"request id {request_id!r} is in use by an unfinished request")
        request = Request(request_id, token_ids, block_hasher=self.hasher, cache_salt=cache_salt, priority=priority)
        self._live[request_id] = LiveRequest(
            request, params, self.tokenizer, self.eos_token_ids, index=index, choice=choice
        )
        self.scheduler.add(request)
        return request_id

    def add_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **details: Any,
    ) -> list[str]:
        """Queue a request for each of the ``sampling_params.n`` answers to each prompt: all of them, or none.

        Answers to one prompt share its blocks: the first computes them.

        Args:
            prompts: One prompt or several.
            sampling_params: For all of them. The i-th answer to a prompt, from 0, has the seed ``seed + i``.
            request_id: A name for all of them; where there are several, each adds its number: ``name-0``, ``name-1``.
            details: ``cache_salt`` and ``priority``, as in :meth:`add_request`.

        Returns:
            Their ids, answers to one prompt in a row. Outputs have the prompt's number as ``index`` and the answer's as
            ``choice``.

        Raises:
            RequestRefusedError: As in :meth:`add_request`; nothing was added.
        """
        params = checked_params(sampling_params)
        tokenized = [self.encode(prompt) for prompt in as_list(prompts)]
        several = len(tokenized) * params.n > 1
        added: list[str] = []
        try:
            for index, token_ids in enumerate(tokenized):
                for choice in range(params.n):
                    name = f"{request_id}-{len(added)}" if several and request_id is not None else request_id
                    own = replace(params, n=1, seed=None if params.seed is None else params.seed + choice)
                    added.append(
                        self.add_request(token_ids, own, request_id=name, index=index, choice=choice, **details)
                    )
        except BaseException:
            for name in added:
                self.abort(name)
            raise
        return added

    def check(self, token_ids: list[int], params: SamplingParams) -> None:
        """Refuse what could never run here.

        Raises:
            RequestRefusedError: Says what and why; a request that can never fit, with the arithmetic.
        """
        if not token_ids:
            raise RequestRefusedError("the prompt is empty: it needs at least one token")
        vocabulary = self.vocabulary_size
        if not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
            bad = next(token for token in token_ids if not 0 <= token < vocabulary)
            raise RequestRefusedError(f"token ids of this model go from 0 to {vocabulary - 1:,}, got {bad:,}")
        if params.stop and self.tokenizer is None:
            raise RequestRefusedError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        self.scheduler.check_fits(len(token_ids), params.max_tokens)

    def step(self) -> list[RequestOutput]:
        """Compute one step of whatever is under way.

        Returns:
            An output for each request that got a token; empty if all are still at their prompts, or nothing is under
            way.
        """
        outputs: list[RequestOutput] = []
        try:
            scheduled = self.scheduler.schedule()
            if not scheduled:
                return outputs
            for live, token in self._compute(scheduled):
                outputs.append(live.append(token))
                if outputs[-1].finished:
                    self._let_go(live)
        except BaseException:
            self._forget_everything()
            raise
        return outputs

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now. Its blocks are free at once.

        Raises:
            RunnerError: No unfinished request has that id.
        """
        live = self._live.get(request_id)
        if live is None:
            raise RunnerError(f"no unfinished request {request_id!r}: it is finished, or was never added")
        self._let_go(live)
        return live.finish("abort")

    def _compute(self, scheduled: list[Scheduled]) -> list[tuple[LiveRequest, Sampled]]:
        """Run a step through the model; the requests that sampled, with their new tokens."""
        for item in scheduled:
            self._live[item.request.request_id].note_admission(item.request.num_computed_tokens)
        slices = [
            SequenceSlice(
                item.request.request_id,
                item.token_ids,
                item.request.num_computed_tokens,
                item.new_blocks,
                samples=item.samples,
            )
            for item in scheduled
        ]
        self.model_runner.forget(self.scheduler.take_released())
        sampling = [self._live[item.request.request_id] for item in scheduled if item.samples]
        logits = self.model_runner.execute(slices)  # [S, V]
        tokens = sample(logits, [live.sampler for live in sampling])
        self.scheduler.complete(scheduled)
        self.num_computed_tokens += sum(item.num_new_tokens for item in scheduled)
        return list(zip(sampling, tokens, strict=True))

    def _let_go(self, live: LiveRequest) -> None:
        self.scheduler.remove(live.request)
        del self._live[live.request.request_id]

    def _forget_everything(self) -> None:
        """After a step that failed half way: its full blocks are registered, but may not hold what they should."""
        for live in list(self._live.values()):
            self._let_go(live)
        self.model_runner.forget_all()
        if not self.manager.reset_prefix_cache():
            # Something is pinned. What is evicted is found by nobody, whoever holds it.
            self.manager.evict_blocks(range(1, len(self.manager.block_pool.blocks)))


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """What was given, or the defaults.

    Raises:
        SamplingParamsError: It is something else.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise SamplingParamsError(f"sampling_params must be a SamplingParams, got {params!r}")
    return params
