"""What a request may ask for."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from runner.errors import SamplingParamsError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request wants. The defaults are greedy: the likeliest token, the one with the lowest id among equals.

    What is done to the logits, in this order: ``min_tokens``, ``repetition_penalty``, ``presence_penalty`` and
    ``frequency_penalty``, ``temperature``, ``top_k``, ``top_p``, ``min_p``. It is the order of transformers, and the
    settings mean the same there.

    Args:
        max_tokens: Most tokens to generate.
        min_tokens: Fewest tokens before one that ends the output; until then such tokens are not chosen, and stop
            strings are text like any other.
        temperature: 0: the likeliest token. Above, logits are divided by it and a token is drawn.
        top_k: Draw from this many likeliest tokens; 0: from all.
        top_p: Draw from the likeliest tokens that have this much probability together.
        min_p: Leave out tokens with less than this share of the likeliest one's probability.
        repetition_penalty: Above 1, tokens of prompt and output become less likely: positive logits are divided by it,
            negative ones multiplied.
        presence_penalty: Taken from the logits of tokens that are in the output.
        frequency_penalty: The same, once for each time a token is in the output.
        seed: Makes what is drawn reproducible, whatever else the engine does at the time. None: different each time.
        stop: Texts that end the output, which is the text before them. One, or several; of those that are complete
            with the same character the longest.
        stop_token_ids: Tokens that end the output, besides the model's own; they are part of ``token_ids``, not of the
            text.
        ignore_eos: Go on after the model's own end-of-sequence tokens.
        logprobs: Give each token's log-probability, and those of as many likeliest tokens; 0: its own alone. They are
            the model's: nothing of the above has been done to them.
        n: Answers to each prompt; the i-th, from 0, has the seed ``seed + i``. They share the prompt's blocks.

    Raises:
        SamplingParamsError: A value out of its range; the message names the range.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        self._check_whole("max_tokens", at_least=1)
        self._check_whole("min_tokens", at_least=0)
        self._check_whole("top_k", at_least=0, hint="; 0 draws from all tokens")
        self._check_whole("n", at_least=1)
        if self.logprobs is not None:
            self._check_whole("logprobs", at_least=0)
        if self.seed is not None and not _is_whole(self.seed):
            raise SamplingParamsError(f"seed must be a whole number or None, got {self.seed!r}")
        if self.min_tokens > self.max_tokens:
            raise SamplingParamsError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        self._check_number("temperature", 0.0, math.inf, "a number of at least 0")
        self._check_number("top_p", 0.0, 1.0, "a number above 0 and up to 1", lowest_excluded=True)
        self._check_number("min_p", 0.0, 1.0, "a number from 0 to 1")
        # Beyond this, logits overflow.
        self._check_number("repetition_penalty", 0.01, 100.0, "a number from 0.01 to 100")
        self._check_number("presence_penalty", -2.0, 2.0, "a number from -2 to 2")
        self._check_number("frequency_penalty", -2.0, 2.0, "a number from -2 to 2")
        if not isinstance(self.ignore_eos, bool):
            raise SamplingParamsError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        self._check_stops()

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Collection) or not all(isinstance(text, str) and text for text in stop):
            raise SamplingParamsError(f"stop must be text or several texts, none of them empty, got {self.stop!r}")
        tokens = self.stop_token_ids
        if not isinstance(tokens, Collection) or not all(_is_whole(token) and token >= 0 for token in tokens):
            raise SamplingParamsError(f"stop_token_ids must be whole numbers of at least 0, got {tokens!r}")
        # Frozen, so that whoever gave a list may go on using it.
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", frozenset(tokens))

    def _check_whole(self, name: str, *, at_least: int, hint: str = "") -> None:
        value = getattr(self, name)
        if not _is_whole(value) or value < at_least:
            raise SamplingParamsError(f"{name} must be a whole number of at least {at_least}{hint}, got {value!r}")

    def _check_number(
        self, name: str, lowest: float, highest: float, wanted: str, *, lowest_excluded: bool = False
    ) -> None:
        value = getattr(self, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or not lowest <= value <= highest
            or (lowest_excluded and value == lowest)
        ):
            raise SamplingParamsError(f"{name} must be {wanted}, got {value!r}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
