"""A small model to go with the byte tokenizer, and engines of both."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from transformers import PreTrainedModel

from runner import Engine, EngineConfig
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.small_models import small_model


def byte_model(num_outputs: int = 256) -> PreTrainedModel:
    """Says nothing but the first tokens of the alphabet: bytes without an end of sequence, or only printable ASCII."""
    return copy.deepcopy(_byte_model(num_outputs))


@cache
def _byte_model(num_outputs: int) -> PreTrainedModel:
    model = small_model("llama", seed=3, vocab_size=300)
    model.get_output_embeddings().weight.data[num_outputs:] = 0
    return model


def byte_engine(**settings: Any) -> Engine:
    """An engine of its own, with these settings."""
    return Engine(byte_model(), byte_tokenizer(), EngineConfig(**settings))
