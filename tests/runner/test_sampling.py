"""What a request may ask for, and when it ends."""

from __future__ import annotations

import pytest
import torch

from runner.errors import SamplingParamsError
from runner.sampling import SamplingParams, finish_reason, sample


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"temperature": 0.7}, "temperature=0.7 is not supported yet"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids must be whole numbers"),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_what_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="top_p"):
        SamplingParams(top_p=0.9)  # type: ignore[call-arg]


def test_greedy_takes_the_likeliest_token_of_each_sequence() -> None:
    assert sample(torch.tensor([[0.0, 3.0, 1.0], [5.0, 5.0, -1.0]])) == [1, 0]


def test_an_output_ends_at_a_stop_token_or_at_its_length() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=[7])
    assert finish_reason(params, 1, 2, {9}) is None
    assert finish_reason(params, 7, 2, {9}) == "stop"
    assert finish_reason(params, 9, 2, {9}) == "stop"
    assert finish_reason(params, 1, 3, {9}) == "length"
    assert finish_reason(params, 7, 3, {9}) == "stop"


def test_ignore_eos_ignores_the_models_tokens_but_not_the_callers() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    assert finish_reason(params, 9, 1, {9}) is None
    assert finish_reason(params, 7, 1, {9, 7}) == "stop"
