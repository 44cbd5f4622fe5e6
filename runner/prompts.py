"""What a prompt may be, and the token ids it comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
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
    if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
        return [token for token in prompt if isinstance(token, int)]
    if tokenizer is None:
        raise RunnerError("this engine has no tokenizer: give prompts as token ids")
    if isinstance(prompt, str):
        return _of_text(tokenizer, prompt)
    messages = [dict(message) for message in prompt if isinstance(message, Mapping)]
    if len(messages) < len(prompt):
        raise RunnerError(f"a prompt is text, whole numbers (token ids) or messages (role and content), got {prompt!r}")
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except (TemplateError, TypeError, ValueError) as error:
        raise RunnerError(f"the model's chat template does not take this conversation: {error}") from error
    return list(encoded["input_ids"])


def _of_text(tokenizer: Any, text: str) -> list[int]:
    try:
        return list(tokenizer(text)["input_ids"])
    except (TypeError, ValueError) as error:  # a lone surrogate, say, which JSON can carry
        raise RunnerError(f"the tokenizer does not take this text: {error}") from error


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, of any of the three kinds, as a list of one."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, Mapping))):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """What the model's generation config and its tokenizer call the end of a sequence."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        if value is not None:
            found |= {value} if isinstance(value, int) else set(value)
    return frozenset(found)
