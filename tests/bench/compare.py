"""Measures kvcore and vLLM on the same workloads, in alternating processes, and prints how they compare.

A ratio is vLLM's time divided by kvcore's. Each run gives one, from the medians of two processes that ran one after the
other (for the lines beside the mean, a few later); the table shows the median over the runs, and the least and the
most. Times are medians over the runs.

Exits with 1 if the two did not find the same tokens in their caches.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.bench import comparison, peer, report

KVCORE = {
    "raw": ["--hash", "sha256_raw", "--only", "hash32k"],
    "same_hash": ["--hash", "sha256", "--only", "hash32k"],
    "unverified": ["--no-verify", "--only", "warm_lookup32k"],
    "kvcore": [],
}
"""What is measured of kvcore, by name, and the options of its script."""

COMPILED = {comparison.compiled(side): side for side in reversed(KVCORE)}
"""The same once more, where it was built compiled."""

SIDES = [*KVCORE, "vllm", *COMPILED]
"""All that is measured, in this order."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all sides as often as asked; every other time in the opposite order."""
    python = peer.python_of(args)
    options = ["--reps", str(args.reps), "--clock", args.clock]
    sides = list(SIDES)
    if not args.compiled_dir.exists():
        peer.progress(f"no compiled kvcore in {args.compiled_dir}, so none is measured; to build it: make compiled")
        sides = [side for side in sides if side not in COMPILED]
    elif not _same_source(args.compiled_dir, peer.ROOT):
        sys.exit(f"kvcore in {args.compiled_dir} was compiled from other source than this: make compiled")
    runs = []
    for number in range(1, args.runs + 1):
        run = {}
        for side in sides if number % 2 else sides[::-1]:
            peer.progress(f"run {number} of {args.runs}: {side}")
            if side == "vllm":
                run[side] = peer.run_vllm(python, options)
            else:
                installed = args.compiled_dir if side in COMPILED else peer.ROOT
                run[side] = peer.run_kvcore([*options, *KVCORE[COMPILED.get(side, side)]], installed=installed)
                if side in COMPILED and not run[side]["manager"]["compiled"]:
                    sys.exit(f"kvcore in {installed} is compiled for another Python than this: make compiled")
                if side not in COMPILED and run[side]["manager"]["compiled"]:
                    sys.exit(f"compiled modules lie among the sources in {installed}/kvcore: make clean")
        runs.append(run)
    return {"machine": report.machine(), "repetitions": args.reps, "runs": runs}


def _same_source(one: Path, other: Path) -> bool:
    """Whether two folders hold the same kvcore, compiled or not."""
    texts = [
        {
            path.relative_to(folder): path.read_bytes()
            for pattern in ("*.py", "*.c", "*.h")
            for path in folder.glob(f"kvcore/**/{pattern}")
        }
        for folder in (one, other)
    ]
    return texts[0] == texts[1]


def section(results: dict[str, Any], compared: comparison.Comparison) -> str:
    """The generated part of the documentation's page."""
    runs, machine = results["runs"], results["machine"]
    ours, theirs = runs[0]["kvcore"], runs[0]["vllm"]
    return "\n".join(
        [
            "![Times of vLLM divided by times of kvcore, by workload](assets/bench/comparison.svg)",
            "",
            comparison.markdown_table(compared),
            "",
            f"kvcore {ours['manager']['version']} with `{ours['manager']['hash']}`, hits verified; vLLM "
            f"{theirs['manager']['version']} with `{theirs['manager']['hash']}`, its default. Python {ours['python']}, "
            f"{machine['processor']}, {machine['system']}. Runs: {len(runs)}; repetitions in each: "
            f"{results['repetitions']}; clock: {ours['clock']}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer.add_arguments(parser)
    parser.add_argument(
        "--compiled-dir", type=Path, default=peer.COMPILED_DIR, help="folder with a compiled kvcore (make compiled)"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs side by side (default: 3)")
    parser.add_argument("--reps", type=int, default=5, help="repetitions in each process, of which the median counts")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a busy machine")
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="show results measured before")
    parser.add_argument("--out", type=Path, default=report.ROOT / report.OUT, help="folder for the results")
    parser.add_argument("--update-docs", action="store_true", help="put table and figure into docs/performance.md")
    args = parser.parse_args()

    results = json.loads(args.source.read_text("utf-8")) if args.source else measure(args)
    report.write_json(args.out / "comparison.json", results)
    try:
        compared = comparison.compare(results["runs"])
    except comparison.HitsDiffer as error:
        sys.exit(str(error))
    print(comparison.text_table(compared))

    from tests.bench import figures

    figures.comparison_figure(compared, args.out / "comparison.svg")
    if args.update_docs:
        figures.comparison_figure(compared, report.ASSETS / "comparison.svg")
        report.write_json(report.ASSETS / "comparison.json", results)
        report.update_section("comparison", section(results, compared))
    peer.progress(f"results and figure: {args.out}")


if __name__ == "__main__":
    main()
