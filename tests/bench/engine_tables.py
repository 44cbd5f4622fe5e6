"""From what ``bench_engine.py`` measured to its tables: speeds and ratios, decode steps, and whether tokens agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Any

from tests.bench.engine_contenders import Served
from tests.bench.report import number

Results = Mapping[str, Any]
"""As ``bench_engine.py`` writes them."""

TITLES = {
    "generate_batch_defaults": "`generate_batch` of transformers, by its defaults",
    "generate_batch_defaults_call": "the same, its set-up counted: by its defaults",
    "generate_batch": "`generate_batch` of transformers, its cache sized for the work",
    "generate_batch_call": "the same, its set-up counted: its cache sized",
    "generate": "`generate` of transformers, one by one",
    "off": "engine, cache off",
    "cold": "engine, cold",
    "warm": "engine, warm",
    "cold_bfloat16": "engine in bfloat16, cold",
    "warm_bfloat16": "engine in bfloat16, warm",
}
"""The ways to serve the prompts, in the order of the table."""

REFERENCE = "generate"
EQUAL = ("off", "cold", "warm")
"""Whose tokens must be those of the reference."""

OPTIONAL = ("generate_batch_defaults", "generate_batch_defaults_call", "generate_batch", "generate_batch_call")
"""What may be missing: where memory is too small for it, or it takes too long."""

AIMS = (
    ("cold", "generate_batch_defaults", 12.0, 15.0),
    ("cold", "generate_batch", 12.0, 15.0),
    ("cold", "generate", 5.0, 7.0),
    ("warm", "cold", 1.5, None),
)
"""How many times as many tokens a second the first should give as the second: at least, and aimed at."""


def differences(results: Results) -> list[str]:
    """Sentences: whose tokens are not those that they must be; none if all is well."""
    expected = results["served"][REFERENCE][0]["tokens"]
    return [
        f"{TITLES[name]}, repetition {repetition}: {len(expected) - same} of {len(expected)} requests differ from "
        f"{TITLES[REFERENCE]}"
        for name in EQUAL
        for repetition, one in enumerate(results["served"][name], 1)
        if (same := _num_same(one["tokens"], expected)) < len(expected)
    ]


def section(results: Results) -> str:
    """The generated part of the documentation's page."""
    prompts, machine, versions = results["prompt_tokens"], results["machine"], results["versions"]
    return "\n".join(
        [
            f"{len(prompts)} requests of {min(prompts)} to {max(prompts)} tokens, the first {results['shared_tokens']} "
            f"the same; {results['max_tokens']} new tokens each.",
            "",
            *_speeds(results),
            "",
            *_aims(results),
            "",
            "Milliseconds of one decode step:",
            "",
            *_decode_steps(results),
            "",
            f"{results['model']}, float32 where nothing else is said; {results['threads']} threads. Engine, cold and "
            f"warm: the median of {len(results['served']['cold'])} repetitions; the other lines: one. torch "
            f"{versions['torch']}, transformers {versions['transformers']}, {machine['processor']}, "
            f"{machine['system']}.",
        ]
    )


def _typical(results: Results, name: str) -> Served:
    """The repetition whose time is the median, the later of two."""
    served = sorted((Served(**one) for one in results["served"][name]), key=lambda one: one.seconds)
    return served[len(served) // 2]


def _speed(results: Results, name: str) -> float:
    return _typical(results, name).tokens_per_second


def _is_there(results: Results, name: str) -> bool:
    return name not in OPTIONAL or name in results["served"]


def _ratio(results: Results, ours: str, other: str) -> str:
    """How many times as fast, where the other was measured."""
    return number(_speed(results, ours) / _speed(results, other)) if _is_there(results, other) else ""


def _num_same(tokens: list[list[int]], expected: list[list[int]]) -> int:
    return sum(own == other for own, other in zip(tokens, expected, strict=True))


def _speeds(results: Results) -> Iterator[str]:
    """A line for each way to serve the prompts."""
    yield (
        "| | tokens/s | to `generate_batch`, by its defaults | to `generate_batch`, sized | to `generate` | "
        "first token, mean | first token, last | cached | same outputs |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    expected = _typical(results, REFERENCE).tokens
    for name, title in TITLES.items():
        if not _is_there(results, name):
            continue
        served = _typical(results, name)
        cached = served.num_cached_tokens
        cells = [
            title,
            number(served.tokens_per_second),
            _ratio(results, name, "generate_batch_defaults"),
            _ratio(results, name, "generate_batch"),
            _ratio(results, name, "generate"),
            f"{number(mean(served.first_tokens))} s",
            f"{number(max(served.first_tokens))} s",
            "" if cached is None else f"{cached / sum(results['prompt_tokens']):.1%}",
            f"{_num_same(served.tokens, expected)} of {len(expected)}",
        ]
        yield f"| {' | '.join(cells)} |"


def _aims(results: Results) -> Iterator[str]:
    """Sentences: ratios with what was aimed at, and what bounds the last of them."""
    for name, reason in results.get("not_served", {}).items():
        yield f"- {TITLES[name]}, could not be measured: {reason}"
    for ours, other, least, aim in AIMS:
        if not _is_there(results, other):
            continue
        ratio = _ratio(results, ours, other)
        wanted = f"wanted: {least:g}" if aim is None else f"wanted: {least:g}, aimed at: {aim:g}"
        yield f"- {TITLES[ours]}, to {TITLES[other]}: **{ratio}** ({wanted})"
    cold, warm = _typical(results, "cold"), _typical(results, "warm")
    yield (
        f"- Cold, all first tokens are there after {number(max(cold.first_tokens))} s, and the "
        f"{results['max_tokens'] - 1} decode steps that follow take {number(cold.step_seconds * 1e3)} ms each; warm, "
        f"{number(max(warm.first_tokens))} s and {number(warm.step_seconds * 1e3)} ms. The cache saves of the former "
        f"alone: if it saved all of it, warm would be {number(cold.seconds / (cold.seconds - max(cold.first_tokens)))} "
        "times as fast as cold."
    )


def _decode_steps(results: Results) -> Iterator[str]:
    """A line for each number of tokens."""
    decode: Mapping[str, Mapping[str, float]] = results["decode"]
    yield f"| tokens in each context | {' | '.join(decode)} |"
    yield "|--:|" + "--:|" * len(decode)
    for context in next(iter(decode.values())):
        cells = [number(series[context]) if context in series else "" for series in decode.values()]
        yield f"| {int(context):,} | {' | '.join(cells)} |"
