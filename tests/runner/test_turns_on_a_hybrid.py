"""Users who take turns on a model with windows find what they said before, and get the tokens they would get alone."""

from __future__ import annotations

import copy

import pytest

from runner import Engine, EngineConfig, SamplingParams
from tests.runner.small_models import WINDOW, generated_by_transformers, random_prompts, small_model

USERS = 4
ANSWER = 8


@pytest.mark.parametrize("window_retention", ["ends", "all"])
def test_users_who_take_turns_find_their_latest_turn_where_ends_are_kept(window_retention: str) -> None:
    model = small_model("gemma3-hybrid")
    # What all users can hit at the end takes a third of the blocks.
    engine = Engine(
        copy.deepcopy(model), config=EngineConfig(num_blocks=380, block_size=4, window_retention=window_retention)
    )
    prompts = random_prompts([7 * WINDOW] * USERS)
    found = []
    for turn in range(3):
        found.append([])
        for user, prompt in enumerate(prompts):
            (output,) = engine.generate(prompt, SamplingParams(max_tokens=ANSWER))
            if user == 0:
                assert [output.token_ids] == generated_by_transformers(model, [prompt], ANSWER)
            found[-1].append(len(prompt) - output.num_cached_tokens)
            prompts[user] = [*prompt, *output.token_ids, turn]
        engine.manager.check_invariants()
    missed = max(max(tokens) for tokens in found[1:])
    assert missed < ANSWER + 2 + 4 if window_retention == "ends" else missed >= 7 * WINDOW
    assert engine.manager.usage == 0
