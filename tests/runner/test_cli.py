"""The commands of ``python -m runner``, on a small random model saved to a folder."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runner import cli
from tests.runner.byte_model import byte_model
from tests.runner.byte_tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]
SMALL = ["--kv-cache-memory", "4MiB", "--max-tokens", "6"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    byte_model(94).save_pretrained(folder)  # only printable ASCII comes out: answers stay on their lines
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call main; the exit status, stdout and stderr."""

    def call(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            status = cli.main(argv)
        except SystemExit as end:
            status = int(end.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def test_generate_continues_prompts_from_arguments_and_from_stdin_alike(run: Run, folder: str) -> None:
    status, out, err = run("generate", "--model", folder, *SMALL, "first", "second")
    assert status == 0
    first, second = re.fullmatch(r"> first\n(.*)\n\n> second\n(.*)\n", out).groups()  # type: ignore[union-attr]
    assert len(first) == len(second) == 6
    assert "11 prompt tokens, 0 of them cached; 12 generated" in err
    assert run("generate", "--model", folder, *SMALL, stdin="first\n\nsecond\n")[1] == out
    assert run("generate", "--model", folder, *SMALL, "first")[1] == f"{first}\n"


def test_generate_prints_one_json_object_a_line(run: Run, folder: str) -> None:
    status, out, _ = run("generate", "--model", folder, *SMALL, "--json", "--chat", "Hi", "Hi")
    assert status == 0
    first, second = map(json.loads, out.splitlines())
    assert (first.pop("num_cached_tokens"), second.pop("num_cached_tokens")) == (0, 16)
    assert first == second
    assert first["num_prompt_tokens"] == len("<user>Hi<assistant>")
    assert (first["num_generated_tokens"], first["finish_reason"], len(first["text"])) == (6, "length", 6)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_weights_are_packed_or_not_as_asked_and_the_answer_is_the_same(run: Run, folder: str) -> None:
    answers = []
    for option, said in (
        ("--packed-weights", r"packed weights .* besides"),
        ("--no-packed-weights", "none: not asked"),
    ):
        status, out, err = run("generate", "--model", folder, *SMALL, option, "first")
        assert status == 0
        assert re.search(said, err)
        answers.append(out)
    assert answers[0] == answers[1]


def test_chat_keeps_the_conversation_and_says_what_was_cached(run: Run, folder: str) -> None:
    lines = "What is a cache, and what is a block?\n\nWhy?\n/clear\nWhat is a cache, and what is a block?\n"
    status, out, err = run("chat", "--model", folder, *SMALL, "--block-size", "8", "--system", "Be brief.", stdin=lines)
    assert status == 0
    answers = out.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2]  # /clear has forgotten what was between
    counts = re.findall(r"\[(\d+) prompt tokens, (\d+) of them cached; 6 generated, ended by length\]", err)
    first, second, again = [(int(prompt), int(cached)) for prompt, cached in counts]
    prompt = len("<system>Be brief.<user>What is a cache, and what is a block?<assistant>")
    assert first == (prompt, 0)
    assert second == (prompt + 6 + len("<user>Why?<assistant>"), (prompt + 5) // 8 * 8)
    assert again == (prompt, (prompt - 1) // 8 * 8)


def test_chat_says_when_the_conversation_has_become_too_long(run: Run, folder: str) -> None:
    status, out, err = run("chat", "--model", folder, *SMALL, "--max-model-len", "64", stdin="Hello\n" * 9)
    assert status == 2
    assert 1 <= len(out.splitlines()) < 9
    assert "the conversation has become too long" in err
    assert "max_model_len = 64" in err


def test_an_interrupted_answer_stays_in_the_conversation_as_far_as_it_came(
    run: Run, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = cli.Engine.stream
    prompts = []

    def interrupted(engine: cli.Engine, prompt: list[dict[str, str]], params: cli.SamplingParams):  # type: ignore[no-untyped-def]
        prompts.append([message["content"] for message in prompt])
        for output in stream(engine, prompt, params):
            yield output
            if len(prompts) == 1 and len(output.token_ids) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(cli.Engine, "stream", interrupted)
    status, out, err = run("chat", "--model", folder, *SMALL, stdin="One\nTwo\n")
    assert status == 0
    assert "[interrupted]" in err
    assert prompts == [["One"], ["One", out.splitlines()[0], "Two"]]
    assert len(prompts[1][1]) == 3


@pytest.mark.parametrize("command", [["generate", "a"], ["chat"], ["bench", "--requests", "1"]], ids=str)
def test_every_command_says_on_stderr_what_it_runs_on(run: Run, folder: str, command: list[str]) -> None:
    options = ["--block-size", "32", "--attention-backend", "torch", "--dtype", "bfloat16", "--max-num-seqs", "3"]
    status, out, err = run(
        *command, "--model", folder, *SMALL, *options, "--max-num-batched-tokens", "128", stdin="a\n"
    )
    assert status == 0
    lines = err.splitlines()
    assert lines[0].startswith("model          LlamaForCausalLM")
    assert "runs on        cpu, bfloat16, attention: torch" in lines
    assert "requests       up to 3 at once, 128 tokens a step" in lines
    assert "prefix hits    multiples of 32 tokens" in lines
    assert "memory         256 blocks x 16.00 KiB = 4.00 MiB" in lines
    assert "runs on" not in out


def test_bench_prints_what_was_cached_cold_and_warm(run: Run, folder: str) -> None:
    arguments = ["--requests", "4", "--prefix-tokens", "64", "--suffix-tokens", "8", "--block-size", "8", *SMALL]
    status, out, _ = run("bench", "--model", folder, *arguments)
    assert status == 0
    assert "4 requests that share 64 tokens" in out
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in out.splitlines()
        if "warm" in line or "cold" in line
    ]
    assert [row[:4] for row in rows] == [["cold", "288", "192", "24"], ["warm", "288", "256", "24"]]
    for row in rows:
        assert float(row[-1]) > 0
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere", "a"], "no model at '/nowhere'"),
        (
            ["--kv-cache-memory", "lots", "a"],
            "expected a number of bytes, or one with a unit (8GiB",
        ),
        (["--kv-cache-memory", "0", "a"], "got '0'"),
        (["--block-size", "none", "a"], "expected a whole number of at least 1, got 'none'"),
        (["--attention-backend", "magic", "a"], "invalid choice: 'magic'"),
        (["--dtype", "float3", "a"], "invalid choice: 'float3'"),
        (["--model", "FOLDER", "--device", "abacus", "a"], "device 'abacus' cannot be used"),
        (["--model", "FOLDER", "--device", "cuda:99", "a"], "device 'cuda:99' cannot be used"),
        (["--model", "FOLDER", "--kv-cache-memory", "1KiB", "a"], "give it at least"),
        (["--model", "FOLDER", "--kv-cache-memory", "900TiB", "a"], "the cache takes 900.00 TiB and this machine has"),
        (["--model", "FOLDER", "--max-num-seqs", "3000", "a"], "max_num_batched_tokens=2048 is less than"),
        (["--model", "FOLDER", "--temperature", "nan", "a"], "temperature must be a number of at least 0, got nan"),
        (["--model", "FOLDER", "--stop", "", "a"], "stop must be text or several texts, none of them empty"),
        (["--model", "FOLDER", "--kv-cache-memory", "4MiB", ""], "the prompt is empty"),
        (["--model", "FOLDER", "--kv-cache-memory", "4MiB", "half a pair: \ud800"], "does not take this text"),
        (["--model", "", "a"], "no model at"),
        (["--model", "FOLDER", "--max-model-len", "9000", "a"], "max_model_len=9,000 is more than the 1,024"),
        (["--model", "FOLDER", "--max-tokens", "9000", "a"], "1 prompt tokens + 9,000 tokens of output"),
        (["--model", "FOLDER"], "no prompt: stdin is empty"),
    ],
)
def test_mistakes_are_named_on_stderr_with_status_2(run: Run, folder: str, arguments: list[str], message: str) -> None:
    status, out, err = run("generate", *(argument.replace("FOLDER", folder) for argument in arguments))
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_folder_without_weights_with_half_of_them_or_without_a_chat_template_is_named(
    run: Run, folder: str, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(folder) / name).read_bytes())
    status, _, err = run("generate", "--model", str(tmp_path), "a")
    assert status == 2
    assert "runner generate: error: the model cannot be loaded" in err
    weights = (Path(folder) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    status, _, err = run("generate", "--model", str(tmp_path), "a")
    assert status == 2
    assert "runner generate: error: the model cannot be loaded" in err
    (tmp_path / "model.safetensors").write_bytes(weights)
    status, _, err = run("chat", "--model", str(tmp_path), stdin="Hello\n")
    assert status == 2
    assert "no chat template" in err


@pytest.mark.parametrize("config", ["[]", "{}", '{"model_type": "llama", "hidden_size": "wide"}', "not JSON"])
def test_a_config_that_is_none_is_named(run: Run, tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    status, _, err = run("generate", "--model", str(tmp_path), "a")
    assert status == 2
    assert "runner generate: error: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_is_piped_in_has_to_be_text(
    run: Run, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    arguments = [command, "--model", folder, *SMALL]
    for stdin, message in (
        (io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"), "can't decode byte 0xff"),
        (None, "closed" if command == "chat" else "no prompt"),
    ):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert cli.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_an_answer_that_the_terminal_cannot_show_is_no_traceback(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert cli.main(["generate", "--model", folder, *SMALL, "é", "é"]) == 2
    assert "set PYTHONIOENCODING" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_help_names_the_options(run: Run, command: str) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    for option in ("--model", "--kv-cache-memory", "--block-size", "--attention-backend", "--dtype", "--max-model-len",
                   "--max-tokens"):  # fmt: skip
        assert option in out


def test_the_module_runs_and_leaves_quietly_when_nobody_reads(folder: str) -> None:
    command = [sys.executable, "-m", "runner", "generate", "--model", folder, *SMALL, "first"]
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert result.returncode == 141
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr
