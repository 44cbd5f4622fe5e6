"""The workloads that kvcore and its peers are measured on, written once for all of them.

Only the standard library is used here, since this module runs in a peer's interpreter too.

A workload is prepared, then one call is timed. Managers and requests are called directly, without a wrapper between:
kvcore and vLLM spell these calls alike, and a frame of Python would be a tenth of what is measured. What they spell
differently is in an :class:`Adapter`.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, Protocol

BLOCK_SIZE = 16
WINDOW = 1024
VOCABULARY = 128_000
PROMPT_TOKENS = 32_768

DECODING_REQUESTS = 256
DECODING_PROMPT_TOKENS = 1_000
DECODING_STEPS = 64

CHURN_REQUESTS = 400
CHURN_FAMILIES = 8
CHURN_SHARED_TOKENS = 1_024
CHURN_OWN_TOKENS = 1_024
CHURN_LIVE = 16
CHURN_BLOCKS_PER_GROUP = 4_096


class Request(Protocol):
    """What the workloads use of a request."""

    num_computed_tokens: int

    @property
    def num_tokens(self) -> int: ...

    def append_output_token_ids(self, token_ids: int) -> None: ...


class Manager(Protocol):
    """What the workloads use of a manager."""

    def allocate_slots(
        self, request: Any, num_new_tokens: int, num_new_computed_tokens: int = 0, new_computed_blocks: Any = None
    ) -> Any | None: ...

    def free(self, request: Any) -> None: ...

    def reset_prefix_cache(self) -> bool: ...


class Groups(NamedTuple):
    """A model's KV cache groups: some of full attention, then some with a window of :data:`WINDOW` tokens."""

    name: str
    num_full: int
    num_windows: int

    @property
    def count(self) -> int:
        return self.num_full + self.num_windows


FULL = Groups("full", 1, 0)
HYBRID = Groups("hybrid", 1, 5)
ALL_GROUPS = (FULL, HYBRID)


class Adapter(Protocol):
    """One implementation to measure."""

    name: str
    version: str
    hash_algorithm: str
    compiled: bool
    """Whether its hot path is compiled."""

    def make_manager(self, groups: Groups, num_blocks: int) -> Manager:
        """A manager with blocks of :data:`BLOCK_SIZE` tokens and prefix caching."""

    def make_request(self, request_id: str, token_ids: list[int]) -> Request:
        """A request with the hashes of its full blocks. It may keep ``token_ids``, which nobody changes."""

    def look_up(self, manager: Any, request: Any) -> tuple[Any, int]:
        """The blocks found in the cache, and how many tokens they hold."""


@dataclass(frozen=True)
class Workload:
    """Something to time.

    Args:
        name: How results are keyed.
        title: How results are shown.
        unit: Unit of the results, "ms" or "us".
        seconds_per_unit: What that unit is in seconds.
        work: Requests, or requests times steps, that one run deals with: its time is divided by them.
        prepare: Makes ready and returns the call to time. That returns the tokens it found in the cache, if it looked.
    """

    name: str
    title: str
    unit: str
    seconds_per_unit: float
    work: int
    prepare: Callable[[Adapter, Groups], Callable[[], int | None]]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCABULARY) for _ in range(count)]


def admit(adapter: Adapter, manager: Manager, request: Request) -> int:
    """Looks a request up, allocates all of it and says that it is computed; returns the tokens of the hit."""
    blocks, num_hit_tokens = adapter.look_up(manager, request)
    allocate(manager, request, num_hit_tokens, blocks)
    request.num_computed_tokens = request.num_tokens
    return num_hit_tokens


def allocate(manager: Manager, request: Request, num_hit_tokens: int, blocks: Any) -> None:
    num_new_tokens = request.num_tokens - num_hit_tokens
    if manager.allocate_slots(request, num_new_tokens, num_hit_tokens, blocks) is None:
        raise RuntimeError("the pool is too small for this workload")


class Prompt:
    """A prompt's way through a manager, one step after the other.

    Args:
        adapter: What to measure.
        groups: KV cache groups.
        num_tokens: Length of the prompt.
        tokens: The prompt; None: random tokens.
        manager: Where it goes; None: a new manager, its pool twice what the prompt needs.
    """

    def __init__(
        self,
        adapter: Adapter,
        groups: Groups,
        num_tokens: int = PROMPT_TOKENS,
        tokens: list[int] | None = None,
        manager: Manager | None = None,
    ) -> None:
        self.adapter = adapter
        self.tokens = tokens or random_tokens(random.Random(0), num_tokens)
        self.manager = manager or adapter.make_manager(groups, 2 * (num_tokens // BLOCK_SIZE + 64) * groups.count)

    def make_request(self, request_id: str) -> Request:
        return self.adapter.make_request(request_id, self.tokens)

    def make_cached_and_request_again(self) -> Request:
        """Caches the prompt, frees it, and makes a second request for it."""
        first = self.make_request("first")
        admit(self.adapter, self.manager, first)
        self.manager.free(first)
        return self.make_request("second")


def hash_prompt(adapter: Adapter, groups: Groups) -> Callable[[], None]:
    tokens = random_tokens(random.Random(0), PROMPT_TOKENS)
    return _keeping(lambda: adapter.make_request("first", tokens))


def cold_admit(adapter: Adapter, groups: Groups) -> Callable[[], int]:
    prompt = Prompt(adapter, groups)
    request = prompt.make_request("first")
    return lambda: admit(adapter, prompt.manager, request)


def free(adapter: Adapter, groups: Groups) -> Callable[[], None]:
    prompt = Prompt(adapter, groups)
    request = prompt.make_request("first")
    admit(adapter, prompt.manager, request)
    return lambda: prompt.manager.free(request)


def warm_lookup(adapter: Adapter, groups: Groups) -> Callable[[], int]:
    prompt = Prompt(adapter, groups)
    request = prompt.make_cached_and_request_again()
    return lambda: adapter.look_up(prompt.manager, request)[1]


def warm_alloc(adapter: Adapter, groups: Groups) -> Callable[[], None]:
    prompt = Prompt(adapter, groups)
    request = prompt.make_cached_and_request_again()
    blocks, num_hit_tokens = adapter.look_up(prompt.manager, request)
    return lambda: allocate(prompt.manager, request, num_hit_tokens, blocks)


def warm_free(adapter: Adapter, groups: Groups) -> Callable[[], None]:
    prompt = Prompt(adapter, groups)
    request = prompt.make_cached_and_request_again()
    admit(adapter, prompt.manager, request)
    return lambda: prompt.manager.free(request)


def warm_prompt(adapter: Adapter, groups: Groups) -> Callable[[], int]:
    prompt = Prompt(adapter, groups)
    prompt.make_cached_and_request_again()
    return lambda: adapter.look_up(prompt.manager, prompt.make_request("third"))[1]


def start_decoding(
    adapter: Adapter,
    groups: Groups,
    num_requests: int = DECODING_REQUESTS,
    prompts: Sequence[list[int]] = (),
    manager: Manager | None = None,
) -> tuple[Manager, list[Request]]:
    """Admits requests, each with one output token that is not computed yet."""
    rng = random.Random(0)
    if not prompts:
        prompts = [random_tokens(rng, DECODING_PROMPT_TOKENS) for _ in range(num_requests)]
    manager = manager or adapter.make_manager(groups, 80 * num_requests * groups.count)
    requests = [adapter.make_request(f"decoding-{i}", prompt) for i, prompt in enumerate(prompts)]
    for request in requests:
        admit(adapter, manager, request)
        request.append_output_token_ids(5)
    return manager, requests


def decode(adapter: Adapter, groups: Groups) -> Callable[[], None]:
    manager, requests = start_decoding(adapter, groups)

    def run() -> None:
        for step in range(DECODING_STEPS):
            for request in requests:
                manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
                request.append_output_token_ids(7 + step)

    return run


def churn(adapter: Adapter, groups: Groups) -> Callable[[], int]:
    rng = random.Random(0)
    manager = adapter.make_manager(groups, CHURN_BLOCKS_PER_GROUP * groups.count)
    families = [random_tokens(rng, CHURN_SHARED_TOKENS) for _ in range(CHURN_FAMILIES)]
    requests = [
        adapter.make_request(f"churn-{i}", families[i % CHURN_FAMILIES] + random_tokens(rng, CHURN_OWN_TOKENS))
        for i in range(CHURN_REQUESTS)
    ]

    def run() -> int:
        live: list[Request] = []
        num_hit_tokens = 0
        for request in requests:
            num_hit_tokens += admit(adapter, manager, request)
            live.append(request)
            if len(live) > CHURN_LIVE:
                manager.free(live.pop(0))
        for request in live:
            manager.free(request)
        return num_hit_tokens

    return run


def _keeping(make: Callable[[], Any]) -> Callable[[], None]:
    """Calls ``make`` and keeps what it returns, so that its end is not timed."""
    kept = []
    return lambda: kept.append(make())


WORKLOADS = (
    Workload("hash32k", "hash a 32K prompt", "ms", 1e-3, 1, hash_prompt),
    Workload("cold_admit32k", "admit it, nothing cached", "ms", 1e-3, 1, cold_admit),
    Workload("free32k", "free it", "ms", 1e-3, 1, free),
    Workload("warm_lookup32k", "look it up, all cached", "ms", 1e-3, 1, warm_lookup),
    Workload("warm_alloc32k", "allocate it, all cached", "ms", 1e-3, 1, warm_alloc),
    Workload("warm_free32k", "free it, all cached", "ms", 1e-3, 1, warm_free),
    Workload("decode", "decode, a request and step", "us", 1e-6, DECODING_STEPS * DECODING_REQUESTS, decode),
    Workload("churn", "churn, a request", "us", 1e-6, CHURN_REQUESTS, churn),
)
"""The workloads that make up the comparison."""

WARM_PROMPT = Workload("warm_prompt32k", "make, hash and look up a cached 32K prompt", "ms", 1e-3, 1, warm_prompt)
"""What a prompt that was seen before costs until its blocks are known: the work of two of the workloads above."""


CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
"""Clocks by name. The CPU time of the thread is of use on a machine that is busy with other things."""


class Timed(NamedTuple):
    """Time of each repetition of a workload, in its unit, and tokens found in the cache, if it looked."""

    values: list[float]
    num_hit_tokens: int | None

    @property
    def median(self) -> float:
        return median(self.values)


def timed(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Any]:
    """Seconds that ``call`` takes, and what it returns; no garbage collection in between."""
    gc.collect()
    gc.disable()
    try:
        start = clock()
        result = call()
        return clock() - start, result
    finally:
        gc.enable()


def measure(
    adapter: Adapter,
    workloads: Iterable[Workload] = WORKLOADS,
    all_groups: Iterable[Groups] = ALL_GROUPS,
    *,
    repetitions: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timed]:
    """Runs each workload with each set of groups, in turn, then all of them again.

    Returns:
        Results by groups' and workload's name, for example ``"hybrid.decode"``.

    Raises:
        RuntimeError: Two repetitions found different numbers of tokens in the cache.
    """
    results: dict[str, Timed] = {}
    for _ in range(repetitions):
        for groups in all_groups:
            for workload in workloads:
                seconds, num_hit_tokens = timed(workload.prepare(adapter, groups), clock)
                key = f"{groups.name}.{workload.name}"
                result = results.setdefault(key, Timed([], num_hit_tokens))
                if num_hit_tokens != result.num_hit_tokens:
                    raise RuntimeError(f"{key} found {num_hit_tokens} tokens, and {result.num_hit_tokens} before")
                result.values.append(seconds / workload.work / workload.seconds_per_unit)
    return results
