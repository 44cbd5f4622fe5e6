"""``kvcore replay``: formats, sizes, what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvcore import ConfigError
from kvcore.cli import main
from kvcore.eviction import LRU
from kvcore.replay import replay
from kvcore.replay_formats import LineParser
from kvcore.replay_many import ReplaySettings, find_policy, replay_many
from kvcore.replay_trace import TraceRequest
from tests.kvcore.traces import make_trace

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 2  # layers, key and value, heads, elements of a head, bytes of one


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(line + "\n" if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write(tmp_path / "trace.jsonl", [{"hash_ids": [*r.hash_ids]} for r in make_trace("scans", 1, 200)])


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["replay", *arguments, "--json", "-"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["replay", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_it_reports_what_each_policy_finds_in_each_pool(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, trace, "--blocks", "300", "600", "--policy", "lru", "slru")
    assert [(result["num_blocks"], result["policy"]) for result in report["results"]] == [
        (size, policy) for size in (300, 600) for policy in ("all-knowing", "lru", "slru")
    ]
    expected = replay(make_trace("scans", 1, 200), 300, "slru").as_dict()
    assert report["results"][2] == expected
    assert report["settings"]["block_size"] == 512
    assert report["trace"]["num_requests"] == 200


@pytest.mark.parametrize("with_rich", [True, False])
def test_the_tables_show_the_same_with_and_without_rich(
    trace: str, with_rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_rich:
        pytest.importorskip("rich", reason="rich is not installed")
    else:
        for module in ("rich", "rich.console", "rich.progress"):
            monkeypatch.setitem(sys.modules, module, None)
    assert main(["replay", trace, "--blocks", "300", "--policy", "lru", "--histograms"]) == 0
    out = capsys.readouterr().out
    result = replay(make_trace("scans", 1, 200), 300)
    assert f"{result.block_hit_rate:.1%}" in out
    assert f"{result.num_tokens_saved:,}" in out
    assert f"{result.num_evictions:,}" in out
    for words in ("200 requests", "all-knowing", "requests with a hit", "Reuse distance", "Age at eviction"):
        assert words in out


def test_the_results_do_not_depend_on_the_number_of_processes(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [trace, "--blocks", "200", "400", "--policy", "adaptive", "fifo", "--concurrency", "4"]
    alone, together = (as_json(capsys, *arguments, "--jobs", jobs) for jobs in ("1", "3"))
    assert alone == together


def test_progress_is_told_once_for_each_replay() -> None:
    seen: list[tuple[int, int]] = []
    replay_many(make_trace("scans", 1, 20), [100, 200], ["lru"], on_done=lambda *done: seen.append(done), jobs=2)
    assert seen == [(i, 4) for i in (1, 2, 3, 4)]


def test_a_size_in_bytes_is_that_of_a_models_blocks(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path / "config.json", [CONFIG])
    memory = str(301 * 512 * BYTES_PER_TOKEN)
    report = as_json(capsys, trace, "--memory", memory, "--config", config, "--policy", "lru")
    assert [result["num_blocks"] for result in report["results"]] == [300, 300]


def test_a_model_with_windows_is_refused(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 1024}
    config = write(tmp_path / "config.json", [CONFIG | layers])
    assert "pass --blocks" in refusal(capsys, trace, "--memory", "1GiB", "--config", config)
    assert "go together" in refusal(capsys, trace, "--memory", "1GiB")


def test_token_ids_share_blocks_as_far_as_they_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = [*range(40)]
    lines = [
        {"prompt_token_ids": prompt, "output_token_ids": [7] * 9},
        {"token_ids": [*prompt, *[7] * 9, 8], "timestamp": 5},
        {"token_ids": [*range(32)], "priority": 1},
    ]
    trace = write(tmp_path / "trace.jsonl", lines)
    (result,) = as_json(capsys, trace, "--blocks", "50", "--policy", "lru", "--no-bound")["results"]
    # 40 tokens are two full blocks, of which a prompt of 32 can hit one: its last token is always computed.
    assert (result["block_size"], result["num_blocks_asked"], result["num_blocks_hit"]) == (16, 7, 3)
    assert result["num_tokens"] == 40 + 50 + 32
    arguments = [trace, "--blocks", "50", "--policy", "lru", "--no-bound", "--outputs", "cache"]
    (result,) = as_json(capsys, *arguments)["results"]
    # With the answer, 48 of whose tokens are in the cache at its end, a third block.
    assert result["num_blocks_hit"] == 4


@pytest.mark.slow
def test_text_needs_a_tokenizer_and_is_read_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    words = {word: number for number, word in enumerate(("unknown", "a", "b", "c", "d"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="unknown"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "tokenizer")
    lines = [{"text": "a b c d a", "output": "b b"}, {"prompt": "a b c d a b b c d"}]
    trace = write(tmp_path / "trace.jsonl", lines)
    arguments = [trace, "--blocks", "9", "--block-size", "2", "--policy", "lru", "--no-bound", "--outputs", "cache"]
    assert "say which tokenizer" in refusal(capsys, *arguments)
    (result,) = as_json(capsys, *arguments, "--tokenizer", str(tmp_path / "tokenizer"))["results"]
    assert (result["num_blocks_asked"], result["num_blocks_hit"]) == (2 + 4, 3)
    assert "has no tokenizer" in refusal(capsys, *arguments, "--tokenizer", str(tmp_path / "nothing"))


def test_mooncakes_ids_are_cut_into_blocks_of_other_sizes() -> None:
    line = '{"hash_ids": [3, 5]}'
    assert LineParser()(line).hash_ids == [3, 5]
    assert LineParser(128)(line).hash_ids == [12, 13, 14, 15, 20, 21, 22, 23]
    with pytest.raises(ConfigError, match="do not divide"):
        LineParser(100)(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "not JSON"),
        ("{}", "expected hash_ids, token_ids, prompt_token_ids, text or prompt"),
        ('{"token_ids": []}', "no tokens"),
        ('{"token_ids": "12"}', "token ids must be a list"),
        ('{"token_ids": [1, true]}', "token ids must be a list"),
        ('{"token_ids": [-1]}', "token id"),
        ('{"token_ids": [1], "output_token_ids": 3}', "token ids must be a list"),
        ('{"token_ids": [1], "timestamp": "now"}', "timestamp must be"),
        ('{"text": 5}', "text and output must be texts"),
        ('{"text": null}', "must be a text"),
    ],
)
def test_a_bad_line_is_refused_or_skipped_and_reported_with_its_number(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcore.cli_replay.load_tokenizer", lambda name: lambda text, is_start: [1])
    trace = write(tmp_path / "trace.jsonl", ['{"token_ids": [1]}', "", line, '{"token_ids": [1]}'])
    arguments = [trace, "--blocks", "9", "--jobs", "1", "--tokenizer", "any"]
    error = refusal(capsys, *arguments)
    assert "trace.jsonl, line 3" in error
    assert message in error
    assert main(["replay", *arguments, "--on-bad-line", "skip", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert "skipped" in captured.err
    assert "line 3" in captured.err
    assert (
        json.loads(captured.out)["trace"] | {"num_requests": 2, "num_bad_lines": 1} == json.loads(captured.out)["trace"]
    )


def test_of_many_bad_lines_the_first_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "trace.jsonl", ["{}"] * 14 + ['{"token_ids": [1]}'])
    assert main(["replay", trace, "--blocks", "9", "--on-bad-line", "skip", "--jobs", "1"]) == 0
    captured = capsys.readouterr()
    assert "skipped 4 more lines" in captured.err
    assert "14 bad lines were left out" in captured.out


def test_several_files_are_one_trace(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    twice = as_json(capsys, trace, trace, "--blocks", "9000", "--policy", "lru", "--no-bound")
    assert twice["trace"]["num_requests"] == 400
    assert twice["results"][0]["block_hit_rate"] == twice["trace"]["best_hit_rate"] > 0.5


def test_what_cannot_be_done_is_refused_before_any_work(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = write(tmp_path / "empty.jsonl", [])
    assert "no request" in refusal(capsys, empty, "--blocks", "9")
    assert "cannot read" in refusal(capsys, "missing.jsonl", "--blocks", "9")
    assert "there is no policy 'mru'" in refusal(capsys, trace, "--blocks", "9", "--policy", "mru")
    assert "module:Class" in refusal(capsys, trace, "--blocks", "9", "--policy", "kvcore.eviction:MRU")
    assert "is no class" in refusal(capsys, trace, "--blocks", "9", "--policy", "kvcore.eviction:__name__")
    assert "ends in .png" in refusal(capsys, trace, "--blocks", "9", "--chart", "chart.gif")
    assert "cannot write" in refusal(capsys, trace, "--blocks", "9", "--jobs", "1", "--json", str(tmp_path))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "kvcore[replay]" in refusal(capsys, trace, "--blocks", "9", "--chart", "chart.png")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs transformers" in refusal(capsys, trace, "--blocks", "9", "--tokenizer", "any")


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_a_chart_is_drawn(suffix: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    chart = tmp_path / f"chart.{suffix}"
    assert main(["replay", trace, "--blocks", "200", "400", "--jobs", "1", "--chart", str(chart)]) == 0
    assert f"wrote {chart}" in capsys.readouterr().out
    drawn = chart.read_bytes()
    assert drawn.startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}[suffix])
    if suffix == "html":
        assert b"<svg" in drawn
        assert b"Age at eviction" in drawn
        assert b"<script" not in drawn


def test_a_policy_of_ones_own_is_found_where_the_command_is_run(trace: str, tmp_path: Path) -> None:
    (tmp_path / "my_policy.py").write_text("from kvcore.eviction import LRU\nclass Mine(LRU):\n    pass\n")
    command = [sys.executable, "-m", "kvcore", "replay", trace, "--blocks", "300", "400", "--policy", "my_policy:Mine"]
    done = subprocess.run(
        [*command, "--json", "found.json", "--jobs", "2"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "my_policy:Mine" in done.stdout
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    expected = replay(make_trace("scans", 1, 200), 300, LRU).num_blocks_hit
    assert next(r["num_blocks_hit"] for r in results if r["policy"] == "my_policy:Mine") == expected
    assert find_policy("kvcore.eviction:LRU") is LRU


def test_settings_reach_every_replay() -> None:
    rng = Random(1)
    requests = [
        TraceRequest(r.hash_ids, 10.0 * i, 0, rng.randint(1, 200)) for i, r in enumerate(make_trace("scans", 1, 200))
    ]
    settings = ReplaySettings(16, "cache", 3, 0.01)
    (result,) = replay_many(requests, [300], ["lru"], settings, bound=False)
    same = replay(requests, 300, block_size=16, outputs="cache", concurrency=3, seconds_per_token=0.01)
    assert result == same
    assert result.num_waited


def test_a_pool_larger_than_any_machine_finds_what_one_finds_that_overwrites_nothing() -> None:
    trace = make_trace("conversations", 3, 200)
    enough, huge = 100_000, 10**15
    for settings in (ReplaySettings(), ReplaySettings(outputs="cache", concurrency=3)):
        results = replay_many(trace, [enough, huge], ["lru", "adaptive"], settings, jobs=1)
        assert [replace(result, num_blocks=enough) for result in results[3:]] == results[:3]
        assert {result.num_blocks for result in results[3:]} == {huge}
