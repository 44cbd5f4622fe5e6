"""What a prompt may be, and the token ids it comes to."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from transformers import PreTrainedModel

from runner.errors import RunnerError

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or a conversation as messages with ``role`` and ``content``."""


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The token ids of a prompt: text as the tokenizer takes it, a conversation by the model's chat template.

    Args:
        tokenizer: A tokenizer of transformers; None where all prompts are token ids.
        prompt: One prompt.

    Raises:
        RunnerError: It is none of these, the tokenizer or its chat template does not take it, or there is none.
    """
    if isinstance(prompt, str):
        return _of_text(tokenizer, prompt)
    parts = _parts(prompt)
    kinds = set(map(type, parts))  # few, where parts are many
    if all(issubclass(kind, Integral) for kind in kinds):
        return list(map(int, parts))
    if all(issubclass(kind, Mapping) for kind in kinds):
        return _of_conversation(tokenizer, parts)
    raise _no_prompt(prompt)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, of any of the three kinds, as a list of one.

    Raises:
        RunnerError: It can be neither a prompt nor several.
    """
    if isinstance(prompts, str):
        return [prompts]
    parts = _parts(prompts)
    return [parts] if parts and isinstance(parts[0], (Integral, Mapping)) else parts


def _parts(prompt: object) -> list[Any]:
    """What prompts, or a prompt that is no text, consist of."""
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
        raise _no_prompt(prompt)
    try:
        return list(prompt)
    except TypeError as error:  # a tensor without dimensions calls itself iterable
        raise _no_prompt(prompt) from error


def _no_prompt(prompt: object) -> RunnerError:
    return RunnerError(
        "a prompt is text, whole numbers (token ids) or messages (mappings with role and content), got "
        f"{reprlib.repr(prompt)}"
    )


def _of_text(tokenizer: Any, text: str) -> list[int]:
    _check_tokenizer(tokenizer)
    try:
        return list(tokenizer(text)["input_ids"])
    except (TypeError, ValueError) as error:  # a lone surrogate, say, which JSON can carry
        raise RunnerError(f"the tokenizer does not take this text: {error}") from error


def _of_conversation(tokenizer: Any, messages: list[Any]) -> list[int]:
    _check_tokenizer(tokenizer)
    conversation = [dict(message) for message in messages]
    try:
        encoded = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # a template is a program, and may end with any of them
        raise RunnerError(f"the model's chat template does not take this conversation: {error}") from error
    return list(encoded["input_ids"])


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is None:
        raise RunnerError("this engine has no tokenizer: give prompts as token ids")


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """What the model's generation config and its tokenizer call the end of a sequence."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        if value is not None:
            found |= {value} if isinstance(value, int) else set(value)
    return frozenset(found)
