"""What OpenAI's clients ask for, in terms of the runner: for serve.py.

A field that is not known here is refused by name, rather than ignored. Fields that are not given have the defaults of
SamplingParams: 128 tokens, greedy.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from openai_errors import APIError
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from runner import RunnerError, SamplingParams

StopString = Annotated[str, Field(max_length=1000)]


class Model(BaseModel):
    """Refuses what it does not know; null is the same as not given."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class Sampling(Model):
    """Fields of SamplingParams under the names they have there. Stops are few: each token is compared with them all."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=100)
    ignore_eos: bool | None = None
    n: int = Field(1, ge=1, le=16)


class StreamOptions(Model):
    include_usage: bool = False


class Body(Sampling, ABC):
    """What both endpoints take. The last three are taken and not used."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: str | None = Field(None, min_length=1)
    priority: int = 0
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_json_text(cls, data: Any) -> Any:
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("text has half of a surrogate pair, which is no character") from error
        except TypeError as error:
            raise ValueError("not sent as JSON: set Content-Type to application/json") from error
        return data

    @abstractmethod
    def prompts(self) -> list[Any]:
        """What to answer, in the forms that the engine takes."""

    def renamed(self) -> dict[str, int]:
        """Fields of SamplingParams that have other names here."""
        return {}

    def sampling_params(self) -> SamplingParams:
        """What the engine is to do with each prompt.

        Raises:
            APIError: A value out of its range.
        """
        given = {name: value for name in Sampling.model_fields if (value := getattr(self, name)) is not None}
        given |= self.renamed()
        try:
            return SamplingParams(**given)
        except RunnerError as error:
            name = re.split(r"\W", str(error))[0]  # messages begin with it
            raise APIError(400, str(error), param=name if name in given else None) from error


class CompletionBody(Body):
    """Of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(min_length=1)
    logprobs: StrictInt | None = Field(None, ge=0, le=20)

    def renamed(self) -> dict[str, int]:
        return {} if self.logprobs is None else {"logprobs": self.logprobs}

    def prompts(self) -> list[Any]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else list(self.prompt)


class TextPart(Model):
    type: Literal["text"]
    text: str


class Message(Model):
    role: str
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates take it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": self.role, "content": "".join(parts)}


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def renamed(self) -> dict[str, int]:
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        extra = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return extra | ({"max_tokens": limit} if (limit := self.max_completion_tokens) is not None else {})

    def prompts(self) -> list[Any]:
        return [[message.for_template() for message in self.messages]]
