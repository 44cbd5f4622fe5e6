"""What a part of the check consists of: measurements that can fail, crash or be left out one by one.

A part is a module of this package with a function ``measurements(settings)``. It runs in processes of its own, so that
a kernel that reads where it must not, which ends all CUDA work of its process, costs one measurement.
"""

from __future__ import annotations

import gc
import importlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

Record = dict[str, Any]
"""What a measurement found, as JSON has it. ``status`` is one of :data:`STATUSES`, ``note`` a sentence or nothing."""

STATUSES = ("ok", "failed", "refused", "error", "not run")
"""Refused: the backend says that it cannot do this. Error: an exception, or the process died."""

SHARE_OF_TIME = 0.9
"""Of a part's time; after it no measurement begins."""


@dataclass(frozen=True)
class Settings:
    """What is checked.

    Args:
        device: "cuda" or "cpu".
        backends: Names of attention backends.
        tiny: Sizes that only show that everything runs.
    """

    device: str
    backends: tuple[str, ...]
    tiny: bool = False

    @property
    def is_timed(self) -> bool:
        """Times mean something: they are those of a GPU."""
        return self.device != "cpu"


@dataclass(frozen=True)
class Measurement:
    """One line of the report.

    Args:
        name: Different for each of a part.
        run: Measures. What it returns becomes the record; an exception becomes a record with the status "error".
    """

    name: str
    run: Callable[[], Record]


@dataclass(frozen=True)
class Order:
    """What a process is to do.

    Args:
        settings: For the part's ``measurements``.
        share: Which of ``num_shares`` equal shares of them.
        num_shares: Processes that work on the part.
        done: Names of measurements to leave out.
        seconds: Time until the process is ended.
    """

    settings: Settings
    share: int = 0
    num_shares: int = 1
    done: frozenset[str] = frozenset()
    seconds: float = float("inf")


def work(part: str, connection: Connection) -> None:
    """A process: imports the part at once, waits for an order, and sends what it finds.

    Sends ``("names", [...])``, then for each measurement ``("begin", name)`` and ``("record", record)``, then
    ``("end", "")``.
    """
    module = importlib.import_module(f"tests.gpu.{part}")
    try:
        order: Order = connection.recv()
    except EOFError:  # whoever would have given it is gone
        return
    start = time.monotonic()
    # The CPU's part is small, and a process that takes all cores takes them from the others.
    torch.set_num_threads(1 if order.settings.device == "cpu" else 2)
    # What is compared is compared in full float32.
    torch.set_float32_matmul_precision("highest")
    chosen = module.measurements(order.settings)[order.share :: order.num_shares]
    chosen = [measurement for measurement in chosen if measurement.name not in order.done]
    connection.send(("names", [measurement.name for measurement in chosen]))
    for measurement in chosen:
        if time.monotonic() - start > SHARE_OF_TIME * order.seconds:
            break
        connection.send(("begin", measurement.name))
        connection.send(("record", run(measurement)))
        if not _is_alive(order.settings.device):
            return  # without an end: another process takes over
    connection.send(("end", ""))


def run(measurement: Measurement) -> Record:
    """The record of a measurement, whatever happens."""
    start = time.perf_counter()
    record: Record = {"name": measurement.name, "status": "ok"}
    try:
        record |= measurement.run()
    except Exception as error:
        record |= {"status": "error", "note": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    record["took"] = time.perf_counter() - start
    gc.collect()
    return record


def _is_alive(device: str) -> bool:
    """CUDA can still be used; and what nobody holds is given back."""
    if device == "cpu":
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
