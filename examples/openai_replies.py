"""How answers look to OpenAI's clients: for serve.py."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from openai_requests import Body

from runner import RequestOutput, TokenLogprobs


class Reply(ABC):
    """Words the answers to one body: answer c to prompt p is choice p * n + c."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, body: Body, tokenizer: Any) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": body.model}
        self._n = body.n
        self._with_usage = body.stream_options.include_usage
        self._tokenizer = tokenizer
        self._latest: dict[int, RequestOutput] = {}  # by choice

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """All answers, finished."""
        self._latest = dict(enumerate(outputs))
        choices = [self._choice(index, self.words(output.text), output) for index, output in self._latest.items()]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage()}

    def chunk(self, output: RequestOutput) -> dict[str, Any] | None:
        """What an output adds to one of the answers; None: nothing that can be seen."""
        index = output.index * self._n + output.choice
        before = self._latest.get(index)
        self._latest[index] = output
        if before and not (output.delta or output.finished or output.logprobs):
            return None
        words = self.piece(output.delta, first=before is None)
        return self._chunk([self._choice(index, words, output, since=len(before.token_ids) if before else 0)])

    def last_chunk(self) -> dict[str, Any] | None:
        """What comes after all others, if it was asked for: the usage."""
        return self._chunk([]) | {"usage": self._usage()} if self._with_usage else None

    @abstractmethod
    def words(self, text: str) -> dict[str, Any]:
        """The text of a whole answer."""

    @abstractmethod
    def piece(self, delta: str, *, first: bool) -> dict[str, Any]:
        """What comes next of an answer's text."""

    @abstractmethod
    def logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        """The log-probabilities of some tokens."""

    def text(self, token_id: int) -> str:
        """A token's."""
        return str(self._tokenizer.decode([token_id]))

    def _choice(self, index: int, words: dict[str, Any], output: RequestOutput, *, since: int = 0) -> dict[str, Any]:
        logprobs = None if output.logprobs is None else self.logprobs(output.logprobs[since:])
        return {"index": index, **words, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._with_usage else {}
        return {**self._head, "object": self.chunk_object, "choices": choices, **usage}

    def _usage(self) -> dict[str, Any]:
        """Counts of tokens; a prompt with several answers counts once, as its first one found it."""
        prompts = [output for output in self._latest.values() if output.choice == 0]
        prompt = sum(len(output.prompt_token_ids) for output in prompts)
        completion = sum(len(output.token_ids) for output in self._latest.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in prompts)},
        }


class CompletionReply(Reply):
    """Of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def words(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def piece(self, delta: str, *, first: bool) -> dict[str, Any]:
        return self.words(delta)

    def logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        return {
            "tokens": [self.text(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self.text(i): value for i, value in token.likeliest.items()} for token in tokens],
        }


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def words(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def piece(self, delta: str, *, first: bool) -> dict[str, Any]:
        return {"delta": ({"role": "assistant"} if first else {}) | {"content": delta}}

    def logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        def named(token_id: int, logprob: float) -> dict[str, Any]:
            text = self.text(token_id)
            # Of a token that is part of a character, the tokenizer does not tell the bytes.
            return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

        return {
            "content": [
                named(token.token_id, token.logprob)
                | {"top_logprobs": [named(i, value) for i, value in token.likeliest.items()]}
                for token in tokens
            ]
        }
