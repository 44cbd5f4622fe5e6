"""Where the time of each workload goes: cProfile tables of kvcore and, given its interpreter, of vLLM.

The profiler makes calls dearer than they are: read the tables for what is called how often, the benchmarks for time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

from tests.bench.workloads import Adapter, Groups, Workload


def tables(
    adapter: Adapter, workloads: Iterable[Workload], all_groups: Iterable[Groups], lines: int
) -> dict[str, dict[str, str]]:
    """A table for each workload and set of groups, functions with the most time of their own first."""
    result = {}
    for groups in all_groups:
        for workload in workloads:
            workload.prepare(adapter, groups)()  # the interpreter specializes what runs twice
            call = workload.prepare(adapter, groups)
            profiler = cProfile.Profile()
            profiler.runcall(call)
            result[f"{groups.name}.{workload.name}"] = _table(profiler, lines)
    return {"tables": result}


def _table(profiler: cProfile.Profile, lines: int) -> str:
    # The tables of pstats show milliseconds; here most calls take less than one.
    stats: Any = pstats.Stats(profiler)
    rows = sorted(((*times, *place) for place, (_, *times, _) in stats.stats.items()), key=lambda row: -row[1])
    text = [f"{stats.total_calls:,} calls, {1e6 * stats.total_tt:,.0f} us; own and cumulated microseconds"]
    for calls, own, cumulated, file, line, function in rows[:lines]:
        where = function if file == "~" else f"{PurePath(file).name}:{line} {function}"
        text.append(f"{calls:9,} {1e6 * own:10,.0f} {1e6 * cumulated:10,.0f}  {where}")
    return "\n".join(text)


def main() -> None:
    from tests.bench import peer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    peer.add_arguments(parser)
    parser.add_argument("--no-peer", action="store_true", help="profile kvcore only")
    parser.add_argument("--only", action="append", metavar="NAME", help="this workload only; may be repeated")
    parser.add_argument("--lines", type=int, default=15, help="lines of each table")
    parser.add_argument("--out", type=Path, help="write the tables to this file instead of printing them")
    args = parser.parse_args()

    options = ["--suite", "profile", "--lines", str(args.lines)]
    for name in args.only or ():
        options += ["--only", name]
    sides = [peer.run_kvcore(options)]
    if not args.no_peer:
        sides.append(peer.run_vllm(peer.python_of(args), options))
    text = "\n".join(
        f"==== {key}, {side['manager']['name']} {side['manager']['version']}\n{side['tables'][key]}\n"
        for key in sides[0]["tables"]
        for side in sides
        if key in side["tables"]
    )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
