"""The examples do what they say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


embed = load("embed_in_your_stack")

PROMPTS = [[*range(1000, 1021), i, i, i] for i in range(4)]


def serve(loop: Any, prompts: list[list[int]], max_new_tokens: int = 12) -> list[list[int]]:
    """The outputs of all prompts; the books are checked after every step."""
    requests = [loop.add(f"r{i}", prompt, max_new_tokens) for i, prompt in enumerate(prompts)]
    for _ in range(1000):
        if not loop.waiting and not loop.running:
            return [request.output_token_ids for request in requests]
        loop.step()
        loop.manager.check_invariants()
    raise AssertionError("the loop does not end")


def answer_without_a_cache(prompt: list[int], max_new_tokens: int = 12) -> list[int]:
    """What the model says when each token is computed from scratch in a cache of its own."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        num_blocks = len(tokens) // embed.BLOCK_SIZE + 2
        tokens.append(embed.FakeModel(num_blocks).run(tokens, 0, len(tokens), list(range(1, num_blocks))))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_blocks", [200, 20, 14, 11, 10])
def test_the_tokens_do_not_depend_on_the_size_of_the_pool(num_blocks: int) -> None:
    loop = embed.Loop(num_blocks)
    assert serve(loop, PROMPTS) == [answer_without_a_cache(prompt) for prompt in PROMPTS]
    assert loop.manager.usage == 0


def test_a_small_pool_forces_preemption_and_a_large_one_does_not() -> None:
    small, large = embed.Loop(14), embed.Loop(200)
    assert serve(small, PROMPTS) == serve(large, PROMPTS)
    assert small.num_preemptions > 0
    assert large.num_preemptions == 0


def test_requests_hit_the_prompt_they_share() -> None:
    loop = embed.Loop(200)
    serve(loop, PROMPTS)
    # 21 shared tokens: five full blocks of four, for each request but the first.
    assert loop.num_hit_tokens == 3 * 20


def test_a_prompt_longer_than_a_step_is_computed_in_chunks() -> None:
    loop = embed.Loop(200)
    request = loop.add("long", list(range(40)), max_new_tokens=1)
    computed = []
    while loop.waiting or loop.running:
        loop.step()
        computed.append(request.num_computed_tokens)
    assert computed == [16, 32, 40]


def test_a_request_that_could_never_fit_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="longer than the cache"):
        embed.Loop(3).add("r", [1, 2, 3, 4, 5], max_new_tokens=4)


def test_the_example_reports_equal_answers_when_run_as_a_script() -> None:
    script = EXAMPLES / "embed_in_your_stack.py"
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    assert "the answers are the same" in done.stdout
