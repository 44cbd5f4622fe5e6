"""From measured times to the tables: ratios, means, what must be equal, what grows."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest

from tests.bench import compare, comparison, report, scaling
from tests.bench.on_kvcore import BATCHED
from tests.bench.workloads import ALL_GROUPS, WARM_PROMPT, WORKLOADS, measure, timed

KEYS = [f"{groups.name}.{w.name}" for groups in ALL_GROUPS for w in (*WORKLOADS, WARM_PROMPT, *BATCHED)]


def side(value: float, hits: int = 100) -> dict[str, Any]:
    return {"medians": dict.fromkeys(KEYS, value), "hit_tokens": {"full.churn": hits}}


def a_run(theirs: float, ours: float) -> dict[str, Any]:
    return {name: side(theirs if name == "vllm" else ours) for name in compare.SIDES}


def test_a_ratio_is_the_median_of_the_ratios_of_each_run_not_that_of_the_medians() -> None:
    # The second run was disturbed, both halves alike; the third was disturbed in one half.
    compared = comparison.compare([a_run(6, 2), a_run(60, 20), a_run(6, 12)])
    row = compared.rows["full.decode"]
    assert row.ratio == 3
    assert (row.theirs, row.ours) == (6, 12)
    assert compared.geometric_mean == pytest.approx(3)


def test_the_geometric_mean_is_taken_over_all_workloads_and_groups() -> None:
    run = a_run(8, 1)
    run["vllm"]["medians"]["hybrid.churn"] = 1.0
    compared = comparison.compare([run])
    assert len(compared.rows) == len(WORKLOADS) * len(ALL_GROUPS)
    assert compared.geometric_mean == pytest.approx(8 ** (15 / 16))


@pytest.mark.parametrize("odd_side", ["kvcore", "unverified", "vllm"])
def test_unequal_hits_are_refused_by_name(odd_side: str) -> None:
    runs = [a_run(5, 1), a_run(5, 1)]
    runs[1][odd_side] = side(1, hits=99)
    with pytest.raises(comparison.HitsDiffer, match=f"full.churn: {odd_side} found 99 tokens of run 2"):
        comparison.compare(runs)


def test_both_tables_show_each_line_with_its_aim() -> None:
    compared = comparison.compare([a_run(6, 2), a_run(8, 2)])
    text, markdown = comparison.text_table(compared), comparison.markdown_table(compared)
    assert "geometric mean of these" in text
    for row in compared.rows.values():
        assert f"| {row.title} | 7.00" in markdown
        assert row.title in text
    assert "sha256_raw" in text
    assert "| 3.00–4.00 | 2.00 ms | 3.50 | 10.0 |" in markdown


def test_a_line_tells_what_compiling_makes_of_it() -> None:
    run = a_run(6, 3)
    run["kvcore, compiled"] = side(1.5)
    run["raw, compiled"] = side(2)
    compared = comparison.compare([run])
    assert (compared.rows["full.decode"].ratio, compared.rows["full.decode"].compiled_ratio) == (2, 4)
    assert [row.compiled_ratio for row in compared.extra if "sha256_raw" in row.note] == [3]
    assert compared.geometric_mean == pytest.approx(2)
    assert compared.compiled_geometric_mean == pytest.approx(4)
    assert "| **geometric mean** | | | **2.0** | | | **4.0** | 5.00 |" in comparison.markdown_table(compared)


def test_a_compiled_time_is_compared_with_that_of_its_own_run() -> None:
    runs = [a_run(40, 20), a_run(6, 3)]
    del runs[0]["kvcore, compiled"]
    runs[1]["kvcore, compiled"] = side(1.5)
    assert comparison.compare(runs).rows["full.decode"].compiled_ratios == [4]


def test_without_a_compiled_kvcore_its_columns_are_empty() -> None:
    run = a_run(6, 2)
    for name in compare.COMPILED:
        del run[name]
    compared = comparison.compare([run])
    assert compared.compiled_geometric_mean is None
    assert "| 3.00 |  |  |  | 10.0 |" in comparison.markdown_table(compared)
    assert "geometric mean of these" in comparison.text_table(compared)


def test_a_number_has_three_digits_and_no_exponent() -> None:
    assert [report.number(value) for value in (0.1234, 1.234, 12.34, 1234.5)] == ["0.123", "1.23", "12.3", "1,234"]


def test_a_section_of_the_page_is_replaced_and_the_rest_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n", "utf-8")
    report.update_section("x", "new", page)
    report.update_section("x", "newer", page)
    assert page.read_text("utf-8") == "a\n<!-- x: begin -->\n\nnewer\n\n<!-- x: end -->\nb\n"
    with pytest.raises(ValueError, match="y: begin"):
        report.update_section("y", "new", page)


def test_the_page_has_the_sections_that_are_generated() -> None:
    text = report.PAGE.read_text("utf-8")
    for name in ("comparison", "scaling"):
        assert f"<!-- {name}: begin -->" in text
        assert f"<!-- {name}: end -->" in text


def scaling_results() -> dict[str, Any]:
    """Everything costs the same at both places, but vLLM's quiet step grows eightfold with the groups."""
    kvcore: dict[str, list[dict[str, float]]] = {}
    for plot in scaling.PLOTS.values():
        for series in plot.series:
            operations = [*plot.operations, "decode_at_once"]
            kvcore[series] = [{"at": at, **dict.fromkeys(operations, 1e-6)} for at in (1, 8)]
    vllm = copy.deepcopy(kvcore)
    vllm["groups"][1]["quiet_step"] = 8e-6
    about = {"machine": {"processor": "p", "system": "s"}, "repetitions": 3, "clock": "wall"}
    return {**about, "kvcore": {"series": kvcore, "python": "3"}, "vLLM": {"series": vllm}}


def test_what_grows_for_one_and_not_for_the_other_is_said_with_the_figure() -> None:
    assert list(scaling.only_one_grows(scaling_results())) == [
        "the same, inside the last block, from 1 to 8 KV cache groups: vLLM's cost grows by 8.0, kvcore's by 1.0"
    ]


def test_the_scaling_section_names_a_figure_for_each_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = scaling_results()
    scaling.draw(results, tmp_path)
    text = scaling.section(results)
    for name in scaling.PLOTS:
        assert f"assets/bench/scaling_{name}.svg" in text
        assert (tmp_path / f"scaling_{name}.svg").stat().st_size > 0


def test_the_comparison_is_drawn(tmp_path: Path) -> None:
    figures = pytest.importorskip("tests.bench.figures", reason="matplotlib", exc_type=ModuleNotFoundError)
    figures.comparison_figure(comparison.compare([a_run(6, 2)]), tmp_path / "bars.svg")
    assert "geometric mean 3.0" in (tmp_path / "bars.svg").read_text("utf-8")


def test_a_call_is_timed_without_collections_and_the_collector_is_on_again_after_an_error() -> None:
    seconds, enabled = timed(gc.isenabled)
    assert seconds >= 0
    assert not enabled
    with pytest.raises(ZeroDivisionError):
        timed(lambda: 1 / 0)
    assert gc.isenabled()


def test_a_workload_that_finds_something_else_each_time_is_refused() -> None:
    answers = iter([1, 2])
    workload = WORKLOADS[0].__class__("odd", "odd", "ms", 1e-3, 1, lambda adapter, groups: lambda: next(answers))
    with pytest.raises(RuntimeError, match=r"full\.odd found 2 tokens, and 1 before"):
        measure(None, [workload], ALL_GROUPS[:1], repetitions=2)  # type: ignore[arg-type]
