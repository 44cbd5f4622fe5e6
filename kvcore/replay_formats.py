"""The formats of traces that ``kvcore replay`` reads: a JSON object a line, told apart by its keys.

| keys | the prompt is | and the answer |
|---|---|---|
| ``hash_ids`` | Mooncake's: an id for every 512 tokens | ``output_length`` |
| ``token_ids`` or ``prompt_token_ids`` | token ids | ``output_token_ids``, or ``output_length`` |
| ``text`` or ``prompt`` | text, for a tokenizer | ``output``, or ``output_length`` |

All may have a ``timestamp`` in milliseconds and a ``priority``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from kvcore.errors import ConfigError, FileFormatError, TokenRangeError
from kvcore.hashing import BlockHasher
from kvcore.replay_trace import (
    MOONCAKE_BLOCK_SIZE,
    TraceRequest,
    counts_of,
    mooncake_request,
    parse_object,
    shown,
    timestamp_of,
)

DEFAULT_BLOCK_SIZE = 16
"""Tokens of a block for traces of tokens and of text."""

Tokenize = Callable[[str, bool], "list[int]"]
"""Token ids of a text, and whether it is the beginning of a sequence."""


class LineParser:
    """Makes requests of lines.

    Args:
        block_size: Tokens of a block; None: as the first line has it, 512 for Mooncake's format and 16 for others.
        tokenize: For lines of text.

    Attributes:
        block_size: As given; or else None until the first line.
    """

    def __init__(self, block_size: int | None = None, tokenize: Tokenize | None = None) -> None:
        self.block_size = block_size
        self.tokenize = tokenize
        self._hasher: BlockHasher | None = None

    def __call__(self, line: bytes | str) -> TraceRequest:
        """The request of a line.

        Raises:
            FileFormatError: It is none.
            ConfigError: It needs a tokenizer, or Mooncake's ids cannot be cut into blocks of this size.
        """
        values = parse_object(line)
        if "hash_ids" in values:
            return self._of_hash_ids(mooncake_request(values))
        for name in ("prompt_token_ids", "token_ids"):
            if name in values:
                return self._of_tokens(values, values[name], values.get("output_token_ids"))
        for name in ("prompt", "text"):
            if name in values:
                return self._of_text(values, name)
        raise FileFormatError(
            f"expected hash_ids, token_ids, prompt_token_ids, text or prompt; the line has {shown([*values])}"
        )

    def _of_hash_ids(self, request: TraceRequest) -> TraceRequest:
        self.block_size = self.block_size or MOONCAKE_BLOCK_SIZE
        parts, left_over = divmod(MOONCAKE_BLOCK_SIZE, self.block_size)
        if left_over:
            raise ConfigError(
                f"a hash id of Mooncake's traces stands for {MOONCAKE_BLOCK_SIZE} tokens, which blocks of "
                f"{self.block_size} tokens do not divide: choose a block size that does"
            )
        if parts == 1:
            return request
        return request._replace(hash_ids=[x * parts + part for x in request.hash_ids for part in range(parts)])

    def _of_text(self, values: Mapping[str, Any], name: str) -> TraceRequest:
        if self.tokenize is None:
            raise ConfigError("the trace is of text: say which tokenizer to use, --tokenizer NAME_OR_FOLDER")
        prompt, output = values[name], values.get("output")
        for text in (prompt, output):
            if not isinstance(text, str | None):
                raise FileFormatError(f"{name} and output must be texts, got {shown(text)}")
        if prompt is None:
            raise FileFormatError(f"{name} must be a text, got None")
        return self._of_tokens(
            values, self.tokenize(prompt, True), None if output is None else self.tokenize(output, False)
        )

    def _of_tokens(self, values: Mapping[str, Any], prompt: Any, output: Any) -> TraceRequest:
        for tokens in (prompt, output):
            if not isinstance(tokens, list | None) or any(type(token) is not int for token in tokens or ()):
                raise FileFormatError(f"token ids must be a list of whole numbers, got {shown(tokens)}")
        if not prompt:
            raise FileFormatError("the prompt has no tokens")
        block_size = self.block_size = self.block_size or DEFAULT_BLOCK_SIZE
        if self._hasher is None:
            # One seed, so that every process has the same ids for the same tokens.
            self._hasher = BlockHasher(block_size, "xxh3", seed="trace")
        known = output or []
        try:
            # Nothing is computed after the last token of an answer, so that it is not in the cache.
            hashes = self._hasher.hash_tokens(prompt + known[:-1])
        except TokenRangeError as error:
            raise FileFormatError(str(error)) from None
        ids = [int.from_bytes(block_hash, "big") for block_hash in hashes]
        num_full, tail = divmod(len(prompt), block_size)
        _, output_length, priority = counts_of(values)
        return TraceRequest(
            ids[:num_full],
            timestamp_of(values),
            len(prompt),
            output_length if output is None else len(output),
            priority,
            tail,
            ids[num_full:],
        )


def load_tokenizer(name: str) -> Tokenize:
    """A tokenizer of transformers, by the name of its model or the path of its folder.

    Raises:
        ConfigError: transformers is not installed, or has no such tokenizer.
    """
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise ConfigError("a trace of text needs transformers: pip install 'kvcore[runner]'") from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"transformers has no tokenizer {name!r}: {error}") from error

    def tokenize(text: str, is_start: bool) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=is_start)
        return ids

    return tokenize
