"""How the next token is chosen, and when to stop."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from runner.errors import SamplingParamsError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request wants. Decoding is greedy: the likeliest token, the one with the lowest id among equals.

    Args:
        max_tokens: Most tokens to generate.
        temperature: 0, which is greedy; nothing else is supported yet.
        stop_token_ids: Tokens that end the output, besides the model's own; they are part of ``token_ids``, not of the
            text.
        ignore_eos: Go on after the model's own end-of-sequence tokens.

    Raises:
        SamplingParamsError: ``max_tokens`` below 1, a stop token that is no whole number, or another temperature than
            0.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise SamplingParamsError(f"max_tokens must be a whole number of at least 1, got {self.max_tokens!r}")
        if self.temperature != 0:
            raise SamplingParamsError(
                f"temperature={self.temperature!r} is not supported yet: decoding is greedy, so leave it at 0"
            )
        if not all(isinstance(token, int) for token in self.stop_token_ids):
            raise SamplingParamsError(f"stop_token_ids must be whole numbers, got {self.stop_token_ids!r}")


def sample(logits: torch.Tensor) -> list[int]:
    """The next token of each sequence.

    Args:
        logits: ``[S, vocabulary]``.

    Returns:
        S token ids.
    """
    return logits.argmax(-1).tolist()


def finish_reason(
    params: SamplingParams, token: int, num_output_tokens: int, eos_token_ids: Collection[int]
) -> str | None:
    """Why a request ends with this token: "stop" (a stop token), "length", or None if it goes on.

    Args:
        params: What the request wants.
        token: Its latest token.
        num_output_tokens: Tokens generated so far, this one included.
        eos_token_ids: The model's own stop tokens.
    """
    if token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos):
        return "stop"
    return "length" if num_output_tokens >= params.max_tokens else None
