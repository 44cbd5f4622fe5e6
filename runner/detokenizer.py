"""Token ids to text as they arrive, never half a character."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\ufffd"
"""What a tokenizer decodes the bytes of an unfinished character to."""


class IncrementalDetokenizer:
    """The text of one growing token sequence.

    A token's text depends on what precedes it (a leading space may be dropped), and a character may take several
    tokens. So the last few tokens are decoded twice, without and with the new ones, and the difference is new text; it
    is held back while it ends in an unfinished character.

    Args:
        tokenizer: Anything with transformers' ``decode``.
        prompt_token_ids: What precedes the output; the end of it serves as context.
    """

    CONTEXT_TOKENS = 6
    """Of the prompt: enough for any character, which has at most 4 bytes, to be whole."""

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int]) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self._tokens = prompt_token_ids[-self.CONTEXT_TOKENS :]  # context, then what has been added
        self._context = 0  # where the context begins
        self._done = len(self._tokens)  # up to here, text has been given out

    def add(self, token_ids: list[int]) -> str:
        """Append tokens. O(tokens since the last whole character).

        Returns:
            The text that became certain, maybe "".
        """
        self._tokens += token_ids
        before, after = self._decode_both()
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        return self._give_out(after[len(before) :])

    def finish(self) -> str:
        """The rest, at the end of the output: an unfinished character comes out as U+FFFD."""
        before, after = self._decode_both()
        return self._give_out(after[len(before) :])

    def _decode_both(self) -> tuple[str, str]:
        before = self._tokens[self._context : self._done]
        after = self._tokens[self._context :]
        return self._decode(before), self._decode(after)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _give_out(self, delta: str) -> str:
        self.text += delta
        self._context, self._done = self._done, len(self._tokens)
        return delta
