"""What the engine says about a request after a step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds of ``time.perf_counter``.

    Attributes:
        arrival: It was added.
        admitted: The step began that it was first part of.
        first_token: Its first token was there.
        last_token: Its latest token was there.
    """

    arrival: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def note_admission(self) -> None:
        """It is part of a step."""
        self.admitted = time.perf_counter()

    def note_token(self) -> None:
        """A token is there."""
        self.last_token = time.perf_counter()
        if self.first_token is None:
            self.first_token = self.last_token

    @property
    def time_waited(self) -> float | None:
        """Seconds from arrival to admission, None before it."""
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token, None before it."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def seconds(self) -> float | None:
        """Seconds from arrival to the latest token, None before the first."""
        return None if self.last_token is None else self.last_token - self.arrival


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was: natural logarithms of the model's own probabilities.

    Args:
        token_id: The token that was chosen.
        logprob: Its log-probability.
        rank: Its place among all tokens; 1 is the likeliest.
        likeliest: The likeliest tokens and theirs, the likeliest first, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    likeliest: dict[int, float]


@dataclass(frozen=True)
class RequestOutput:
    """The state of one request.

    Args:
        request_id: The request.
        index: Its place among the prompts given to ``generate`` or ``stream``.
        prompt_token_ids: Tokens of the prompt.
        token_ids: Tokens generated so far, the end-of-sequence token included.
        text: Their text so far; special tokens have none. It ends before a stop string.
        delta: What this step added to the text. Never half a character, nor what may be the beginning of a stop
            string: it may lag behind the tokens, and is often "".
        finish_reason: "stop", "length", "abort", or None while it goes on.
        num_cached_tokens: Tokens of the prompt that were found in the cache when the request was admitted.
        num_preemptions: How often it lost its blocks and was computed again.
        metrics: When things happened.
        choice: Its place among the n answers to its prompt.
        logprobs: One entry for each of ``token_ids``; None if they were not asked for.
        stop_reason: The stop string, or the token, that ended the output with "stop"; else None.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    delta: str
    finish_reason: str | None
    num_cached_tokens: int
    num_preemptions: int
    metrics: RequestMetrics
    choice: int = 0
    logprobs: list[TokenLogprobs] | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """Nothing more will come."""
        return self.finish_reason is not None
