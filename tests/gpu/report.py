"""From what ``check.py`` found to its Markdown report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from tests.bench.report import number

Record = Mapping[str, Any]
Results = Mapping[str, Any]
"""As ``check.py`` writes them."""

MUST_BE_RIGHT = ("correctness", "end_to_end")
"""Parts that compare with a reference. Of the others, only what they call a failure counts as wrong."""

WANTED_SHARE = 0.7
WANTED_AT = (64, 8192)
"""Of the copy's bandwidth, for decode attention of so many sequences and tokens."""


def wrong(results: Results) -> list[str]:
    """Names of checks that failed.

    In the parts that compare also of those that broke off, and whether nothing at all was compared.
    """
    parts = results["parts"]
    found = [
        f"{part}: {record['name']}"
        for part, records in parts.items()
        for record in records
        if record["status"] == "failed" or (record["status"] == "error" and part in MUST_BE_RIGHT)
    ]
    for part in MUST_BE_RIGHT:
        if part in parts and not any(record["status"] == "ok" and "backend" in record for record in parts[part]):
            found.append(f"{part}: nothing was compared")
    return found


def section(results: Results) -> str:
    """The generated part of the documentation's page."""
    parts = results["parts"]
    writers = {
        "availability": ("Backends", _backends),
        "correctness": ("Attention beside the reference", _correctness),
        "end_to_end": ("Models beside transformers", _models),
        "decode": ("Decode attention", _decode),
        "prefill": ("Prefill attention", _prefill),
        "engines": ("The whole engine", _engines),
    }
    lines = [_made_on(results), ""]
    if results["settings"]["device"] == "cpu":
        lines += ["Run on a CPU, at sizes that show that everything runs: no times.", ""]
    for part, (title, writer) in writers.items():
        if part in parts:
            lines += [f"### {title}", "", *writer(parts[part]), ""]
    lines += _not_done(parts)
    if found := wrong(results):
        lines += ["", f"**Wrong: {len(found)}.** {'; '.join(found)}"]
    return "\n".join(lines).strip() + "\n"


def _made_on(results: Results) -> str:
    machine, versions = results["machine"], results["versions"]
    where = f"{machine['processor']}, {machine['system']}"
    if "card" in machine:
        where = f"{machine['card']} ({machine['memory'] / 2**30:.0f} GiB), driver {machine['driver']}, {where}"
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    took = f", in {results['total_seconds'] / 60:.1f} minutes" if "total_seconds" in results else " (cut off)"
    return f"{where}; {told}. {results['date']}{took}."


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """A Markdown table whose first ``left`` columns are text."""
    if not rows:
        yield "Nothing was measured."
        return
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * left + "--:|" * (len(titles) - left)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"


def _backends(records: Sequence[Record]) -> Iterator[str]:
    rows = [
        (
            record["name"],
            "yes" if record["status"] == "ok" else "no",
            str(record.get("page", "")),
            "yes" if record.get("graphs") else "no" if "graphs" in record else "",
            record.get("note", ""),
        )
        for record in records
    ]
    yield from _table(("backend", "can be used", "page", "CUDA graphs", ""), rows, left=5)


def _correctness(records: Sequence[Record]) -> Iterator[str]:
    """A line for each backend and element type; families that failed are told below."""
    rows = []
    families = [record for record in records if "cases" in record]

    def key(record: Record) -> tuple[str, str]:
        return record["backend"], record["dtype"]

    for (backend, dtype), group in groupby(sorted(families, key=key), key=key):
        some = list(group)
        measured = [record for record in some if "whole" in record]
        largest = {
            name: max((record[name] for record in measured), default=float("nan"))
            for name in ("whole", "vector", "largest")
        }
        bound = some[0]["allowed"]
        rows.append(
            (
                backend,
                dtype,
                str(sum(record["cases"] for record in some)),
                str(sum(len(record["failures"]) for record in some)),
                str(sum(record["refused"] for record in some)),
                f"{largest['whole']:.1e} ({bound['whole']:.0e})",
                f"{largest['vector']:.1e} ({bound['vector']:.1e})",
                f"{largest['largest']:.1e}",
            )
        )
    titles = (
        "backend", "element type", "cases", "wrong", "refused", "relative error (allowed)", "of one vector (allowed)",
        "largest difference",
    )  # fmt: skip
    yield from _table(titles, rows, left=2)
    refusals = sorted({text for record in families for text in record["refusals"]})
    if refusals:
        yield from ("", "Refused:", "", *(f"- {text}" for text in refusals))


def _models(records: Sequence[Record]) -> Iterator[str]:
    rows = []
    for record in records:
        if "model" not in record or "dtype" not in record:
            continue
        is_exact = record["dtype"] == "float32"
        rows.append(
            (
                record["model"],
                record["backend"],
                "yes" if record["graphs"] else "no",
                record["dtype"],
                "right" if record["status"] == "ok" else "wrong",
                f"{record['same']} of {record['of']} outputs the same"
                if is_exact
                else f"{record['error']:.1e} from float32; transformers {record['error_of_transformers']:.1e}",
            )
        )
    yield from _table(("model", "backend", "CUDA graphs", "element type", "", ""), rows, left=6)


def _decode(records: Sequence[Record]) -> Iterator[str]:
    measured = [record for record in records if "bytes" in record]
    rows = []
    for record in measured:
        times = record.get("seconds", {})
        rows.append(
            (
                record["backend"],
                str(record["page"]),
                f"{record['batch']:,} x {record['context']:,}",
                "" if record["window"] is None else f"{record['window']:,}",
                number(record["bytes"] / 2**20),
                _microseconds(times.get("eager")),
                _microseconds(times.get("graph")),
                f"{record['bandwidth'] / 1e9:,.0f}" if "bandwidth" in record else "",
                f"{record['share']:.0%}" if "share" in record else "",
            )
        )
    titles = ("backend", "page", "sequences x tokens", "window", "MiB", "µs", "µs in a graph", "GB/s", "of a copy")
    yield from _table(titles, rows)
    copies = [record["copy_bandwidth"] for record in measured if "copy_bandwidth" in record]
    if copies:
        yield from ("", f"A copy on the device reads and writes {max(copies) / 1e9:,.0f} GB/s together.")
    shares = [
        record["share"]
        for record in measured
        if "share" in record and record["window"] is None and (record["batch"], record["context"]) == WANTED_AT
    ]
    if shares:
        at = f"{WANTED_AT[0]} x {WANTED_AT[1]:,}"
        yield from ("", f"The best at {at} reads at **{max(shares):.0%}** of a copy (aimed at: {WANTED_SHARE:.0%}).")
    savings = [_saving(record, measured) for record in measured]
    told = [text for text in savings if text]
    if told:
        yield from ("", "What windows save:", "", *told)


def _saving(windowed: Record, records: Sequence[Record]) -> str | None:
    """A sentence about a shape with a window beside the same without; None if there is nothing to compare."""
    if windowed["window"] is None or "seconds" not in windowed:
        return None
    same = ("backend", "page", "batch", "context")
    for full in records:
        if full["window"] is None and "seconds" in full and all(full[key] == windowed[key] for key in same):
            times_faster = _seconds(full) / _seconds(windowed)
            times_fewer = full["bytes"] / windowed["bytes"]
            saved = (1 - 1 / times_faster) / (1 - 1 / times_fewer)
            return (
                f"- {windowed['backend']}, pages of {windowed['page']}: {number(times_faster)} times as fast, with "
                f"{number(times_fewer)} times fewer bytes: {saved:.0%} of the time that could be saved"
            )
    return None


def _seconds(record: Record) -> float:
    return record["seconds"].get("graph", record["seconds"]["eager"])


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else number(seconds * 1e6)


def _prefill(records: Sequence[Record]) -> Iterator[str]:
    rows = [
        (
            record["backend"],
            f"{record['new']:,}" + (f" after {record['past']:,}" if record["past"] else ""),
            "" if record["window"] is None else f"{record['window']:,}",
            number(record["seconds"] * 1e3) if "seconds" in record else "",
            number(record["flops_per_second"] / 1e12) if "seconds" in record else "",
        )
        for record in records
        if "flops" in record
    ]
    yield from _table(("backend", "tokens", "window", "ms", "TFLOP/s"), rows)


def _engines(records: Sequence[Record]) -> Iterator[str]:
    measured = [record for record in records if "way" in record]
    timed = [record for record in measured if "tokens_per_second" in record]
    counts = list(dict.fromkeys(count for record in timed for count in record["tokens_per_second"]))
    best = {
        count: max((r["tokens_per_second"][count] for r in timed if r["way"].startswith("transformers")), default=None)
        for count in counts
    }
    titles = ["", "CUDA graphs"]
    for count in counts:
        requests = "1 request" if count == "1" else f"{count} requests"
        titles += [f"tokens/s, {requests}", "to transformers"]
    rows = []
    for record in measured:
        row = [record["way"], {True: "yes", False: "no", None: ""}[record["graphs"]]]
        for count in counts:
            speed = record.get("tokens_per_second", {}).get(count)
            row += ["", ""] if speed is None else [number(speed), number(speed / best[count]) if best[count] else ""]
        rows.append(row)
    yield from _table(titles, rows, left=2)
    if timed:
        yield from ("", f"{timed[0]['prompt_tokens']} tokens of prompt, {timed[0]['new_tokens']} new ones.")


def _not_done(parts: Mapping[str, Sequence[Record]]) -> list[str]:
    """Everything that failed, broke off, was refused or left out, with its reason; equal ones together."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for part, records in parts.items():
        for record in records:
            status, is_told_above = record["status"], part in ("availability", "correctness")
            if status in ("failed", "error", "not run") or (status == "refused" and not is_told_above):
                reason = " ".join(str(record.get("note", "")).split())[:500]
                names.setdefault((part, status, reason), []).append(record["name"])
    found = [f"- {part}, {status}: {'; '.join(some)}. {reason}" for (part, status, reason), some in names.items()]
    return ["### Failed, refused or not run", "", *found] if found else []
