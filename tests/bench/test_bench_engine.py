"""The engine's benchmark, at the size of a toy: it runs, says what it found, and refuses to compare unequal outputs."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.bench import bench_engine, engine_tables, report
from tests.runner.byte_model import byte_model
from tests.runner.byte_tokenizer import byte_tokenizer

OPTIONS = [
    *("--requests=3", "--shared-tokens=40", "--max-tokens=3", "--threads=1", "--reps=2", "--contexts", "32", "64"),
    "--batch-memory=1.5",  # less than nine tenths of any machine's
]

DEFAULTS = "generate_batch_defaults"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of a run."""
    folder = tmp_path_factory.mktemp("engine")
    byte_model().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    run(*OPTIONS, "--model", str(folder / "model"), "--out", str(folder))
    return folder


@pytest.fixture
def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "engine.json").read_text("utf-8"))


def run(*options: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench_engine", *options])
        bench_engine.main()


@pytest.mark.slow
def test_every_way_generates_as_much_and_in_float32_the_same(results: dict[str, Any]) -> None:
    assert set(results["served"]) == set(engine_tables.TITLES) - {DEFAULTS, f"{DEFAULTS}_call"}
    for served in results["served"].values():
        for one in served:
            assert [len(tokens) for tokens in one["tokens"]] == [3, 3, 3]
            assert all(0 < first < one["seconds"] for first in one["first_tokens"])
    assert len(results["served"]["warm"]) == 2
    assert engine_tables.differences(results) == []


@pytest.mark.slow
def test_cold_the_first_request_computes_what_the_others_find_and_warm_all_find_it(results: dict[str, Any]) -> None:
    found = {name: served[0]["num_cached_tokens"] for name, served in results["served"].items()}
    full_blocks = 40 // 4 * 4
    assert found["off"] == 0
    assert found["cold"] == found["cold_bfloat16"] == 2 * full_blocks
    assert found["warm"] == found["warm_bfloat16"] >= 3 * full_blocks


@pytest.mark.slow
def test_the_tables_have_a_line_for_each_way_and_each_context_and_a_place_in_the_page(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--from", str(out / "engine.json"), "--out", str(tmp_path))
    text = capsys.readouterr().out
    for name, title in engine_tables.TITLES.items():
        assert (f"| {title} |" in text) is (DEFAULTS not in name)
    for context in (32, 64):
        assert f"\n| {context} |" in text
    page = tmp_path / "performance.md"
    page.write_text(report.PAGE.read_text("utf-8"), "utf-8")
    report.update_section("engine", text, page)
    assert text.strip() in page.read_text("utf-8")


@pytest.mark.slow
def test_a_cache_that_memory_is_too_small_for_is_told_of_and_compared_where_it_was_measured(
    results: dict[str, Any],
) -> None:
    (reason,) = results["not_served"].values()
    assert "memory" in reason.lower()
    title = engine_tables.TITLES[DEFAULTS]
    assert f"- {title}, could not be measured: {reason}" in engine_tables.section(results)
    assert f"engine, cold, to {title}" not in engine_tables.section(results)
    measured = copy.deepcopy(results)
    measured["not_served"] = {}
    for call in ("", "_call"):
        served = copy.deepcopy(results["served"][f"generate_batch{call}"])
        served[0]["seconds"] = 4 * results["served"]["cold"][0]["seconds"]
        measured["served"][DEFAULTS + call] = served
    measured["served"]["cold"] = measured["served"]["cold"][:1]
    assert f"- engine, cold, to {title}: **4.00** (wanted: 12, aimed at: 15)" in engine_tables.section(measured)


@pytest.mark.slow
def test_unequal_outputs_are_named_and_end_the_program(results: dict[str, Any], tmp_path: Path) -> None:
    other = copy.deepcopy(results)
    other["served"]["warm"][1]["tokens"][2][0] += 1
    report.write_json(tmp_path / "other.json", other)
    with pytest.raises(SystemExit, match="engine, warm, repetition 2: 1 of 3 requests differ"):
        run("--from", str(tmp_path / "other.json"), "--out", str(tmp_path))


@pytest.mark.slow
def test_a_decode_step_that_nothing_is_known_of_leaves_its_cell_empty(results: dict[str, Any]) -> None:
    apart = list(results["decode"])[2]
    del results["decode"][apart]["64"]
    (line,) = (line for line in engine_tables.section(results).splitlines() if line.startswith("| 64 |"))
    assert "|  |" in line
