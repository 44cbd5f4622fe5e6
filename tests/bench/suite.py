"""The command line that every implementation's script has: runs one suite and prints one JSON object.

Only the standard library is used here, since this module runs in a peer's interpreter too.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Callable, Iterable
from typing import Any

from tests.bench import gc_pause, profile_tables, scaling_series
from tests.bench.workloads import ALL_GROUPS, CLOCKS, WARM_PROMPT, WORKLOADS, Adapter, Workload, measure

MakeAdapter = Callable[[argparse.Namespace], Adapter]


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--suite", choices=["workloads", "scaling", "profile", "gc"], default="workloads")
    parser.add_argument("--reps", type=int, default=5, help="repetitions; the median counts")
    parser.add_argument("--only", action="append", metavar="NAME", help="this workload or series only; may be repeated")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a busy machine")
    parser.add_argument("--quick", action="store_true", help="scaling: small sizes only, to see that it works")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="gc: size of the pool")
    parser.add_argument("--remedy", choices=list(gc_pause.REMEDIES), default="nothing", help="gc: what to do about it")
    parser.add_argument("--lines", type=int, default=20, help="profile: lines of each table")
    return parser


def run(args: argparse.Namespace, make_adapter: MakeAdapter, own_workloads: Iterable[Workload] = ()) -> None:
    """Runs the suite that ``args`` ask for and prints its result.

    Args:
        args: From :func:`argument_parser`.
        make_adapter: Makes the implementation to measure.
        own_workloads: Workloads that only this implementation can run.
    """
    workloads = [*WORKLOADS, WARM_PROMPT, *own_workloads]
    names = list(scaling_series.SERIES) if args.suite == "scaling" else [workload.name for workload in workloads]
    if unknown := set(args.only or ()).difference(names):
        sys.exit(f"no {' or '.join(sorted(unknown))} here; there are: {', '.join(names)}")

    adapter = make_adapter(args)
    # What was imported does not change any more: nothing is gained by looking at it in every collection.
    gc.collect()
    gc.freeze()
    chosen = [workload for workload in workloads if not args.only or workload.name in args.only]
    result: Any
    if args.suite == "workloads":
        timed = measure(adapter, chosen, repetitions=args.reps, clock=CLOCKS[args.clock])
        result = {
            "medians": {key: result.median for key, result in timed.items()},
            "values": {key: result.values for key, result in timed.items()},
            "hit_tokens": {key: hits for key, (_, hits) in timed.items() if hits is not None},
        }
    elif args.suite == "scaling":
        result = scaling_series.measure(
            adapter, args.only, repetitions=args.reps, clock=CLOCKS[args.clock], quick=args.quick
        )
    elif args.suite == "gc":
        result = gc_pause.measure(adapter, args.remedy, args.blocks)
    else:
        result = profile_tables.tables(adapter, chosen, ALL_GROUPS, args.lines)
    about = {
        "name": adapter.name,
        "version": adapter.version,
        "hash": adapter.hash_algorithm,
        "compiled": adapter.compiled,
    }
    json.dump({"manager": about, "python": platform.python_version(), "clock": args.clock, **result}, sys.stdout)
    print()
