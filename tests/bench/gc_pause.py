"""What a large pool costs in garbage collections, and what helps: kvcore and, given its interpreter, vLLM.

Each variant runs in a process of its own: it makes a manager, decodes with the collector on, lets the application
around it keep more and more objects, and then collects everything once by hand. Collections are timed by
``gc.callbacks``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.bench.workloads import (
    DECODING_PROMPT_TOKENS,
    DECODING_REQUESTS,
    DECODING_STEPS,
    FULL,
    Adapter,
    Manager,
    start_decoding,
)

APPLICATION_OBJECTS = 400_000

Make = Callable[[], Any]

Pauses = dict[int, list[float]]
"""Seconds of each collection, by generation."""


def nothing(make: Make) -> Any:
    """The pool as it is."""
    return make()


def paused(make: Make) -> Any:
    """The collector is off while the manager is made."""
    gc.disable()
    try:
        return make()
    finally:
        gc.enable()


def promoted(make: Make) -> Any:
    """The same; then freezing and unfreezing moves all objects to the oldest generation, without a look at them."""
    gc.disable()
    try:
        manager = make()
        gc.freeze()
        gc.unfreeze()
        return manager
    finally:
        gc.enable()


def frozen(make: Make) -> Any:
    """The collector is off while the manager is made; then all that exists is left out of later collections."""
    gc.disable()
    try:
        manager = make()
        gc.freeze()
        return manager
    finally:
        gc.enable()


def untracked(make: Make) -> Any:
    """The blocks alone are left out, through CPython's C interface. Cycles through them are then never collected."""
    call = ctypes.pythonapi.PyObject_GC_UnTrack
    call.argtypes = [ctypes.py_object]
    call.restype = None
    manager = paused(make)
    deque(map(call, manager.block_pool.blocks), maxlen=0)
    return manager


REMEDIES: dict[str, Callable[[Make], Any]] = {
    function.__name__: function for function in (nothing, paused, promoted, frozen, untracked)
}
"""Ways to make a manager, by name."""


class Watch:
    """Times collections from when it is made until :meth:`stop`."""

    def __init__(self) -> None:
        self.pauses: Pauses = {0: [], 1: [], 2: []}
        self._start = 0.0
        gc.callbacks.append(self._called)

    def stop(self) -> Pauses:
        gc.callbacks.remove(self._called)
        return self.pauses

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        else:
            self.pauses[info["generation"]].append(time.perf_counter() - self._start)


def measure(adapter: Adapter, remedy: str, num_blocks: int) -> dict[str, Any]:
    """Times the collections of one variant.

    Args:
        adapter: What makes the pool.
        remedy: A name of :data:`REMEDIES`.
        num_blocks: Size of the pool.

    Returns:
        ``pauses``: for each phase, seconds of every collection by generation; ``seconds``: of each phase.
    """
    pauses, seconds = {}, {}
    manager: Manager | None = None
    kept: list[Any] = []

    def make() -> None:
        nonlocal manager
        manager = REMEDIES[remedy](lambda: adapter.make_manager(FULL, num_blocks))

    def decode() -> None:
        prompts = [[i + 1] * DECODING_PROMPT_TOKENS for i in range(DECODING_REQUESTS)]
        _, requests = start_decoding(adapter, FULL, prompts=prompts, manager=manager)
        for step in range(DECODING_STEPS):
            for request in requests:
                manager.allocate_slots(request, 1)  # type: ignore[union-attr]
                request.num_computed_tokens += 1
                request.append_output_token_ids(7 + step)

    phases = {
        "make the manager": make,
        "decode": decode,
        f"keep {APPLICATION_OBJECTS:,} objects": lambda: kept.extend([] for _ in range(APPLICATION_OBJECTS)),
        "collect everything": gc.collect,
    }
    for phase, run in phases.items():
        watch = Watch()
        start = time.perf_counter()
        run()
        seconds[phase] = time.perf_counter() - start
        pauses[phase] = watch.stop()
    return {"remedy": remedy, "seconds": seconds, "pauses": pauses}


def _line(phase: str, seconds: float, pauses: dict[str, list[float]]) -> str:
    counts = " ".join(f"{len(values):5}" for values in pauses.values())
    everything = [value for values in pauses.values() for value in values]
    total, longest = sum(everything), max(everything, default=0.0)
    return f"  {phase:22} {1e3 * seconds:9.1f} {1e3 * total:9.1f} {1e3 * longest:9.2f}   {counts}"


def main() -> None:
    from tests.bench import peer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer.add_arguments(parser)
    parser.add_argument("--no-peer", action="store_true", help="measure kvcore only")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="size of the pool (default: 1000000)")
    parser.add_argument("--remedy", action="append", choices=list(REMEDIES), help="this variant only; may be repeated")
    args = parser.parse_args()

    python = None if args.no_peer else peer.python_of(args)
    print(f"{args.blocks:,} blocks; milliseconds; collections of generations 0, 1 and 2")
    for remedy in args.remedy or REMEDIES:
        print(f"\n{remedy}: {REMEDIES[remedy].__doc__}")
        options = ["--suite", "gc", "--blocks", str(args.blocks), "--remedy", remedy]
        for side in [peer.run_kvcore(options), *([peer.run_vllm(python, options)] if python else [])]:
            print(f"  {side['manager']['name']:22} {'took':>9} {'in gc':>9} {'longest':>9}    gen 0 gen 1 gen 2")
            for phase, seconds in side["seconds"].items():
                print(_line(phase, seconds, side["pauses"][phase]))


if __name__ == "__main__":
    main()
