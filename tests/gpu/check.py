"""Checks attention backends and engine on a GPU, measures them, and prints a Markdown report: one command, minutes.

Each part runs in processes of its own and has its share of the time; what does not fit is reported as not run. A line a
measurement goes to the standard output as it comes, progress to the standard error, and the JSON file is written anew
after each, so that a run that is cut off still tells what it found.

Exits with 1 if a backend or a model is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tests.bench.report import ROOT, update_section, write_json
from tests.gpu import report
from tests.gpu.machine import machine, versions
from tests.gpu.processes import Worker, run_part
from tests.gpu.work import Record, Settings

PAGE = ROOT / "docs" / "gpu.md"
KEPT = ROOT / "docs" / "assets" / "gpu" / "check.json"
"""What the page was made from."""

OUT = ROOT / "artifacts" / "gpu" / "check.json"
BACKENDS = "triton,flash,torch"
GRACE = 10.0
"""Seconds kept for what comes after the last part."""


@dataclass(frozen=True)
class Part:
    """A module of this package that measures.

    Args:
        name: Of the module.
        weight: Its share of the time that is left when it begins is its weight among those of the parts that are left.
        workers: Processes that share its measurements on a GPU. Those that measure times have the device to themselves.
    """

    name: str
    weight: float
    workers: int = 1


PARTS = (
    # Weighty because all processes import what they need meanwhile; what it leaves goes to the others.
    Part("availability", 5),
    # Most of their time is spent compiling kernels.
    Part("correctness", 5, workers=12),
    Part("end_to_end", 4, workers=4),
    Part("decode", 3),
    Part("prefill", 2),
    Part("engines", 4),
)


def main() -> None:
    args = _arguments()
    if args.source:
        results = json.loads(args.source.read_text("utf-8"))
    else:
        # Before any process imports Triton, which looks at it then.
        if args.device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
        else:
            os.environ.pop("TRITON_INTERPRET", None)
        settings = Settings(args.device, args.backend, args.tiny)
        results = check(settings, minutes=args.minutes, only=args.only, path=args.json)
    text = report.section(results)
    print(f"\n{text}", flush=True)
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(text, "utf-8")
    if args.update_docs:
        update_section("gpu", text, PAGE)
        write_json(KEPT, results)
    sys.exit(1 if report.wrong(results) else 0)


def check(settings: Settings, *, minutes: float, only: Sequence[str], path: Path) -> dict[str, Any]:
    """Runs the parts.

    Args:
        settings: What to check.
        minutes: For everything.
        only: Names of parts; the first part always runs.
        path: The JSON file.

    Returns:
        As the JSON file has it.
    """
    start = time.monotonic()
    chosen = [part for part in PARTS if part.name in only or part is PARTS[0]]
    # Importing takes seconds, and costs nothing while other parts measure.
    workers = {
        part.name: [Worker(part.name) for _ in range(part.workers if settings.is_timed else 1)] for part in chosen
    }
    results: dict[str, Any] = {
        "settings": asdict(settings),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(settings.device),
        "versions": versions(),
        "minutes": minutes,
        "parts": {},
        "seconds": {},
    }
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(chosen))
        for i, part in enumerate(chosen):
            progress.update(task, description=part.name)
            left = 60 * minutes - GRACE - (time.monotonic() - start)
            seconds = max(0.0, left) * part.weight / sum(later.weight for later in chosen[i:])
            began = time.monotonic()
            found = results["parts"][part.name] = []
            for record in run_part(workers[part.name], settings, seconds):
                found.append(record)
                print(line(part.name, record), flush=True)
                write_json(path, results)
            results["seconds"][part.name] = time.monotonic() - began
            if part is PARTS[0]:
                available = tuple(record["backend"] for record in found if record["status"] == "ok")
                settings = replace(settings, backends=available)
            progress.advance(task)
    results["total_seconds"] = time.monotonic() - start
    write_json(path, results)
    console.print(f"{results['total_seconds']:.0f} s; results: {path}")
    return results


def line(part: str, record: Record) -> str:
    """What is said of a measurement as soon as it is there. A traceback is shown whole."""
    took = f" [{record['took']:.1f} s]" if "took" in record else ""
    text = f"{part}: {record['status']}: {record['name']}: {record.get('note', '')}{took}"
    return text + (f"\n{record['traceback']}" if "traceback" in record else "")


def _names(text: str) -> tuple[str, ...]:
    """Names with commas between them, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"expected names with commas between them, such as {BACKENDS}, got {text!r}")
    return names


def positive(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="default: %(default)s")
    parser.add_argument(
        "--backend", type=_names, default=BACKENDS, help="names, with commas between them (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that everything runs, as on a CPU")
    parser.add_argument("--minutes", type=positive, default=8.0, help="for everything (default: %(default)s)")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="parts to run (default: all)")
    parser.add_argument("--json", type=Path, default=OUT, metavar="PATH", help="where results go")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="where the report goes, besides standard output")
    parser.add_argument("--from-json", dest="source", type=Path, metavar="PATH", help="report results measured before")
    parser.add_argument(
        "--update-docs", action="store_true", help="put the report into docs/gpu.md, and keep the results"
    )
    args = parser.parse_args()
    if args.device == "cpu" and not args.tiny and not args.source:
        parser.error("on a CPU only --tiny ends in reasonable time")
    if args.source and not args.source.is_file():
        parser.error(f"--from-json: there is no file {str(args.source)!r}")
    return args


if __name__ == "__main__":
    main()
