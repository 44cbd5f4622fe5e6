"""When an output ends, and where its text does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from runner.detokenizer import IncrementalDetokenizer
from runner.sampling import SamplingParams


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


class StopStrings:
    """Lets text pass up to the first stop string, wherever the pieces it comes in begin and end.

    The first is the one that is complete first; of two that are complete with the same character, the longer. What may
    be the beginning of one is held back.

    Args:
        stops: The strings, none of them empty.

    Attributes:
        found: The stop string that ended the text, None before. After it, nothing passes.
    """

    def __init__(self, stops: Collection[str]) -> None:
        self.found: str | None = None
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Append text.

        O((length of the longest stop string) ** 2 * stop strings) at worst, and the text's length.

        Args:
            text: What comes next.
            may_stop: False: stop strings that are complete within this text are text like any other.

        Returns:
            What passes, maybe "".
        """
        if self.found is not None or not text:
            return ""
        # What was complete in the held text was let pass: only ends after it count.
        seen, text = len(self._held), self._held + text
        matches = []
        if may_stop:
            for stop in self._stops:
                start = text.find(stop, max(0, seen - len(stop) + 1))
                if start >= 0:
                    matches.append((start + len(stop), start, stop))
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops if len(stop) > length):
                return length
        return 0


class OutputText:
    """The text of an output as its tokens arrive.

    Args:
        tokenizer: Anything with transformers' ``decode``; None: there is no text.
        prompt_token_ids: What precedes the output.
        stops: Stop strings.

    Attributes:
        text: All that was given out.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], stops: Collection[str] = ()) -> None:
        self.text = ""
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._stops = StopStrings(stops)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, None before."""
        return self._stops.found

    def add(self, token: int, *, may_stop: bool = True) -> str:
        """Append a token; what became certain of the text, maybe "". ``may_stop`` as in :meth:`StopStrings.feed`."""
        if self._detokenizer is None:
            return ""
        return self._give_out(self._stops.feed(self._detokenizer.add([token]), may_stop=may_stop))

    def finish(self, *, may_stop: bool = True) -> str:
        """The rest, at the end of the output. An unfinished character can hide a stop string in front of it."""
        if self._detokenizer is None:
            return ""
        rest = self._stops.feed(self._detokenizer.finish(), may_stop=may_stop)
        return self._give_out(rest + self._stops.finish())

    def _give_out(self, delta: str) -> str:
        self.text += delta
        return delta
