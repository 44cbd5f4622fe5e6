"""The command line: what it prints, how it refuses, and that both ways of starting it are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvcore
from kvcore.cli import main
from kvcore.planning import capacity_report
from kvcore.planning_hf import plan_from_hf_config

CONFIG: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def test_plan_prints_the_layers_of_each_group_and_the_capacity_report(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--memory", "8GiB", "--max-in-flight-tokens", "2048", "--length", "1024", "--length", "131072"]
    assert main(["plan", config_file, *arguments]) == 0
    layout, report = capsys.readouterr().out.split("\n\n", 1)
    lines = layout.splitlines()
    assert lines[1].split() == ["group", "0", *(f"layers.{i}" for i in (0, 7, 14, 21, 28))]
    assert lines[-1].split() == ["group", "6", *(f"layers.{i}" for i in (5, 11, 17, 23, 29))]
    config = plan_from_hf_config(CONFIG, memory_bytes=8 * 2**30)
    expected = capacity_report(config, max_model_len=131072, request_lengths=(1024, 131072), max_in_flight_tokens=2048)
    assert report == f"{expected}\n"


def test_plan_prints_the_same_as_json(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config_file, "--num-blocks", "500", "--max-model-len", "4,096", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    config = plan_from_hf_config(CONFIG, num_blocks=500)
    assert values["num_blocks"] == 500
    assert [tuple(group["layer_names"]) for group in values["groups"]] == [
        group.layer_names for group in config.kv_cache_groups
    ]
    assert values["groups"][0]["kv_cache_spec"] == {
        "kind": "SlidingWindowSpec",
        "block_size": 16,
        "num_kv_heads": 4,
        "head_size": 256,
        "dtype": "bfloat16",
        "sliding_window": 1024,
    }
    assert [(tensor["size"], tuple(tensor["shared_by"])) for tensor in values["tensors"]] == [
        (tensor.size, tensor.shared_by) for tensor in config.kv_cache_tensors
    ]
    report = capacity_report(config, max_model_len=4096)
    for group, expected in zip(values["groups"], report.groups, strict=True):
        assert group["padded_bytes_per_block"] == expected.padded_bytes_per_block
        assert group["max_blocks_per_request"] == expected.max_blocks_per_request
    assert values["capacity"]["tokens_per_request"] == report.tokens_per_request
    assert values["capacity"]["total_tokens"] == report.total_tokens
    assert values["capacity"]["total_bytes"] == report.total_bytes
    assert [length["num_tokens"] for length in values["capacity"]["lengths"]] == [4096]


def test_plan_passes_every_option_on(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--block-size", "32", "--dtype", "float32", "--group-size", "10", "--pad-pages"]
    assert main(["plan", config_file, "--memory", "1GiB", "--json", *options]) == 0
    values = json.loads(capsys.readouterr().out)
    config = plan_from_hf_config(CONFIG, memory_bytes=2**30, block_size=32, dtype="float32", group_size=10)
    assert values["num_blocks"] == config.num_blocks
    assert [len(group["layer_names"]) for group in values["groups"]] == [10, 10, 9, 5]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8GiB", 8 * 2**30), ("1.5 gib", 3 * 2**29), ("500MB", 500_000_000), ("4096kb", 4_096_000), ("10000000", 10**7)],
)
def test_memory_is_read_with_and_without_units(
    text: str, num_bytes: int, config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config_file, "--memory", text, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["num_blocks"] == plan_from_hf_config(CONFIG, memory_bytes=num_bytes).num_blocks


def test_layers_beyond_one_line_are_wrapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    assert main(["plan", str(file), "--memory", "8GiB"]) == 0
    layout = capsys.readouterr().out.split("\n\n", 1)[0]
    assert layout.split()[-32:] == [f"layers.{i}" for i in range(32)]
    assert all(len(line) <= 100 for line in layout.splitlines())


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "missing.json", "--memory", "8GiB"], "cannot read 'missing.json'"),
        (["plan", "{config}", "--memory", "1000"], "1,000 bytes are too few"),
        (
            ["plan", "{config}", "--memory", "8GiB", "--max-model-len", "100", "--length", "200"],
            "longer than max_model",
        ),
    ],
)
def test_what_cannot_be_planned_ends_with_a_message_and_status_2(
    arguments: list[str], message: str, config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(config=config_file) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvcore plan: error: ")
    assert message in printed.err


def test_a_config_that_names_no_longest_sequence_asks_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    values = {"model_type": "new", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "dtype": "int8"}
    file.write_text(json.dumps(values))
    assert main(["plan", str(file), "--num-blocks", "10"]) == 2
    assert "pass --max-model-len N" in capsys.readouterr().err
    assert main(["plan", str(file), "--num-blocks", "10", "--max-model-len", "32"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["plan"], "CONFIG"),
        (["plan", "c.json"], "--memory --num-blocks"),
        (["plan", "c.json", "--memory", "8GiB", "--num-blocks", "4"], "not allowed with"),
        (["plan", "c.json", "--memory", "8 apples"], "expected a number of bytes, or one with a unit"),
        (["plan", "c.json", "--memory", "-1"], "argument --memory"),
        (["plan", "c.json", "--memory", "0"], "expected at least one byte"),
        (["plan", "c.json", "--num-blocks", "many"], "expected a whole number of at least 1, got 'many'"),
        (["plan", "c.json", "--memory", "8GiB", "--length", "0"], "expected a whole number of at least 1, got '0'"),
        (["plan", "c.json", "--memory", "8GiB", "--dtype", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_arguments_that_make_no_sense_end_with_usage_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("usage: kvcore")
    assert message in printed.err


# Starting it


def test_help_shows_an_example_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "\n  kvcore plan gemma-3-4b-it/config.json --memory 8GiB" in text
    for option in (
        "--memory",
        "--num-blocks",
        "--block-size",
        "--dtype",
        "--max-in-flight-tokens",
        "--length",
        "--json",
    ):
        assert option in text


def test_python_m_kvcore_is_the_same_command(config_file: str) -> None:
    root = Path(kvcore.__file__).parent.parent

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvcore", *arguments]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    assert (
        run("--version").stdout
        == f"kvcore {kvcore.__version__} ({'compiled' if kvcore.COMPILED else 'not compiled'})\n"
    )
    planned = run("plan", config_file, "--memory", "8GiB")
    assert (planned.returncode, planned.stderr) == (0, "")
    assert planned.stdout.startswith("layers of each group")
    refused = run("plan", config_file, "--memory", "1kB")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Traceback" not in refused.stderr
