"""Times on a CUDA device: events, warm-up, median; and CUDA graphs, so that gaps between launches do not count."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import torch

Run = Callable[[], Any]

COPIED_BYTES = 2 << 30
"""Many times the L2 cache of any card."""


def median_seconds(run: Run, *, budget: float = 0.6, least: int = 5, most: int = 50) -> float:
    """Of one call of ``run``, on the current CUDA device.

    Args:
        run: Launches work; called twice before the clock starts.
        budget: Seconds that all timed calls may take together, as far as ``least`` lets them.
        least: Timed calls at least.
        most: Timed calls at most.
    """
    run()
    (first,) = _times(run, 1)
    return median(_times(run, max(least, min(most, int(budget / max(first, 1e-6))))))


def _times(run: Run, count: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda.synchronize()
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def captured(warm_up: Run, run: Run) -> Run:
    """``run`` as the replay of a CUDA graph.

    Args:
        warm_up: Called first, outside the graph: compiles what ``run`` needs.
        run: Called once, while it is captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@cache
def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy from the device to itself. Measured once in a process."""
    source = torch.randn(COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    # A card that was idle takes a while to raise its clocks.
    for _ in range(200):
        target.copy_(source)
    return 2 * COPIED_BYTES / median_seconds(lambda: target.copy_(source))
