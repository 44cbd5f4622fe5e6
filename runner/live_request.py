"""A request on its way through the engine: what is kept about it beside the books."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvcore.request import Request
from runner.detokenizer import IncrementalDetokenizer
from runner.outputs import RequestMetrics, RequestOutput
from runner.sampling import SamplingParams, finish_reason


class LiveRequest:
    """A request that is not finished.

    Args:
        request: As the books know it.
        params: What it wants.
        tokenizer: For its text; None: it has none.
        index: Its place among the prompts of one call.

    Attributes:
        num_cached_tokens: Tokens of the prompt that were in the cache at its first admission, None before it.
    """

    def __init__(self, request: Request, params: SamplingParams, tokenizer: Any, index: int) -> None:
        self.request = request
        self.params = params
        self.index = index
        self.num_cached_tokens: int | None = None
        self._prompt_token_ids = request.prompt_token_ids
        self._token_ids: list[int] = []
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, self._prompt_token_ids)
        self._metrics = RequestMetrics()

    def append(self, token: int, eos_token_ids: Collection[int]) -> RequestOutput:
        """Note a new token; the output says whether it was the last."""
        self.request.append_output_token_ids(token)
        self._token_ids.append(token)
        self._metrics.note_token()
        reason = finish_reason(self.params, token, len(self._token_ids), eos_token_ids)
        delta = ""
        # A token that stops is not text, special or not.
        if self._detokenizer is not None and reason != "stop":
            delta = self._detokenizer.add([token])
        return self.finish(reason, delta) if reason else self._output(delta, None)

    def finish(self, reason: str, delta: str = "") -> RequestOutput:
        """The last output, with all text that was held back."""
        if self._detokenizer is not None:
            delta += self._detokenizer.finish()
        return self._output(delta, reason)

    def _output(self, delta: str, reason: str | None) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            index=self.index,
            prompt_token_ids=self._prompt_token_ids,
            token_ids=list(self._token_ids),
            text=self._detokenizer.text if self._detokenizer else "",
            delta=delta,
            finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preemptions=self.request.num_preemptions,
            metrics=self._metrics,
        )
