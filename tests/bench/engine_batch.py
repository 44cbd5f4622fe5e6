"""``generate_batch`` of transformers in a process of its own, for what it does to the memory.

Run by ``bench_engine.py``. By its defaults the cache takes nine tenths of the machine's memory, whatever the work is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from runner.loader import find_model
from tests.bench import peer
from tests.bench.engine_contenders import Prompts, Served, by_generate, by_generate_batch

TIMEOUT = 300.0
"""Seconds that a process gets, its start and the loading of the model included."""


def in_a_process(
    model: str | None,
    prompts: Prompts,
    max_tokens: int,
    *,
    threads: int,
    by_defaults: bool,
    memory_gib: float | None = None,
) -> tuple[Served, Served] | str:
    """As :func:`~tests.bench.engine_contenders.by_generate_batch`, elsewhere; or why nothing came of it.

    Args:
        model: What ``find_model`` takes.
        prompts: Token ids.
        max_tokens: For each prompt.
        threads: That torch computes with.
        by_defaults: Leave the size of the cache to transformers.
        memory_gib: What the process may take beyond the model; None: what is free.
    """
    task = {
        "model": model,
        "prompts": prompts,
        "max_tokens": max_tokens,
        "threads": threads,
        "by_defaults": by_defaults,
        "memory_gib": memory_gib,
    }
    command = [sys.executable, "-m", "tests.bench.engine_batch"]
    try:
        done = subprocess.run(
            command, cwd=peer.ROOT, input=json.dumps(task), capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it did not finish within {TIMEOUT:g} s"
    if done.returncode < 0:
        return f"it was ended by signal {-done.returncode}, as a process that takes too much memory is"
    if done.returncode:
        return next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it failed silently")
    own, whole = (Served(**one) for one in json.loads(done.stdout.splitlines()[-1]))
    return own, whole


def _run(task: dict[str, Any]) -> tuple[Served, Served]:
    torch.set_num_threads(task["threads"])
    model = find_model(task["model"]).load_model(dtype=torch.float32, device=torch.device("cpu"))
    prompts, max_tokens = task["prompts"], task["max_tokens"]
    # The first calls of a process are slow: threads start, memory is mapped.
    by_generate(model, [prompts[0][::-1]], 2)
    _limit_memory(task["memory_gib"])
    return by_generate_batch(model, prompts, max_tokens, by_defaults=task["by_defaults"])


def _limit_memory(gib: float | None) -> None:
    """Fail here, and early, rather than have the system look for something to end. Only on Linux."""
    meminfo = dict(_sizes(Path("/proc/meminfo")))
    status = dict(_sizes(Path("/proc/self/status")))
    if "MemAvailable" not in meminfo or "VmSize" not in status:
        return
    import resource  # not everywhere

    more = meminfo["MemAvailable"] if gib is None else int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (status["VmSize"] + more, resource.RLIM_INFINITY))
    with suppress(OSError):  # and if the system does, this process first
        Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Names and bytes from a file with lines like ``VmSize:  1024 kB``."""
    with suppress(OSError):
        for line in path.read_text("utf-8").splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                yield name, 1024 * int(rest.split()[0])


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in _run(json.load(sys.stdin))]), flush=True)
    # What transformers has started in the background is not waited for.
    os._exit(0)
