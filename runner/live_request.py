"""A request on its way through the engine: what is kept about it beside the books."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvcore.request import Request
from runner.logits import Sampled, TokenSampler
from runner.outputs import RequestMetrics, RequestOutput, TokenLogprobs
from runner.sampling import SamplingParams
from runner.stopping import OutputText, finish_reason


class LiveRequest:
    """A request that is not finished.

    Args:
        request: As the books know it.
        params: What it wants.
        tokenizer: For its text; None: it has none.
        eos_token_ids: The model's own stop tokens.
        index: Its place among the prompts of one call.
        choice: Its place among the answers to its prompt.

    Attributes:
        sampler: Chooses its tokens.
        num_cached_tokens: Tokens of the prompt that were in the cache at its first admission, None before it.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        tokenizer: Any,
        eos_token_ids: Collection[int],
        *,
        index: int = 0,
        choice: int = 0,
    ) -> None:
        self.request = request
        self.params = params
        self.index = index
        self.choice = choice
        self.num_cached_tokens: int | None = None
        self._eos_token_ids = eos_token_ids
        self._prompt_token_ids = request.prompt_token_ids
        self.sampler = TokenSampler(params, self._prompt_token_ids, eos_token_ids)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text = OutputText(tokenizer, self._prompt_token_ids, params.stop)
        self._metrics = RequestMetrics()

    def note_admission(self, num_cached_tokens: int) -> None:
        """It is in a step: for the first time, or again."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached_tokens
            self._metrics.note_admission()

    def append(self, sampled: Sampled) -> RequestOutput:
        """Note a new token; the output says whether it was the last."""
        token = sampled.token
        self.request.append_output_token_ids(token)
        self._token_ids.append(token)
        if sampled.logprobs is not None:
            self._logprobs.append(sampled.logprobs)
        self._metrics.note_token()
        reason = finish_reason(self.params, token, len(self._token_ids), self._eos_token_ids)
        # A token that stops is not text, special or not.
        delta = "" if reason == "stop" else self._text.add(token, may_stop=self._may_stop)
        if self._text.stop_string is not None:
            reason = "stop"
        return self.finish(reason, delta) if reason else self._output(delta, None)

    def finish(self, reason: str, delta: str = "") -> RequestOutput:
        """The last output, with all text that was held back."""
        delta += self._text.finish(may_stop=self._may_stop)
        if reason == "length" and self._text.stop_string is not None:
            reason = "stop"
        return self._output(delta, reason)

    @property
    def _may_stop(self) -> bool:
        return len(self._token_ids) >= self.params.min_tokens

    def _output(self, delta: str, reason: str | None) -> RequestOutput:
        stop_reason: str | int | None = None
        if reason == "stop":
            stop_reason = self._token_ids[-1] if self._text.stop_string is None else self._text.stop_string
        return RequestOutput(
            request_id=self.request.request_id,
            index=self.index,
            choice=self.choice,
            prompt_token_ids=self._prompt_token_ids,
            token_ids=list(self._token_ids),
            text=self._text.text,
            delta=delta,
            logprobs=None if self.params.logprobs is None else list(self._logprobs),
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preemptions=self.request.num_preemptions,
            metrics=self._metrics,
        )
