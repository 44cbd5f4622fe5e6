"""Replays of one trace in pools of several sizes, under several policies, on several processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any

from kvcore.errors import ConfigError
from kvcore.eviction import POLICIES, PolicyChoice
from kvcore.replay import ALL_KNOWING, SECONDS_PER_TOKEN, replay, replay_all_knowing
from kvcore.replay_results import ReplayResult
from kvcore.replay_trace import MOONCAKE_BLOCK_SIZE, TraceRequest
from kvcore.spec import cdiv


@dataclass(frozen=True)
class ReplaySettings:
    """What all replays of a trace share; see :func:`kvcore.replay.replay`."""

    block_size: int = MOONCAKE_BLOCK_SIZE
    outputs: str = "ignore"
    concurrency: int | None = None
    seconds_per_token: float = SECONDS_PER_TOKEN

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def find_policy(name: str) -> PolicyChoice:
    """A policy of the package by its name, or one's own as ``module:Class``, found as Python finds modules.

    Raises:
        ConfigError: There is none.
    """
    module_name, colon, class_name = name.partition(":")
    if not colon:
        if name in POLICIES:
            return name
        raise ConfigError(f"there is no policy {name!r}: choose {', '.join(sorted(POLICIES))}, or module:Class")
    try:
        policy: Any = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"there is no policy {name!r}: {error}; module:Class names a class of a module that can be imported"
        ) from error
    if not callable(policy):
        raise ConfigError(f"{name!r} is no class: module:Class is called once for each pool")
    choice: PolicyChoice = policy
    return choice


def replay_many(
    requests: Sequence[TraceRequest],
    sizes: Sequence[int],
    policies: Sequence[str],
    settings: ReplaySettings | None = None,
    *,
    jobs: int | None = None,
    bound: bool = True,
    on_done: Callable[[int, int], None] = lambda num_done, num_all: None,
) -> list[ReplayResult]:
    """Replays a trace for each size and policy. The results do not depend on the number of processes.

    Args:
        requests: The trace.
        sizes: Blocks beside the null block.
        policies: As for :func:`find_policy`.
        settings: What all replays share.
        jobs: Processes; None: as many as there are cores to run on.
        bound: Also the all-knowing policy.
        on_done: Called with how many are done, of how many.

    Returns:
        Size by size as given, in each the policies as given, the all-knowing one first.

    Raises:
        ConfigError: There is no such policy.
        CountError: As :func:`kvcore.replay.replay`.
    """
    settings = settings or ReplaySettings()
    for policy in policies:
        find_policy(policy)
    tasks = [(size, policy) for size in sizes for policy in ([ALL_KNOWING] if bound else []) + list(policies)]
    jobs = min(jobs or _num_cores(), len(tasks))
    if jobs <= 1:
        results = []
        for task in tasks:
            results.append(_replay(requests, settings, *task))
            on_done(len(results), len(tasks))
        return results
    with ProcessPoolExecutor(jobs, initializer=_start_worker, initargs=(requests, settings, sys.path)) as executor:
        futures = [executor.submit(_work, *task) for task in tasks]
        try:
            for num_done, future in enumerate(as_completed(futures), 1):
                future.result()
                on_done(num_done, len(tasks))
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _replay(requests: Sequence[TraceRequest], settings: ReplaySettings, num_blocks: int, policy: str) -> ReplayResult:
    if policy == ALL_KNOWING:
        return replay_all_knowing(requests, num_blocks, block_size=settings.block_size, outputs=settings.outputs)
    # A pool that never overwrites anything answers as every larger one, which would take memory for each of its blocks.
    all_taken = 1 + sum(_most_blocks(request, settings.block_size) for request in requests)
    result = replay(requests, min(num_blocks, all_taken), find_policy(policy), name=policy, **settings.as_dict())
    return replace(result, num_blocks=num_blocks)


def _most_blocks(request: TraceRequest, block_size: int) -> int:
    """No request takes more: its prompt's blocks, those of its answer, and one that is partly filled."""
    return len(request.hash_ids) + len(request.output_ids) + cdiv(request.output_length, block_size) + 1


_trace: Sequence[TraceRequest] = ()
_settings = ReplaySettings()
"""In a worker: set once when it starts, so that a trace is not sent with every task."""


def _start_worker(requests: Sequence[TraceRequest], settings: ReplaySettings, path: list[str]) -> None:
    global _trace, _settings
    _trace, _settings = requests, settings
    sys.path[:] = path  # where a policy of the user's own is found


def _work(num_blocks: int, policy: str) -> ReplayResult:
    return _replay(_trace, _settings, num_blocks, policy)
